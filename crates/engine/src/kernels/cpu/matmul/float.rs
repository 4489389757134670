//! Products with float weights: rows times panels, sequential in k.

#![expect(
    clippy::needless_range_loop,
    reason = "registers of several arrays are walked side by side; iterators would be closures"
)]

use std::array::from_fn;
use std::ops::Range;

use super::super::input::MatmulInput;
use super::super::panels::Panels;
use super::super::simd::{Element, LaneArray, Simd, instantiate};
use super::{PANEL_STEP, Product, Tile};

/// Float weights of one matrix, with where their products go.
type FloatProduct<'a, 'b, T> = (&'a Product<'b>, &'a Panels<LaneArray<T>>);

instantiate! {
    /// A tile of a product with float weights.
    pub(super) fn tile<T: Element>(product: FloatProduct<'_, '_, T>, input: &MatmulInput, tile: Tile)
        = tile_body
}

#[inline(always)]
fn tile_body<S: Simd, T: Element>(
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
    let panels: [&[LaneArray<T>]; P] =
        from_fn(|p| product.weight.panel(all_panels, first_panel + p));
    let rows: [&[f32]; R] = from_fn(|r| input.float_row(first_row + r));
    let mut sums = [[s.splat(0.0); P]; R];
    for k in 0..input.cols() {
        let mut weights = [s.splat(0.0); P];
        for p in 0..P {
            weights[p] = T::load(s, &panels[p][k]);
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
