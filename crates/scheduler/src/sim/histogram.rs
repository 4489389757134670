//! Lengths of time as counts per bucket: memory does not grow with the run, quantiles are within 1 %.

use serde::{Deserialize, Serialize};

use crate::time::Span;

/// Buckets per doubling, as a power of two: neighbours differ by 1/128.
const PRECISION_BITS: u32 = 7;

/// Counts spans in buckets of equal ratio (below 128 ns one bucket per nanosecond).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Histogram {
    counts: Vec<u64>,
    total: u64,
    sum: u128,
    max: Span,
}

impl Histogram {
    /// Counts `span` once.
    pub fn add(&mut self, span: Span) {
        let bucket = bucket_of(span.0);
        if self.counts.len() <= bucket {
            self.counts.resize(bucket + 1, 0);
        }
        self.counts[bucket] += 1;
        self.total += 1;
        self.sum += u128::from(span.0);
        self.max = self.max.max(span);
    }

    /// Spans counted.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// The largest; zero when there is none.
    pub fn max(&self) -> Span {
        self.max
    }

    /// The mean; zero when there is none.
    pub fn mean(&self) -> Span {
        match self.total {
            0 => Span(0),
            total => Span((self.sum / u128::from(total)) as u64),
        }
    }

    /// The smallest recorded length, to within its bucket, that `share` of all spans do not exceed.
    pub fn quantile(&self, share: f64) -> Span {
        let rank = ((share * self.total as f64).ceil() as u64).clamp(1, self.total.max(1));
        let mut seen = 0;
        for (bucket, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= rank {
                return Span(upper_end(bucket)).min(self.max);
            }
        }
        Span(0)
    }

    /// Where the cumulative share of all spans changes: (upper end of the bucket, share up to it).
    pub fn cumulative(&self) -> Vec<(Span, f64)> {
        let mut seen = 0;
        let buckets = self
            .counts
            .iter()
            .enumerate()
            .filter(|(_, count)| **count > 0);
        let point = |(bucket, count): (usize, &u64)| {
            seen += count;
            let end = Span(upper_end(bucket)).min(self.max);
            (end, seen as f64 / self.total as f64)
        };
        buckets.map(point).collect()
    }
}

fn bucket_of(nanos: u64) -> usize {
    let bits = u64::BITS - nanos.leading_zeros();
    let shift = bits.saturating_sub(PRECISION_BITS + 1);
    ((nanos >> shift) + (u64::from(shift) << PRECISION_BITS)) as usize
}

/// The largest number of nanoseconds that falls into `bucket`.
fn upper_end(bucket: usize) -> u64 {
    let bucket = bucket as u64;
    let shift = (bucket >> PRECISION_BITS).saturating_sub(1);
    let mantissa = bucket - (shift << PRECISION_BITS);
    (((u128::from(mantissa) + 1) << shift) - 1).min(u128::from(u64::MAX)) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_falls_into_a_bucket_that_holds_it_within_a_hundredth() {
        let lengths = (0..64).flat_map(|bit| {
            let power = 1u64 << bit;
            [power - 1, power, power + power / 3, power + (power - 1)]
        });
        for nanos in lengths {
            let end = upper_end(bucket_of(nanos));
            assert!(
                nanos <= end && (end - nanos) as f64 <= nanos as f64 / 128.0,
                "{nanos} {end}"
            );
        }
    }

    #[test]
    fn quantiles_are_those_of_the_sorted_list() {
        let mut histogram = Histogram::default();
        let lengths: Vec<u64> = (1..=1000).map(|n| n * n * 37).collect();
        for nanos in &lengths {
            histogram.add(Span(*nanos));
        }
        for (share, rank) in [(0.0, 0), (0.5, 499), (0.9, 899), (0.99, 989), (1.0, 999)] {
            let exact = lengths[rank];
            let found = histogram.quantile(share).0;
            assert!(
                found >= exact && found as f64 <= exact as f64 * 1.008,
                "{share}: {found} {exact}"
            );
        }
        assert_eq!(histogram.max(), Span(37_000_000));
        assert_eq!(histogram.mean(), Span(lengths.iter().sum::<u64>() / 1000));
        assert_eq!(
            histogram.cumulative().last(),
            Some(&(Span(37_000_000), 1.0))
        );
    }

    #[test]
    fn an_empty_one_says_zero() {
        assert_eq!(Histogram::default().quantile(0.99), Span(0));
        assert_eq!(Histogram::default().mean(), Span(0));
        assert!(Histogram::default().cumulative().is_empty());
    }
}
