//! Products with quantised weights: exact integer sums by block, scaled and added up in floats.

#![expect(
    clippy::needless_range_loop,
    reason = "registers of several arrays are walked side by side; iterators would be closures"
)]

use std::marker::PhantomData;

use super::super::input::{GROUP, Halves, MatmulInput, QuantGroup};
use super::super::pack::{
    FactorPanels, Factors, IntegerPanels, QuantKind, QuantPanel, QuantPanels,
};
use super::super::simd::{Element, Level, Simd, instantiate, prefetch_behind};
use super::{Product, Tile};

/// Quantised weights of one matrix with factors of type F, and where their products go.
type QuantProduct<'a, 'b, F> = (&'a Product<'b>, &'a IntegerPanels, &'a FactorPanels<F>);

/// A tile of a product with quantised weights.
pub(super) fn tile(
    level: Level,
    (product, panels): (&Product<'_>, &QuantPanels),
    input: &MatmulInput,
    tile: Tile,
) {
    match panels.parts() {
        (integers, Factors::F16(factors)) => {
            tile_of_factor(level, (product, integers, factors), input, tile);
        }
        (integers, Factors::F32(factors)) => {
            tile_of_factor(level, (product, integers, factors), input, tile);
        }
    }
}

fn tile_of_factor<F: Element>(
    level: Level,
    product: QuantProduct<'_, '_, F>,
    input: &MatmulInput,
    tile: Tile,
) {
    match product.1.kind() {
        QuantKind::U4 => tile_of_kind::<U4<F>>(level, product, input, tile),
        QuantKind::I4 => tile_of_kind::<I4<F>>(level, product, input, tile),
        QuantKind::U5 => tile_of_kind::<U5<F>>(level, product, input, tile),
        QuantKind::I5 => tile_of_kind::<I5<F>>(level, product, input, tile),
        QuantKind::I6Half => tile_of_kind::<I6Half<F>>(level, product, input, tile),
        QuantKind::I8 => tile_of_kind::<I8<F>>(level, product, input, tile),
    }
}

instantiate! {
    /// A tile of a product with quantised weights.
    fn tile_of_kind<K: Kind>(
        product: QuantProduct<'_, '_, K::Factor>,
        input: &MatmulInput,
        tile: Tile,
    )
        = tile_body::<_, K>
}

/// Blocks of 32 k between what is multiplied and what is asked for from memory: with eight rows about the time
/// that memory takes to answer.
const AHEAD: usize = 16;

/// Some rows of a group.
#[derive(Clone, Copy)]
struct Rows<'a> {
    group: QuantGroup<'a>,
    first: usize,
}

impl<'a> Rows<'a> {
    /// Block `block` of row `r`.
    #[inline(always)]
    fn quants(&self, block: usize, r: usize) -> &'a [i8; 32] {
        &self.group.quants[block][self.first + r]
    }

    /// Sums over the halves of block `block` of row `r`.
    #[inline(always)]
    fn halves(&self, block: usize, r: usize) -> &'a Halves {
        &self.group.halves[block][self.first + r]
    }
}

/// How a kind of packed integers is multiplied: adds 32 k to the sums of R rows.
trait Kind {
    /// What scales and mins are stored as.
    type Factor: Element;
    /// Units in 32 k.
    const UNITS: usize;
    /// Scales in 32 k.
    const SCALES: usize;

    fn add_block<S: Simd, const R: usize>(
        s: S,
        panel: &QuantPanel<'_, Self::Factor>,
        rows: Rows<'_>,
        block: usize,
        sums: &mut [S::Floats; R],
    );
}

#[inline(always)]
fn tile_body<S: Simd, K: Kind>(
    s: S,
    (product, integers, factors): QuantProduct<'_, '_, K::Factor>,
    input: &MatmulInput,
    tile: Tile,
) {
    for index in tile.panels {
        let panel = (index, integers.panel(factors, index, input.cols()));
        let mut row = tile.rows.start;
        while row < tile.rows.end {
            // Steps of powers of two from the start of a tile stay inside a group.
            row += match S::MAX_ROWS.min(tile.rows.end - row) {
                1 => quant_step::<S, K, 1>(s, product, panel, input, row),
                2 => quant_step::<S, K, 2>(s, product, panel, input, row),
                3 => quant_step::<S, K, 3>(s, product, panel, input, row),
                4..8 => quant_step::<S, K, 4>(s, product, panel, input, row),
                _ => quant_step::<S, K, 8>(s, product, panel, input, row),
            };
        }
    }
}

