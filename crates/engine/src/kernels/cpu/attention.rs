//! Attention of query tokens along their paths through the KV blocks.
//!
//! One definition for decode, prefill, cached and fresh prefixes (A6). For a query head at position p, the
//! positions it sees fall into splits of 256, at absolute positions. In each split:
//!
//! ```text
//! s_j = scale · Σ_d q[d]·k_j[d]         sequential in d, positions as lanes; then the softcap
//! m   = max s_j;  p_j = exp(s_j − m)
//! l   = Σ p_j                           16 lanes over the blocks, then the fixed tree
//! o[d] = Σ p_j·v_j[d]                   sequential in j
//! ```
//!
//! Splits are merged in ascending order by rescaling to the common maximum, as in online softmax (Milakov and
//! Gimelshein, arXiv 1805.02867; the split over KV is that of Flash-Decoding). A query's bits depend on its
//! position and its keys and values alone. So the query heads of a KV head, and the tokens of a chunk, may
//! share loads, and splits may run on different threads.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::disjoint::Disjoint;
use super::kv::{KvSlices, TypedLayer};
use super::math::{exp_lanes, softcap_lanes};
use super::simd::{Element, LaneArray, Simd, instantiate};
use super::{AttentionBatch, CpuKernels, KvLayer, KvShape, LANES, TokenPath};

/// Positions of a split.
const SPLIT: usize = 256;

/// Queries that share loads of keys and values: enough to hide them, few enough for their scores to stay in
/// the first-level cache.
const MAX_GROUP_QUERIES: usize = 16;

/// Memory of one worker.
#[derive(Default)]
pub(super) struct Scratch {
    partial: Partial,
    merged: Partial,
    /// (queries, 256)
    scores: Vec<f32>,
    /// A block of keys (head_dim, 16) and of values (16, head_dim) that lies scattered in the pool.
    gathered: Gathered,
}

/// Softmax-weighted values of a group's queries over some positions.
#[derive(Default)]
struct Partial {
    /// Largest score and sum of exponentials, by query.
    stats: Vec<Stats>,
    /// (queries, head_dim), not yet divided by the sum.
    values: Vec<f32>,
}

#[derive(Clone, Copy)]
struct Stats {
    max: f32,
    sum: f32,
}

#[derive(Default)]
struct Gathered {
    keys: Vec<f32>,
    values: Vec<f32>,
}

/// The memory of all workers.
pub(super) struct Scratches(Vec<Mutex<Scratch>>);

impl Scratches {
    pub(super) fn new(num_threads: usize) -> Self {
        Scratches((0..num_threads).map(|_| Mutex::default()).collect())
    }

    /// Never contended: a worker has one index at a time.
    fn of(&self, worker: usize) -> MutexGuard<'_, Scratch> {
        // A panic in the middle leaves numbers behind, which the next use overwrites.
        self.0[worker]
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// One call of the kernel.
#[derive(Clone, Copy)]
struct Job<'a> {
    shape: KvShape,
    batch: &'a AttentionBatch<'a>,
}

/// What shares loads: neighbouring tokens of one path, the query heads of one KV head.
struct Group<'a, T> {
    job: Job<'a>,
    kv: KvSlices<'a, T>,
    tokens: Range<usize>,
    kv_head: usize,
}

/// Attention of every token; out (tokens, heads, head_dim).
pub(super) fn attend(
    kernels: &CpuKernels,
    shape: KvShape,
    layer: &KvLayer,
    batch: &AttentionBatch<'_>,
    out: &mut [f32],
) {
    assert!(shape.head_dim.is_multiple_of(LANES), "head_dim in lanes");
    assert!(
        batch.num_heads.is_multiple_of(shape.num_kv_heads),
        "equal groups of heads"
    );
    let len = batch.paths.len() * batch.num_heads * shape.head_dim;
    assert_eq!(
        (batch.queries.len(), out.len()),
        (len, len),
        "(tokens, heads, head_dim)"
    );
    let job = Job { shape, batch };
    match layer.typed() {
        TypedLayer::F32(kv) => attend_typed(kernels, job, kv, out),
        TypedLayer::F16(kv) => attend_typed(kernels, job, kv, out),
    }
}

