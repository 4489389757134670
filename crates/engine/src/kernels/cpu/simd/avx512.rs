//! The lanes as one AVX-512 register, with the byte dot products of VNNI.

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::avx2::sum_bytes;
use super::{FifthBits, LaneArray, Simd, UNIT_BYTES};

/// Proof that the processor has AVX-512 (F, BW, VL, DQ) with VNNI, and the AVX2 set; only
/// [`Avx512::detect`] makes it.
#[derive(Clone, Copy, Debug)]
pub(in crate::kernels::cpu) struct Avx512(());

impl Avx512 {
    /// The proof, if this processor has the instructions.
    pub(super) fn detect() -> Option<Self> {
        let available = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vnni")
            && is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        available.then_some(Avx512(()))
    }
}

/// Bits of √½: the border between mantissas that count as below and above one.
const SQRT_HALF_BITS: i32 = 0x3f35_04f3;

/// Evaluates an expression over intrinsics; `$token` is the proof that they exist.
macro_rules! with {
    ($token:expr, $body:expr) => {{
        let Avx512(()) = $token;
        // SAFETY: the token exists only after detection of every instruction used in this file, and all
        // memory is reached through references to arrays of the size that is loaded or stored.
        unsafe { $body }
    }};
}

impl Simd for Avx512 {
    // 32 registers hold the sums of eight rows, floats and integers, beside the weights.
    const MAX_ROWS: usize = 8;

    type Floats = __m512;
    type Ints = __m512i;

    #[inline(always)]
    fn splat(self, value: f32) -> __m512 {
        with!(self, _mm512_set1_ps(value))
    }

    #[inline(always)]
    fn load(self, from: &LaneArray<f32>) -> __m512 {
        with!(self, _mm512_loadu_ps(from.as_ptr()))
    }

    #[inline(always)]
    fn load_f16(self, from: &LaneArray<f16>) -> __m512 {
        with!(
            self,
            _mm512_cvtph_ps(_mm256_loadu_si256(from.as_ptr().cast()))
        )
    }

    #[inline(always)]
    fn load_bf16(self, from: &LaneArray<bf16>) -> __m512 {
        with!(self, {
            // The bits of a bf16 are a float's upper half.
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.as_ptr().cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        })
    }

