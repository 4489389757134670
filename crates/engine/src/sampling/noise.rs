//! Gumbel noise as a pure function of (seed, choice, position, token).
//!
//! Not a generator with a state: whoever computes the noise of a token, whenever and wherever, gets the
//! same bits. That is what makes output independent of batches, preemption, drafts and workers (A6).
//!
//! The bits of token t are output t of a SplitMix64 stream (Steele, Lea and Flood, "Fast Splittable
//! Pseudorandom Number Generators", OOPSLA 2014, with Stafford's mix 13), which passes BigCrush and is as
//! cheap to enter anywhere as at its start. Its start is a hash of seed, choice and position by two more
//! rounds of the same bijection: keys of one seed never collide, and neighbouring positions start at
//! unrelated places. Two streams share a stretch only if their starts differ by less than a vocabulary of
//! steps: for a million positions a chance of about 2⁻⁷.

use millpond_scheduler::TokenId;

/// Step of the stream: 2⁶⁴ over the golden ratio, odd.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// The noise of one position of one choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NoiseStream {
    start: u64,
}

/// 64 random bits, to be read as a number strictly between 0 and 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bits(u64);

impl NoiseStream {
    /// The stream of the token at absolute `position`.
    pub fn new(seed: u64, choice: u32, position: u32) -> Self {
        let place = (u64::from(choice) << 32) | u64::from(position);
        let seeded = mix(seed.wrapping_add(STEP));
        NoiseStream {
            start: mix(seeded.wrapping_add(place.wrapping_mul(STEP))),
        }
    }

    /// The bits of `token`.
    #[inline]
    pub fn bits(self, token: TokenId) -> Bits {
        let index = u64::from(token.0) + 1;
        Bits(mix(self.start.wrapping_add(index.wrapping_mul(STEP))))
    }
}

impl Bits {
    /// −ln(−ln(1 − v)), standard Gumbel noise, where v is one of the 2⁵² odd multiples of 2⁻⁵³.
    ///
    /// All v and 1 − v are exact floats, none is 0 or 1. Large noise comes from small v, where floats are
    /// dense, so that the tail that decides for unlikely tokens is right down to 2⁻⁵³ (noise 36.7). `libm` is
    /// plain Rust: the same bits on every platform.
    pub fn gumbel(self) -> f64 {
        let odd = (self.0 >> 12) * 2 + 1;
        let v = odd as f64 * (f64::EPSILON / 2.0);
        -libm::log(-libm::log1p(-v))
    }

    /// An upper bound of `gumbel`, at most about 0.7 above it where it matters, for a few cheap operations.
    ///
    /// −ln(1 − v) ≥ v, so the noise is at most −ln v. The leading 24 bits of v, read as a float, bound v
    /// from below; and the pattern of a float x is 2²³ · (127 + a number not above log₂ x). Without a leading
    /// bit the pattern is 0 and the bound 104.
    #[inline]
    pub fn ceiling(self) -> f32 {
        const SLOPE: f32 = -std::f32::consts::LN_2 / 8_388_608.0;
        const OFFSET: f32 = std::f32::consts::LN_2 * (127.0 + 24.0);
        let leading = (self.0 >> 40) as i32 as f32;
        // Positive floats have patterns below 2³¹.
        leading.to_bits() as i32 as f32 * SLOPE + OFFSET
    }
}

/// A bijection of 64 bits in which every input bit flips every output bit with probability ½.
#[inline]
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stream_is_fixed() {
        // A change of these numbers changes what every seed ever answered.
        let stream = NoiseStream::new(42, 1, 7);
        let noise: Vec<f64> = (0..4).map(|t| stream.bits(TokenId(t)).gumbel()).collect();
        let expected = [
            3.763_270_284_318_876,
            0.090_213_319_926_738_45,
            -0.955_909_398_769_643_2,
            2.110_841_270_141_346_4,
        ];
        assert_eq!(noise, expected);
    }

    #[test]
    fn no_bits_give_infinite_noise() {
        let edges = [0, 1, u64::MAX, u64::MAX - 1, 1 << 63, 0xfff, 0x1000, !0xfff];
        let noise = edges.map(|bits| Bits(bits).gumbel());
        assert!(noise.iter().all(|g| g.is_finite()), "{noise:?}");
        assert!((Bits(0).gumbel() - 36.736_8).abs() < 1e-4);
        assert!((Bits(u64::MAX).gumbel() + 3.603_8).abs() < 1e-3);
    }

    #[test]
    fn the_ceiling_is_never_below_the_noise() {
        let stream = NoiseStream::new(1, 0, 0);
        let sampled = (0..200_000).map(|t| stream.bits(TokenId(t)));
        let edges = (0..64).flat_map(|shift| [Bits(1 << shift), Bits(u64::MAX >> shift)]);
        for bits in sampled.chain(edges) {
            let (noise, ceiling) = (bits.gumbel(), f64::from(bits.ceiling()));
            assert!(ceiling > noise - 1e-4, "{bits:?}: {ceiling} < {noise}");
            let useful = noise < 0.0 || ceiling < noise + 0.7 || noise > 16.0;
            assert!(useful, "{bits:?}: {ceiling} far above {noise}");
        }
    }

    #[test]
    fn moments_are_those_of_gumbel() {
        let num = 1_000_000;
        let stream = NoiseStream::new(3, 0, 11);
        let noise = || (0..num).map(|t| stream.bits(TokenId(t)).gumbel());
        let mean = noise().sum::<f64>() / f64::from(num);
        let variance = noise().map(|g| (g - mean).powi(2)).sum::<f64>() / f64::from(num);
        // Euler's constant and π²/6, within four standard errors.
        assert!((mean - 0.577_216).abs() < 0.0052, "{mean}");
        assert!((variance - 1.644_934).abs() < 0.014, "{variance}");
    }
}
