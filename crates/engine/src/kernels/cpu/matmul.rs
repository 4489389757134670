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
//! The bias is added last, then what the output held, if it is to be added to. Outputs are the lanes; what differs between numbers of rows is only how many
//! independent accumulators are in flight.

mod float;
mod quantised;

use std::ops::Range;

use super::disjoint::Disjoint;
use super::input::MatmulInput;
use super::pack::Weights;
use super::simd::{Level, Simd, load_partial, store_partial};
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
    add: bool,
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
            add: output.add,
            out: Disjoint::new(output.out),
        }
    }

    /// Adds the bias and writes (or adds) 16 outputs of a row (fewer in the last panel).
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
            Some(out) if self.add => s.store(s.add(s.load(out), sums), out),
            Some(out) => s.store(sums, out),
            None if self.add => store_partial(s, s.add(load_partial(s, out), sums), out),
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
        Weights::F32(panels) => float::tile(level, (product, panels), input, tile),
        Weights::F16(panels) => float::tile(level, (product, panels), input, tile),
        Weights::Bf16(panels) => float::tile(level, (product, panels), input, tile),
        Weights::Quantised(panels) => quantised::tile(level, (product, panels), input, tile),
    }
}
