//! Seeded randomness: one small generator and the distributions that workloads and faults draw from.
//!
//! Every number is made with operations that IEEE 754 defines exactly, so that a seed means the same on
//! every machine.

/// A stream of random numbers that its seed determines (SplitMix64; Steele, Lea and Flood, 2014).
#[derive(Clone, Debug)]
pub struct Dice(u64);

impl Dice {
    /// The stream of `seed`.
    pub fn new(seed: u64) -> Self {
        Dice(seed)
    }

    /// An independent stream named by `purpose`, so that drawing more of one kind moves no other.
    pub fn fork(&self, purpose: u64) -> Dice {
        Dice(finalise(self.0 ^ finalise(purpose)))
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        finalise(self.0)
    }

    /// A number below `sides`, each equally likely; 0 when there is none.
    pub fn below(&mut self, sides: u64) -> u64 {
        ((u128::from(self.bits()) * u128::from(sides)) >> 64) as u64
    }

    /// A number from `low` to `high`, both included.
    pub fn between(&mut self, low: u32, high: u32) -> u32 {
        let sides = u64::from(high.saturating_sub(low)) + 1;
        low + self.below(sides) as u32
    }

    /// At least 0 and below 1.
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// True with this probability.
    pub fn chance(&mut self, probability: f64) -> bool {
        self.unit() < probability
    }

    /// Exponentially distributed: the gaps of a Poisson process with this mean gap.
    pub fn exponential(&mut self, mean: f64) -> f64 {
        -mean * ln(1.0 - self.unit())
    }

    /// One of `items`; `None` when there is none.
    pub fn pick<'a, T>(&mut self, items: &'a [T]) -> Option<&'a T> {
        items.get(self.below(items.len() as u64) as usize)
    }
}

fn finalise(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// Natural logarithm of a positive normal number, from exact operations alone.
///
/// With x = m · 2^e and √½ ≤ m < √2, ln m is 2 artanh((m − 1) / (m + 1)), summed until terms vanish.
fn ln(x: f64) -> f64 {
    let bits = x.to_bits();
    let mut exponent = ((bits >> 52) & 0x7ff) as i64 - 1023;
    let mut mantissa = f64::from_bits((bits & ((1 << 52) - 1)) | (1023 << 52));
    if mantissa > std::f64::consts::SQRT_2 {
        mantissa *= 0.5;
        exponent += 1;
    }
    let ratio = (mantissa - 1.0) / (mantissa + 1.0);
    let square = ratio * ratio;
    let (mut power, mut sum) = (ratio, 0.0);
    for odd in (1..=23).step_by(2) {
        sum += power / f64::from(odd);
        power *= square;
    }
    exponent as f64 * std::f64::consts::LN_2 + 2.0 * sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_logarithm_is_the_logarithm() {
        for x in [1e-16, 0.1, 0.5, 0.707, 0.708, 1.0, 1.414, 1.415, 3.0, 1e9] {
            assert!((ln(x) - f64::ln(x)).abs() < 1e-13 * f64::ln(x).abs().max(1.0));
        }
    }

    #[test]
    fn a_seed_gives_the_same_numbers_for_ever() {
        let mut dice = Dice::new(7);
        assert_eq!(
            [dice.bits(), dice.bits()],
            [0x63cb_e1e4_5932_0dd7, 0x044c_3cd7_f43c_661c]
        );
        assert_ne!(Dice::new(7).fork(1).bits(), Dice::new(7).fork(2).bits());
    }

    #[test]
    fn draws_stay_in_range_and_have_the_mean_they_should() {
        let mut dice = Dice::new(1);
        let (mut sum, mut hits) = (0.0, 0);
        for _ in 0..100_000 {
            assert!((3..=9).contains(&dice.between(3, 9)));
            sum += dice.exponential(2.0);
            hits += u32::from(dice.chance(0.25));
        }
        assert!((1.97..2.03).contains(&(sum / 1e5)));
        assert!((24_500..25_500).contains(&hits));
        assert_eq!(dice.pick::<u8>(&[]), None);
        assert_eq!(dice.between(5, 5), 5);
    }
}
