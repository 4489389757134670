//! The left side of matrix products: float rows, or rows quantised to int8 once and shared by several products.

use super::simd::{Simd, instantiate};
use super::{CpuKernels, LANES, disjoint::Disjoint};

/// Activations that share a scale.
pub(super) const BLOCK: usize = 32;

/// Below this magnitude a block counts as zero: 127 / it must not overflow.
const SMALLEST_MAX: f32 = 1e-30;

/// The left side of matrix products: activations (rows, cols), quantised once and shared.
#[derive(Default)]
pub struct MatmulInput {
    rows: usize,
    cols: usize,
    form: Form,
    /// (rows, cols) when float, else empty.
    values: Vec<f32>,
    /// (rows, cols / 32) when int8, else empty.
    quants: Vec<[i8; BLOCK]>,
    /// (rows, cols / 32) when int8, else empty.
    scales: Vec<BlockScale>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Form {
    #[default]
    Float,
    Int8,
}

/// What 32 int8 activations q stand for: the values d · q.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct BlockScale {
    /// d = max |x| / 127; NaN when the block holds a value that is not finite.
    pub scale: f32,
    /// Σ q of the first and of the last 16.
    pub half_totals: [i32; 2],
    /// d · Σ q
    pub sum: f32,
    /// d · Σ q of the first and of the last 16.
    pub half_sums: [f32; 2],
}

/// One row of int8 activations.
#[derive(Clone, Copy)]
pub(super) struct QuantRow<'a> {
    /// By block.
    pub quants: &'a [[i8; BLOCK]],
    /// By block.
    pub scales: &'a [BlockScale],
}

impl MatmulInput {
    /// Rows.
    pub(super) fn rows(&self) -> usize {
        self.rows
    }

    /// Columns.
    pub(super) fn cols(&self) -> usize {
        self.cols
    }

    /// True when the rows are int8.
    pub(super) fn is_int8(&self) -> bool {
        self.form == Form::Int8
    }

    /// Row `row` of a float input.
    #[inline(always)]
    pub(super) fn float_row(&self, row: usize) -> &[f32] {
        &self.values[row * self.cols..(row + 1) * self.cols]
    }

    /// Row `row` of an int8 input.
    #[inline(always)]
    pub(super) fn quant_row(&self, row: usize) -> QuantRow<'_> {
        let num_blocks = self.cols / BLOCK;
        let blocks = row * num_blocks..(row + 1) * num_blocks;
        QuantRow {
            quants: &self.quants[blocks.clone()],
            scales: &self.scales[blocks],
        }
    }

    /// Copies the rows.
    pub(super) fn load_float(&mut self, x: &[f32], rows: usize, cols: usize) {
        self.reset(Form::Float, rows, cols);
        self.values.extend_from_slice(x);
    }

    /// Quantises the rows.
    pub(super) fn load_int8(&mut self, kernels: &CpuKernels, x: &[f32], rows: usize, cols: usize) {
        assert!(
            cols.is_multiple_of(BLOCK),
            "int8 rows are made of blocks of 32, not {cols} columns"
        );
        self.reset(Form::Int8, rows, cols);
        let num_blocks = rows * cols / BLOCK;
        self.quants.resize(num_blocks, [0; BLOCK]);
        self.scales.resize(num_blocks, BlockScale::default());
        let (blocks, _) = x.as_chunks::<BLOCK>();
        let quants = Disjoint::new(&mut self.quants);
        let scales = Disjoint::new(&mut self.scales);
        let level = kernels.level;
        kernels.over(num_blocks, BLOCK, &|range| {
            // SAFETY: `over` gives every block to one call.
            let (quants, scales) =
                unsafe { (quants.part(range.clone()), scales.part(range.clone())) };
            quantise(level, &blocks[range], quants, scales);
        });
    }

    fn reset(&mut self, form: Form, rows: usize, cols: usize) {
        self.form = form;
        (self.rows, self.cols) = (rows, cols);
        self.values.clear();
        self.quants.clear();
        self.scales.clear();
    }
}

instantiate! {
    /// int8 and scale of every block: d = max |x| / 127, q = x · (127 / max |x|), halves to even.
    fn quantise(x: &[[f32; BLOCK]], quants: &mut [[i8; BLOCK]], scales: &mut [BlockScale]) = quantise_body
}

#[inline(always)]
fn quantise_body<S: Simd>(
    s: S,
    x: &[[f32; BLOCK]],
    quants: &mut [[i8; BLOCK]],
    scales: &mut [BlockScale],
) {
    for ((x, quants), scale) in x.iter().zip(quants).zip(scales) {
        *scale = quantise_block(s, x, quants);
    }
}

#[inline(always)]
fn quantise_block<S: Simd>(s: S, x: &[f32; BLOCK], quants: &mut [i8; BLOCK]) -> BlockScale {
    let (halves, _) = x.as_chunks::<LANES>();
    let (low, high) = (s.load(&halves[0]), s.load(&halves[1]));
    let magnitude = s.max(s.max(low, s.neg(low)), s.max(high, s.neg(high)));
    let max = s.max_lane(magnitude);
    // 0 · x is NaN for infinities and NaN, which `max` may have dropped.
    let zero = s.splat(0.0);
    let trouble = s.sum(s.mul_add(low, zero, s.mul(high, zero)));
    if trouble.is_nan() || max < SMALLEST_MAX {
        return empty_block(trouble, quants);
    }
    let inverse = s.splat(127.0 / max);
    let (to, _) = quants.as_chunks_mut::<LANES>();
    s.store_i8(s.mul(low, inverse), &mut to[0]);
    s.store_i8(s.mul(high, inverse), &mut to[1]);
    let totals = [total(&to[0]), total(&to[1])];
    let scale = max / 127.0;
    BlockScale {
        scale,
        half_totals: totals,
        sum: scale * (totals[0] + totals[1]) as f32,
        half_sums: [scale * totals[0] as f32, scale * totals[1] as f32],
    }
}

/// A block of zeros; with a NaN for `scale` all its products are NaN.
#[inline(always)]
fn empty_block(scale: f32, quants: &mut [i8; BLOCK]) -> BlockScale {
    *quants = [0; BLOCK];
    BlockScale {
        scale,
        half_totals: [0; 2],
        sum: scale,
        half_sums: [scale; 2],
    }
}

#[inline(always)]
fn total(quants: &[i8; LANES]) -> i32 {
    let mut sum = 0;
    for &quant in quants {
        sum += i32::from(quant);
    }
    sum
}