fn attend_typed<T: Element>(
    kernels: &CpuKernels,
    job: Job<'_>,
    kv: KvSlices<'_, T>,
    out: &mut [f32],
) {
    assert_eq!(
        (kv.keys.len(), kv.values.len()),
        (job.shape.len(), job.shape.len())
    );
    let token_groups = job.token_groups();
    let num_kv_heads = job.shape.num_kv_heads;
    let out = Disjoint::new(out);
    let (level, scratches) = (kernels.level, &kernels.scratches);
    kernels.for_each_worker(token_groups.len() * num_kv_heads, &|worker, index| {
        let group = Group {
            job,
            kv,
            tokens: token_groups[index / num_kv_heads].clone(),
            kv_head: index % num_kv_heads,
        };
        attend_group(level, &group, &mut scratches.of(worker), &out);
    });
}

impl Job<'_> {
    /// Query heads of a KV head.
    fn heads_per_kv(&self) -> usize {
        self.batch.num_heads / self.shape.num_kv_heads
    }

    /// Runs of tokens at consecutive positions of one block table.
    fn token_groups(&self) -> Vec<Range<usize>> {
        let max_tokens = (MAX_GROUP_QUERIES / self.heads_per_kv()).max(1);
        let paths = self.batch.paths;
        let mut groups: Vec<Range<usize>> = Vec::with_capacity(paths.len());
        for token in 0..paths.len() {
            match groups.last_mut() {
                Some(group)
                    if group.len() < max_tokens && continues(&paths[token - 1], &paths[token]) =>
                {
                    group.end = token + 1;
                }
                Some(_) | None => groups.push(token..token + 1),
            }
        }
        groups
    }

    /// Positions that a token sees.
    #[inline(always)]
    fn visible(&self, token: usize) -> Range<usize> {
        let end = self.batch.paths[token].position as usize + 1;
        let window = self.batch.window.map_or(end, |window| window as usize);
        end.saturating_sub(window)..end
    }
}

fn continues(before: &TokenPath, token: &TokenPath) -> bool {
    before.table == token.table
        && before.position.checked_add(1) == Some(token.position)
        && before.tail.is_empty()
        && token.tail.is_empty()
}

