//! Weighted sums of values over a split.

#![expect(
    clippy::needless_range_loop,
    reason = "registers of several arrays are walked side by side; iterators would be closures"
)]

use std::ops::Range;

use super::super::LANES;
use super::super::simd::{Element, Simd};
use super::group::{Group, Half, relative};
use super::{SPLIT_BLOCKS, Scratch};

/// Values (16, head_dim) of the blocks of a split; empty where they lie scattered or nobody sees them.
type Tiles<'a, T> = [&'a [T]; SPLIT_BLOCKS];

/// Adds the weighted values at the positions of a split to all queries.
///
/// Blocks that several queries see whole are added to them together, in one go with the sums in registers;
/// what is left at the ends, block by block. Either way a query takes its positions in ascending order.
#[inline(always)]
pub(super) fn add_split<S: Simd, T: Element>(
    s: S,
    group: &Group<'_, T>,
    split: usize,
    scratch: &mut Scratch,
) {
    let mut tiles: Tiles<'_, T> = [&[]; SPLIT_BLOCKS];
    for block in group.blocks_in(split) {
        let tile = group.pool_tile(Half::Values, split * SPLIT_BLOCKS + block);
        tiles[block] = tile.unwrap_or_default();
    }
    let num_queries = group.num_queries();
    let mut query = 0;
    while query < num_queries {
        let len = match S::MAX_ROWS.min(num_queries - query) {
            few @ 1..4 => few,
            4..8 => 4,
            _ => 8,
        };
        let queries = query..query + len;
        let whole = whole_blocks(group, split, queries.clone(), &tiles);
        add_ends(
            s,
            group,
            split,
            (queries.clone(), 0..whole.start),
            scratch,
            &tiles,
        );
        let run = Run {
            tiles: &tiles[whole.clone()],
            block: whole.start,
            seen: 0..LANES,
            row_chunks: group.job.shape.head_dim / LANES,
        };
        let to = (&scratch.scores[..], &mut scratch.partial.values[..]);
        add_run(s, &run, queries.clone(), to);
        add_ends(
            s,
            group,
            split,
            (queries, whole.end..SPLIT_BLOCKS),
            scratch,
            &tiles,
        );
        query += len;
    }
}

/// Blocks in a row that lie in the pool and that all `queries` see whole.
#[inline(always)]
fn whole_blocks<T: Element>(
    group: &Group<'_, T>,
    split: usize,
    queries: Range<usize>,
    tiles: &Tiles<'_, T>,
) -> Range<usize> {
    let (mut start, mut end) = (0, SPLIT_BLOCKS);
    for query in queries {
        let seen = group.visible_in(query, split);
        start = start.max(seen.start.div_ceil(LANES));
        end = end.min(seen.end / LANES);
    }
    let mut len = 0;
    while start + len < end && !tiles[start + len].is_empty() {
        len += 1;
    }
    start..start + len
}

/// Adds what queries see of `blocks`, block by block.
#[inline(always)]
fn add_ends<S: Simd, T: Element>(
    s: S,
    group: &Group<'_, T>,
    split: usize,
    (queries, blocks): (Range<usize>, Range<usize>),
    scratch: &mut Scratch,
    tiles: &Tiles<'_, T>,
) {
    let in_split = group.blocks_in(split);
    for block in blocks.start.max(in_split.start)..blocks.end.min(in_split.end) {
        let at = (queries.clone(), split, block);
        let to = (&scratch.scores[..], &mut scratch.partial.values[..]);
        if tiles[block].is_empty() {
            let index = split * SPLIT_BLOCKS + block;
            group.gather(Half::Values, index, &mut scratch.gathered);
            add_block(s, group, &scratch.gathered[..], at, to);
        } else {
            add_block(s, group, tiles[block], at, to);
        }
    }
}

/// Adds the weighted values of one block. `to`: exponentials (queries, 256) and sums (queries, head_dim).
#[inline(always)]
fn add_block<S: Simd, T: Element, V: Element>(
    s: S,
    group: &Group<'_, T>,
    values: &[V],
    (queries, split, block): (Range<usize>, usize, usize),
    (weights, sums): (&[f32], &mut [f32]),
) {
    let mut query = queries.start;
    while query < queries.end {
        let seen = relative(group.visible_in(query, split), block * LANES, LANES);
        // The heads of a token see the same positions.
        let mut len = 1;
        while len < 4 && query + len < queries.end {
            let other = relative(group.visible_in(query + len, split), block * LANES, LANES);
            if other != seen {
                break;
            }
            len += 1;
        }
        let run = Run {
            tiles: &[values],
            block,
            seen,
            row_chunks: group.job.shape.head_dim / LANES,
        };
        add_run(s, &run, query..query + len, (weights, &mut *sums));
        query += len;
    }
}

