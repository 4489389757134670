//! The lanes in plain Rust: the definition that every other instruction set must equal bit for bit.

use std::array::from_fn;

use half::{bf16, f16};

use super::{FifthBits, LaneArray, Simd, UNIT_BYTES};

/// Needs nothing of the processor.
#[derive(Clone, Copy, Debug)]
pub(in crate::kernels::cpu) struct Portable;

/// Bits of √½: the border between mantissas that count as below and above one.
const SQRT_HALF_BITS: i32 = 0x3f35_04f3;

impl Simd for Portable {
    const MAX_ROWS: usize = 4;

    type Floats = LaneArray<f32>;
    type Ints = LaneArray<i32>;

    #[inline(always)]
    fn splat(self, value: f32) -> Self::Floats {
        [value; 16]
    }

    #[inline(always)]
    fn load(self, from: &LaneArray<f32>) -> Self::Floats {
        *from
    }

    #[inline(always)]
    fn load_f16(self, from: &LaneArray<f16>) -> Self::Floats {
        from.map(f16::to_f32)
    }

    #[inline(always)]
    fn load_bf16(self, from: &LaneArray<bf16>) -> Self::Floats {
        from.map(bf16::to_f32)
    }

    #[inline(always)]
    fn store(self, lanes: Self::Floats, to: &mut LaneArray<f32>) {
        *to = lanes;
    }

    #[inline(always)]
    fn add(self, a: Self::Floats, b: Self::Floats) -> Self::Floats {
        from_fn(|i| a[i] + b[i])
    }

    #[inline(always)]
    fn sub(self, a: Self::Floats, b: Self::Floats) -> Self::Floats {
        from_fn(|i| a[i] - b[i])
    }

    #[inline(always)]
    fn mul(self, a: Self::Floats, b: Self::Floats) -> Self::Floats {
        from_fn(|i| a[i] * b[i])
    }

    #[inline(always)]
    fn div(self, a: Self::Floats, b: Self::Floats) -> Self::Floats {
        from_fn(|i| a[i] / b[i])
    }