    #[inline(always)]
    fn store(self, lanes: __m512, to: &mut LaneArray<f32>) {
        with!(self, _mm512_storeu_ps(to.as_mut_ptr(), lanes));
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        with!(self, _mm512_add_ps(a, b))
    }

    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        with!(self, _mm512_sub_ps(a, b))
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        with!(self, _mm512_mul_ps(a, b))
    }

    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        with!(self, _mm512_div_ps(a, b))
    }

    #[inline(always)]
    fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        with!(self, _mm512_fmadd_ps(a, b, c))
    }

    #[inline(always)]
    fn neg(self, a: __m512) -> __m512 {
        with!(self, _mm512_xor_ps(a, _mm512_set1_ps(-0.0)))
    }

    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        with!(self, _mm512_max_ps(a, b))
    }

    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        with!(self, _mm512_min_ps(a, b))
    }

    #[inline(always)]
    fn select_less(self, (x, y): (__m512, __m512), then: __m512, otherwise: __m512) -> __m512 {
        with!(self, {
            let less = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(x, y);
            _mm512_mask_blend_ps(less, otherwise, then)
        })
    }

    #[inline(always)]
    fn round(self, a: __m512) -> __m512 {
        const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        with!(self, _mm512_roundscale_ps::<NEAREST>(a))
    }

    #[inline(always)]
    fn scale(self, a: __m512, n: __m512) -> __m512 {
        with!(self, _mm512_scalef_ps(a, n))
    }

    #[inline(always)]
    fn split_exponent(self, a: __m512) -> (__m512, __m512) {
        with!(self, {
            let bits = _mm512_castps_si512(a);
            let above = _mm512_sub_epi32(bits, _mm512_set1_epi32(SQRT_HALF_BITS));
            let exponent = _mm512_srai_epi32::<23>(above);
            let mantissa = _mm512_sub_epi32(bits, _mm512_slli_epi32::<23>(exponent));
            (_mm512_castsi512_ps(mantissa), _mm512_cvtepi32_ps(exponent))
        })
    }

    #[inline(always)]
    fn sum(self, a: __m512) -> f32 {
        with!(self, {
            let eight = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps::<1>(a));
            let four = _mm_add_ps(
                _mm256_castps256_ps128(eight),
                _mm256_extractf128_ps::<1>(eight),
            );
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
        })
    }

    #[inline(always)]
    fn max_lane(self, a: __m512) -> f32 {
        with!(self, {
            let eight = _mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps::<1>(a));
            let four = _mm_max_ps(
                _mm256_castps256_ps128(eight),
                _mm256_extractf128_ps::<1>(eight),
            );
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps::<1>(two, two)))
        })
    }

    #[inline(always)]
    fn max_magnitude(self, a: __m512, b: __m512) -> f32 {
        with!(self, {
            // Without their sign, floats are ordered as their bits are, and NaN comes last.
            let all = _mm512_set1_epi32(0x7fff_ffff);
            let a = _mm512_and_si512(_mm512_castps_si512(a), all);
            let b = _mm512_and_si512(_mm512_castps_si512(b), all);
            f32::from_bits(_mm512_reduce_max_epi32(_mm512_max_epi32(a, b)) as u32)
        })
    }

    #[inline(always)]
    fn add_ints(self, a: __m512i, b: __m512i) -> __m512i {
        with!(self, _mm512_add_epi32(a, b))
    }

    #[inline(always)]
    fn sub_int(self, a: __m512i, b: i32) -> __m512i {
        with!(self, _mm512_sub_epi32(a, _mm512_set1_epi32(b)))
    }

    #[inline(always)]
    fn to_floats(self, a: __m512i) -> __m512 {
        with!(self, _mm512_cvtepi32_ps(a))
    }

    #[inline(always)]
    fn store_i8(self, a: __m512, to: &mut LaneArray<i8>) {
        with!(self, {
            let bytes = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a));
            _mm_storeu_si128(to.as_mut_ptr().cast(), bytes);
        });
    }

    #[inline(always)]
    fn sum_i8(self, from: &LaneArray<i8>) -> i32 {
        with!(self, sum_bytes(from))
    }

    #[inline(always)]
    fn store_f16(self, lanes: __m512, to: &mut LaneArray<f16>) {
        const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT;
        with!(self, {
            let halves = _mm512_cvtps_ph::<NEAREST>(lanes);
            _mm256_storeu_si256(to.as_mut_ptr().cast(), halves);
        });
    }

    #[inline(always)]
    fn dot_u4<const R: usize>(
        self,
        weights: &[u8; UNIT_BYTES],
        rows: [&[i8; 32]; R],
    ) -> [__m512i; R] {
        with!(self, {
            let nibble = _mm512_set1_epi8(15);
            let mut sums = [_mm512_setzero_si512(); R];
            for group in 0..4 {
                let packed = load_bytes(weights, group);
                let low = _mm512_and_si512(packed, nibble);
                let high = _mm512_and_si512(_mm512_srli_epi16::<4>(packed), nibble);
                add_products(&mut sums, (low, high), &rows, group);
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
    ) -> [__m512i; R] {
        with!(self, {
            let (nibble, sixteen) = (_mm512_set1_epi8(15), _mm512_set1_epi8(16));
            let mut sums = [_mm512_setzero_si512(); R];
            for group in 0..4 {
                let packed = load_bytes(weights, group);
                let low = _mm512_and_si512(packed, nibble);
                let high = _mm512_and_si512(_mm512_srli_epi16::<4>(packed), nibble);
                let low = _mm512_mask_add_epi8(low, fifth_bits[2 * group], low, sixteen);
                let high = _mm512_mask_add_epi8(high, fifth_bits[2 * group + 1], high, sixteen);
                add_products(&mut sums, (low, high), &rows, group);
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
    ) -> [__m512i; R] {
        self.dot_i8(weights, rows, totals)
    }

    #[inline(always)]
    fn dot_i8<const R: usize>(
        self,
        weights: &[u8; UNIT_BYTES],
        rows: [&[i8; 16]; R],
        totals: [i32; R],
    ) -> [__m512i; R] {
        with!(self, {
            // The instruction wants one factor unsigned: Σ (q + 128)·a − 128·Σ a.
            let sign = _mm512_set1_epi8(-128);
            let mut sums = [_mm512_setzero_si512(); R];
            for group in 0..4 {
                let lifted = _mm512_xor_si512(load_bytes(weights, group), sign);
                for r in 0..R {
                    sums[r] = _mm512_dpbusd_epi32(sums[r], lifted, broadcast(rows[r], group));
                }
            }
            for r in 0..R {
                let excess = _mm512_slli_epi32::<7>(_mm512_set1_epi32(totals[r]));
                sums[r] = _mm512_sub_epi32(sums[r], excess);
            }
            sums
        })
    }
}

/// Adds the products of k = 4·group and on and of k = 16 + 4·group and on.
///
/// # Safety
/// AVX-512 with VNNI must exist.
#[inline(always)]
unsafe fn add_products<const R: usize>(
    sums: &mut [__m512i; R],
    (low, high): (__m512i, __m512i),
    rows: &[&[i8; 32]; R],
    group: usize,
) {
    for r in 0..R {
        // SAFETY: the caller's promise.
        unsafe {
            sums[r] = _mm512_dpbusd_epi32(sums[r], low, broadcast(rows[r], group));
            sums[r] = _mm512_dpbusd_epi32(sums[r], high, broadcast(rows[r], 4 + group));
        }
    }
}

/// Group `group` of a unit.
///
/// # Safety
/// AVX-512 must exist.
#[inline(always)]
unsafe fn load_bytes(unit: &[u8; UNIT_BYTES], group: usize) -> __m512i {
    assert!(group < 4);
    // SAFETY: 64 bytes at 64·3 are the last of the unit; the caller's promise.
    unsafe { _mm512_loadu_si512(unit.as_ptr().add(64 * group).cast()) }
}

/// Four activations, repeated for all outputs.
///
/// # Safety
/// AVX-512 must exist.
#[inline(always)]
unsafe fn broadcast<const N: usize>(row: &[i8; N], group: usize) -> __m512i {
    assert!(4 * group + 4 <= N);
    // SAFETY: inside the row by the assertion; the caller's promise.
    unsafe { _mm512_set1_epi32(row.as_ptr().add(4 * group).cast::<i32>().read_unaligned()) }
}
