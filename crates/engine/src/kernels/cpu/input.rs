//! The left side of matrix products: float rows, or rows quantised to int8 once and shared by several products.
//!
//! What makes the rows (a norm, a gate) runs here too, row by row, while a row is in the first-level cache.

use std::ops::Range;

use super::elementwise::{EXP_COST, gate_slice, norm_rows};
use super::simd::{Level, Simd, instantiate};
use super::{CpuKernels, LANES, disjoint::Disjoint};
use crate::config::Activation;

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
    /// (rows, cols) unless the rows are int8 and nothing had to be computed. Keeps its largest size.
    values: Vec<f32>,
    /// (groups of 8 rows, cols / 32) when int8. Keeps its largest size.
    blocks: GroupBlocks,
}

/// Where the rows (rows, cols) of an input come from.
#[derive(Clone, Copy)]
pub enum InputRows<'a> {
    /// As they are.
    Plain(&'a [f32]),
    /// x / rms(x) · weight
    Normed {
        /// (rows, cols)
        x: &'a [f32],
        /// cols values.
        weight: &'a [f32],
        /// Added to the mean square.
        eps: f32,
    },
    /// activation(gate) · up
    Gated {
        /// What the gate goes through.
        activation: Activation,
        /// (rows, cols)
        gate: &'a [f32],
        /// (rows, cols)
        up: &'a [f32],
    },
}

impl<'a> From<&'a [f32]> for InputRows<'a> {
    fn from(x: &'a [f32]) -> Self {
        InputRows::Plain(x)
    }
}

impl<'a> From<&'a Vec<f32>> for InputRows<'a> {
    fn from(x: &'a Vec<f32>) -> Self {
        InputRows::Plain(x)
    }
}

impl InputRows<'_> {
    /// Values in all rows.
    pub fn len(&self) -> usize {
        match self {
            InputRows::Plain(x) | InputRows::Normed { x, .. } => x.len(),
            InputRows::Gated { gate, .. } => gate.len(),
        }
    }

    /// True without rows.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What a value costs, in simple operations.
    fn cost(&self) -> usize {
        match self {
            InputRows::Plain(_) => 1,
            InputRows::Normed { .. } => 2,
            InputRows::Gated { .. } => EXP_COST,
        }
    }

    /// Computes the values `range`, which are one row.
    fn make(&self, level: Level, range: Range<usize>, out: &mut [f32]) {
        match *self {
            InputRows::Plain(x) => out.copy_from_slice(&x[range]),
            InputRows::Normed { x, weight, eps } => {
                out.copy_from_slice(&x[range]);
                norm_rows(level, out, weight, eps);
            }
            InputRows::Gated {
                activation,
                gate,
                up,
            } => gate_slice(level, activation, (&gate[range.clone()], &up[range]), out),
        }
    }
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
    /// Bytes that inputs of (rows, cols) need at most.
    pub(crate) fn num_bytes(rows: usize, cols: usize) -> usize {
        let block = size_of::<[i8; BLOCK]>() + 2 * size_of::<f32>() + size_of::<Halves>();
        let num_blocks = rows.next_multiple_of(GROUP) * (cols / BLOCK);
        rows * cols * size_of::<f32>() + num_blocks * block
    }

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

    /// Makes the rows, and quantises them when `int8` is set.
    pub(super) fn load(
        &mut self,
        kernels: &CpuKernels,
        source: InputRows<'_>,
        (rows, cols): (usize, usize),
        int8: bool,
    ) {
        assert_eq!(source.len(), rows * cols, "(rows, cols)");
        (self.rows, self.cols) = (rows, cols);
        self.form = if int8 { Form::Int8 } else { Form::Float };
        if !int8 || !matches!(source, InputRows::Plain(_)) {
            grow(&mut self.values, rows * cols, 0.0);
        }
        let num_blocks = if int8 { cols / BLOCK } else { 0 };
        if int8 {
            assert!(
                cols.is_multiple_of(BLOCK),
                "int8 rows are made of blocks of 32, not {cols} columns"
            );
            self.blocks.grow(rows.div_ceil(GROUP) * num_blocks);
        }
        let values = Disjoint::new(&mut self.values);
        let blocks = SharedBlocks::new(&mut self.blocks);
        let level = kernels.level;
        let load_row = |row: usize| {
            let range = row * cols..(row + 1) * cols;
            let row_values = match source {
                InputRows::Plain(x) if int8 => &x[range],
                source => {
                    // SAFETY: a row is loaded once.
                    let made = unsafe { values.part(range.clone()) };
                    source.make(level, range, made);
                    made
                }
            };
            if int8 {
                let start = row / GROUP * num_blocks;
                // SAFETY: `over` gives every group to one call.
                let blocks = unsafe { blocks.part(start..start + num_blocks) };
                quantise(
                    level,
                    row_values.as_chunks::<BLOCK>().0,
                    row % GROUP,
                    blocks,
                );
            }
        };
        // Whole groups, so that no two threads write to one element.
        let cost = GROUP * cols * (source.cost() + usize::from(int8));
        kernels.over(rows.div_ceil(GROUP), cost, &|groups| {
            (groups.start * GROUP..rows.min(groups.end * GROUP)).for_each(load_row);
        });
    }
}

/// Makes room for `len` elements; what is there is overwritten by the caller.
fn grow<T: Clone>(elements: &mut Vec<T>, len: usize, value: T) {
    if elements.len() < len {
        elements.resize(len, value);
    }
}

impl GroupBlocks {
    fn grow(&mut self, len: usize) {
        grow(&mut self.quants, len, [[0; BLOCK]; GROUP]);
        grow(&mut self.scales, len, [0.0; GROUP]);
        grow(&mut self.sums, len, [0.0; GROUP]);
        grow(&mut self.halves, len, [Halves::default(); GROUP]);
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
        let (halves, _) = to.quants[block][row].as_chunks::<LANES>();
        let totals = [s.sum_i8(&halves[0]), s.sum_i8(&halves[1])];
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
    let max = s.max_magnitude(low, high);
    if !max.is_finite() || max < SMALLEST_MAX {
        *quants = [0; BLOCK];
        return 0.0 * max;
    }
    let inverse = s.splat(127.0 / max);
    let (to, _) = quants.as_chunks_mut::<LANES>();
    s.store_i8(s.mul(low, inverse), &mut to[0]);
    s.store_i8(s.mul(high, inverse), &mut to[1]);
    max / 127.0
}
