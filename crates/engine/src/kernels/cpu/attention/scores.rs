//! Scores of queries at the positions of a split, and their softmax.

#![expect(
    clippy::needless_range_loop,
    reason = "registers of several arrays are walked side by side; iterators would be closures"
)]

use std::ops::Range;

use super::super::math::{exp_lanes, softcap_lanes};
use super::super::simd::{Element, LaneArray, Simd, prefetch};
use super::super::{AttentionBatch, LANES};
use super::group::{Group, Half};
use super::partial::Stats;
use super::{SPLIT_BLOCKS, Scratch};

/// Blocks that one call scores at once, so that few queries have enough independent sums in flight.
const MAX_RUN: usize = 4;

/// Scores of all queries at the positions of a split.
#[inline(always)]
pub(super) fn score_split<S: Simd, T: Element>(
    s: S,
    group: &Group<'_, T>,
    split: usize,
    scratch: &mut Scratch,
) {
    let blocks = group.blocks_in(split);
    let mut block = blocks.start;
    while block < blocks.end {
        let mut keys: [&[T]; MAX_RUN] = [&[]; MAX_RUN];
        let mut len = 0;
        while len < MAX_RUN && block + len < blocks.end {
            let index = split * SPLIT_BLOCKS + block + len;
            let Some(tile) = group.pool_tile(Half::Keys, index) else {
                break;
            };
            // Blocks lie anywhere: the processor can't guess what is read next.
            prefetch(
                group
                    .pool_tile(Half::Keys, index + MAX_RUN)
                    .unwrap_or_default(),
            );
            prefetch(group.pool_tile(Half::Values, index).unwrap_or_default());
            keys[len] = tile;
            len += 1;
        }
        if len > 0 {
            score_run(s, group, &keys[..len], block, &mut scratch.scores);
            block += len;
        } else {
            let index = split * SPLIT_BLOCKS + block;
            group.gather(Half::Keys, index, &mut scratch.gathered);
            score_run(s, group, &[&scratch.gathered], block, &mut scratch.scores);
            block += 1;
        }
    }
}

/// Scores of all queries at a run of blocks, into columns `block` and on of scores (queries, 16 blocks, 16).
#[inline(always)]
fn score_run<S: Simd, T: Element, K: Element>(
    s: S,
    group: &Group<'_, T>,
    keys: &[&[K]],
    block: usize,
    scores: &mut [f32],
) {
    let num_queries = group.num_queries();
    let mut query = 0;
    while query < num_queries {
        let at = (query, block);
        // As many sums in flight as hide the latency of an addition and fit the registers.
        query += match (num_queries - query, S::MAX_ROWS) {
            (1, _) => score_queries::<S, T, K, 1, 4>(s, group, keys, at, scores),
            (2, 8) => score_queries::<S, T, K, 2, 4>(s, group, keys, at, scores),
            (2, _) => score_queries::<S, T, K, 2, 2>(s, group, keys, at, scores),
            (3, 8) => score_queries::<S, T, K, 3, 4>(s, group, keys, at, scores),
            (3, _) => score_queries::<S, T, K, 3, 1>(s, group, keys, at, scores),
            (4..8, 8) => score_queries::<S, T, K, 4, 4>(s, group, keys, at, scores),
            (_, 8) => score_queries::<S, T, K, 8, 2>(s, group, keys, at, scores),
            (_, _) => score_queries::<S, T, K, 4, 1>(s, group, keys, at, scores),
        };
    }
}

/// Scores of R queries, P blocks at a time; returns R.
#[inline(always)]
fn score_queries<S: Simd, T: Element, K: Element, const R: usize, const P: usize>(
    s: S,
    group: &Group<'_, T>,
    keys: &[&[K]],
    (query, block): (usize, usize),
    scores: &mut [f32],
) -> usize {
    let mut done = 0;
    while done < keys.len() {
        let at = (query, block + done);
        if done + P <= keys.len() {
            score_tile::<S, T, K, R, P>(s, group, &keys[done..], at, scores);
            done += P;
        } else {
            score_tile::<S, T, K, R, 1>(s, group, &keys[done..], at, scores);
            done += 1;
        }
    }
    R
}

/// Scores of R queries at the first P of `keys`.
#[inline(always)]
fn score_tile<S: Simd, T: Element, K: Element, const R: usize, const P: usize>(
    s: S,
    group: &Group<'_, T>,
    keys: &[&[K]],
    (query, block): (usize, usize),
    scores: &mut [f32],
) {
    let head_dim = group.job.shape.head_dim;
    let mut rows = [&group.query(query)[..head_dim]; R];
    for r in 1..R {
        rows[r] = &group.query(query + r)[..head_dim];
    }
    let mut tiles: [&[LaneArray<K>]; P] = [&[]; P];
    for p in 0..P {
        tiles[p] = &keys[p].as_chunks::<LANES>().0[..head_dim];
    }
    let mut sums = [[s.splat(0.0); P]; R];
    for dim in 0..head_dim {
        let mut key = [s.splat(0.0); P];
        for p in 0..P {
            key[p] = K::load(s, &tiles[p][dim]);
        }
        for r in 0..R {
            let x = s.splat(rows[r][dim]);
            for p in 0..P {
                sums[r][p] = s.mul_add(x, key[p], sums[r][p]);
            }
        }
    }
    let (columns, _) = scores.as_chunks_mut::<LANES>();
    for r in 0..R {
        for p in 0..P {
            let column = &mut columns[(query + r) * SPLIT_BLOCKS + block + p];
            s.store(finish_score(s, group.job.batch, sums[r][p]), column);
        }
    }
}

#[inline(always)]
fn finish_score<S: Simd>(s: S, batch: &AttentionBatch<'_>, dot: S::Floats) -> S::Floats {
    let score = s.mul(dot, s.splat(batch.scale));
    match batch.softcap {
        Some(cap) => softcap_lanes(s, score, cap),
        None => score,
    }
}

/// Turns the scores at `seen` of a split into exponentials; the rest of their blocks becomes zero.
#[inline(always)]
pub(super) fn softmax<S: Simd>(s: S, scores: &mut [f32], seen: Range<usize>) -> Stats {
    let blocks = seen.start / LANES..seen.end.div_ceil(LANES);
    scores[blocks.start * LANES..seen.start.max(blocks.start * LANES)].fill(f32::NEG_INFINITY);
    scores[seen.end..seen.end.max(blocks.end * LANES)].fill(f32::NEG_INFINITY);
    let (columns, _) = scores.as_chunks_mut::<LANES>();
    let columns = &mut columns[blocks];
    let mut max = s.splat(f32::NEG_INFINITY);
    for column in columns.iter() {
        max = s.max(max, s.load(column));
    }
    let max = s.max_lane(max);
    let mut sums = s.splat(0.0);
    for column in columns {
        let exponential = exp_lanes(s, s.sub(s.load(column), s.splat(max)));
        sums = s.add(sums, exponential);
        s.store(exponential, column);
    }
    Stats {
        max,
        sum: s.sum(sums),
    }
}
