//! The engine's gauges and counters as Prometheus families, made when scraped.

use millpond_engine::llm::{EngineStats, IterationTokens};
use prometheus::proto::{
    Bucket, Counter, Gauge, Histogram, LabelPair, Metric, MetricFamily, MetricType,
};

use super::{CacheConfig, ENGINE, KernelConfig};
use crate::app::unix_seconds;

/// All families that come from the engine.
pub(super) fn families(model: &str, cache: &CacheConfig, stats: &EngineStats) -> Vec<MetricFamily> {
    let families = Families { model };
    let mut all = families.queue(stats);
    all.extend(families.cache(cache, stats));
    all.extend(families.tokens(stats));
    all.extend(families.absent_features());
    all
}

/// Which kernels run: a name of our own, since vLLM has none for it.
pub(super) fn kernels(model: &str, kernels: &KernelConfig) -> MetricFamily {
    let num_threads = kernels.num_threads.to_string();
    Families { model }.gauges(
        "millpond:kernels_info",
        "Instruction set and threads of the kernels; the value is 1.",
        &[(&[("isa", &kernels.isa), ("threads", &num_threads)], 1.0)],
    )
}

/// Builds families with the labels that all share.
struct Families<'a> {
    model: &'a str,
}

/// One sample: its own labels, its value.
type Sample<'a> = (&'a [(&'a str, &'a str)], f64);