impl<T: Element> Group<'_, T> {
    #[inline(always)]
    fn num_queries(&self) -> usize {
        self.tokens.len() * self.job.heads_per_kv()
    }

    #[inline(always)]
    fn token(&self, query: usize) -> usize {
        self.tokens.start + query / self.job.heads_per_kv()
    }

    /// Where a query (and its output) lies in (tokens, heads, head_dim).
    #[inline(always)]
    fn query_range(&self, query: usize) -> Range<usize> {
        let heads_per_kv = self.job.heads_per_kv();
        let head = self.kv_head * heads_per_kv + query % heads_per_kv;
        let row = self.token(query) * self.job.batch.num_heads + head;
        row * self.job.shape.head_dim..(row + 1) * self.job.shape.head_dim
    }

    #[inline(always)]
    fn query(&self, query: usize) -> &[f32] {
        &self.job.batch.queries[self.query_range(query)]
    }

    /// Positions that any token of the group sees.
    #[inline(always)]
    fn visible(&self) -> Range<usize> {
        let first = self.job.visible(self.tokens.start);
        let last = self.job.visible(self.tokens.end - 1);
        first.start..last.end
    }

    /// Positions of a query inside a split, relative to the split.
    #[inline(always)]
    fn visible_in(&self, query: usize, split: usize) -> Range<usize> {
        relative(self.job.visible(self.token(query)), split * SPLIT, SPLIT)
    }

    /// Blocks of the path that the group sees in a split, relative to the split.
    #[inline(always)]
    fn blocks_in(&self, split: usize) -> Range<usize> {
        let seen = relative(self.visible(), split * SPLIT, SPLIT);
        seen.start / LANES..seen.end.div_ceil(LANES)
    }

    /// Keys and values of block `index` of the path: from the pool, or gathered where the tail scatters them.
    #[inline(always)]
    fn block<'s>(&'s self, index: usize, gathered: &'s mut Gathered) -> Block<'s, T> {
        let path = &self.job.batch.paths[self.tokens.start];
        let first_scattered = (path.position + 1 - path.tail.len()) as usize;
        if path.tail.is_empty() || (index + 1) * LANES <= first_scattered {
            let table = &self.job.batch.blocks[path.table.range()];
            let start = self
                .job
                .shape
                .tile_start(table[index].0 as usize, self.kv_head);
            let range = start..start + self.job.shape.tile();
            Block::InPool {
                keys: &self.kv.keys[range.clone()],
                values: &self.kv.values[range],
            }
        } else {
            self.gather(path, index, gathered);
            Block::Gathered {
                keys: &gathered.keys,
                values: &gathered.values,
            }
        }
    }

    /// Collects a block slot by slot. Widening to f32 is exact, so it has the bits of a block in the pool.
    fn gather(&self, path: &TokenPath, index: usize, gathered: &mut Gathered) {
        let (shape, head_dim) = (self.job.shape, self.job.shape.head_dim);
        gathered.keys.clear();
        gathered.keys.resize(shape.tile(), 0.0);
        gathered.values.clear();
        gathered.values.resize(shape.tile(), 0.0);
        for lane in 0..LANES {
            let Some(slot) = self.slot(path, index * LANES + lane) else {
                break;
            };
            let start = shape.tile_start(slot / LANES, self.kv_head);
            for dim in 0..head_dim {
                let key = self.kv.keys[start + dim * LANES + slot % LANES];
                gathered.keys[dim * LANES + lane] = key.to_f32();
                let value = self.kv.values[start + slot % LANES * head_dim + dim];
                gathered.values[lane * head_dim + dim] = value.to_f32();
            }
        }
    }

    /// The slot of a position of a path; none beyond its end.
    fn slot(&self, path: &TokenPath, position: usize) -> Option<usize> {
        let batch = self.job.batch;
        let tail = &batch.tail_slots[path.tail.range()];
        let first_of_tail = path.position as usize + 1 - tail.len();
        match position.checked_sub(first_of_tail) {
            Some(index) => tail.get(index).map(|&slot| slot as usize),
            None => {
                let block = batch.blocks[path.table.range()][position / LANES];
                Some(block.0 as usize * LANES + position % LANES)
            }
        }
    }
}

/// `range` cut to `start..start + len`, relative to `start`.
#[inline(always)]
fn relative(range: Range<usize>, start: usize, len: usize) -> Range<usize> {
    let end = range.end.clamp(start, start + len) - start;
    (range.start.clamp(start, start + len) - start).min(end)..end
}

/// One block of one KV head: keys (head_dim, 16), values (16, head_dim).
enum Block<'a, T> {
    InPool { keys: &'a [T], values: &'a [T] },
    Gathered { keys: &'a [f32], values: &'a [f32] },
}

impl Partial {
    #[inline(always)]
    fn reset(&mut self, num_queries: usize, head_dim: usize) {
        let nothing = Stats {
            max: f32::NEG_INFINITY,
            sum: 0.0,
        };
        self.stats.clear();
        self.stats.resize(num_queries, nothing);
        self.values.clear();
        self.values.resize(num_queries * head_dim, 0.0);
    }
}

instantiate! {
    /// Attention of one group.
    fn attend_group<T: Element>(group: &Group<'_, T>, scratch: &mut Scratch, out: &Disjoint<'_, f32>)
        = attend_group_body
}

#[inline(always)]
fn attend_group_body<S: Simd, T: Element>(
    s: S,
    group: &Group<'_, T>,
    scratch: &mut Scratch,
    out: &Disjoint<'_, f32>,
) {
    let head_dim = group.job.shape.head_dim;
    scratch.merged.reset(group.num_queries(), head_dim);
    let seen = group.visible();
    for split in seen.start / SPLIT..seen.end.div_ceil(SPLIT) {
        attend_split(s, group, split, scratch);
        for query in 0..group.num_queries() {
            // A split that a query sees nothing of must leave it alone: 0 + −0 is not −0.
            if !group.visible_in(query, split).is_empty() {
                merge(s, &mut scratch.merged, &scratch.partial, query, head_dim);
            }
        }
    }
    for query in 0..group.num_queries() {
        // SAFETY: every (token, head) is in one group.
        let out = unsafe { out.part(group.query_range(query)) };
        finish(s, &scratch.merged, query, out);
    }
}

