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

#![expect(
    clippy::needless_range_loop,
    reason = "registers of several arrays are walked side by side; iterators would be closures"
)]

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::disjoint::Disjoint;
use super::kv::{KvSlices, TypedLayer};
use super::math::{exp_lanes, softcap_lanes};
use super::simd::{Element, LaneArray, Level, Simd, instantiate, prefetch};
use super::{AttentionBatch, CpuKernels, KvLayer, KvShape, LANES, TokenPath};

/// Positions of a split.
const SPLIT: usize = 256;

/// Blocks of a split.
const SPLIT_BLOCKS: usize = SPLIT / LANES;

/// Blocks that one call scores at once, so that few queries have enough independent sums in flight.
const MAX_RUN: usize = 4;

/// Queries that share loads of keys and values: enough to hide them, few enough for their scores to stay in
/// the first-level cache.
const MAX_GROUP_QUERIES: usize = 16;

/// With fewer groups for each thread than this, splits are spread over threads too.
const MIN_GROUPS_PER_THREAD: usize = 4;

/// Memory of one worker.
#[derive(Default)]
struct Scratch {
    partial: Partial,
    merged: Partial,
    /// (queries, 256)
    scores: Vec<f32>,
    /// Keys (head_dim, 16) or values (16, head_dim) of a block that the tail scatters.
    gathered: Vec<f32>,
}

/// Softmax-weighted values of a group's queries over some positions.
#[derive(Default)]
struct Partial {
    /// By query.
    stats: Vec<Stats>,
    /// (queries, head_dim), not yet divided by the sum.
    values: Vec<f32>,
}

/// Largest score and sum of exponentials.
#[derive(Clone, Copy)]
struct Stats {
    max: f32,
    sum: f32,
}

/// Memory that calls reuse.
pub(super) struct Memory {
    /// By worker. Never contended: a worker has one index at a time.
    workers: Vec<Mutex<Scratch>>,
    /// Results of splits that are spread over threads.
    splits: Vec<Mutex<Partial>>,
}

impl Memory {
    pub(super) fn new(num_threads: usize) -> Self {
        Memory {
            workers: (0..num_threads).map(|_| Mutex::default()).collect(),
            splits: Vec::new(),
        }
    }
}

/// A panic in the middle leaves numbers behind, which the next use overwrites.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One call of the kernel.
#[derive(Clone, Copy)]
struct Job<'a> {
    level: Level,
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
    let sizes = (batch.queries.len(), out.len());
    assert_eq!(sizes, (len, len), "(tokens, heads, head_dim)");
    let job = Job {
        level: kernels.level,
        shape,
        batch,
    };
    let out = Disjoint::new(out);
    match layer.typed() {
        TypedLayer::F32(kv) => attend_typed(kernels, job, kv, &out),
        TypedLayer::F16(kv) => attend_typed(kernels, job, kv, &out),
    }
}

fn attend_typed<T: Element>(
    kernels: &CpuKernels,
    job: Job<'_>,
    kv: KvSlices<'_, T>,
    out: &Disjoint<'_, f32>,
) {
    let sizes = (kv.keys.len(), kv.values.len());
    assert_eq!(
        sizes,
        (job.shape.len(), job.shape.len()),
        "the pool has the shape"
    );
    let groups: Vec<Group<'_, T>> = job
        .token_groups()
        .into_iter()
        .flat_map(|tokens| (0..job.shape.num_kv_heads).map(move |head| (tokens.clone(), head)))
        .map(|(tokens, kv_head)| Group {
            job,
            kv,
            tokens,
            kv_head,
        })
        .collect();
    if groups.len() < MIN_GROUPS_PER_THREAD * kernels.num_threads() && kernels.num_threads() > 1 {
        attend_spread(kernels, &groups, out);
    } else {
        let memory = kernels.attention_memory.borrow();
        let workers = memory.workers.as_slice();
        kernels.for_each_worker(groups.len(), &|worker, index| {
            let scratch = &mut *lock(&workers[worker]);
            attend_group(job.level, &groups[index], scratch, out);
        });
    }
}

