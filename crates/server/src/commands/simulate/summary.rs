//! One simulated run as numbers for people and programs: seconds, rates and shares, no histograms.

use millpond_scheduler::sim::histogram::Histogram;
use millpond_scheduler::sim::report::{Ended, Hits, Lost, Report, Series, Transfers};
use serde::Serialize;

/// Quantiles of a length of time, in seconds.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Quantiles {
    /// The mean.
    pub mean: f64,
    /// Half are no longer.
    pub p50: f64,
    /// Nine in ten are no longer.
    pub p90: f64,
    /// 99 in a hundred are no longer.
    pub p99: f64,
    /// The longest.
    pub max: f64,
}

impl Quantiles {
    /// Of `histogram`.
    pub fn of(histogram: &Histogram) -> Self {
        let quantile = |share| histogram.quantile(share).as_secs_f64();
        Quantiles {
            mean: histogram.mean().as_secs_f64(),
            p50: quantile(0.5),
            p90: quantile(0.9),
            p99: quantile(0.99),
            max: histogram.max().as_secs_f64(),
        }
    }
}

/// Hit rate of the prefix cache, by the four definitions in use.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct HitRate {
    /// Hit blocks over prompt blocks.
    pub block_weighted: f64,
    /// Hit tokens over prompt tokens.
    pub token_weighted: f64,
    /// Mean over requests of their own share.
    pub mean_per_request: f64,
    /// Requests with a hit over requests.
    pub share_with_hit: f64,
}

impl HitRate {
    /// Of `hits`.
    pub fn of(hits: &Hits) -> Self {
        HitRate {
            block_weighted: hits.block_weighted(),
            token_weighted: hits.token_weighted(),
            mean_per_request: hits.mean_per_request(),
            share_with_hit: hits.share_with_hit(),
        }
    }
}

/// One run.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    /// What was simulated, in words; of a sweep, what sets it apart.
    pub label: String,
    /// How the requests ended.
    pub ended: Ended,
    /// From the first arrival to the last end, in seconds.
    pub duration_s: f64,
    /// Prompt tokens taken in.
    pub prompt_tokens: u64,
    /// Output tokens delivered.
    pub output_tokens: u64,
    /// Output tokens per second.
    pub output_tokens_per_s: f64,
    /// Finished requests per second.
    pub requests_per_s: f64,
    /// Requests per second that kept the promise.
    pub goodput_per_s: f64,
    /// Share of requests that kept the promise, if one was given.
    pub slo_attainment: Option<f64>,
    /// From arrival to the first token.
    pub ttft_s: Quantiles,
    /// Between neighbouring tokens.
    pub itl_s: Quantiles,
    /// Mean time per token after the first, per request.
    pub tpot_s: Quantiles,
    /// From arrival to the end.
    pub latency_s: Quantiles,
    /// From arrival until first scheduled.
    pub queue_s: Quantiles,
    /// What the prefix cache saved.
    pub hit_rate: HitRate,
    /// What was computed for nothing.
    pub lost: Lost,
    /// Hand-offs between workers.
    pub transfers: Transfers,
    /// Steps of all workers.
    pub steps: u64,
    /// Share of the workers' time spent in steps.
    pub utilisation: f64,
    /// Faults that struck.
    pub faults: u64,
    /// Digest of the event log.
    pub digest: String,
    /// How it went over time.
    pub series: Series,
    #[serde(skip)]
    pub(super) histograms: Histograms,
}

/// Distributions, for plots.
#[derive(Clone, Debug)]
pub struct Histograms {
    pub(super) ttft: Histogram,
    pub(super) itl: Histogram,
    pub(super) latency: Histogram,
}

impl Summary {
    /// Of a run of `num_workers` workers.
    pub fn new(label: String, report: Report, num_workers: usize) -> Self {
        let all_time = report.duration.as_secs_f64() * num_workers as f64;
        Summary {
            label,
            ended: report.ended,
            duration_s: report.duration.as_secs_f64(),
            prompt_tokens: report.num_prompt_tokens,
            output_tokens: report.num_output_tokens,
            output_tokens_per_s: report.tokens_per_second(),
            requests_per_s: report.requests_per_second(),
            goodput_per_s: report.goodput(),
            slo_attainment: report.attainment(),
            ttft_s: Quantiles::of(&report.ttft),
            itl_s: Quantiles::of(&report.itl),
            tpot_s: Quantiles::of(&report.tpot),
            latency_s: Quantiles::of(&report.latency),
            queue_s: Quantiles::of(&report.queue),
            hit_rate: HitRate::of(&report.hits),
            lost: report.lost,
            transfers: report.transfers,
            steps: report.num_steps,
            utilisation: match all_time > 0.0 {
                true => report.busy.as_secs_f64() / all_time,
                false => 0.0,
            },
            faults: report.num_faults,
            digest: format!("{:016x}", report.digest),
            histograms: Histograms {
                ttft: report.ttft,
                itl: report.itl,
                latency: report.latency,
            },
            series: report.series,
        }
    }
}
