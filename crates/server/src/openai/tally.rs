//! Counts and times of an answer: what `usage` and `timings` say.

use millpond_scheduler::{Summary, Timestamp};
use serde::Serialize;

/// Counts what an answer used, prompt by prompt and choice by choice.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    prompt_tokens: u64,
    completion_tokens: u64,
    cached_tokens: Option<u64>,
    times: Option<Times>,
}

/// Moments of the whole answer: the earliest starts, the latest end.
#[derive(Clone, Copy, Debug)]
struct Times {
    arrival: Timestamp,
    first_scheduled: Timestamp,
    first_token: Timestamp,
    finished: Timestamp,
}

/// OpenAI's `usage`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Usage {
    prompt_tokens: u64,
    completion_tokens: u64,
    total_tokens: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_tokens_details: Option<PromptTokensDetails>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct PromptTokensDetails {
    cached_tokens: u64,
}

/// Where the time went, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Timings {
    queue_ms: f64,
    prefill_ms: f64,
    decode_ms: f64,
    total_ms: f64,
}

impl Tally {
    /// A prompt of `num_tokens` is read.
    pub fn add_prompt(&mut self, num_tokens: usize) {
        self.prompt_tokens += num_tokens as u64;
    }

    /// `num_tokens` more were generated.
    pub fn add_output(&mut self, num_tokens: usize) {
        self.completion_tokens += num_tokens as u64;
    }

    /// A choice ended. A prompt is read once, so its cached tokens are those of its first choice.
    pub fn finish(&mut self, choice: u32, summary: &Summary) {
        if choice == 0 {
            let cached = self.cached_tokens.unwrap_or(0) + u64::from(summary.num_cached_tokens);
            self.cached_tokens = Some(cached);
        }
        let times = Times::of(summary);
        self.times = Some(self.times.map_or(times, |known| known.join(times)));
    }

    /// Counts so far; cached tokens are known once a choice has ended.
    pub fn usage(&self) -> Usage {
        Usage {
            prompt_tokens: self.prompt_tokens,
            completion_tokens: self.completion_tokens,
            total_tokens: self.prompt_tokens + self.completion_tokens,
            prompt_tokens_details: self
                .cached_tokens
                .map(|cached_tokens| PromptTokensDetails { cached_tokens }),
        }
    }

    /// Times so far, once a choice has ended.
    pub fn timings(&self) -> Option<Timings> {
        self.times.map(Times::timings)
    }
}

impl Times {
    fn of(summary: &Summary) -> Self {
        let first_scheduled = summary.first_scheduled.unwrap_or(summary.finished);
        Times {
            arrival: summary.arrival,
            first_scheduled,
            first_token: summary.first_token.unwrap_or(summary.finished),
            finished: summary.finished,
        }
    }

    fn join(self, other: Times) -> Times {
        Times {
            arrival: self.arrival.min(other.arrival),
            first_scheduled: self.first_scheduled.min(other.first_scheduled),
            first_token: self.first_token.min(other.first_token),
            finished: self.finished.max(other.finished),
        }
    }

    fn timings(self) -> Timings {
        let millis = |from: Timestamp, to: Timestamp| {
            let micros = (to - from).0 / 1_000;
            micros as f64 / 1e3
        };
        Timings {
            queue_ms: millis(self.arrival, self.first_scheduled),
            prefill_ms: millis(self.first_scheduled, self.first_token),
            decode_ms: millis(self.first_token, self.finished),
            total_ms: millis(self.arrival, self.finished),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn summary(cached: u32, millis: [u64; 4]) -> Summary {
        let [arrival, scheduled, token, finished] = millis.map(|ms| Timestamp(ms * 1_000_000));
        Summary {
            num_cached_tokens: cached,
            arrival,
            first_scheduled: Some(scheduled),
            first_token: Some(token),
            finished,
            ..Summary::default()
        }
    }

    #[test]
    fn choices_share_the_prompt() {
        let mut tally = Tally::default();
        tally.add_prompt(10);
        tally.add_output(3);
        tally.add_output(2);
        assert_eq!(tally.usage().prompt_tokens_details, None);
        tally.finish(0, &summary(4, [0, 1, 5, 9]));
        tally.finish(1, &summary(4, [0, 2, 4, 12]));
        let usage = serde_json::to_value(tally.usage()).expect("plain data");
        let expected = serde_json::json!({
            "prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15,
            "prompt_tokens_details": {"cached_tokens": 4},
        });
        assert_eq!(usage, expected);
        let timings = Timings {
            queue_ms: 1.0,
            prefill_ms: 3.0,
            decode_ms: 8.0,
            total_ms: 12.0,
        };
        assert_eq!(tally.timings(), Some(timings));
    }
}
