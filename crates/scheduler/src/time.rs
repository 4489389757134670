//! Time as a value: integer nanoseconds since an origin that the driver chose.
//!
//! Nothing here reads a clock; whoever owns the loop passes `now` in (ADR 0002).

use std::ops::{Add, Sub};

use serde::{Deserialize, Serialize};

/// A point in time, in nanoseconds since the driver's origin.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct Timestamp(pub u64);

/// A length of time in nanoseconds.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct Span(pub u64);

impl Span {
    /// A span of whole milliseconds.
    pub const fn from_millis(millis: u64) -> Self {
        Span(millis.saturating_mul(1_000_000))
    }

    /// A span of whole seconds.
    pub const fn from_secs(secs: u64) -> Self {
        Span(secs.saturating_mul(1_000_000_000))
    }

    /// The span in seconds, for reports.
    pub fn as_secs_f64(self) -> f64 {
        self.0 as f64 * 1e-9
    }
}

impl Add<Span> for Timestamp {
    type Output = Timestamp;

    fn add(self, span: Span) -> Timestamp {
        Timestamp(self.0.saturating_add(span.0))
    }
}

impl Sub for Timestamp {
    type Output = Span;

    /// The span from `earlier` to `self`; zero when `earlier` is the later one.
    fn sub(self, earlier: Timestamp) -> Span {
        Span(self.0.saturating_sub(earlier.0))
    }
}
