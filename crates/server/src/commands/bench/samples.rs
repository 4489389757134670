//! Medians and percentiles.

use serde::Serialize;

/// Values of one quantity in ascending order; at least one.
#[derive(Clone, Debug, PartialEq)]
pub struct Samples(Vec<f64>);

/// A rate over rounds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    pub median: f64,
    pub min: f64,
    pub max: f64,
}

/// A latency over requests.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Latency {
    pub p50: f64,
    pub p99: f64,
}

impl Samples {
    /// None of none.
    pub fn new(mut values: Vec<f64>) -> Option<Self> {
        values.sort_unstable_by(f64::total_cmp);
        (!values.is_empty()).then_some(Samples(values))
    }

    /// Linear interpolation between the two nearest samples; `share` lies in 0..=1.
    pub fn percentile(&self, share: f64) -> f64 {
        let place = (self.0.len() - 1) as f64 * share;
        let (low, high) = (
            self.0[place.floor() as usize],
            self.0[place.ceil() as usize],
        );
        low + (high - low) * place.fract()
    }

    /// Median and range.
    pub fn spread(&self) -> Spread {
        Spread {
            median: self.percentile(0.5),
            min: self.percentile(0.0),
            max: self.percentile(1.0),
        }
    }

    /// The two percentiles that are reported.
    pub fn latency(&self) -> Latency {
        Latency {
            p50: self.percentile(0.5),
            p99: self.percentile(0.99),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(values: &[f64], share: f64, expected: f64) {
        let samples = Samples::new(values.to_vec()).expect("values");
        let found = samples.percentile(share);
        assert!(
            (found - expected).abs() < 1e-12,
            "{values:?} at {share}: {found}"
        );
    }

    #[test]
    fn percentiles_interpolate_between_neighbours() {
        check(&[7.0], 0.99, 7.0);
        check(&[3.0, 1.0], 0.5, 2.0);
        check(&[4.0, 1.0, 3.0, 2.0], 0.5, 2.5);
        check(&[5.0, 1.0, 3.0], 0.5, 3.0);
        check(&[1.0, 2.0], 0.0, 1.0);
        check(&[1.0, 2.0], 1.0, 2.0);
        let hundred: Vec<f64> = (0..=100).map(f64::from).collect();
        check(&hundred, 0.99, 99.0);
        check(&hundred[..100], 0.99, 98.01);
    }

    #[test]
    fn nothing_has_no_percentile() {
        assert_eq!(Samples::new(Vec::new()), None);
    }

    #[test]
    fn a_spread_is_median_and_range() {
        let spread = Samples::new(vec![9.0, 1.0, 2.0]).expect("values").spread();
        assert_eq!((spread.median, spread.min, spread.max), (2.0, 1.0, 9.0));
    }
}
