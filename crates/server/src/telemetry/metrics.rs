//! Prometheus metrics under vLLM's names and bucket edges, every series present from the first scrape.
//!
//! Source of names and edges: `vllm/v1/metrics/loggers.py` (v0.17 and later), so that gateways and dashboards
//! made for it work unchanged. Gauges and counters of the engine are read when scraped; histograms are fed as
//! requests go by.

mod engine;

use std::collections::HashMap;

use millpond_engine::llm::{EngineStats, Llm};
use millpond_scheduler::{FinishReason, RowError, Summary, Timestamp};
use prometheus::{
    Histogram, HistogramOpts, IntCounter, IntCounterVec, Opts, Registry, TextEncoder,
};

/// Which of several engines behind one port; there is one.
const ENGINE: &str = "0";

const FIRST_TOKEN_EDGES: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
];
const TOKEN_EDGES: &[f64] = &[
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
];
const REQUEST_EDGES: &[f64] = &[
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
];
const CHOICE_EDGES: &[f64] = &[1.0, 2.0, 5.0, 10.0, 20.0];

/// All metrics of one server.
pub struct Metrics {
    registry: Registry,
    model: String,
    cache: CacheConfig,
    kernels: KernelConfig,
    /// Fed as requests go by.
    pub requests: RequestMetrics,
}

/// What `cache_config_info` tells.
struct CacheConfig {
    block_size: u32,
    num_blocks: u32,
    prefix_cache: bool,
}

/// What `kernels_info` tells.
struct KernelConfig {
    isa: String,
    num_threads: usize,
}

/// Fed as requests go by. Cheap to clone.
#[derive(Clone)]
pub struct RequestMetrics {
    ends: Ends,
    /// Seconds.
    pub times: Times,
    /// Tokens and choices.
    pub counts: Counts,
}

/// How requests ended or were refused.
#[derive(Clone)]
struct Ends {
    finished: IntCounterVec,
    rejected: IntCounterVec,
    corrupted: IntCounter,
}

/// Histograms of seconds.
#[derive(Clone)]
pub struct Times {
    first_token: Histogram,
    /// Between two deltas of a choice.
    pub inter_token: Histogram,
    per_output_token: Histogram,
    end_to_end: Histogram,
    queue: Histogram,
    inference: Histogram,
    prefill: Histogram,
    decode: Histogram,
}

/// Histograms of tokens and choices.
#[derive(Clone)]
pub struct Counts {
    prompt: Histogram,
    computed_prompt: Histogram,
    generated: Histogram,
    /// The longest choice of each request.
    pub longest_choice: Histogram,
    /// What requests asked for as `max_tokens`.
    pub params_max_tokens: Histogram,
    /// What requests asked for as `n`.
    pub params_n: Histogram,
}

/// Values of the label `finished_reason`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishedLabel {
    /// It came to its own end.
    Stop,
    /// A length limit was met.
    Length,
    /// Aborted, timed out, or the client went away.
    Abort,
    /// Its row failed.
    Error,
}

impl FinishedLabel {
    const ALL: [FinishedLabel; 4] = [
        FinishedLabel::Stop,
        FinishedLabel::Length,
        FinishedLabel::Abort,
        FinishedLabel::Error,
    ];

    fn as_str(self) -> &'static str {
        match self {
            FinishedLabel::Stop => "stop",
            FinishedLabel::Length => "length",
            FinishedLabel::Abort => "abort",
            FinishedLabel::Error => "error",
        }
    }

    /// The label of a reason.
    pub fn of(reason: &FinishReason) -> Self {
        match reason {
            FinishReason::Stop(_) => FinishedLabel::Stop,
            FinishReason::Length => FinishedLabel::Length,
            FinishReason::Cancelled | FinishReason::Timeout(_) => FinishedLabel::Abort,
            FinishReason::Error(_) => FinishedLabel::Error,
        }
    }
}

/// Values of `reason` of `admission_rejections`; we have no limit on queued tokens, so the second stays zero.
const REJECTIONS: [&str; 2] = ["max_num_queued_reqs", "max_num_queued_tokens"];