/// Fills `scratch.partial` with the attention over one split.
#[inline(always)]
fn attend_split<S: Simd, T: Element>(
    s: S,
    group: &Group<'_, T>,
    split: usize,
    scratch: &mut Scratch,
) {
    let num_queries = group.num_queries();
    scratch.partial.reset(num_queries, group.job.shape.head_dim);
    scratch.scores.resize(num_queries * SPLIT, 0.0);
    let blocks = group.blocks_in(split);
    for block in blocks.clone() {
        let index = split * (SPLIT / LANES) + block;
        match group.block(index, &mut scratch.gathered) {
            Block::InPool { keys, .. } => score_block(s, group, keys, block, &mut scratch.scores),
            Block::Gathered { keys, .. } => score_block(s, group, keys, block, &mut scratch.scores),
        }
    }
    for query in 0..num_queries {
        let scores = &mut scratch.scores[query * SPLIT..(query + 1) * SPLIT];
        scratch.partial.stats[query] = softmax(s, scores, group.visible_in(query, split));
    }
    for block in blocks {
        let index = split * (SPLIT / LANES) + block;
        let at = (split, block);
        let to = (scratch.scores.as_slice(), &mut scratch.partial.values[..]);
        match group.block(index, &mut scratch.gathered) {
            Block::InPool { values, .. } => add_block(s, group, values, at, to),
            Block::Gathered { values, .. } => add_block(s, group, values, at, to),
        }
    }
}

/// Scores of all queries at 16 positions, into column `block` of scores (queries, 16 blocks, 16).
#[inline(always)]
fn score_block<S: Simd, T: Element, K: Element>(
    s: S,
    group: &Group<'_, T>,
    keys: &[K],
    block: usize,
    scores: &mut [f32],
) {
    let (keys, _) = keys.as_chunks::<LANES>();
    let num_queries = group.num_queries();
    let mut query = 0;
    while query < num_queries {
        query += match num_queries - query {
            1 => score_tile::<S, T, K, 1>(s, group, keys, (query, block), scores),
            2 => score_tile::<S, T, K, 2>(s, group, keys, (query, block), scores),
            3 => score_tile::<S, T, K, 3>(s, group, keys, (query, block), scores),
            _ => score_tile::<S, T, K, 4>(s, group, keys, (query, block), scores),
        };
    }
}

/// Scores of R queries; returns R.
#[inline(always)]
fn score_tile<S: Simd, T: Element, K: Element, const R: usize>(
    s: S,
    group: &Group<'_, T>,
    keys: &[LaneArray<K>],
    (query, block): (usize, usize),
    scores: &mut [f32],
) -> usize {
    let mut rows = [group.query(query); R];
    for r in 1..R {
        rows[r] = group.query(query + r);
    }
    let mut sums = [s.splat(0.0); R];
    for (dim, key) in keys.iter().enumerate() {
        let key = K::load(s, key);
        for r in 0..R {
            sums[r] = s.mul_add(s.splat(rows[r][dim]), key, sums[r]);
        }
    }
    let scale = s.splat(group.job.batch.scale);
    let (columns, _) = scores.as_chunks_mut::<LANES>();
    for r in 0..R {
        let mut scaled = s.mul(sums[r], scale);
        if let Some(cap) = group.job.batch.softcap {
            scaled = softcap_lanes(s, scaled, cap);
        }
        s.store(scaled, &mut columns[(query + r) * (SPLIT / LANES) + block]);
    }
    R
}

