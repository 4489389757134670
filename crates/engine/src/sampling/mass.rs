//! Probability mass in integers, so that a sum does not depend on the order of its terms.
//!
//! The filters' selection moves candidates around; with floats its sums, and so the last token of a
//! nucleus, would depend on the way of moving. Integers add up exactly. No token is chosen here.

use crate::kernels::cpu::math::exp_in_place;

/// Logits whose exponentials are taken together.
const TILE: usize = 256;

/// Units in the most likely token's probability: 2²⁰ tokens as likely as that fit an `i64`, and what
/// rounding to units loses of a whole vocabulary is below the rounding of f32.
const UNITS: f64 = (1_u64 << 42) as f64;

/// The distribution that temperature makes of logits, up to its normaliser.
#[derive(Clone, Copy, Debug)]
pub(super) struct Law {
    /// The largest logit, finite.
    pub peak: f32,
    /// Positive.
    pub temperature: f32,
}

impl Law {
    /// Log-probability relative to the most likely token's.
    pub fn score(self, logit: f32) -> f64 {
        (f64::from(logit) - f64::from(self.peak)) / f64::from(self.temperature)
    }

    /// The logit whose log-probability is `score` (≤ 0) below the most likely token's; finite.
    pub fn logit_at(self, score: f64) -> f32 {
        let logit = f64::from(self.peak) + score * f64::from(self.temperature);
        (logit as f32).clamp(f32::MIN, self.peak)
    }

    /// Mass of all `items`, the most likely token's being 2⁴²; masked ones have none.
    pub fn mass<T>(self, items: &[T], logit: impl Fn(&T) -> f32) -> i64 {
        let inverse = self.temperature.recip();
        let mut tile = [0.0_f32; TILE];
        let mut total = 0;
        for chunk in items.chunks(TILE) {
            let (scores, _) = tile.split_at_mut(chunk.len());
            for (score, item) in scores.iter_mut().zip(chunk) {
                *score = (logit(item) - self.peak) * inverse;
            }
            exp_in_place(scores);
            total += scores.iter().copied().map(units).fold(0, i64::wrapping_add);
        }
        total
    }
}

/// ln Σ e^logit of finite logits.
pub(super) fn log_sum_exp(logits: &[f32], peak: f32) -> f64 {
    let law = Law {
        peak,
        temperature: 1.0,
    };
    let mass = law.mass(logits, |x| *x);
    f64::from(peak) + libm::log(mass as f64 / UNITS)
}

/// A probability of at most 1 in whole units.
///
/// A float of size 2¹⁰ has a last place of 2⁻⁴², so that adding one rounds to units and leaves their number
/// in the low bits: a conversion that is vector code everywhere.
#[inline]
fn units(probability: f32) -> i64 {
    const SHIFT: f64 = 1.5 * 1024.0;
    let pattern = (f64::from(probability) + SHIFT).to_bits();
    pattern.wrapping_sub(SHIFT.to_bits()).cast_signed()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_sum_exp_agrees_with_f64() {
        for spread in [0.0, 1.0, 5.0, 40.0] {
            let logits: Vec<f32> = (0..49_152)
                .map(|i| (i * 7919 % 49_999) as f32 / 49_999.0 * spread - 3.0)
                .collect();
            let peak = logits.iter().copied().fold(f32::MIN, f32::max);
            let sum: f64 = logits.iter().map(|x| f64::from(*x).exp()).sum();
            let error = log_sum_exp(&logits, peak) - sum.ln();
            assert!(error.abs() < 1e-6, "spread {spread}: {error:e}");
        }
    }

    #[test]
    fn mass_does_not_depend_on_order() {
        let law = Law {
            peak: 4.0,
            temperature: 0.7,
        };
        let mut logits: Vec<f32> = (0..1000)
            .map(|i| (i * 577 % 991) as f32 / 100.0 - 5.9)
            .collect();
        let forward = law.mass(&logits, |x| *x);
        logits.reverse();
        assert_eq!(forward, law.mass(&logits, |x| *x));
        logits.sort_unstable_by(f32::total_cmp);
        assert_eq!(forward, law.mass(&logits, |x| *x));
    }
}
