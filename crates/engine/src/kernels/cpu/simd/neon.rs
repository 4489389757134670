//! The lanes as four NEON registers; how bytes are multiplied is a part of its own.

mod dot;
mod widening;

use std::arch::aarch64::*;

use half::{bf16, f16};

use super::{FifthBits, LaneArray, Simd, UNIT_BYTES};

pub(in crate::kernels::cpu) use dot::Dot;
pub(in crate::kernels::cpu) use widening::Widening;

/// 16 integers.
type Ints = [int32x4_t; 4];

/// Bytes of four outputs over 16 k: byte 4·output + i of register g is that of k = 4·g + i.
type Quarter = [int8x16_t; 4];

/// The byte products that dot products are made of. Values prove that the processor has the instructions.
pub(in crate::kernels::cpu) trait ByteProducts: Copy {
    /// The proof, if this processor has the instructions.
    fn detect() -> Option<Self>;

    /// sums + Σ q·a over 16 k for four outputs, q in −128..=127, a in −127..=127.
    fn add(self, sums: int32x4_t, weights: Quarter, row: int8x16_t) -> int32x4_t;
}

/// Bits of √½: the border between mantissas that count as below and above one.
const SQRT_HALF_BITS: i32 = 0x3f35_04f3;

/// Evaluates an expression over intrinsics; `$token` is the proof that they exist.
macro_rules! with {
    ($token:expr, $body:expr) => {{
        let Neon(_) = $token;
        // SAFETY: products, and so the token, exist only after detection of every instruction used here, and all
        // memory is reached through references to arrays of the size that is loaded or stored.
        unsafe { $body }
    }};
}

/// An array of an expression for the registers 0 to 3, whose number is `$i`.
macro_rules! each {
    ($i:ident, $lanes:expr) => {
        [
            {
                const $i: usize = 0;
                $lanes
            },
            {
                const $i: usize = 1;
                $lanes
            },
            {
                const $i: usize = 2;
                $lanes
            },
            {
                const $i: usize = 3;
                $lanes
            },
        ]
    };
}

/// The lanes of a processor with NEON and these products.
#[derive(Clone, Copy, Debug)]
pub(in crate::kernels::cpu) struct Neon<P>(P);

impl<P: ByteProducts> Neon<P> {
    /// The lanes, if this processor has the instructions.
    pub(super) fn detect() -> Option<Self> {
        P::detect().map(Neon)
    }

    /// Σ q·a over 16 k for 16 outputs.
    #[inline(always)]
    fn dot<const R: usize>(self, weights: &[u8; UNIT_BYTES], rows: [&[i8; 16]; R]) -> [Ints; R] {
        with!(self, {
            let mut sums = [[vdupq_n_s32(0); 4]; R];
            for quarter in 0..4 {
                let weights = as_signed(load_quarter(weights, quarter));
                for (sums, row) in sums.iter_mut().zip(rows) {
                    sums[quarter] = self.0.add(sums[quarter], weights, load_row(row));
                }
            }
            sums
        })
    }

    /// Adds Σ q·a over 32 k for the four outputs of a quarter; `low` are the weights of the first 16 k.
    #[inline(always)]
    fn add_quarter<const R: usize>(
        self,
        sums: &mut [Ints; R],
        quarter: usize,
        (low, high): (Quarter, Quarter),
        rows: [&[i8; 32]; R],
    ) {
        with!(self, {
            for (sums, row) in sums.iter_mut().zip(rows) {
                let [near, far] = load_halves(row);
                sums[quarter] = self.0.add(sums[quarter], low, near);
                sums[quarter] = self.0.add(sums[quarter], high, far);
            }
        });
    }
}

impl<P: ByteProducts> Simd for Neon<P> {
    const MAX_ROWS: usize = 4;

    type Floats = [float32x4_t; 4];
    type Ints = Ints;

    #[inline(always)]
    fn splat(self, value: f32) -> Self::Floats {
        with!(self, [vdupq_n_f32(value); 4])
    }

