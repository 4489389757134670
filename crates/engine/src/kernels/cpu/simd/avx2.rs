//! The lanes as two AVX2 registers; how bytes are multiplied is a part of its own.

mod pairs;
mod vnni;

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::{FifthBits, LaneArray, Simd, UNIT_BYTES};

pub(in crate::kernels::cpu) use pairs::Pairs;
pub(in crate::kernels::cpu) use vnni::Vnni;

/// 16 integers.
type Ints = [__m256i; 2];

/// The dot products of [`Simd`] on AVX2 registers. Values prove that the processor has AVX2, FMA and F16C, and
/// what the products need besides.
pub(in crate::kernels::cpu) trait ByteProducts: Copy {
    /// The proof, if this processor has the instructions.
    fn detect() -> Option<Self>;

    /// [`Simd::dot_u4`]
    fn dot_u4<const R: usize>(self, weights: &[u8; UNIT_BYTES], rows: [&[i8; 32]; R]) -> [Ints; R];
    /// [`Simd::dot_u5`]
    fn dot_u5<const R: usize>(
        self,
        weights: &[u8; UNIT_BYTES],
        fifth_bits: &FifthBits,
        rows: [&[i8; 32]; R],
    ) -> [Ints; R];
    /// [`Simd::dot_i6`]
    fn dot_i6<const R: usize>(
        self,
        weights: &[u8; UNIT_BYTES],
        rows: [&[i8; 16]; R],
        totals: [i32; R],
    ) -> [Ints; R];
    /// [`Simd::dot_i8`]
    fn dot_i8<const R: usize>(
        self,
        weights: &[u8; UNIT_BYTES],
        rows: [&[i8; 16]; R],
        totals: [i32; R],
    ) -> [Ints; R];
}

/// The lanes of a processor with AVX2, FMA, F16C and these products.
#[derive(Clone, Copy, Debug)]
pub(in crate::kernels::cpu) struct Avx2<P>(P);

impl<P: ByteProducts> Avx2<P> {
    /// The lanes, if this processor has the instructions.
    pub(super) fn detect() -> Option<Self> {
        P::detect().map(Avx2)
    }
}

/// AVX2, FMA and F16C, which every level of this file needs.
fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c")
}

/// Bits of √½: the border between mantissas that count as below and above one.
const SQRT_HALF_BITS: i32 = 0x3f35_04f3;

/// Evaluates an expression over intrinsics; `$token` is the proof that they exist.
macro_rules! with {
    ($token:expr, $body:expr) => {{
        let Avx2(_) = $token;
        // SAFETY: products, and so the token, exist only after detection of every instruction used here, and all
        // memory is reached through references to arrays of the size that is loaded or stored.
        unsafe { $body }
    }};
}

impl<P: ByteProducts> Simd for Avx2<P> {
    const MAX_ROWS: usize = 4;

    type Floats = [__m256; 2];
    type Ints = Ints;

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

    #[inline(always)]
    fn dot_u4<const R: usize>(self, weights: &[u8; UNIT_BYTES], rows: [&[i8; 32]; R]) -> [Ints; R] {
        self.0.dot_u4(weights, rows)
    }

    #[inline(always)]
    fn dot_u5<const R: usize>(
        self,
        weights: &[u8; UNIT_BYTES],
        fifth_bits: &FifthBits,
        rows: [&[i8; 32]; R],
    ) -> [Ints; R] {
        self.0.dot_u5(weights, fifth_bits, rows)
    }

    #[inline(always)]
    fn dot_i6<const R: usize>(
        self,
        weights: &[u8; UNIT_BYTES],
        rows: [&[i8; 16]; R],
        totals: [i32; R],
    ) -> [Ints; R] {
        self.0.dot_i6(weights, rows, totals)
    }

    #[inline(always)]
    fn dot_i8<const R: usize>(
        self,
        weights: &[u8; UNIT_BYTES],
        rows: [&[i8; 16]; R],
        totals: [i32; R],
    ) -> [Ints; R] {
        self.0.dot_i8(weights, rows, totals)
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
