//! The lanes as two AVX2 registers.

#![expect(
    clippy::needless_range_loop,
    reason = "halves of several arrays are walked side by side"
)]

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::{FifthBits, LaneArray, Simd, UNIT_BYTES};

/// Proof that the processor has AVX2, FMA and F16C; only [`Avx2::detect`] makes it.
#[derive(Clone, Copy, Debug)]
pub(in crate::kernels::cpu) struct Avx2(());

impl Avx2 {
    /// The proof, if this processor has the instructions.
    pub(super) fn detect() -> Option<Self> {
        let available = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        available.then_some(Avx2(()))
    }
}

/// Bits of √½: the border between mantissas that count as below and above one.
const SQRT_HALF_BITS: i32 = 0x3f35_04f3;

/// Evaluates an expression over intrinsics; `$token` is the proof that they exist.
macro_rules! with {
    ($token:expr, $body:expr) => {{
        let Avx2(()) = $token;
        // SAFETY: the token exists only after detection of every instruction used in this file, and all
        // memory is reached through references to arrays of the size that is loaded or stored.
        unsafe { $body }
    }};
}

impl Simd for Avx2 {
    const MAX_ROWS: usize = 4;

    type Floats = [__m256; 2];
    type Ints = [__m256i; 2];

    #[inline(always)]
    fn splat(self, value: f32) -> Self::Floats {
        with!(self, [_mm256_set1_ps(value); 2])
    }

    #[inline(always)]
    fn load(self, from: &LaneArray<f32>) -> Self::Floats {
        let at = from.as_ptr();
        with!(self, [_mm256_loadu_ps(at), _mm256_loadu_ps(at.add(8))])
    }

    #[inline(always)]
    fn load_f16(self, from: &LaneArray<f16>) -> Self::Floats {
        let at = from.as_ptr().cast::<__m128i>();
        with!(
            self,
            [
                _mm256_cvtph_ps(_mm_loadu_si128(at)),
                _mm256_cvtph_ps(_mm_loadu_si128(at.add(1))),
            ]
        )
    }

    #[inline(always)]
    fn load_bf16(self, from: &LaneArray<bf16>) -> Self::Floats {
        let at = from.as_ptr().cast::<__m128i>();
        with!(self, [widen_bf16(at), widen_bf16(at.add(1))])
    }

    #[inline(always)]
    fn store(self, lanes: Self::Floats, to: &mut LaneArray<f32>) {
        let at = to.as_mut_ptr();
        with!(self, {
            _mm256_storeu_ps(at, lanes[0]);
            _mm256_storeu_ps(at.add(8), lanes[1]);
        });
    }

