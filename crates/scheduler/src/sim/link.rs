//! The simulated way between two workers: how long keys and values travel, one transfer after another.

use serde::{Deserialize, Serialize};

use crate::time::{Span, Timestamp};

/// What a link can do.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LinkSpeed {
    /// Bytes per second, for each sending worker.
    pub bytes_per_second: f64,
    /// From the last byte sent until it is there.
    pub latency: Span,
    /// Bytes of keys and values per token: 2 × layers × KV heads × head size × bytes per number.
    pub bytes_per_token: f64,
}

impl LinkSpeed {
    /// A link that takes no time.
    pub const INSTANT: LinkSpeed = LinkSpeed {
        bytes_per_second: f64::INFINITY,
        latency: Span(0),
        bytes_per_token: 0.0,
    };
}

/// The sending side of one worker.
#[derive(Clone, Copy, Debug, Default)]
pub struct Link {
    busy_until: Timestamp,
}

impl Link {
    /// Sends the keys and values of `num_tokens` after what is being sent already; says when they are there.
    pub fn send(&mut self, speed: &LinkSpeed, num_tokens: u64, now: Timestamp) -> Timestamp {
        let seconds = num_tokens as f64 * speed.bytes_per_token / speed.bytes_per_second;
        self.busy_until = self.busy_until.max(now) + Span((seconds * 1e9) as u64);
        self.busy_until + speed.latency
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transfers_queue_behind_each_other_and_latency_is_paid_by_each() {
        let speed = LinkSpeed {
            bytes_per_second: 1e9,
            latency: Span(5),
            bytes_per_token: 10.0,
        };
        let mut link = Link::default();
        assert_eq!(link.send(&speed, 10, Timestamp(0)), Timestamp(105));
        assert_eq!(link.send(&speed, 10, Timestamp(50)), Timestamp(205));
        assert_eq!(link.send(&speed, 10, Timestamp(1_000)), Timestamp(1_105));
        let mut link = Link::default();
        assert_eq!(
            link.send(&LinkSpeed::INSTANT, 10, Timestamp(3)),
            Timestamp(3)
        );
    }
}
