//! Matrix products: rows of activations times packed weights.
//!
//! One order of accumulation for every number of rows, so that a row has the same bits whatever shares the
//! batch (A6). For float weights, sequential in k:
//!
//! ```text
//! acc = fma(x[k], w[k], acc)
//! ```
//!
//! For quantised weights, sequential in blocks b of 32 (of 16 where weights share scales by 16), with exact
//! integer sums inside:
//!
//! ```text
//! acc = fma(d_w[b] · d_x[b], Σ q_w·q_x, acc)
//! acc = fma(min_w[b], d_x[b] · Σ q_x, acc)      formats with mins
//! ```
//!
//! The bias is added last. Outputs are the lanes; what differs between numbers of rows is only how many
//! independent accumulators are in flight.

#![expect(
    clippy::needless_range_loop,
    reason = "registers of several arrays are walked side by side; iterators would be closures"
)]

use std::array::from_fn;
use std::ops::Range;

use super::disjoint::Disjoint;
use super::input::{MatmulInput, QuantRow};
use super::pack::{QuantKind, QuantPanel, QuantPanels, Weights};
use super::simd::{
    Aligned, Element, LaneArray, Level, Simd, instantiate, load_partial, store_partial,
};
use super::{CpuKernels, LANES, MatmulOutput, PackedMatrix};

/// Rows that one thread multiplies with a few panels before it goes on: their activations stay in cache.
const MAX_TILE_ROWS: usize = 64;

/// Panels that a tile takes at least and in multiples of: as many as one row is multiplied with at once.
const PANEL_STEP: usize = 4;

/// Panels that a tile takes at most.
const MAX_TILE_PANELS: usize = 32;

/// One product with its output shared between threads.
struct Product<'a> {
    weight: &'a PackedMatrix,
    bias: Option<&'a [f32]>,
    /// (rows, out_features)
    out: Disjoint<'a, f32>,
}

/// What one thread computes in one go.
struct Tile {
    panels: Range<usize>,
    rows: Range<usize>,
}

/// How products are cut into tiles.
struct Tiling {
    rows: usize,
    tile_panels: usize,
}