/// Turns the scores at `seen` of a split into exponentials; the rest of their blocks becomes zero.
#[inline(always)]
fn softmax<S: Simd>(s: S, scores: &mut [f32], seen: Range<usize>) -> Stats {
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

/// Adds the weighted values of one block to all queries. `to`: exponentials (queries, 256) and sums
/// (queries, head_dim).
#[inline(always)]
fn add_block<S: Simd, T: Element, V: Element>(
    s: S,
    group: &Group<'_, T>,
    values: &[V],
    (split, block): (usize, usize),
    (weights, sums): (&[f32], &mut [f32]),
) {
    let num_queries = group.num_queries();
    let tile = ValueTile {
        values,
        head_dim: group.job.shape.head_dim,
        block,
    };
    let mut query = 0;
    while query < num_queries {
        let seen = relative(group.visible_in(query, split), block * LANES, LANES);
        // Queries share loads where they see the same positions, which is everywhere but at their ends.
        let mut len = 1;
        while len < 4 && query + len < num_queries {
            let other = relative(group.visible_in(query + len, split), block * LANES, LANES);
            if other != seen {
                break;
            }
            len += 1;
        }
        query += match len {
            1 => add_tile::<S, V, 1>(s, &tile, seen, query, (weights, sums)),
            2 => add_tile::<S, V, 2>(s, &tile, seen, query, (weights, sums)),
            3 => add_tile::<S, V, 3>(s, &tile, seen, query, (weights, sums)),
            _ => add_tile::<S, V, 4>(s, &tile, seen, query, (weights, sums)),
        };
    }
}

/// The values (16, head_dim) of block `block` of a split.
struct ValueTile<'a, V> {
    values: &'a [V],
    head_dim: usize,
    block: usize,
}

/// Adds the positions `seen` of a block to R queries; returns R.
#[inline(always)]
fn add_tile<S: Simd, V: Element, const R: usize>(
    s: S,
    tile: &ValueTile<'_, V>,
    seen: Range<usize>,
    query: usize,
    (weights, sums): (&[f32], &mut [f32]),
) -> usize {
    let chunks_per_row = tile.head_dim / LANES;
    let (values, _) = tile.values.as_chunks::<LANES>();
    let (weights, _) = weights.as_chunks::<LANES>();
    let (sums, _) = sums.as_chunks_mut::<LANES>();
    let mut rows = [&weights[query * (SPLIT / LANES) + tile.block]; R];
    for r in 1..R {
        rows[r] = &weights[(query + r) * (SPLIT / LANES) + tile.block];
    }
    for chunk in 0..chunks_per_row {
        let mut lanes = [s.splat(0.0); R];
        for r in 0..R {
            lanes[r] = s.load(&sums[(query + r) * chunks_per_row + chunk]);
        }
        for position in seen.clone() {
            let value = V::load(s, &values[position * chunks_per_row + chunk]);
            for r in 0..R {
                lanes[r] = s.mul_add(s.splat(rows[r][position]), value, lanes[r]);
            }
        }
        for r in 0..R {
            s.store(lanes[r], &mut sums[(query + r) * chunks_per_row + chunk]);
        }
    }
    R
}

/// Adds a split to what was merged before it.
#[inline(always)]
fn merge<S: Simd>(s: S, merged: &mut Partial, partial: &Partial, query: usize, head_dim: usize) {
    let (old, new) = (merged.stats[query], partial.stats[query]);
    let max = if old.max > new.max { old.max } else { new.max };
    let mut factors = [0.0; LANES];
    (factors[0], factors[1]) = (old.max - max, new.max - max);
    s.store(exp_lanes(s, s.load(&factors)), &mut factors);
    merged.stats[query] = Stats {
        max,
        sum: old.sum.mul_add(factors[0], new.sum * factors[1]),
    };
    let (old_factor, new_factor) = (s.splat(factors[0]), s.splat(factors[1]));
    let range = query * head_dim..(query + 1) * head_dim;
    let (to, _) = merged.values[range.clone()].as_chunks_mut::<LANES>();
    let (from, _) = partial.values[range].as_chunks::<LANES>();
    for (to, from) in to.iter_mut().zip(from) {
        let scaled = s.mul(s.load(from), new_factor);
        s.store(s.mul_add(s.load(to), old_factor, scaled), to);
    }
}

/// Divides by the sum of exponentials.
#[inline(always)]
fn finish<S: Simd>(s: S, merged: &Partial, query: usize, out: &mut [f32]) {
    let sum = s.splat(merged.stats[query].sum);
    let head_dim = out.len();
    let (to, _) = out.as_chunks_mut::<LANES>();
    let (from, _) = merged.values[query * head_dim..(query + 1) * head_dim].as_chunks::<LANES>();
    for (to, from) in to.iter_mut().zip(from) {
        s.store(s.div(s.load(from), sum), to);
    }
}
