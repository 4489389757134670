//! What a run amounted to, as data: latencies, throughput, goodput, hit rates, lost work, and how it went over time.
//!
//! Nothing is printed here; whoever asked for the run decides how the numbers look.

use serde::{Deserialize, Serialize};

use super::histogram::Histogram;
use crate::plan::Summary;
use crate::request::FinishReason;
use crate::stats::BlockCounts;
use crate::time::{Span, Timestamp};

/// Points of a time series: when there are more, every second one is dropped and the interval doubles.
const MAX_SAMPLES: usize = 512;

/// The service that a request is promised.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Slo {
    /// From arrival to the first token, at most.
    pub ttft: Span,
    /// Mean time per token after the first, at most.
    pub tpot: Span,
}

/// One run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// How the requests ended.
    pub ended: Ended,
    /// From the first arrival to the last end.
    pub duration: Span,
    /// Prompt tokens of requests that were taken in.
    pub num_prompt_tokens: u64,
    /// Output tokens delivered.
    pub num_output_tokens: u64,
    /// From arrival to the first token.
    pub ttft: Histogram,
    /// Between neighbouring tokens of an answer.
    pub itl: Histogram,
    /// Mean time per token after the first, one per request with at least two.
    pub tpot: Histogram,
    /// From arrival to the end, of requests that finished.
    pub latency: Histogram,
    /// From arrival until first scheduled.
    pub queue: Histogram,
    /// Requests that kept the promise, if one was given.
    pub slo: Option<Attainment>,
    /// What the prefix caches saved.
    pub hits: Hits,
    /// What was computed for nothing.
    pub lost: Lost,
    /// Hand-offs between workers.
    pub transfers: Transfers,
    /// Steps of all workers.
    pub num_steps: u64,
    /// Time all workers together spent in steps.
    pub busy: Span,
    /// Faults that struck.
    pub num_faults: u64,
    /// How it went over time.
    pub series: Series,
    /// Digest of the event log: equal runs have equal digests.
    pub digest: u64,
}

/// How the requests ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ended {
    /// Came to their own end.
    pub finished: u64,
    /// Their client went away.
    pub cancelled: u64,
    /// Passed a deadline.
    pub timed_out: u64,
    /// Failed.
    pub failed: u64,
    /// Were never taken in: they can never fit, or the queue was full.
    pub refused: u64,
}

/// How many requests kept their promise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attainment {
    /// The promise.
    pub slo: Slo,
    /// First token in time.
    pub num_ttft: u64,
    /// Tokens fast enough.
    pub num_tpot: u64,
    /// Both.
    pub num_both: u64,
}

/// What the prefix caches saved, by the four definitions in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Hits {
    /// Prompt blocks, of all requests that were scheduled.
    pub num_blocks: u64,
    /// Those found whole.
    pub num_hit_blocks: u64,
    /// Prompt tokens.
    pub num_tokens: u64,
    /// Those found.
    pub num_hit_tokens: u64,
    /// Requests scheduled.
    pub num_requests: u64,
    /// Those for which anything was found.
    pub num_requests_hit: u64,
    /// Sum over requests of the share of their tokens that was found.
    pub sum_of_shares: f64,
}

/// What was computed for nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lost {
    /// Sequences sent back to the queue for want of blocks.
    pub num_preemptions: u64,
    /// Prefill tokens computed beyond the prompts' own: again after preemption or loss, or for requests that never
    /// finished.
    pub num_prefill_tokens: u64,
    /// Output tokens of requests that did not finish.
    pub num_output_tokens: u64,
}

/// Hand-offs between workers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Transfers {
    /// Started.
    pub started: u64,
    /// Arrived whole.
    pub completed: u64,
    /// Lost, corrupt or too late.
    pub failed: u64,
    /// KV blocks that arrived.
    pub num_blocks: u64,
    /// Time between the first token and the block tables being complete, all transfers together.
    pub time: Span,
}

/// A point of the time series; counts over all workers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sample {
    /// When.
    pub at: Timestamp,
    /// Sequences in steps.
    pub num_running: u32,
    /// Sequences waiting.
    pub num_waiting: u32,
    /// The pools, added up.
    pub blocks: BlockCounts,
    /// Output tokens delivered so far.
    pub num_output_tokens: u64,
}