impl Families<'_> {
    fn queue(&self, stats: &EngineStats) -> Vec<MetricFamily> {
        let waiting = stats.num_waiting as f64;
        vec![
            self.gauge(
                "vllm:num_requests_running",
                "Sequences running.",
                stats.num_running as f64,
            ),
            self.gauge("vllm:num_requests_waiting", "Sequences waiting.", waiting),
            self.gauges(
                "vllm:num_requests_waiting_by_reason",
                "Sequences waiting, by reason.",
                &[
                    (&[("reason", "capacity")], waiting),
                    (&[("reason", "deferred")], 0.0),
                ],
            ),
            self.gauges(
                "vllm:engine_sleep_state",
                "1 for the state the engine is in.",
                &[
                    (&[("sleep_state", "awake")], 1.0),
                    (&[("sleep_state", "weights_offloaded")], 0.0),
                    (&[("sleep_state", "discard_all")], 0.0),
                ],
            ),
        ]
    }

    fn cache(&self, cache: &CacheConfig, stats: &EngineStats) -> Vec<MetricFamily> {
        let usage = stats.num_used_blocks as f64 / (stats.num_blocks.max(1)) as f64;
        let help = "Share of the blocks held by sequences, 0 to 1.";
        let (block_size, num_blocks) = (cache.block_size.to_string(), cache.num_blocks.to_string());
        let prefix_cache = if cache.prefix_cache { "True" } else { "False" };
        vec![
            self.gauge("vllm:kv_cache_usage_perc", help, usage),
            // Older gateways and dashboards read this name.
            self.gauge("vllm:gpu_cache_usage_perc", help, usage),
            self.gauges(
                "vllm:cache_config_info",
                "Configuration of the key-value cache; the value is 1.",
                &[(
                    &[
                        ("block_size", &block_size),
                        ("num_gpu_blocks", &num_blocks),
                        ("enable_prefix_caching", prefix_cache),
                    ],
                    1.0,
                )],
            ),
            self.counter(
                "vllm:prefix_cache_queries_total",
                "Prompt tokens looked up in the prefix cache.",
                stats.prefix_query_tokens,
            ),
            self.counter(
                "vllm:prefix_cache_hits_total",
                "Prompt tokens found in the prefix cache.",
                stats.prefix_hit_tokens,
            ),
        ]
    }

    fn tokens(&self, stats: &EngineStats) -> Vec<MetricFamily> {
        let cached = stats.prefix_hit_tokens;
        let computed = stats.num_prompt_tokens.saturating_sub(cached);
        let by_source: &[Sample] = &[
            (&[("source", "local_compute")], computed as f64),
            (&[("source", "local_cache_hit")], cached as f64),
            (&[("source", "external_kv_transfer")], 0.0),
        ];
        vec![
            self.counter(
                "vllm:num_preemptions_total",
                "Sequences preempted.",
                stats.num_preemptions,
            ),
            self.counter(
                "vllm:prompt_tokens_total",
                "Prompt tokens read.",
                stats.num_prompt_tokens,
            ),
            self.counter(
                "vllm:generation_tokens_total",
                "Tokens generated.",
                stats.num_generated_tokens,
            ),
            self.counter(
                "vllm:prompt_tokens_cached_total",
                "Prompt tokens read from the cache.",
                cached,
            ),
            self.counters(
                "vllm:prompt_tokens_by_source_total",
                "Prompt tokens, by source.",
                by_source,
            ),
            self.steps(&stats.iteration_tokens),
        ]
    }

    /// Series of features that we do not have: present and zero, so that dashboards show them as such.
    fn absent_features(&self) -> Vec<MetricFamily> {
        const COUNTERS: [(&str, &str); 7] = [
            (
                "vllm:external_prefix_cache_queries_total",
                "Prompt tokens looked up in an external cache.",
            ),
            (
                "vllm:external_prefix_cache_hits_total",
                "Prompt tokens found in an external cache.",
            ),
            (
                "vllm:mm_cache_queries_total",
                "Media items looked up in the cache.",
            ),
            (
                "vllm:mm_cache_hits_total",
                "Media items found in the cache.",
            ),
            ("vllm:spec_decode_num_drafts_total", "Drafts verified."),
            ("vllm:spec_decode_num_draft_tokens_total", "Tokens drafted."),
            (
                "vllm:spec_decode_num_accepted_tokens_total",
                "Drafted tokens accepted.",
            ),
        ];
        let mut families: Vec<MetricFamily> = COUNTERS
            .into_iter()
            .map(|(name, help)| self.counter(name, help, 0))
            .collect();
        families.push(self.counters(
            "vllm:spec_decode_num_accepted_tokens_per_pos_total",
            "Drafted tokens accepted, by position.",
            &[(&[("position", "0")], 0.0)],
        ));
        families.push(self.gauges(
            "vllm:lora_requests_info",
            "Adapters in use; the value is the time of the sample.",
            &[(
                &[
                    ("max_lora", "0"),
                    ("waiting_lora_adapters", ""),
                    ("running_lora_adapters", ""),
                ],
                unix_seconds() as f64,
            )],
        ));
        families
    }

    fn steps(&self, steps: &IterationTokens) -> MetricFamily {
        let mut histogram = Histogram::default();
        histogram.set_sample_count(steps.count);
        histogram.set_sample_sum(steps.sum as f64);
        let bucket = |(edge, count): &(f64, u64)| {
            let mut bucket = Bucket::default();
            bucket.set_upper_bound(*edge);
            bucket.set_cumulative_count(*count);
            bucket
        };
        histogram.set_bucket(steps.buckets.iter().map(bucket).collect());
        let mut metric = Metric::from_label(self.labels(&[]));
        metric.set_histogram(histogram);
        let help = "Tokens computed per step.";
        family(
            "vllm:iteration_tokens_total",
            help,
            MetricType::HISTOGRAM,
            vec![metric],
        )
    }

    fn gauge(&self, name: &str, help: &str, value: f64) -> MetricFamily {
        self.gauges(name, help, &[(&[], value)])
    }

    fn gauges(&self, name: &str, help: &str, samples: &[Sample]) -> MetricFamily {
        let metric = |(labels, value): &Sample| {
            let mut gauge = Gauge::default();
            gauge.set_value(*value);
            let mut metric = Metric::from_label(self.labels(labels));
            metric.set_gauge(gauge);
            metric
        };
        family(
            name,
            help,
            MetricType::GAUGE,
            samples.iter().map(metric).collect(),
        )
    }

    fn counter(&self, name: &str, help: &str, value: u64) -> MetricFamily {
        self.counters(name, help, &[(&[], value as f64)])
    }

    fn counters(&self, name: &str, help: &str, samples: &[Sample]) -> MetricFamily {
        let metric = |(labels, value): &Sample| {
            let mut counter = Counter::default();
            counter.set_value(*value);
            let mut metric = Metric::from_label(self.labels(labels));
            metric.set_counter(counter);
            metric
        };
        family(
            name,
            help,
            MetricType::COUNTER,
            samples.iter().map(metric).collect(),
        )
    }

    fn labels(&self, own: &[(&str, &str)]) -> Vec<LabelPair> {
        let shared = [("engine", ENGINE), ("model_name", self.model)];
        let pair = |(name, value): &(&str, &str)| {
            let mut pair = LabelPair::default();
            pair.set_name((*name).to_owned());
            pair.set_value((*value).to_owned());
            pair
        };
        own.iter().chain(&shared).map(pair).collect()
    }
}

fn family(name: &str, help: &str, kind: MetricType, metrics: Vec<Metric>) -> MetricFamily {
    let mut family = MetricFamily::default();
    family.set_name(name.to_owned());
    family.set_help(help.to_owned());
    family.set_field_type(kind);
    family.set_metric(metrics);
    family
}