    #[inline(always)]
    fn add(self, a: Self::Floats, b: Self::Floats) -> Self::Floats {
        with!(self, [_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])])
    }

    #[inline(always)]
    fn sub(self, a: Self::Floats, b: Self::Floats) -> Self::Floats {
        with!(self, [_mm256_sub_ps(a[0], b[0]), _mm256_sub_ps(a[1], b[1])])
    }

    #[inline(always)]
    fn mul(self, a: Self::Floats, b: Self::Floats) -> Self::Floats {
        with!(self, [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])])
    }

    #[inline(always)]
    fn div(self, a: Self::Floats, b: Self::Floats) -> Self::Floats {
        with!(self, [_mm256_div_ps(a[0], b[0]), _mm256_div_ps(a[1], b[1])])
    }

    #[inline(always)]
    fn mul_add(self, a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats {
        with!(
            self,
            [
                _mm256_fmadd_ps(a[0], b[0], c[0]),
                _mm256_fmadd_ps(a[1], b[1], c[1]),
            ]
        )
    }

    #[inline(always)]
    fn neg(self, a: Self::Floats) -> Self::Floats {
        with!(self, {
            let sign = _mm256_set1_ps(-0.0);
            [_mm256_xor_ps(a[0], sign), _mm256_xor_ps(a[1], sign)]
        })
    }

    #[inline(always)]
    fn max(self, a: Self::Floats, b: Self::Floats) -> Self::Floats {
        with!(self, [_mm256_max_ps(a[0], b[0]), _mm256_max_ps(a[1], b[1])])
    }

    #[inline(always)]
    fn min(self, a: Self::Floats, b: Self::Floats) -> Self::Floats {
        with!(self, [_mm256_min_ps(a[0], b[0]), _mm256_min_ps(a[1], b[1])])
    }

    #[inline(always)]
    fn select_less(
        self,
        (x, y): (Self::Floats, Self::Floats),
        then: Self::Floats,
        otherwise: Self::Floats,
    ) -> Self::Floats {
        with!(self, {
            let low = _mm256_cmp_ps::<_CMP_LT_OQ>(x[0], y[0]);
            let high = _mm256_cmp_ps::<_CMP_LT_OQ>(x[1], y[1]);
            [
                _mm256_blendv_ps(otherwise[0], then[0], low),
                _mm256_blendv_ps(otherwise[1], then[1], high),
            ]
        })
    }

    #[inline(always)]
    fn round(self, a: Self::Floats) -> Self::Floats {
        const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        with!(
            self,
            [
                _mm256_round_ps::<NEAREST>(a[0]),
                _mm256_round_ps::<NEAREST>(a[1]),
            ]
        )
    }

    #[inline(always)]
    fn scale(self, a: Self::Floats, n: Self::Floats) -> Self::Floats {
        // 2^128 is no float: two steps, of which only the last can round.
        let half = self.round(self.mul(n, self.splat(0.5)));
        let rest = self.sub(n, half);
        with!(self, {
            let first = self.mul(a, [pow2(half[0]), pow2(half[1])]);
            self.mul(first, [pow2(rest[0]), pow2(rest[1])])
        })
    }

    #[inline(always)]
    fn split_exponent(self, a: Self::Floats) -> (Self::Floats, Self::Floats) {
        with!(self, {
            let (low, low_exponent) = split_exponent(a[0]);
            let (high, high_exponent) = split_exponent(a[1]);
            ([low, high], [low_exponent, high_exponent])
        })
    }

    #[inline(always)]
    fn sum(self, a: Self::Floats) -> f32 {
        with!(self, {
            let eight = _mm256_add_ps(a[0], a[1]);
            let four = _mm_add_ps(
                _mm256_castps256_ps128(eight),
                _mm256_extractf128_ps::<1>(eight),
            );
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
        })
    }

    #[inline(always)]
    fn max_lane(self, a: Self::Floats) -> f32 {
        with!(self, {
            let eight = _mm256_max_ps(a[0], a[1]);
            let four = _mm_max_ps(
                _mm256_castps256_ps128(eight),
                _mm256_extractf128_ps::<1>(eight),
            );
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps::<1>(two, two)))
        })
    }

    #[inline(always)]
    fn max_magnitude(self, a: Self::Floats, b: Self::Floats) -> f32 {
        with!(self, {
            // Without their sign, floats are ordered as their bits are, and NaN comes last.
            let all = _mm256_set1_epi32(0x7fff_ffff);
            let mut largest = _mm256_setzero_si256();
            for x in [a[0], a[1], b[0], b[1]] {
                let magnitude = _mm256_and_si256(_mm256_castps_si256(x), all);
                largest = _mm256_max_epi32(largest, magnitude);
            }
            let four = _mm_max_epi32(
                _mm256_castsi256_si128(largest),
                _mm256_extracti128_si256::<1>(largest),
            );
            let two = _mm_max_epi32(four, _mm_shuffle_epi32::<0b01_00_11_10>(four));
            let one = _mm_max_epi32(two, _mm_shuffle_epi32::<0b10_11_00_01>(two));
            f32::from_bits(_mm_cvtsi128_si32(one) as u32)
        })
    }

    #[inline(always)]
    fn add_ints(self, a: Self::Ints, b: Self::Ints) -> Self::Ints {
        with!(
            self,
            [_mm256_add_epi32(a[0], b[0]), _mm256_add_epi32(a[1], b[1])]
        )
    }

    #[inline(always)]
    fn sub_int(self, a: Self::Ints, b: i32) -> Self::Ints {
        with!(self, {
            let b = _mm256_set1_epi32(b);
            [_mm256_sub_epi32(a[0], b), _mm256_sub_epi32(a[1], b)]
        })
    }

    #[inline(always)]
    fn to_floats(self, a: Self::Ints) -> Self::Floats {
        with!(self, [_mm256_cvtepi32_ps(a[0]), _mm256_cvtepi32_ps(a[1])])
    }

    #[inline(always)]
    fn store_i8(self, a: Self::Floats, to: &mut LaneArray<i8>) {
        let at = to.as_mut_ptr().cast::<__m128i>();
        with!(self, {
            let words = _mm256_packs_epi32(_mm256_cvtps_epi32(a[0]), _mm256_cvtps_epi32(a[1]));
            // Packing works within halves of a register: put the four quarters back in order.
            let ordered = _mm256_permute4x64_epi64::<0b11_01_10_00>(words);
            let low = _mm256_castsi256_si128(ordered);
            let high = _mm256_extracti128_si256::<1>(ordered);
            _mm_storeu_si128(at, _mm_packs_epi16(low, high));
        });
    }

    #[inline(always)]
    fn sum_i8(self, from: &LaneArray<i8>) -> i32 {
        with!(self, sum_bytes(from))
    }

    #[inline(always)]
    fn store_f16(self, lanes: Self::Floats, to: &mut LaneArray<f16>) {
        const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT;
        let at = to.as_mut_ptr().cast::<__m128i>();
        with!(self, {
            _mm_storeu_si128(at, _mm256_cvtps_ph::<NEAREST>(lanes[0]));
            _mm_storeu_si128(at.add(1), _mm256_cvtps_ph::<NEAREST>(lanes[1]));
        });
    }

    // The dot products take 8 outputs at a time: with all 16 the sums of several rows would not fit the
    // registers beside the unpacked weights.

    #[inline(always)]
    fn dot_u4<const R: usize>(
        self,
        weights: &[u8; UNIT_BYTES],
        rows: [&[i8; 32]; R],
    ) -> [Self::Ints; R] {
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
    ) -> [Self::Ints; R] {
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
    ) -> [Self::Ints; R] {
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
    ) -> [Self::Ints; R] {
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

/// Sum of 16 signed bytes: the instruction adds unsigned ones, so 128 is added to each.
///
/// # Safety
/// SSE2 must exist.
#[inline(always)]
pub(super) unsafe fn sum_bytes(from: &LaneArray<i8>) -> i32 {
    // SAFETY: 16 bytes are read; the caller's promise.
    unsafe {
        let bytes = _mm_loadu_si128(from.as_ptr().cast());
        let lifted = _mm_xor_si128(bytes, _mm_set1_epi8(-128));
        let halves = _mm_sad_epu8(lifted, _mm_setzero_si128());
        let sum = _mm_add_epi32(halves, _mm_unpackhi_epi64(halves, halves));
        _mm_cvtsi128_si32(sum) - 16 * 128
    }
}

/// Group `group` of a unit for outputs 8·half and on.
///
/// # Safety
/// AVX2 must exist.
#[inline(always)]
unsafe fn load_bytes(unit: &[u8; UNIT_BYTES], group: usize, half: usize) -> __m256i {
    assert!(group < 4 && half < 2);
    // SAFETY: 32 bytes at 64·3 + 32 are the last of the unit; the caller's promise.
    unsafe { _mm256_loadu_si256(unit.as_ptr().add(64 * group + 32 * half).cast()) }
}

/// 8 bf16 to floats: their bits are a float's upper half.
///
/// # Safety
/// AVX2 must exist and 16 bytes be readable at `at`.
#[inline(always)]
unsafe fn widen_bf16(at: *const __m128i) -> __m256 {
    // SAFETY: the caller's promise.
    unsafe {
        let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(at));
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
    }
}