    #[inline(always)]
    fn load(self, from: &LaneArray<f32>) -> Self::Floats {
        with!(self, each!(I, vld1q_f32(from.as_ptr().add(4 * I))))
    }

    #[inline(always)]
    fn load_f16(self, from: &LaneArray<f16>) -> Self::Floats {
        with!(self, {
            let at = from.as_ptr().cast::<u16>();
            each!(I, {
                let bits = vld1_u16(at.add(4 * I));
                vcvt_f32_f16(vreinterpret_f16_u16(bits))
            })
        })
    }

    #[inline(always)]
    fn load_bf16(self, from: &LaneArray<bf16>) -> Self::Floats {
        with!(self, {
            let at = from.as_ptr().cast::<u16>();
            each!(I, {
                let bits = vld1_u16(at.add(4 * I));
                // The bits of a bf16 are a float's upper half.
                vreinterpretq_f32_u32(vshll_n_u16::<16>(bits))
            })
        })
    }

    #[inline(always)]
    fn store(self, lanes: Self::Floats, to: &mut LaneArray<f32>) {
        with!(self, {
            let at = to.as_mut_ptr();
            for (i, lanes) in lanes.into_iter().enumerate() {
                vst1q_f32(at.add(4 * i), lanes);
            }
        });
    }

    #[inline(always)]
    fn add(self, a: Self::Floats, b: Self::Floats) -> Self::Floats {
        with!(self, each!(I, vaddq_f32(a[I], b[I])))
    }

    #[inline(always)]
    fn sub(self, a: Self::Floats, b: Self::Floats) -> Self::Floats {
        with!(self, each!(I, vsubq_f32(a[I], b[I])))
    }

    #[inline(always)]
    fn mul(self, a: Self::Floats, b: Self::Floats) -> Self::Floats {
        with!(self, each!(I, vmulq_f32(a[I], b[I])))
    }

    #[inline(always)]
    fn div(self, a: Self::Floats, b: Self::Floats) -> Self::Floats {
        with!(self, each!(I, vdivq_f32(a[I], b[I])))
    }

