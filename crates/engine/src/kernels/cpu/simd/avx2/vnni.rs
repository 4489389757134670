//! Byte products that are added in fours to 32 bits: VNNI for AVX2 registers, on processors without AVX-512.

#![expect(
    clippy::needless_range_loop,
    reason = "halves of several arrays are walked side by side"
)]

use std::arch::x86_64::*;

use super::{ByteProducts, Ints, broadcast, has_avx2, load_bytes, with_fifth_bits};
use super::{FifthBits, UNIT_BYTES};

/// Proof that the processor has AVX-VNNI, AVX2, FMA and F16C; only [`Vnni::detect`] makes it.
#[derive(Clone, Copy, Debug)]
pub(in crate::kernels::cpu) struct Vnni(());

/// Evaluates an expression over intrinsics; `$token` is the proof that they exist.
macro_rules! with {
    ($token:expr, $body:expr) => {{
        let Vnni(()) = $token;
        // SAFETY: the token exists only after detection of every instruction used in this file.
        unsafe { $body }
    }};
}

// 8 outputs at a time, for the registers' sake.
impl ByteProducts for Vnni {
    fn detect() -> Option<Self> {
        (has_avx2() && is_x86_feature_detected!("avxvnni")).then_some(Vnni(()))
    }

    #[inline(always)]
    fn dot_u4<const R: usize>(self, weights: &[u8; UNIT_BYTES], rows: [&[i8; 32]; R]) -> [Ints; R] {
        with!(self, {
            let nibble = _mm256_set1_epi8(15);
            let mut sums = [[_mm256_setzero_si256(); 2]; R];
            for half in 0..2 {
                for group in 0..4 {
                    let packed = load_bytes(weights, group, half);
                    let low = _mm256_and_si256(packed, nibble);
                    let high = _mm256_and_si256(_mm256_srli_epi16::<4>(packed), nibble);
                    for r in 0..R {
                        add_products(&mut sums[r][half], (low, high), rows[r], group);
                    }
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
                for group in 0..4 {
                    let packed = load_bytes(weights, group, half);
                    let shifted = _mm256_srli_epi16::<4>(packed);
                    let low_bits = (fifth_bits[2 * group] >> (32 * half)) as u32;
                    let high_bits = (fifth_bits[2 * group + 1] >> (32 * half)) as u32;
                    let low = with_fifth_bits(_mm256_and_si256(packed, nibble), low_bits);
                    let high = with_fifth_bits(_mm256_and_si256(shifted, nibble), high_bits);
                    for r in 0..R {
                        add_products(&mut sums[r][half], (low, high), rows[r], group);
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
        totals: [i32; R],
    ) -> [Ints; R] {
        self.dot_i8(weights, rows, totals)
    }

    #[inline(always)]
    fn dot_i8<const R: usize>(
        self,
        weights: &[u8; UNIT_BYTES],
        rows: [&[i8; 16]; R],
        totals: [i32; R],
    ) -> [Ints; R] {
        with!(self, {
            // The instruction wants one factor unsigned: Σ (q + 128)·a − 128·Σ a.
            let sign = _mm256_set1_epi8(-128);
            let mut sums = [[_mm256_setzero_si256(); 2]; R];
            for r in 0..R {
                sums[r] = [_mm256_set1_epi32(-128 * totals[r]); 2];
            }
            for half in 0..2 {
                for group in 0..4 {
                    let lifted = _mm256_xor_si256(load_bytes(weights, group, half), sign);
                    for r in 0..R {
                        let activations = broadcast(rows[r], group);
                        sums[r][half] = _mm256_dpbusd_avx_epi32(sums[r][half], lifted, activations);
                    }
                }
            }
            sums
        })
    }
}

/// Adds the products of k = 4·group and on and of k = 16 + 4·group and on.
///
/// # Safety
/// AVX-VNNI must exist.
#[inline(always)]
unsafe fn add_products(
    sum: &mut __m256i,
    (low, high): (__m256i, __m256i),
    row: &[i8; 32],
    group: usize,
) {
    // SAFETY: the caller's promise.
    unsafe {
        *sum = _mm256_dpbusd_avx_epi32(*sum, low, broadcast(row, group));
        *sum = _mm256_dpbusd_avx_epi32(*sum, high, broadcast(row, 4 + group));
    }
}