/// 2^n by placing n in the exponent field.
///
/// # Safety
/// AVX2 must exist.
#[inline(always)]
unsafe fn pow2(n: __m256) -> __m256 {
    // SAFETY: the caller's promise.
    unsafe {
        let biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
        _mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased))
    }
}

/// Mantissa in [√½, √2) and exponent.
///
/// # Safety
/// AVX2 must exist.
#[inline(always)]
unsafe fn split_exponent(a: __m256) -> (__m256, __m256) {
    // SAFETY: the caller's promise.
    unsafe {
        let bits = _mm256_castps_si256(a);
        let above = _mm256_sub_epi32(bits, _mm256_set1_epi32(SQRT_HALF_BITS));
        let exponent = _mm256_srai_epi32::<23>(above);
        let mantissa = _mm256_sub_epi32(bits, _mm256_slli_epi32::<23>(exponent));
        (_mm256_castsi256_ps(mantissa), _mm256_cvtepi32_ps(exponent))
    }
}

/// Adds 16 to the nibbles whose bit is set.
///
/// # Safety
/// AVX2 must exist.
#[inline(always)]
unsafe fn with_fifth_bits(nibbles: __m256i, bits: u32) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe {
        // Byte i looks at bit i % 8 of byte i / 8.
        let bytes = _mm256_shuffle_epi8(
            _mm256_set1_epi32(bits as i32),
            _mm256_setr_epi64x(
                0,
                0x0101_0101_0101_0101,
                0x0202_0202_0202_0202,
                0x0303_0303_0303_0303,
            ),
        );
        let single = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64 as i64);
        let is_set = _mm256_cmpeq_epi8(_mm256_and_si256(bytes, single), single);
        _mm256_add_epi8(nibbles, _mm256_and_si256(is_set, _mm256_set1_epi8(16)))
    }
}

/// Four activations, repeated for eight outputs.
///
/// # Safety
/// AVX2 must exist.
#[inline(always)]
unsafe fn broadcast<const N: usize>(row: &[i8; N], group: usize) -> __m256i {
    assert!(4 * group + 4 <= N);
    // SAFETY: inside the row by the assertion; the caller's promise.
    unsafe { _mm256_set1_epi32(row.as_ptr().add(4 * group).cast::<i32>().read_unaligned()) }
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