/// Neighbouring blocks of which the same positions are seen.
struct Run<'a, V> {
    /// Values (16, head_dim) by block.
    tiles: &'a [&'a [V]],
    /// The first block, relative to the split.
    block: usize,
    /// Of each block.
    seen: Range<usize>,
    /// head_dim / 16
    row_chunks: usize,
}

/// Adds a run to up to `MAX_ROWS` queries. `to`: exponentials (queries, 256) and sums (queries, head_dim).
#[inline(always)]
fn add_run<S: Simd, V: Element>(
    s: S,
    run: &Run<'_, V>,
    queries: Range<usize>,
    to: (&[f32], &mut [f32]),
) {
    let query = queries.start;
    // As many sums in flight as hide the latency of an addition and fit the registers.
    match (queries.len(), S::MAX_ROWS) {
        (1, _) => add_to::<S, V, 1, 4>(s, run, query, to),
        (2, 8) => add_to::<S, V, 2, 4>(s, run, query, to),
        (2, _) => add_to::<S, V, 2, 2>(s, run, query, to),
        (3, 8) => add_to::<S, V, 3, 4>(s, run, query, to),
        (3, _) => add_to::<S, V, 3, 1>(s, run, query, to),
        (4, 8) => add_to::<S, V, 4, 4>(s, run, query, to),
        (_, 8) => add_to::<S, V, 8, 2>(s, run, query, to),
        (_, _) => add_to::<S, V, 4, 1>(s, run, query, to),
    }
}

/// Adds a run to R queries, C times 16 dimensions at a time.
#[inline(always)]
fn add_to<S: Simd, V: Element, const R: usize, const C: usize>(
    s: S,
    run: &Run<'_, V>,
    query: usize,
    (weights, sums): (&[f32], &mut [f32]),
) {
    let mut chunk = 0;
    while chunk < run.row_chunks {
        let to = (weights, &mut *sums);
        if chunk + C <= run.row_chunks {
            add_chunks::<S, V, R, C>(s, run, (query, chunk), to);
            chunk += C;
        } else {
            add_chunks::<S, V, R, 1>(s, run, (query, chunk), to);
            chunk += 1;
        }
    }
}

/// Adds C times 16 dimensions of a run to R queries.
#[inline(always)]
fn add_chunks<S: Simd, V: Element, const R: usize, const C: usize>(
    s: S,
    run: &Run<'_, V>,
    (query, chunk): (usize, usize),
    (weights, sums): (&[f32], &mut [f32]),
) {
    if run.tiles.is_empty() {
        return;
    }
    let (weights, _) = weights.as_chunks::<LANES>();
    let (sums, _) = sums.as_chunks_mut::<LANES>();
    let mut lanes = [[s.splat(0.0); C]; R];
    for r in 0..R {
        for c in 0..C {
            lanes[r][c] = s.load(&sums[(query + r) * run.row_chunks + chunk + c]);
        }
    }
    for (index, tile) in run.tiles.iter().enumerate() {
        let (values, _) = tile.as_chunks::<LANES>();
        let mut rows = [&weights[query * SPLIT_BLOCKS + run.block + index]; R];
        for r in 1..R {
            rows[r] = &weights[(query + r) * SPLIT_BLOCKS + run.block + index];
        }
        for position in run.seen.clone() {
            let mut value = [s.splat(0.0); C];
            for c in 0..C {
                value[c] = V::load(s, &values[position * run.row_chunks + chunk + c]);
            }
            for r in 0..R {
                let weight = s.splat(rows[r][position]);
                for c in 0..C {
                    lanes[r][c] = s.mul_add(weight, value[c], lanes[r][c]);
                }
            }
        }
    }
    for r in 0..R {
        for c in 0..C {
            let to = &mut sums[(query + r) * run.row_chunks + chunk + c];
            s.store(lanes[r][c], to);
        }
    }
}
