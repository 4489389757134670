//! The left side of matrix products: float rows, or rows quantised to int8 once and shared by several products.

use std::ops::Range;

use super::simd::{Simd, instantiate};
use super::{CpuKernels, LANES, disjoint::Disjoint};

/// Activations that share a scale.
pub(super) const BLOCK: usize = 32;

/// Rows that lie together: a kernel that takes them through the weights reads one stream of activations.
pub(super) const GROUP: usize = 8;

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
    /// (groups of 8 rows, cols / 32) when int8, else empty.
    blocks: GroupBlocks,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Form {
    #[default]
    Float,
    Int8,
}

/// int8 activations q and their scales d, by group and block.
///
/// d = max |x| / 127; NaN when the block holds a value that is not finite.
#[derive(Default)]
struct GroupBlocks {
    quants: Vec<[[i8; BLOCK]; GROUP]>,
    scales: Vec<[f32; GROUP]>,
    /// d · Σ q
    sums: Vec<[f32; GROUP]>,
    halves: Vec<[Halves; GROUP]>,
}

/// Sums over the first and over the last 16 of a block, for weights with such blocks or with an offset.
#[derive(Clone, Copy, Default)]
pub(super) struct Halves {
    /// Σ q
    pub totals: [i32; 2],
    /// d · Σ q
    pub sums: [f32; 2],
}

/// Eight rows of int8 activations; all slices are by block.
#[derive(Clone, Copy)]
pub(super) struct QuantGroup<'a> {
    /// Integers q.
    pub quants: &'a [[[i8; BLOCK]; GROUP]],
    /// Their scales d.
    pub scales: &'a [[f32; GROUP]],
    /// d · Σ q
    pub sums: &'a [[f32; GROUP]],
    /// The same by halves.
    pub halves: &'a [[Halves; GROUP]],
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

    /// Rows 8·index and on of an int8 input.
    #[inline(always)]
    pub(super) fn quant_group(&self, index: usize) -> QuantGroup<'_> {
        let num_blocks = self.cols / BLOCK;
        let range = index * num_blocks..(index + 1) * num_blocks;
        QuantGroup {
            quants: &self.blocks.quants[range.clone()],
            scales: &self.blocks.scales[range.clone()],
            sums: &self.blocks.sums[range.clone()],
            halves: &self.blocks.halves[range],
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
        let num_blocks = cols / BLOCK;
        self.blocks.resize(rows.div_ceil(GROUP) * num_blocks);
        let shared = SharedBlocks::new(&mut self.blocks);
        let level = kernels.level;
        // Whole groups, so that no two threads write to one element.
        kernels.over(rows.div_ceil(GROUP), GROUP * cols, &|groups| {
            let end = rows.min(groups.end * GROUP);
            for row in groups.start * GROUP..end {
                let (x, _) = x[row * cols..(row + 1) * cols].as_chunks::<BLOCK>();
                let start = row / GROUP * num_blocks;
                // SAFETY: `over` gives every group to one call.
                let blocks = unsafe { shared.part(start..start + num_blocks) };
                quantise(level, x, row % GROUP, blocks);
            }
        });
    }

    fn reset(&mut self, form: Form, rows: usize, cols: usize) {
        self.form = form;
        (self.rows, self.cols) = (rows, cols);
        self.values.clear();
    }
}

impl GroupBlocks {
    /// What is kept from before is overwritten or not read.
    fn resize(&mut self, len: usize) {
        self.quants.resize(len, [[0; BLOCK]; GROUP]);
        self.scales.resize(len, [0.0; GROUP]);
        self.sums.resize(len, [0.0; GROUP]);
        self.halves.resize(len, [Halves::default(); GROUP]);
    }
}

/// Blocks that several threads fill.
struct SharedBlocks<'a> {
    quants: Disjoint<'a, [[i8; BLOCK]; GROUP]>,
    scales: Disjoint<'a, [f32; GROUP]>,
    sums: Disjoint<'a, [f32; GROUP]>,
    halves: Disjoint<'a, [Halves; GROUP]>,
}

/// Blocks that one thread fills.
struct BlocksMut<'a> {
    quants: &'a mut [[[i8; BLOCK]; GROUP]],
    scales: &'a mut [[f32; GROUP]],
    sums: &'a mut [[f32; GROUP]],
    halves: &'a mut [[Halves; GROUP]],
}

impl<'a> SharedBlocks<'a> {
    fn new(blocks: &'a mut GroupBlocks) -> Self {
        SharedBlocks {
            quants: Disjoint::new(&mut blocks.quants),
            scales: Disjoint::new(&mut blocks.scales),
            sums: Disjoint::new(&mut blocks.sums),
            halves: Disjoint::new(&mut blocks.halves),
        }
    }

    /// # Safety
    /// As for [`Disjoint::part`].
    unsafe fn part(&self, range: Range<usize>) -> BlocksMut<'_> {
        // SAFETY: the caller's promise.
        unsafe {
            BlocksMut {
                quants: self.quants.part(range.clone()),
                scales: self.scales.part(range.clone()),
                sums: self.sums.part(range.clone()),
                halves: self.halves.part(range),
            }
        }
    }
}

instantiate! {
    /// int8 and scale of every block of a row: d = max |x| / 127, q = x · (127 / max |x|), halves to even.
    fn quantise(x: &[[f32; BLOCK]], row: usize, to: BlocksMut<'_>) = quantise_body
}

#[inline(always)]
fn quantise_body<S: Simd>(s: S, x: &[[f32; BLOCK]], row: usize, to: BlocksMut<'_>) {
    for (block, x) in x.iter().enumerate() {
        let scale = quantise_block(s, x, &mut to.quants[block][row]);
        let totals = half_totals(&to.quants[block][row]);
        to.scales[block][row] = scale;
        to.sums[block][row] = scale * (totals[0] + totals[1]) as f32;
        to.halves[block][row] = Halves {
            totals,
            sums: [scale * totals[0] as f32, scale * totals[1] as f32],
        };
    }
}

/// Returns d. A block of zeros has d = 0, one with a value that is not finite has zeros and d = NaN.
#[inline(always)]
fn quantise_block<S: Simd>(s: S, x: &[f32; BLOCK], quants: &mut [i8; BLOCK]) -> f32 {
    let (halves, _) = x.as_chunks::<LANES>();
    let (low, high) = (s.load(&halves[0]), s.load(&halves[1]));
    let magnitude = s.max(s.max(low, s.neg(low)), s.max(high, s.neg(high)));
    let max = s.max_lane(magnitude);
    // 0 · x is NaN for infinities and NaN, which `max` may have dropped.
    let zero = s.splat(0.0);
    let trouble = s.sum(s.mul_add(low, zero, s.mul(high, zero)));
    if trouble.is_nan() || max < SMALLEST_MAX {
        *quants = [0; BLOCK];
        return trouble;
    }
    let inverse = s.splat(127.0 / max);
    let (to, _) = quants.as_chunks_mut::<LANES>();
    s.store_i8(s.mul(low, inverse), &mut to[0]);
    s.store_i8(s.mul(high, inverse), &mut to[1]);
    max / 127.0
}

#[inline(always)]
fn half_totals(quants: &[i8; BLOCK]) -> [i32; 2] {
    let (halves, _) = quants.as_chunks::<LANES>();
    [total(&halves[0]), total(&halves[1])]
}

#[inline(always)]
fn total(quants: &[i8; LANES]) -> i32 {
    let mut sum = 0;
    for &quant in quants {
        sum += i32::from(quant);
    }
    sum
}