/// R rows times one panel; returns R.
#[inline(always)]
fn quant_step<S: Simd, K: Kind, const R: usize>(
    s: S,
    product: &Product<'_>,
    (index, panel): (usize, QuantPanel<'_, K::Factor>),
    input: &MatmulInput,
    first_row: usize,
) -> usize {
    let rows = Rows {
        group: input.quant_group(first_row / GROUP),
        first: first_row % GROUP,
    };
    let mut sums = [s.splat(0.0); R];
    for block in 0..rows.group.quants.len() {
        prefetch_behind(&panel.units[block * K::UNITS..], AHEAD * K::UNITS);
        prefetch_behind(&panel.scales[block * K::SCALES..], AHEAD * K::SCALES);
        K::add_block(s, &panel, rows, block, &mut sums);
    }
    for r in 0..R {
        product.store(s, sums[r], first_row + r, index);
    }
    R
}

/// Kinds of integers with factors of type F.
struct U4<F>(PhantomData<F>);
struct I4<F>(PhantomData<F>);
struct U5<F>(PhantomData<F>);
struct I5<F>(PhantomData<F>);
struct I6Half<F>(PhantomData<F>);
struct I8<F>(PhantomData<F>);

impl<F: Element> Kind for U4<F> {
    type Factor = F;
    const UNITS: usize = 1;
    const SCALES: usize = 1;

    #[inline(always)]
    fn add_block<S: Simd, const R: usize>(
        s: S,
        panel: &QuantPanel<'_, F>,
        rows: Rows<'_>,
        block: usize,
        sums: &mut [S::Floats; R],
    ) {
        let ints = s.dot_u4(&panel.units[block], quants(rows, block));
        add_scaled(s, panel, rows, (block, ints), sums);
    }
}

impl<F: Element> Kind for I4<F> {
    type Factor = F;
    const UNITS: usize = 1;
    const SCALES: usize = 1;

    #[inline(always)]
    fn add_block<S: Simd, const R: usize>(
        s: S,
        panel: &QuantPanel<'_, F>,
        rows: Rows<'_>,
        block: usize,
        sums: &mut [S::Floats; R],
    ) {
        let mut ints = s.dot_u4(&panel.units[block], quants(rows, block));
        subtract_offset(s, 8, rows, block, &mut ints);
        add_scaled(s, panel, rows, (block, ints), sums);
    }
}

impl<F: Element> Kind for U5<F> {
    type Factor = F;
    const UNITS: usize = 1;
    const SCALES: usize = 1;

    #[inline(always)]
    fn add_block<S: Simd, const R: usize>(
        s: S,
        panel: &QuantPanel<'_, F>,
        rows: Rows<'_>,
        block: usize,
        sums: &mut [S::Floats; R],
    ) {
        let (unit, fifth_bits) = (&panel.units[block], &panel.fifth_bits[block]);
        let ints = s.dot_u5(unit, fifth_bits, quants(rows, block));
        add_scaled(s, panel, rows, (block, ints), sums);
    }
}

impl<F: Element> Kind for I5<F> {
    type Factor = F;
    const UNITS: usize = 1;
    const SCALES: usize = 1;

    #[inline(always)]
    fn add_block<S: Simd, const R: usize>(
        s: S,
        panel: &QuantPanel<'_, F>,
        rows: Rows<'_>,
        block: usize,
        sums: &mut [S::Floats; R],
    ) {
        let (unit, fifth_bits) = (&panel.units[block], &panel.fifth_bits[block]);
        let mut ints = s.dot_u5(unit, fifth_bits, quants(rows, block));
        subtract_offset(s, 16, rows, block, &mut ints);
        add_scaled(s, panel, rows, (block, ints), sums);
    }
}

impl<F: Element> Kind for I8<F> {
    type Factor = F;
    const UNITS: usize = 2;
    const SCALES: usize = 1;

    #[inline(always)]
    fn add_block<S: Simd, const R: usize>(
        s: S,
        panel: &QuantPanel<'_, F>,
        rows: Rows<'_>,
        block: usize,
        sums: &mut [S::Floats; R],
    ) {
        let (quants, totals) = half_quants::<R>(rows, block, 0);
        let mut ints = s.dot_i8(&panel.units[2 * block], quants, totals);
        let (quants, totals) = half_quants::<R>(rows, block, 1);
        let high = s.dot_i8(&panel.units[2 * block + 1], quants, totals);
        for r in 0..R {
            ints[r] = s.add_ints(ints[r], high[r]);
        }
        add_scaled(s, panel, rows, (block, ints), sums);
    }
}

impl<F: Element> Kind for I6Half<F> {
    type Factor = F;
    const UNITS: usize = 2;
    const SCALES: usize = 2;

    #[inline(always)]
    fn add_block<S: Simd, const R: usize>(
        s: S,
        panel: &QuantPanel<'_, F>,
        rows: Rows<'_>,
        block: usize,
        sums: &mut [S::Floats; R],
    ) {
        for half in 0..2 {
            let unit = 2 * block + half;
            let (quants, totals) = half_quants::<R>(rows, block, half);
            let ints = s.dot_i6(&panel.units[unit], quants, totals);
            let scale = F::load(s, &panel.scales[unit]);
            for r in 0..R {
                let factor = s.mul(scale, s.splat(rows.group.scales[block][rows.first + r]));
                sums[r] = s.mul_add(factor, s.to_floats(ints[r]), sums[r]);
            }
            if let Some(min) = panel.mins.get(unit) {
                let min = F::load(s, min);
                for r in 0..R {
                    let sum = s.splat(rows.halves(block, r).sums[half]);
                    sums[r] = s.mul_add(min, sum, sums[r]);
                }
            }
        }
    }
}

/// Scales the integer sums of a block of 32 and adds the mins.
#[inline(always)]
fn add_scaled<S: Simd, F: Element, const R: usize>(
    s: S,
    panel: &QuantPanel<'_, F>,
    rows: Rows<'_>,
    (block, ints): (usize, [S::Ints; R]),
    sums: &mut [S::Floats; R],
) {
    let scale = F::load(s, &panel.scales[block]);
    for r in 0..R {
        let factor = s.mul(scale, s.splat(rows.group.scales[block][rows.first + r]));
        sums[r] = s.mul_add(factor, s.to_floats(ints[r]), sums[r]);
    }
    if let Some(min) = panel.mins.get(block) {
        let min = F::load(s, min);
        for r in 0..R {
            sums[r] = s.mul_add(
                min,
                s.splat(rows.group.sums[block][rows.first + r]),
                sums[r],
            );
        }
    }
}

/// Σ (q + offset)·x − offset·Σ x
#[inline(always)]
fn subtract_offset<S: Simd, const R: usize>(
    s: S,
    offset: i32,
    rows: Rows<'_>,
    block: usize,
    ints: &mut [S::Ints; R],
) {
    for r in 0..R {
        let [low, high] = rows.halves(block, r).totals;
        ints[r] = s.sub_int(ints[r], offset * (low + high));
    }
}

/// Block `block` of each row.
#[inline(always)]
fn quants<'a, const R: usize>(rows: Rows<'a>, block: usize) -> [&'a [i8; 32]; R] {
    let mut quants = [rows.quants(block, 0); R];
    for r in 1..R {
        quants[r] = rows.quants(block, r);
    }
    quants
}

/// One half of block `block` of each row, and its sums.
#[inline(always)]
fn half_quants<'a, const R: usize>(
    rows: Rows<'a>,
    block: usize,
    half: usize,
) -> ([&'a [i8; 16]; R], [i32; R]) {
    let mut quants = [&rows.quants(block, 0).as_chunks::<16>().0[half]; R];
    let mut totals = [0; R];
    for r in 0..R {
        quants[r] = &rows.quants(block, r).as_chunks::<16>().0[half];
        totals[r] = rows.halves(block, r).totals[half];
    }
    (quants, totals)
}
