//! Byte products that are added in pairs to 16 bits, then to 32: what every AVX2 processor has.

#![expect(
    clippy::needless_range_loop,
    reason = "halves of several arrays are walked side by side"
)]

use std::arch::x86_64::*;

use super::{ByteProducts, Ints, broadcast, has_avx2, load_bytes, with_fifth_bits};
use super::{FifthBits, UNIT_BYTES};

/// Proof that the processor has AVX2, FMA and F16C; only [`Pairs::detect`] makes it.
#[derive(Clone, Copy, Debug)]
pub(in crate::kernels::cpu) struct Pairs(());

/// Evaluates an expression over intrinsics; `$token` is the proof that they exist.
macro_rules! with {
    ($token:expr, $body:expr) => {{
        let Pairs(()) = $token;
        // SAFETY: the token exists only after detection of every instruction used in this file.
        unsafe { $body }
    }};
}

// 8 outputs at a time: with all 16 the sums of several rows would not fit the registers beside the unpacked
// weights.
impl ByteProducts for Pairs {
    fn detect() -> Option<Self> {
        has_avx2().then_some(Pairs(()))
    }

    #[inline(always)]
    fn dot_u4<const R: usize>(self, weights: &[u8; UNIT_BYTES], rows: [&[i8; 32]; R]) -> [Ints; R] {
        with!(self, {
            let nibble = _mm256_set1_epi8(15);
            let mut sums = [[_mm256_setzero_si256(); 2]; R];
            for half in 0..2 {
                let mut words = [_mm256_setzero_si256(); R];
                for group in 0..4 {
                    let packed = load_bytes(weights, group, half);
                    let low = _mm256_and_si256(packed, nibble);
                    let high = _mm256_and_si256(_mm256_srli_epi16::<4>(packed), nibble);
                    for r in 0..R {
                        let near = _mm256_maddubs_epi16(low, broadcast(rows[r], group));
                        let far = _mm256_maddubs_epi16(high, broadcast(rows[r], 4 + group));
                        // Eight products pair up per 16-bit lane: 8 · 2 · 15 · 127 = 30480 fits.
                        words[r] =
                            in_order(_mm256_add_epi16(words[r], _mm256_add_epi16(near, far)));
                    }
                }
                for r in 0..R {
                    sums[r][half] = widen_sums(words[r]);
                }
            }
            sums
        })
    }

    #[inline(always)]
    fn dot_u5<const R: usize>(
        self,
        weights: &[u8; UNIT_BYTES],
        fifth_bits: &FifthBits,
        rows: [&[i8; 32]; R],
    ) -> [Ints; R] {
        with!(self, {
            let nibble = _mm256_set1_epi8(15);
            let mut sums = [[_mm256_setzero_si256(); 2]; R];
            for half in 0..2 {
                for pair in 0..2 {
                    let mut words = [_mm256_setzero_si256(); R];
                    for group in [2 * pair, 2 * pair + 1] {
                        let packed = load_bytes(weights, group, half);
                        let shifted = _mm256_srli_epi16::<4>(packed);
                        let low_bits = (fifth_bits[2 * group] >> (32 * half)) as u32;
                        let high_bits = (fifth_bits[2 * group + 1] >> (32 * half)) as u32;
                        let low = with_fifth_bits(_mm256_and_si256(packed, nibble), low_bits);
                        let high = with_fifth_bits(_mm256_and_si256(shifted, nibble), high_bits);
                        for r in 0..R {
                            let near = _mm256_maddubs_epi16(low, broadcast(rows[r], group));
                            let far = _mm256_maddubs_epi16(high, broadcast(rows[r], 4 + group));
                            // Four products pair up per 16-bit lane: 4 · 2 · 31 · 127 = 31496 fits.
                            words[r] =
                                in_order(_mm256_add_epi16(words[r], _mm256_add_epi16(near, far)));
                        }
                    }
                    for r in 0..R {
                        sums[r][half] = _mm256_add_epi32(sums[r][half], widen_sums(words[r]));
                    }
                }
            }
            sums
        })
    }

    #[inline(always)]
    fn dot_i6<const R: usize>(
        self,
        weights: &[u8; UNIT_BYTES],
        rows: [&[i8; 16]; R],
        _totals: [i32; R],
    ) -> [Ints; R] {
        with!(self, {
            let mut sums = [[_mm256_setzero_si256(); 2]; R];
            for half in 0..2 {
                let mut words = [_mm256_setzero_si256(); R];
                for group in 0..4 {
                    let packed = load_bytes(weights, group, half);
                    for r in 0..R {
                        let products = signed_products(packed, broadcast(rows[r], group));
                        // Four products pair up per 16-bit lane: 4 · 2 · 32 · 127 = 32512 fits.
                        words[r] = in_order(_mm256_add_epi16(words[r], products));
                    }
                }
                for r in 0..R {
                    sums[r][half] = widen_sums(words[r]);
                }
            }
            sums
        })
    }

    #[inline(always)]
    fn dot_i8<const R: usize>(
        self,
        weights: &[u8; UNIT_BYTES],
        rows: [&[i8; 16]; R],
        _totals: [i32; R],
    ) -> [Ints; R] {
        with!(self, {
            let mut sums = [[_mm256_setzero_si256(); 2]; R];
            for half in 0..2 {
                for group in 0..4 {
                    let packed = load_bytes(weights, group, half);
                    for r in 0..R {
                        let products = signed_products(packed, broadcast(rows[r], group));
                        // One pair of products fits 16 bits: 2 · 128 · 127 = 32512.
                        let pairs = widen_sums(products);
                        sums[r][half] = in_order(_mm256_add_epi32(sums[r][half], pairs));
                    }
                }
            }
            sums
        })
    }
}

/// Sums of neighbouring products w·a as 16-bit integers; `maddubs` wants one factor unsigned, so the sign of
/// w moves to a (which is never −128, whose negation would overflow).
///
/// # Safety
/// AVX2 must exist.
#[inline(always)]
unsafe fn signed_products(w: __m256i, a: __m256i) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe { _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(a, w)) }
}

/// Adds neighbouring 16-bit sums to 32 bits.
///
/// # Safety
/// AVX2 must exist.
#[inline(always)]
unsafe fn widen_sums(words: __m256i) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe { _mm256_madd_epi16(words, _mm256_set1_epi16(1)) }
}

/// The value itself, computed before the next such value. Without this the compiler computes row after row
/// and spills the unpacked weights, which costs a third of the speed.
///
/// # Safety
/// AVX must exist.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn in_order(mut value: __m256i) -> __m256i {
    // SAFETY: an empty instruction; the caller's promise lets it name the register.
    unsafe {
        std::arch::asm!("/* {0} */", inout(ymm_reg) value, options(nomem, nostack, preserves_flags));
    }
    value
}