/// Samples at even times, at most a few hundred however long the run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Series {
    /// In order of time.
    pub samples: Vec<Sample>,
    /// At least this long from one to the next.
    pub interval: Span,
}

impl Default for Series {
    fn default() -> Self {
        Series {
            samples: Vec::new(),
            interval: Span::from_millis(1),
        }
    }
}

impl Series {
    /// Is it time for the next sample?
    pub fn is_due(&self, now: Timestamp) -> bool {
        let last = self.samples.last();
        last.is_none_or(|last| now - last.at >= self.interval)
    }

    /// Appends a sample.
    pub fn push(&mut self, sample: Sample) {
        self.samples.push(sample);
        if self.samples.len() >= MAX_SAMPLES {
            let mut number = 0;
            self.samples.retain(|_| {
                number += 1;
                number % 2 == 1
            });
            self.interval = Span(self.interval.0 * 2);
        }
    }
}

impl Hits {
    /// Counts a request that was scheduled.
    pub fn add(&mut self, num_prompt: u32, num_cached: u32, block_size: u32) {
        self.add_blocks(num_prompt.div_ceil(block_size), num_cached / block_size);
        self.add_tokens(num_prompt, num_cached);
    }

    /// Counts the blocks of a request, and those found.
    pub fn add_blocks(&mut self, num_blocks: u32, num_hit: u32) {
        self.num_blocks += u64::from(num_blocks);
        self.num_hit_blocks += u64::from(num_hit);
    }

    /// Counts a request by its tokens, and those found.
    pub fn add_tokens(&mut self, num_prompt: u32, num_cached: u32) {
        self.num_tokens += u64::from(num_prompt);
        self.num_hit_tokens += u64::from(num_cached);
        self.num_requests += 1;
        self.num_requests_hit += u64::from(num_cached > 0);
        self.sum_of_shares += f64::from(num_cached) / f64::from(num_prompt.max(1));
    }

    /// Hit blocks over blocks.
    pub fn block_weighted(&self) -> f64 {
        share(self.num_hit_blocks, self.num_blocks)
    }

    /// Hit tokens over tokens.
    pub fn token_weighted(&self) -> f64 {
        share(self.num_hit_tokens, self.num_tokens)
    }

    /// Mean over requests of the share of their tokens that was found.
    pub fn mean_per_request(&self) -> f64 {
        match self.num_requests {
            0 => 0.0,
            n => self.sum_of_shares / n as f64,
        }
    }

    /// Requests with a hit over requests.
    pub fn share_with_hit(&self) -> f64 {
        share(self.num_requests_hit, self.num_requests)
    }
}

fn share(part: u64, whole: u64) -> f64 {
    match whole {
        0 => 0.0,
        _ => part as f64 / whole as f64,
    }
}

impl Ended {
    /// All of them.
    pub fn total(&self) -> u64 {
        self.finished + self.cancelled + self.timed_out + self.failed + self.refused
    }

    /// Counts one.
    pub fn add(&mut self, reason: &FinishReason) {
        let count = match reason {
            FinishReason::Stop(_) | FinishReason::Length => &mut self.finished,
            FinishReason::Cancelled => &mut self.cancelled,
            FinishReason::Timeout(_) => &mut self.timed_out,
            FinishReason::Error(_) => &mut self.failed,
        };
        *count += 1;
    }
}

impl Attainment {
    /// Nobody yet.
    pub fn new(slo: Slo) -> Self {
        Attainment {
            slo,
            num_ttft: 0,
            num_tpot: 0,
            num_both: 0,
        }
    }

    fn add(&mut self, ttft: Span, tpot: Span) {
        let (first, later) = (ttft <= self.slo.ttft, tpot <= self.slo.tpot);
        self.num_ttft += u64::from(first);
        self.num_tpot += u64::from(later);
        self.num_both += u64::from(first && later);
    }
}

impl Report {
    /// An empty one.
    pub fn new(slo: Option<Slo>) -> Self {
        Report {
            slo: slo.map(Attainment::new),
            ..Report::default()
        }
    }