/// Few groups: every split is an index of its own, then the splits of each group are merged.
fn attend_spread<T: Element>(
    kernels: &CpuKernels,
    groups: &[Group<'_, T>],
    out: &Disjoint<'_, f32>,
) {
    // (group, split), all splits of a group in a row, and where each group's begin.
    let mut pieces = Vec::new();
    let mut starts = Vec::with_capacity(groups.len());
    for group in groups {
        starts.push(pieces.len());
        pieces.extend(group.splits().map(|split| (group, split)));
    }
    let mut memory = kernels.attention_memory.borrow_mut();
    let memory = &mut *memory;
    let num_splits = memory.splits.len().max(pieces.len());
    memory.splits.resize_with(num_splits, Mutex::default);
    let (workers, splits) = (memory.workers.as_slice(), memory.splits.as_slice());
    kernels.for_each_worker(pieces.len(), &|worker, index| {
        let (group, split) = pieces[index];
        let scratch = &mut *lock(&workers[worker]);
        attend_split(group.job.level, group, split, scratch);
        std::mem::swap(&mut scratch.partial, &mut *lock(&splits[index]));
    });
    for (group, start) in groups.iter().zip(starts) {
        let scratch = &mut *lock(&workers[0]);
        merge_splits(group.job.level, group, &splits[start..], (scratch, out));
    }
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

    /// Splits that any token of the group sees.
    #[inline(always)]
    fn splits(&self) -> Range<usize> {
        let seen = self.visible();
        seen.start / SPLIT..seen.end.div_ceil(SPLIT)
    }

    /// Keys or values of block `index` of the path in the pool; none where the tail scatters them.
    #[inline(always)]
    fn pool_tile(&self, half: Half, index: usize) -> Option<&[T]> {
        let path = self.path();
        let table = &self.job.batch.blocks[path.table.range()];
        let first_scattered = (path.position + 1 - path.tail.len()) as usize;
        let is_whole = path.tail.is_empty() || (index + 1) * LANES <= first_scattered;
        let block = table.get(index).filter(|_| is_whole)?;
        let start = self.job.shape.tile_start(block.0 as usize, self.kv_head);
        Some(&self.pool(half)[start..start + self.job.shape.tile()])
    }

    #[inline(always)]
    fn pool(&self, half: Half) -> &[T] {
        match half {
            Half::Keys => self.kv.keys,
            Half::Values => self.kv.values,
        }
    }

    /// The path of the group: with a tail there is one token, without all share the table.
    #[inline(always)]
    fn path(&self) -> &TokenPath {
        &self.job.batch.paths[self.tokens.start]
    }

    /// Collects a block slot by slot. Widening to f32 is exact, so it has the bits of a block in the pool.
    fn gather(&self, half: Half, index: usize, buffer: &mut Vec<f32>) {
        let (shape, head_dim) = (self.job.shape, self.job.shape.head_dim);
        // Strides of positions and dimensions.
        let (position_step, dim_step) = match half {
            Half::Keys => (1, LANES),
            Half::Values => (head_dim, 1),
        };
        buffer.clear();
        buffer.resize(shape.tile(), 0.0);
        for lane in 0..LANES {
            let Some(slot) = self.slot(index * LANES + lane) else {
                break;
            };
            let start = shape.tile_start(slot / LANES, self.kv_head);
            let from = &self.pool(half)[start..start + shape.tile()];
            for dim in 0..head_dim {
                buffer[lane * position_step + dim * dim_step] =
                    from[slot % LANES * position_step + dim * dim_step].to_f32();
            }
        }
    }

    /// The slot of a position of the path; none beyond its end.
    fn slot(&self, position: usize) -> Option<usize> {
        let (batch, path) = (self.job.batch, self.path());
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

/// Keys or values.
#[derive(Clone, Copy)]
enum Half {
    Keys,
    Values,
}

impl Partial {
    #[inline(always)]
    fn reset<T: Element>(&mut self, group: &Group<'_, T>) {
        let num_queries = group.num_queries();
        let nothing = Stats {
            max: f32::NEG_INFINITY,
            sum: 0.0,
        };
        self.stats.clear();
        self.stats.resize(num_queries, nothing);
        self.values.clear();
        self.values
            .resize(num_queries * group.job.shape.head_dim, 0.0);
    }
}

instantiate! {
    /// Attention of one group.
    fn attend_group<T: Element>(group: &Group<'_, T>, scratch: &mut Scratch, out: &Disjoint<'_, f32>)
        = attend_group_body
}

instantiate! {
    /// Fills `scratch.partial` with the attention over one split.
    fn attend_split<T: Element>(group: &Group<'_, T>, split: usize, scratch: &mut Scratch)
        = attend_split_body
}

instantiate! {
    /// Merges the results of all splits of a group, which `splits` begins with.
    fn merge_splits<T: Element>(
        group: &Group<'_, T>,
        splits: &[Mutex<Partial>],
        to: (&mut Scratch, &Disjoint<'_, f32>),
    ) = merge_splits_body
}

#[inline(always)]
fn attend_group_body<S: Simd, T: Element>(
    s: S,
    group: &Group<'_, T>,
    scratch: &mut Scratch,
    out: &Disjoint<'_, f32>,
) {
    scratch.merged.reset(group);
    for split in group.splits() {
        attend_split_body(s, group, split, scratch);
        merge(s, group, split, (&mut scratch.merged, &scratch.partial));
    }
    finish(s, group, &scratch.merged, out);
}

#[inline(always)]
fn merge_splits_body<S: Simd, T: Element>(
    s: S,
    group: &Group<'_, T>,
    splits: &[Mutex<Partial>],
    (scratch, out): (&mut Scratch, &Disjoint<'_, f32>),
) {
    scratch.merged.reset(group);
    for (split, partial) in group.splits().zip(splits) {
        merge(s, group, split, (&mut scratch.merged, &lock(partial)));
    }
    finish(s, group, &scratch.merged, out);
}

#[inline(always)]
fn attend_split_body<S: Simd, T: Element>(
    s: S,
    group: &Group<'_, T>,
    split: usize,
    scratch: &mut Scratch,
) {
    scratch.partial.reset(group);
    scratch.scores.resize(group.num_queries() * SPLIT, 0.0);
    score_split(s, group, split, scratch);
    for query in 0..group.num_queries() {
        let scores = &mut scratch.scores[query * SPLIT..(query + 1) * SPLIT];
        scratch.partial.stats[query] = softmax(s, scores, group.visible_in(query, split));
    }
    add_split(s, group, split, scratch);
}

/// Scores of all queries at the positions of a split.
#[inline(always)]
fn score_split<S: Simd, T: Element>(
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

/// Adds the weighted values at the positions of a split to all queries.
#[inline(always)]
fn add_split<S: Simd, T: Element>(s: S, group: &Group<'_, T>, split: usize, scratch: &mut Scratch) {
    for block in group.blocks_in(split) {
        let index = split * SPLIT_BLOCKS + block;
        let at = (split, block);
        let to = (scratch.scores.as_slice(), &mut scratch.partial.values[..]);
        match group.pool_tile(Half::Values, index) {
            Some(values) => add_block(s, group, values, at, to),
            None => {
                group.gather(Half::Values, index, &mut scratch.gathered);
                add_block(s, group, &scratch.gathered, at, to);
            }
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
        query += match num_queries - query {
            1 => score_queries::<S, T, K, 1, 4>(s, group, keys, at, scores),
            2 => score_queries::<S, T, K, 2, 2>(s, group, keys, at, scores),
            3 => score_queries::<S, T, K, 3, 1>(s, group, keys, at, scores),
            _ => score_queries::<S, T, K, 4, 1>(s, group, keys, at, scores),
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
    let tile = ValueTile {
        values: values.as_chunks::<LANES>().0,
        row_chunks: group.job.shape.head_dim / LANES,
        block,
    };
    let num_queries = group.num_queries();
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
            1 => add_queries::<S, V, 1, 4>(s, &tile, seen, query, (weights, sums)),
            2 => add_queries::<S, V, 2, 2>(s, &tile, seen, query, (weights, sums)),
            3 => add_queries::<S, V, 3, 1>(s, &tile, seen, query, (weights, sums)),
            _ => add_queries::<S, V, 4, 1>(s, &tile, seen, query, (weights, sums)),
        };
    }
}

/// The values (16, head_dim) of block `block` of a split.
struct ValueTile<'a, V> {
    values: &'a [LaneArray<V>],
    /// head_dim / 16
    row_chunks: usize,
    block: usize,
}

/// Adds the positions `seen` of a block to R queries, C times 16 dimensions at a time; returns R.
#[inline(always)]
fn add_queries<S: Simd, V: Element, const R: usize, const C: usize>(
    s: S,
    tile: &ValueTile<'_, V>,
    seen: Range<usize>,
    query: usize,
    (weights, sums): (&[f32], &mut [f32]),
) -> usize {
    let mut chunk = 0;
    while chunk < tile.row_chunks {
        let to = (weights, &mut *sums);
        if chunk + C <= tile.row_chunks {
            add_tile::<S, V, R, C>(s, tile, seen.clone(), (query, chunk), to);
            chunk += C;
        } else {
            add_tile::<S, V, R, 1>(s, tile, seen.clone(), (query, chunk), to);
            chunk += 1;
        }
    }
    R
}

/// Adds the positions `seen` of a block to C times 16 dimensions of R queries.
#[inline(always)]
fn add_tile<S: Simd, V: Element, const R: usize, const C: usize>(
    s: S,
    tile: &ValueTile<'_, V>,
    seen: Range<usize>,
    (query, chunk): (usize, usize),
    (weights, sums): (&[f32], &mut [f32]),
) {
    let (weights, _) = weights.as_chunks::<LANES>();
    let (sums, _) = sums.as_chunks_mut::<LANES>();
    let mut rows = [&weights[query * SPLIT_BLOCKS + tile.block]; R];
    let mut lanes = [[s.splat(0.0); C]; R];
    for r in 0..R {
        rows[r] = &weights[(query + r) * SPLIT_BLOCKS + tile.block];
        for c in 0..C {
            lanes[r][c] = s.load(&sums[(query + r) * tile.row_chunks + chunk + c]);
        }
    }
    for position in seen {
        let mut value = [s.splat(0.0); C];
        for c in 0..C {
            value[c] = V::load(s, &tile.values[position * tile.row_chunks + chunk + c]);
        }
        for r in 0..R {
            let weight = s.splat(rows[r][position]);
            for c in 0..C {
                lanes[r][c] = s.mul_add(weight, value[c], lanes[r][c]);
            }
        }
    }
    for r in 0..R {
        for c in 0..C {
            let to = &mut sums[(query + r) * tile.row_chunks + chunk + c];
            s.store(lanes[r][c], to);
        }
    }
}

/// Adds a split to what was merged before it.
#[inline(always)]
fn merge<S: Simd, T: Element>(
    s: S,
    group: &Group<'_, T>,
    split: usize,
    (merged, partial): (&mut Partial, &Partial),
) {
    let head_dim = group.job.shape.head_dim;
    for query in 0..group.num_queries() {
        // A split that a query sees nothing of must leave it alone: 0 + −0 is not −0.
        if group.visible_in(query, split).is_empty() {
            continue;
        }
        let stats = (&mut merged.stats[query], partial.stats[query]);
        let factors = merge_stats(s, stats);
        let range = query * head_dim..(query + 1) * head_dim;
        let values = (&mut merged.values[range.clone()], &partial.values[range]);
        merge_values(s, factors, values);
    }
}

/// Sums on the scale of the common maximum; returns the factors that take both sides there.
#[inline(always)]
fn merge_stats<S: Simd>(s: S, (merged, new): (&mut Stats, Stats)) -> (f32, f32) {
    let old = *merged;
    let max = if old.max > new.max { old.max } else { new.max };
    let mut factors = [0.0; LANES];
    (factors[0], factors[1]) = (old.max - max, new.max - max);
    s.store(exp_lanes(s, s.load(&factors)), &mut factors);
    let sum = old.sum.mul_add(factors[0], new.sum * factors[1]);
    *merged = Stats { max, sum };
    (factors[0], factors[1])
}

#[inline(always)]
fn merge_values<S: Simd>(
    s: S,
    (old_factor, new_factor): (f32, f32),
    (merged, new): (&mut [f32], &[f32]),
) {
    let (old_factor, new_factor) = (s.splat(old_factor), s.splat(new_factor));
    let (merged, _) = merged.as_chunks_mut::<LANES>();
    let (new, _) = new.as_chunks::<LANES>();
    for (merged, new) in merged.iter_mut().zip(new) {
        let scaled = s.mul(s.load(new), new_factor);
        s.store(s.mul_add(s.load(merged), old_factor, scaled), merged);
    }
}

/// Divides by the sums of exponentials.
#[inline(always)]
fn finish<S: Simd, T: Element>(
    s: S,
    group: &Group<'_, T>,
    merged: &Partial,
    out: &Disjoint<'_, f32>,
) {
    let head_dim = group.job.shape.head_dim;
    for query in 0..group.num_queries() {
        // SAFETY: every (token, head) is in one group.
        let out = unsafe { out.part(group.query_range(query)) };
        let sum = s.splat(merged.stats[query].sum);
        let (to, _) = out.as_chunks_mut::<LANES>();
        let values = &merged.values[query * head_dim..(query + 1) * head_dim];
        let (from, _) = values.as_chunks::<LANES>();
        for (to, from) in to.iter_mut().zip(from) {
            s.store(s.div(s.load(from), sum), to);
        }
    }
}