/// All products of one input, in one parallel region.
pub(super) fn multiply(
    kernels: &CpuKernels,
    input: &MatmulInput,
    outputs: &mut [MatmulOutput<'_>],
) {
    let products: Vec<Product<'_>> = outputs
        .iter_mut()
        .map(|output| Product::new(input, output))
        .collect();
    let tiling = Tiling::new(kernels.num_threads(), input.rows(), &products);
    let num_tiles = products
        .iter()
        .map(|product| tiling.num_tiles(product))
        .sum();
    let level = kernels.level;
    kernels.for_each(num_tiles, &|index| {
        let (product, tile) = tiling.tile(&products, index);
        multiply_tile(level, product, input, tile);
    });
}

impl<'a> Product<'a> {
    fn new(input: &MatmulInput, output: &'a mut MatmulOutput<'_>) -> Self {
        let (weight, bias) = (output.weight, output.bias);
        assert_eq!(input.cols(), weight.in_features(), "columns of the input");
        assert_eq!(input.is_int8(), weight.is_quantised(), "form of the input");
        assert_eq!(
            output.out.len(),
            input.rows() * weight.out_features(),
            "size of the output"
        );
        assert!(bias.is_none_or(|bias| bias.len() == weight.out_features()));
        Product {
            weight,
            bias,
            out: Disjoint::new(output.out),
        }
    }

    /// Adds the bias and writes 16 outputs of a row (fewer in the last panel).
    #[inline(always)]
    fn store<S: Simd>(&self, s: S, sums: S::Floats, row: usize, panel: usize) {
        let num_outputs = self.weight.out_features();
        let start = panel * LANES;
        let end = num_outputs.min(start + LANES);
        let sums = match self.bias {
            Some(bias) => s.add(sums, load_partial(s, &bias[start..end])),
            None => sums,
        };
        let at = row * num_outputs;
        // SAFETY: tiles do not overlap, and each is computed once.
        let out = unsafe { self.out.part(at + start..at + end) };
        match out.as_mut_array::<LANES>() {
            Some(out) => s.store(sums, out),
            None => store_partial(s, sums, out),
        }
    }
}

impl Tiling {
    /// Tiles large enough to be worth handing out, and several for each thread.
    fn new(num_threads: usize, rows: usize, products: &[Product<'_>]) -> Self {
        let num_panels: usize = products
            .iter()
            .map(|product| product.weight.num_panels())
            .sum();
        let share = num_panels.div_ceil(num_threads * 8);
        let tile_panels = share.next_multiple_of(PANEL_STEP).min(MAX_TILE_PANELS);
        Tiling { rows, tile_panels }
    }

    fn num_tiles(&self, product: &Product<'_>) -> usize {
        product.weight.num_panels().div_ceil(self.tile_panels) * self.rows.div_ceil(MAX_TILE_ROWS)
    }

    /// Tile `index` of all products: rows vary fastest, so that weights stay in cache.
    fn tile<'p, 'a>(
        &self,
        products: &'p [Product<'a>],
        mut index: usize,
    ) -> (&'p Product<'a>, Tile) {
        let mut which = 0;
        while index >= self.num_tiles(&products[which]) {
            index -= self.num_tiles(&products[which]);
            which += 1;
        }
        let product = &products[which];
        let num_row_tiles = self.rows.div_ceil(MAX_TILE_ROWS);
        let (panel_tile, row_tile) = (index / num_row_tiles, index % num_row_tiles);
        let tile = Tile {
            panels: piece(panel_tile, self.tile_panels, product.weight.num_panels()),
            rows: piece(row_tile, MAX_TILE_ROWS, self.rows),
        };
        (product, tile)
    }
}

/// Piece `index` of `0..len` cut into pieces of `size`.
fn piece(index: usize, size: usize, len: usize) -> Range<usize> {
    index * size..len.min((index + 1) * size)
}

/// Computes one tile of a product.
fn multiply_tile(level: Level, product: &Product<'_>, input: &MatmulInput, tile: Tile) {
    match product.weight.weights() {
        Weights::F32(panels) => float_tile(level, (product, panels), input, tile),
        Weights::F16(panels) => float_tile(level, (product, panels), input, tile),
        Weights::Bf16(panels) => float_tile(level, (product, panels), input, tile),
        Weights::Quantised(panels) => match panels.kind {
            QuantKind::U4 => quant_tile::<U4>(level, (product, panels), input, tile),
            QuantKind::I4 => quant_tile::<I4>(level, (product, panels), input, tile),
            QuantKind::I6 => quant_tile::<I6>(level, (product, panels), input, tile),
            QuantKind::I6Half => quant_tile::<I6Half>(level, (product, panels), input, tile),
            QuantKind::I8 => quant_tile::<I8>(level, (product, panels), input, tile),
        },
    }
}

instantiate! {
    /// A tile of a product with float weights.
    fn float_tile<T: Element>(product: FloatProduct<'_, '_, T>, input: &MatmulInput, tile: Tile)
        = float_tile_body
}

instantiate! {
    /// A tile of a product with quantised weights.
    fn quant_tile<K: Kind>(product: (&Product<'_>, &QuantPanels), input: &MatmulInput, tile: Tile)
        = quant_tile_body::<_, K>
}

/// Float weights of one matrix, with where their products go.
type FloatProduct<'a, 'b, T> = (&'a Product<'b>, &'a [Aligned<LaneArray<T>>]);

#[inline(always)]
fn float_tile_body<S: Simd, T: Element>(
    s: S,
    product: FloatProduct<'_, '_, T>,
    input: &MatmulInput,
    tile: Tile,
) {
    let mut panel = tile.panels.start;
    while panel < tile.panels.end {
        let end = tile.panels.end.min(panel + PANEL_STEP);
        float_rows(s, product, input, (panel..end, tile.rows.clone()));
        panel = end;
    }
}

/// All rows times up to four panels, in steps of as many accumulators as registers hold.
#[inline(always)]
fn float_rows<S: Simd, T: Element>(
    s: S,
    product: FloatProduct<'_, '_, T>,
    input: &MatmulInput,
    (panels, rows): (Range<usize>, Range<usize>),
) {
    let mut row = rows.start;
    while row < rows.end {
        row += match rows.end - row {
            1 => float_step::<S, T, 1, 4>(s, product, input, (panels.clone(), row)),
            2 | 3 => float_step::<S, T, 2, 2>(s, product, input, (panels.clone(), row)),
            4 | 5 => float_step::<S, T, 4, 1>(s, product, input, (panels.clone(), row)),
            _ => float_step::<S, T, 6, 1>(s, product, input, (panels.clone(), row)),
        };
    }
}

/// R rows times some panels, P at a time; returns R.
#[inline(always)]
fn float_step<S: Simd, T: Element, const R: usize, const P: usize>(
    s: S,
    product: FloatProduct<'_, '_, T>,
    input: &MatmulInput,
    (panels, row): (Range<usize>, usize),
) -> usize {
    let mut panel = panels.start;
    while panel < panels.end {
        if panel + P <= panels.end {
            float_dot::<S, T, R, P>(s, product, input, (panel, row));
            panel += P;
        } else {
            float_dot::<S, T, R, 1>(s, product, input, (panel, row));
            panel += 1;
        }
    }
    R
}

/// R rows times P panels.
#[inline(always)]
fn float_dot<S: Simd, T: Element, const R: usize, const P: usize>(
    s: S,
    (product, all_panels): FloatProduct<'_, '_, T>,
    input: &MatmulInput,
    (first_panel, first_row): (usize, usize),
) {
    let panels: [&[Aligned<LaneArray<T>>]; P] =
        from_fn(|p| product.weight.panel(all_panels, first_panel + p));
    let rows: [&[f32]; R] = from_fn(|r| input.float_row(first_row + r));
    let mut sums = [[s.splat(0.0); P]; R];
    for k in 0..input.cols() {
        let mut weights = [s.splat(0.0); P];
        for p in 0..P {
            weights[p] = T::load(s, &panels[p][k].0);
        }
        for r in 0..R {
            let x = s.splat(rows[r][k]);
            for p in 0..P {
                sums[r][p] = s.mul_add(x, weights[p], sums[r][p]);
            }
        }
    }
    for r in 0..R {
        for p in 0..P {
            product.store(s, sums[r][p], first_row + r, first_panel + p);
        }
    }
}

/// How a kind of packed integers is multiplied: adds 32 k to the sums of R rows.
trait Kind {
    fn add_block<S: Simd, const R: usize>(
        s: S,
        panel: &QuantPanel<'_>,
        rows: &[QuantRow<'_>; R],
        block: usize,
        sums: &mut [S::Floats; R],
    );
}

#[inline(always)]
fn quant_tile_body<S: Simd, K: Kind>(
    s: S,
    (product, panels): (&Product<'_>, &QuantPanels),
    input: &MatmulInput,
    tile: Tile,
) {
    for index in tile.panels {
        let panel = (index, panels.panel(index, input.cols()));
        let mut row = tile.rows.start;
        while row < tile.rows.end {
            row += match tile.rows.end - row {
                1 => quant_step::<S, K, 1>(s, product, panel, input, row),
                2 => quant_step::<S, K, 2>(s, product, panel, input, row),
                3 => quant_step::<S, K, 3>(s, product, panel, input, row),
                _ => quant_step::<S, K, 4>(s, product, panel, input, row),
            };
        }
    }
}

/// R rows times one panel; returns R.
#[inline(always)]
fn quant_step<S: Simd, K: Kind, const R: usize>(
    s: S,
    product: &Product<'_>,
    (index, panel): (usize, QuantPanel<'_>),
    input: &MatmulInput,
    first_row: usize,
) -> usize {
    let rows: [QuantRow<'_>; R] = from_fn(|r| input.quant_row(first_row + r));
    let mut sums = [s.splat(0.0); R];
    for block in 0..rows[0].quants.len() {
        K::add_block(s, &panel, &rows, block, &mut sums);
    }
    for r in 0..R {
        product.store(s, sums[r], first_row + r, index);
    }
    R
}

struct U4;
struct I4;
struct I6;
struct I6Half;
struct I8;

impl Kind for U4 {
    #[inline(always)]
    fn add_block<S: Simd, const R: usize>(
        s: S,
        panel: &QuantPanel<'_>,
        rows: &[QuantRow<'_>; R],
        block: usize,
        sums: &mut [S::Floats; R],
    ) {
        let ints = s.dot_u4(&panel.units[block].0, quants(rows, block));
        add_scaled(s, panel, rows, (block, ints), sums);
    }
}

impl Kind for I4 {
    #[inline(always)]
    fn add_block<S: Simd, const R: usize>(
        s: S,
        panel: &QuantPanel<'_>,
        rows: &[QuantRow<'_>; R],
        block: usize,
        sums: &mut [S::Floats; R],
    ) {
        let mut ints = s.dot_u4(&panel.units[block].0, quants(rows, block));
        for r in 0..R {
            // Σ (q + 8)·x − 8·Σ x
            ints[r] = s.sub_int(ints[r], 8 * rows[r].scales[block].total);
        }
        add_scaled(s, panel, rows, (block, ints), sums);
    }
}

impl Kind for I6 {
    #[inline(always)]
    fn add_block<S: Simd, const R: usize>(
        s: S,
        panel: &QuantPanel<'_>,
        rows: &[QuantRow<'_>; R],
        block: usize,
        sums: &mut [S::Floats; R],
    ) {
        let mut ints = s.dot_i6(&panel.units[2 * block].0, half_quants(rows, block, 0));
        let high = s.dot_i6(&panel.units[2 * block + 1].0, half_quants(rows, block, 1));
        for r in 0..R {
            ints[r] = s.add_ints(ints[r], high[r]);
        }
        add_scaled(s, panel, rows, (block, ints), sums);
    }
}

impl Kind for I8 {
    #[inline(always)]
    fn add_block<S: Simd, const R: usize>(
        s: S,
        panel: &QuantPanel<'_>,
        rows: &[QuantRow<'_>; R],
        block: usize,
        sums: &mut [S::Floats; R],
    ) {
        let mut ints = s.dot_i8(&panel.units[2 * block].0, half_quants(rows, block, 0));
        let high = s.dot_i8(&panel.units[2 * block + 1].0, half_quants(rows, block, 1));
        for r in 0..R {
            ints[r] = s.add_ints(ints[r], high[r]);
        }
        add_scaled(s, panel, rows, (block, ints), sums);
    }
}

impl Kind for I6Half {
    #[inline(always)]
    fn add_block<S: Simd, const R: usize>(
        s: S,
        panel: &QuantPanel<'_>,
        rows: &[QuantRow<'_>; R],
        block: usize,
        sums: &mut [S::Floats; R],
    ) {
        for half in 0..2 {
            let unit = 2 * block + half;
            let ints = s.dot_i6(&panel.units[unit].0, half_quants(rows, block, half));
            let scale = s.load(&panel.scales[unit].0);
            for r in 0..R {
                let factor = s.mul(scale, s.splat(rows[r].scales[block].scale));
                sums[r] = s.mul_add(factor, s.to_floats(ints[r]), sums[r]);
            }
            if let Some(min) = panel.mins.get(unit) {
                let min = s.load(&min.0);
                for r in 0..R {
                    let sum = s.splat(rows[r].scales[block].half_sums[half]);
                    sums[r] = s.mul_add(min, sum, sums[r]);
                }
            }
        }
    }
}

/// Scales the integer sums of a block of 32 and adds the mins.
#[inline(always)]
fn add_scaled<S: Simd, const R: usize>(
    s: S,
    panel: &QuantPanel<'_>,
    rows: &[QuantRow<'_>; R],
    (block, ints): (usize, [S::Ints; R]),
    sums: &mut [S::Floats; R],
) {
    let scale = s.load(&panel.scales[block].0);
    for r in 0..R {
        let factor = s.mul(scale, s.splat(rows[r].scales[block].scale));
        sums[r] = s.mul_add(factor, s.to_floats(ints[r]), sums[r]);
    }
    if let Some(min) = panel.mins.get(block) {
        let min = s.load(&min.0);
        for r in 0..R {
            sums[r] = s.mul_add(min, s.splat(rows[r].scales[block].sum), sums[r]);
        }
    }
}

/// Block `block` of each row.
#[inline(always)]
fn quants<'a, const R: usize>(rows: &[QuantRow<'a>; R], block: usize) -> [&'a [i8; 32]; R] {
    let mut quants = [&rows[0].quants[block]; R];
    for r in 1..R {
        quants[r] = &rows[r].quants[block];
    }
    quants
}

/// One half of block `block` of each row.
#[inline(always)]
fn half_quants<'a, const R: usize>(
    rows: &[QuantRow<'a>; R],
    block: usize,
    half: usize,
) -> [&'a [i8; 16]; R] {
    let mut quants = [&rows[0].quants[block].as_chunks::<16>().0[half]; R];
    for r in 1..R {
        quants[r] = &rows[r].quants[block].as_chunks::<16>().0[half];
    }
    quants
}