    /// Counts a request that ended.
    pub fn end(&mut self, reason: &FinishReason, summary: &Summary) {
        self.ended.add(reason);
        if summary.first_scheduled.is_some() {
            self.queue.add(summary.queue());
        }
        let Some(first) = summary.first_token else {
            return;
        };
        let ttft = first - summary.arrival;
        self.ttft.add(ttft);
        let num_later = u64::from(summary.num_output_tokens.saturating_sub(1));
        let tpot = Span((summary.finished - first).0 / num_later.max(1));
        if num_later > 0 {
            self.tpot.add(tpot);
        }
        match reason {
            FinishReason::Stop(_) | FinishReason::Length => {
                self.latency.add(summary.finished - summary.arrival);
                if let Some(slo) = &mut self.slo {
                    slo.add(ttft, tpot);
                }
            }
            FinishReason::Cancelled | FinishReason::Timeout(_) | FinishReason::Error(_) => {
                self.lost.num_output_tokens += u64::from(summary.num_output_tokens);
            }
        }
    }

    /// Output tokens per second.
    pub fn tokens_per_second(&self) -> f64 {
        per_second(self.num_output_tokens, self.duration)
    }

    /// Finished requests per second.
    pub fn requests_per_second(&self) -> f64 {
        per_second(self.ended.finished, self.duration)
    }

    /// Requests per second that kept their promise; all that finished if none was given.
    pub fn goodput(&self) -> f64 {
        let num_good = self.slo.map_or(self.ended.finished, |slo| slo.num_both);
        per_second(num_good, self.duration)
    }

    /// Share of all requests that kept their promise.
    pub fn attainment(&self) -> Option<f64> {
        let slo = self.slo?;
        Some(share(slo.num_both, self.ended.total()))
    }
}

fn per_second(count: u64, span: Span) -> f64 {
    match span.0 {
        0 => 0.0,
        _ => count as f64 / span.as_secs_f64(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hits_are_counted_by_all_four_definitions() {
        let mut hits = Hits::default();
        hits.add(32, 16, 16);
        hits.add(64, 0, 16);
        hits.add(20, 19, 16);
        assert_eq!(hits.block_weighted(), 2.0 / 8.0);
        assert_eq!(hits.token_weighted(), 35.0 / 116.0);
        assert_eq!(hits.mean_per_request(), (0.5 + 0.95) / 3.0);
        assert_eq!(hits.share_with_hit(), 2.0 / 3.0);
    }

    #[test]
    fn a_request_keeps_its_promise_if_both_times_do() {
        let slo = Slo {
            ttft: Span(10),
            tpot: Span(5),
        };
        let mut report = Report::new(Some(slo));
        let mut end = |first: u64, finished: u64, reason: FinishReason| {
            let summary = Summary {
                num_output_tokens: 3,
                first_scheduled: Some(Timestamp(0)),
                first_token: Some(Timestamp(first)),
                finished: Timestamp(finished),
                ..Summary::default()
            };
            report.end(&reason, &summary);
        };
        end(10, 20, FinishReason::Length);
        end(11, 21, FinishReason::Length);
        end(10, 22, FinishReason::Length);
        end(1, 2, FinishReason::Cancelled);
        let slo = report.slo.expect("given");
        assert_eq!((slo.num_ttft, slo.num_tpot, slo.num_both), (2, 2, 1));
        assert_eq!(report.attainment(), Some(0.25));
        assert_eq!((report.ended.finished, report.ended.cancelled), (3, 1));
        assert_eq!(report.lost.num_output_tokens, 3);
    }

    #[test]
    fn a_series_stays_short_and_even() {
        let mut series = Series::default();
        for at in (0..10_000_000_000).step_by(100_000) {
            if series.is_due(Timestamp(at)) {
                series.push(Sample {
                    at: Timestamp(at),
                    ..Sample::default()
                });
            }
        }
        assert!((MAX_SAMPLES / 4..MAX_SAMPLES).contains(&series.samples.len()));
        let gaps = series
            .samples
            .windows(2)
            .map(|pair| pair[1].at - pair[0].at);
        assert!(gaps.clone().all(|gap| gap >= series.interval));
        assert!(gaps.clone().all(|gap| gap.0 <= series.interval.0 * 2));
    }
}