impl Metrics {
    /// Metrics for `llm`, served as `model`. `prefix_cache` is reported as it is.
    pub fn new(llm: &Llm, model: &str, prefix_cache: bool) -> prometheus::Result<Self> {
        let info = llm.info();
        let registry = Registry::new();
        let maker = Maker {
            registry: &registry,
            model,
        };
        Ok(Metrics {
            requests: RequestMetrics::new(&maker, info.max_context)?,
            model: model.to_owned(),
            cache: CacheConfig {
                block_size: info.memory.block_size,
                num_blocks: info.memory.num_blocks,
                prefix_cache,
            },
            kernels: KernelConfig {
                isa: info.isa.clone(),
                num_threads: info.num_threads,
            },
            registry,
        })
    }

    /// Everything in Prometheus' text format.
    pub fn render(&self, stats: &EngineStats) -> prometheus::Result<String> {
        let mut families = self.registry.gather();
        families.extend(engine::families(&self.model, &self.cache, stats));
        families.push(engine::kernels(&self.model, &self.kernels));
        families.sort_by(|left, right| left.name().cmp(right.name()));
        TextEncoder::new().encode_to_string(&families)
    }
}

/// Makes and registers metrics with the labels that all share.
struct Maker<'a> {
    registry: &'a Registry,
    model: &'a str,
}

impl Maker<'_> {
    fn labels(&self) -> HashMap<String, String> {
        [("model_name", self.model), ("engine", ENGINE)]
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .into()
    }

    fn histogram(&self, name: &str, help: &str, edges: &[f64]) -> prometheus::Result<Histogram> {
        let options = HistogramOpts::new(name, help)
            .buckets(edges.to_vec())
            .const_labels(self.labels());
        let histogram = Histogram::with_opts(options)?;
        self.registry.register(Box::new(histogram.clone()))?;
        Ok(histogram)
    }

    fn counter(&self, name: &str, help: &str) -> prometheus::Result<IntCounter> {
        let counter = IntCounter::with_opts(Opts::new(name, help).const_labels(self.labels()))?;
        self.registry.register(Box::new(counter.clone()))?;
        Ok(counter)
    }

    /// A counter with one label, whose series all exist from the start.
    fn counters(
        &self,
        name: &str,
        help: &str,
        label: &str,
        values: &[&str],
    ) -> prometheus::Result<IntCounterVec> {
        let options = Opts::new(name, help).const_labels(self.labels());
        let counters = IntCounterVec::new(options, &[label])?;
        for value in values {
            counters.with_label_values(&[*value]);
        }
        self.registry.register(Box::new(counters.clone()))?;
        Ok(counters)
    }
}

impl RequestMetrics {
    fn new(maker: &Maker, max_context: u32) -> prometheus::Result<Self> {
        Ok(RequestMetrics {
            ends: Ends::new(maker)?,
            times: Times::new(maker)?,
            counts: Counts::new(maker, max_context)?,
        })
    }

    /// A sequence ended.
    pub fn count_end(&self, label: FinishedLabel) {
        let finished = &self.ends.finished;
        finished.with_label_values(&[label.as_str()]).inc();
    }

    /// A request was refused because the queue was full.
    pub fn count_rejection(&self) {
        let rejected = &self.ends.rejected;
        rejected.with_label_values(&[REJECTIONS[0]]).inc();
    }

    /// Why, how fast and how long a sequence was when it ended.
    pub fn observe_end(&self, reason: &FinishReason, summary: &Summary) {
        self.count_end(FinishedLabel::of(reason));
        if *reason == FinishReason::Error(RowError::NonFiniteLogits) {
            self.ends.corrupted.inc();
        }
        self.times.observe(summary);
        self.counts.observe(summary);
    }
}

impl Ends {
    fn new(maker: &Maker) -> prometheus::Result<Self> {
        Ok(Ends {
            finished: maker.counters(
                "vllm:request_success_total",
                "Requests that ended, by reason.",
                "finished_reason",
                &FinishedLabel::ALL.map(FinishedLabel::as_str),
            )?,
            rejected: maker.counters(
                "vllm:admission_rejections_total",
                "Requests refused because a queue limit was met.",
                "reason",
                &REJECTIONS,
            )?,
            corrupted: maker.counter(
                "vllm:corrupted_requests_total",
                "Requests that ended because the model produced non-finite logits.",
            )?,
        })
    }
}