    #[inline(always)]
    fn mul_add(self, a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats {
        with!(self, each!(I, vfmaq_f32(c[I], a[I], b[I])))
    }

    #[inline(always)]
    fn neg(self, a: Self::Floats) -> Self::Floats {
        with!(self, each!(I, vnegq_f32(a[I])))
    }

    #[inline(always)]
    fn max(self, a: Self::Floats, b: Self::Floats) -> Self::Floats {
        with!(self, each!(I, larger(a[I], b[I])))
    }

    #[inline(always)]
    fn min(self, a: Self::Floats, b: Self::Floats) -> Self::Floats {
        self.select_less((a, b), a, b)
    }

    #[inline(always)]
    fn select_less(
        self,
        (x, y): (Self::Floats, Self::Floats),
        then: Self::Floats,
        otherwise: Self::Floats,
    ) -> Self::Floats {
        with!(self, {
            each!(I, vbslq_f32(vcltq_f32(x[I], y[I]), then[I], otherwise[I]))
        })
    }

    #[inline(always)]
    fn round(self, a: Self::Floats) -> Self::Floats {
        with!(self, each!(I, vrndnq_f32(a[I])))
    }

    #[inline(always)]
    fn scale(self, a: Self::Floats, n: Self::Floats) -> Self::Floats {
        with!(self, {
            // 2^128 is no float: two steps, of which only the last can round.
            let half = self.round(self.mul(n, self.splat(0.5)));
            let rest = self.sub(n, half);
            let first = each!(I, vmulq_f32(a[I], pow2(half[I])));
            each!(I, vmulq_f32(first[I], pow2(rest[I])))
        })
    }

    #[inline(always)]
    fn split_exponent(self, a: Self::Floats) -> (Self::Floats, Self::Floats) {
        with!(self, {
            let bits = each!(I, vreinterpretq_s32_f32(a[I]));
            let border = vdupq_n_s32(SQRT_HALF_BITS);
            let exponents = each!(I, vshrq_n_s32::<23>(vsubq_s32(bits[I], border)));
            let mantissas = each!(I, {
                let mantissa = vsubq_s32(bits[I], vshlq_n_s32::<23>(exponents[I]));
                vreinterpretq_f32_s32(mantissa)
            });
            (mantissas, self.to_floats(exponents))
        })
    }

    #[inline(always)]
    fn sum(self, a: Self::Floats) -> f32 {
        with!(self, {
            let four = vaddq_f32(vaddq_f32(a[0], a[2]), vaddq_f32(a[1], a[3]));
            let two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
            vget_lane_f32::<0>(two) + vget_lane_f32::<1>(two)
        })
    }

    #[inline(always)]
    fn max_lane(self, a: Self::Floats) -> f32 {
        with!(self, {
            let four = larger(larger(a[0], a[2]), larger(a[1], a[3]));
            // Lanes 2 and 3 in front: what is compared in the others is not looked at.
            let two = larger(four, vextq_f32::<2>(four, four));
            let one = larger(two, vdupq_laneq_f32::<1>(two));
            vgetq_lane_f32::<0>(one)
        })
    }

    #[inline(always)]
    fn max_magnitude(self, a: Self::Floats, b: Self::Floats) -> f32 {
        with!(self, {
            // Without their sign, floats are ordered as their bits are, and NaN comes last.
            let mut largest = vdupq_n_u32(0);
            for x in [a, b].as_flattened() {
                let magnitude = vandq_u32(vreinterpretq_u32_f32(*x), vdupq_n_u32(0x7fff_ffff));
                largest = vmaxq_u32(largest, magnitude);
            }
            f32::from_bits(vmaxvq_u32(largest))
        })
    }

    #[inline(always)]
    fn add_ints(self, a: Self::Ints, b: Self::Ints) -> Self::Ints {
        with!(self, each!(I, vaddq_s32(a[I], b[I])))
    }

    #[inline(always)]
    fn sub_int(self, a: Self::Ints, b: i32) -> Self::Ints {
        with!(self, each!(I, vsubq_s32(a[I], vdupq_n_s32(b))))
    }

    #[inline(always)]
    fn to_floats(self, a: Self::Ints) -> Self::Floats {
        with!(self, each!(I, vcvtq_f32_s32(a[I])))
    }

    #[inline(always)]
    fn store_i8(self, a: Self::Floats, to: &mut LaneArray<i8>) {
        with!(self, {
            let words = each!(I, vqmovn_s32(vcvtnq_s32_f32(a[I])));
            let low = vqmovn_s16(vcombine_s16(words[0], words[1]));
            let high = vqmovn_s16(vcombine_s16(words[2], words[3]));
            vst1q_s8(to.as_mut_ptr(), vcombine_s8(low, high));
        });
    }

    #[inline(always)]
    fn sum_i8(self, from: &LaneArray<i8>) -> i32 {
        with!(self, i32::from(vaddlvq_s8(load_row(from))))
    }

    #[inline(always)]
    fn store_f16(self, lanes: Self::Floats, to: &mut LaneArray<f16>) {
        with!(self, {
            let at = to.as_mut_ptr().cast::<u16>();
            for (i, lanes) in lanes.into_iter().enumerate() {
                let bits = vreinterpret_u16_f16(vcvt_f16_f32(lanes));
                vst1_u16(at.add(4 * i), bits);
            }
        });
    }

    // The dot products take 4 outputs at a time: their weights and the sums of several rows fit the registers.

    #[inline(always)]
    fn dot_u4<const R: usize>(self, weights: &[u8; UNIT_BYTES], rows: [&[i8; 32]; R]) -> [Ints; R] {
        with!(self, {
            let mut sums = [[vdupq_n_s32(0); 4]; R];
            for quarter in 0..4 {
                let [low, high] = nibbles(load_quarter(weights, quarter));
                let weights = (as_signed(low), as_signed(high));
                self.add_quarter(&mut sums, quarter, weights, rows);
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
            let mut sums = [[vdupq_n_s32(0); 4]; R];
            for quarter in 0..4 {
                let [low, high] = nibbles(load_quarter(weights, quarter));
                let bits = fifth_bits.map(|word| (word >> (16 * quarter)) as u16);
                let low = each!(G, with_fifth_bits(low[G], bits[2 * G]));
                let high = each!(G, with_fifth_bits(high[G], bits[2 * G + 1]));
                let weights = (low, high);
                self.add_quarter(&mut sums, quarter, weights, rows);
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
        self.dot(weights, rows)
    }

    #[inline(always)]
    fn dot_i8<const R: usize>(
        self,
        weights: &[u8; UNIT_BYTES],
        rows: [&[i8; 16]; R],
        _totals: [i32; R],
    ) -> [Ints; R] {
        self.dot(weights, rows)
    }
}

/// a > b ? a : b, so that a NaN in b survives and one in a does not.
#[inline]
#[target_feature(enable = "neon")]
fn larger(a: float32x4_t, b: float32x4_t) -> float32x4_t {
    vbslq_f32(vcgtq_f32(a, b), a, b)
}

/// 2^n by placing n in the exponent field.
#[inline]
#[target_feature(enable = "neon")]
fn pow2(n: float32x4_t) -> float32x4_t {
    let biased = vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127));
    vreinterpretq_f32_s32(vshlq_n_s32::<23>(biased))
}

/// The four groups of a unit for outputs 4·quarter and on.
#[inline]
#[target_feature(enable = "neon")]
fn load_quarter(unit: &[u8; UNIT_BYTES], quarter: usize) -> [uint8x16_t; 4] {
    assert!(quarter < 4);
    each!(G, {
        // SAFETY: 16 bytes at 64·3 + 16·3 are the last of the unit.
        unsafe { vld1q_u8(unit.as_ptr().add(64 * G + 16 * quarter)) }
    })
}

/// Activations of 16 k.
#[inline]
#[target_feature(enable = "neon")]
fn load_row(row: &[i8; 16]) -> int8x16_t {
    // SAFETY: 16 bytes are the array.
    unsafe { vld1q_s8(row.as_ptr()) }
}

/// Activations of 32 k.
#[inline]
#[target_feature(enable = "neon")]
fn load_halves(row: &[i8; 32]) -> [int8x16_t; 2] {
    // SAFETY: 16 bytes at 16 are the last of the array.
    unsafe { [vld1q_s8(row.as_ptr()), vld1q_s8(row.as_ptr().add(16))] }
}

/// The same bytes with a sign.
#[inline]
#[target_feature(enable = "neon")]
fn as_signed(bytes: [uint8x16_t; 4]) -> Quarter {
    each!(G, vreinterpretq_s8_u8(bytes[G]))
}

/// The low and the high nibbles.
#[inline]
#[target_feature(enable = "neon")]
fn nibbles(packed: [uint8x16_t; 4]) -> [[uint8x16_t; 4]; 2] {
    [
        each!(G, vandq_u8(packed[G], vdupq_n_u8(15))),
        each!(G, vshrq_n_u8::<4>(packed[G])),
    ]
}

/// Adds 16 to the nibbles whose bit is set.
#[inline]
#[target_feature(enable = "neon")]
fn with_fifth_bits(nibbles: uint8x16_t, bits: u16) -> int8x16_t {
    // Byte i looks at bit i % 8 of byte i / 8.
    let [low, high] = bits.to_le_bytes();
    let bytes = vcombine_u8(vdup_n_u8(low), vdup_n_u8(high));
    let single = vcreate_u8(0x8040_2010_0804_0201);
    let is_set = vtstq_u8(bytes, vcombine_u8(single, single));
    vreinterpretq_s8_u8(vorrq_u8(nibbles, vandq_u8(is_set, vdupq_n_u8(16))))
}