    #[inline(always)]
    fn mul_add(self, a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats {
        from_fn(|i| a[i].mul_add(b[i], c[i]))
    }

    #[inline(always)]
    fn neg(self, a: Self::Floats) -> Self::Floats {
        a.map(|value| -value)
    }

    #[inline(always)]
    fn max(self, a: Self::Floats, b: Self::Floats) -> Self::Floats {
        from_fn(|i| larger(a[i], b[i]))
    }

    #[inline(always)]
    fn min(self, a: Self::Floats, b: Self::Floats) -> Self::Floats {
        from_fn(|i| if a[i] < b[i] { a[i] } else { b[i] })
    }

    #[inline(always)]
    fn select_less(
        self,
        (x, y): (Self::Floats, Self::Floats),
        then: Self::Floats,
        otherwise: Self::Floats,
    ) -> Self::Floats {
        from_fn(|i| if x[i] < y[i] { then[i] } else { otherwise[i] })
    }

    #[inline(always)]
    fn round(self, a: Self::Floats) -> Self::Floats {
        a.map(f32::round_ties_even)
    }

    #[inline(always)]
    fn scale(self, a: Self::Floats, n: Self::Floats) -> Self::Floats {
        // 2^128 is no float: two steps, of which only the last can round.
        let pow2 = |n: f32| f32::from_bits(((n as i32).wrapping_add(127) << 23) as u32);
        from_fn(|i| {
            let half = (n[i] * 0.5).round_ties_even();
            a[i] * pow2(half) * pow2(n[i] - half)
        })
    }

    #[inline(always)]
    fn split_exponent(self, a: Self::Floats) -> (Self::Floats, Self::Floats) {
        let exponents: LaneArray<i32> =
            from_fn(|i| (a[i].to_bits() as i32).wrapping_sub(SQRT_HALF_BITS) >> 23);
        let mantissas = from_fn(|i| {
            f32::from_bits((a[i].to_bits() as i32).wrapping_sub(exponents[i] << 23) as u32)
        });
        (mantissas, exponents.map(|exponent| exponent as f32))
    }

    #[inline(always)]
    fn sum(self, a: Self::Floats) -> f32 {
        let eight: [f32; 8] = from_fn(|i| a[i] + a[i + 8]);
        let four: [f32; 4] = from_fn(|i| eight[i] + eight[i + 4]);
        (four[0] + four[2]) + (four[1] + four[3])
    }

    #[inline(always)]
    fn max_lane(self, a: Self::Floats) -> f32 {
        let eight: [f32; 8] = from_fn(|i| larger(a[i], a[i + 8]));
        let four: [f32; 4] = from_fn(|i| larger(eight[i], eight[i + 4]));
        larger(larger(four[0], four[2]), larger(four[1], four[3]))
    }

    #[inline(always)]
    fn max_magnitude(self, a: Self::Floats, b: Self::Floats) -> f32 {
        // Without their sign, floats are ordered as their bits are, and NaN comes last.
        let magnitude = |x: &f32| x.to_bits() & 0x7fff_ffff;
        let largest = a.iter().chain(&b).map(magnitude).max();
        f32::from_bits(largest.unwrap_or(0))
    }

    #[inline(always)]
    fn add_ints(self, a: Self::Ints, b: Self::Ints) -> Self::Ints {
        from_fn(|i| a[i].wrapping_add(b[i]))
    }

    #[inline(always)]
    fn sub_int(self, a: Self::Ints, b: i32) -> Self::Ints {
        a.map(|value| value.wrapping_sub(b))
    }

    #[inline(always)]
    fn to_floats(self, a: Self::Ints) -> Self::Floats {
        a.map(|value| value as f32)
    }

    #[inline(always)]
    fn store_i8(self, a: Self::Floats, to: &mut LaneArray<i8>) {
        *to = a.map(|value| value.round_ties_even() as i8);
    }

    #[inline(always)]
    fn sum_i8(self, from: &LaneArray<i8>) -> i32 {
        from.iter().map(|value| i32::from(*value)).sum()
    }

    #[inline(always)]
    fn store_f16(self, lanes: Self::Floats, to: &mut LaneArray<f16>) {
        *to = lanes.map(f16::from_f32);
    }

    #[inline(always)]
    fn dot_u4<const R: usize>(
        self,
        weights: &[u8; UNIT_BYTES],
        rows: [&[i8; 32]; R],
    ) -> [Self::Ints; R] {
        rows.map(|row| {
            let mut sums = [0i32; 16];
            for (i, &byte) in weights.iter().enumerate() {
                let k = i / 64 * 4 + i % 4;
                sums[i % 64 / 4] += i32::from(byte & 15) * i32::from(row[k])
                    + i32::from(byte >> 4) * i32::from(row[k + 16]);
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
        let mut sums = self.dot_u4(weights, rows);
        for (word, bits) in fifth_bits.iter().enumerate() {
            for i in (0..64).filter(|i| bits >> i & 1 == 1) {
                let k = word % 2 * 16 + word / 2 * 4 + i % 4;
                for (sums, row) in sums.iter_mut().zip(rows) {
                    sums[i / 4] += 16 * i32::from(row[k]);
                }
            }
        }
        sums
    }

    #[inline(always)]
    fn dot_i6<const R: usize>(
        self,
        weights: &[u8; UNIT_BYTES],
        rows: [&[i8; 16]; R],
        totals: [i32; R],
    ) -> [Self::Ints; R] {
        self.dot_i8(weights, rows, totals)
    }

    #[inline(always)]
    fn dot_i8<const R: usize>(
        self,
        weights: &[u8; UNIT_BYTES],
        rows: [&[i8; 16]; R],
        _totals: [i32; R],
    ) -> [Self::Ints; R] {
        rows.map(|row| {
            let mut sums = [0i32; 16];
            for (i, &byte) in weights.iter().enumerate() {
                let k = i / 64 * 4 + i % 4;
                sums[i % 64 / 4] += i32::from(byte as i8) * i32::from(row[k]);
            }
            sums
        })
    }
}

#[inline(always)]
fn larger(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}