impl Times {
    fn new(maker: &Maker) -> prometheus::Result<Self> {
        let token = |name: &str, help: &str| maker.histogram(name, help, TOKEN_EDGES);
        let request = |name: &str, help: &str| maker.histogram(name, help, REQUEST_EDGES);
        Ok(Times {
            first_token: maker.histogram(
                "vllm:time_to_first_token_seconds",
                "Time from arrival to the first token.",
                FIRST_TOKEN_EDGES,
            )?,
            inter_token: token(
                "vllm:inter_token_latency_seconds",
                "Time between two tokens of a sequence.",
            )?,
            per_output_token: token(
                "vllm:request_time_per_output_token_seconds",
                "Mean time per token after the first, by request.",
            )?,
            end_to_end: request(
                "vllm:e2e_request_latency_seconds",
                "Time from arrival to the end.",
            )?,
            queue: request("vllm:request_queue_time_seconds", "Time spent waiting.")?,
            inference: request("vllm:request_inference_time_seconds", "Time spent running.")?,
            prefill: request(
                "vllm:request_prefill_time_seconds",
                "Time from first scheduled to the first token.",
            )?,
            decode: request(
                "vllm:request_decode_time_seconds",
                "Time from the first token to the end.",
            )?,
        })
    }

    fn observe(&self, summary: &Summary) {
        let since_arrival = |moment: Timestamp| (moment - summary.arrival).as_secs_f64();
        let (prefill, decode) = (
            summary.prefill().as_secs_f64(),
            summary.decode().as_secs_f64(),
        );
        if let Some(first_token) = summary.first_token {
            self.first_token.observe(since_arrival(first_token));
        }
        if summary.num_output_tokens > 1 {
            let gaps = f64::from(summary.num_output_tokens - 1);
            self.per_output_token.observe(decode / gaps);
        }
        self.end_to_end.observe(since_arrival(summary.finished));
        self.queue.observe(summary.queue().as_secs_f64());
        self.inference.observe(prefill + decode);
        self.prefill.observe(prefill);
        self.decode.observe(decode);
    }
}

impl Counts {
    fn new(maker: &Maker, max_context: u32) -> prometheus::Result<Self> {
        let edges = ladder(max_context);
        let tokens = |name: &str, help: &str| maker.histogram(name, help, &edges);
        Ok(Counts {
            prompt: tokens("vllm:request_prompt_tokens", "Tokens of prompts.")?,
            computed_prompt: tokens(
                "vllm:request_prefill_kv_computed_tokens",
                "Prompt tokens computed, those from the cache not counted.",
            )?,
            generated: tokens("vllm:request_generation_tokens", "Tokens generated.")?,
            longest_choice: tokens(
                "vllm:request_max_num_generation_tokens",
                "Tokens of the longest choice of a request.",
            )?,
            params_max_tokens: tokens(
                "vllm:request_params_max_tokens",
                "The field max_tokens of requests.",
            )?,
            params_n: maker.histogram(
                "vllm:request_params_n",
                "The field n of requests.",
                CHOICE_EDGES,
            )?,
        })
    }

    fn observe(&self, summary: &Summary) {
        let num_prompt = summary.num_prompt_tokens;
        let num_computed = num_prompt.saturating_sub(summary.num_cached_tokens);
        self.prompt.observe(f64::from(num_prompt));
        self.computed_prompt.observe(f64::from(num_computed));
        self.generated.observe(f64::from(summary.num_output_tokens));
    }
}

/// 1, 2, 5, 10, 20, … up to `max`.
fn ladder(max: u32) -> Vec<f64> {
    let decades = (0..10).map(|exponent| 10_f64.powi(exponent));
    decades
        .flat_map(|decade| [1.0, 2.0, 5.0].map(|step| step * decade))
        .take_while(|edge| *edge <= f64::from(max))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ladder_ends_at_the_context() {
        assert_eq!(ladder(120), [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0]);
        assert_eq!(ladder(2), [1.0, 2.0]);
    }

    #[test]
    fn every_reason_has_its_label() {
        let labels: Vec<_> = FinishedLabel::ALL.map(FinishedLabel::as_str).into();
        assert_eq!(labels, ["stop", "length", "abort", "error"]);
        assert_eq!(
            FinishedLabel::of(&FinishReason::Cancelled),
            FinishedLabel::Abort
        );
    }
}
