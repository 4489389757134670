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

mod group;
mod partial;
mod scores;
mod values;

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::disjoint::Disjoint;
use super::kv::{KvSlices, TypedLayer};
use super::simd::{Element, Simd, instantiate};
use super::{AttentionBatch, CpuKernels, KvLayer, KvShape, LANES};
use group::{Group, Job};
use partial::{Partial, finish, merge};
use scores::{score_split, softmax};
use values::add_split;

/// Positions of a split.
const SPLIT: usize = 256;

/// Blocks of a split.
const SPLIT_BLOCKS: usize = SPLIT / LANES;

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

/// Memory that calls reuse, so that a step allocates nothing once the largest has been seen.
pub(super) struct Memory {
    /// By worker. Never contended: a worker has one index at a time.
    workers: Vec<Mutex<Scratch>>,
    /// Tokens that share loads.
    token_groups: Vec<Range<usize>>,
    /// For calls that spread splits over threads.
    spread: Spread,
}

/// Splits that are indices of their own.
#[derive(Default)]
struct Spread {
    /// (group, split), all splits of a group in a row.
    pieces: Vec<(usize, usize)>,
    /// Their results.
    partials: Vec<Mutex<Partial>>,
}

impl Memory {
    pub(super) fn new(num_threads: usize) -> Self {
        Memory {
            workers: (0..num_threads).map(|_| Mutex::default()).collect(),
            token_groups: Vec::new(),
            spread: Spread::default(),
        }
    }
}

/// A panic in the middle leaves numbers behind, which the next use overwrites.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// All groups of a call: every run of tokens with every KV head.
struct Groups<'a, T> {
    job: Job<'a>,
    kv: KvSlices<'a, T>,
    tokens: &'a [Range<usize>],
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
    let memory = &mut *kernels.attention_memory.borrow_mut();
    job.token_groups(&mut memory.token_groups);
    let groups = Groups {
        job,
        kv,
        tokens: &memory.token_groups,
    };
    let num_threads = kernels.num_threads();
    if num_threads > 1 && groups.len() < MIN_GROUPS_PER_THREAD * num_threads {
        let memory = (memory.workers.as_slice(), &mut memory.spread);
        attend_spread(kernels, &groups, memory, out);
    } else {
        let workers = memory.workers.as_slice();
        kernels.for_each_worker(groups.len(), &|worker, index| {
            let scratch = &mut *lock(&workers[worker]);
            // Later tokens see more: the largest groups first, so that no thread ends with one.
            let group = groups.get(groups.len() - 1 - index);
            attend_group(job.level, &group, scratch, out);
        });
    }
}

/// Few groups: every split is an index of its own, then the splits of each group are merged.
fn attend_spread<T: Element>(
    kernels: &CpuKernels,
    groups: &Groups<'_, T>,
    (workers, spread): (&[Mutex<Scratch>], &mut Spread),
    out: &Disjoint<'_, f32>,
) {
    let Spread { pieces, partials } = spread;
    pieces.clear();
    for index in 0..groups.len() {
        let splits = groups.get(index).splits();
        pieces.extend(splits.map(|split| (index, split)));
    }
    let num_partials = partials.len().max(pieces.len());
    partials.resize_with(num_partials, Mutex::default);
    let (pieces, partials) = (pieces.as_slice(), partials.as_slice());
    kernels.for_each_worker(pieces.len(), &|worker, piece| {
        let (index, split) = pieces[piece];
        let scratch = &mut *lock(&workers[worker]);
        attend_split(groups.job.level, &groups.get(index), split, scratch);
        std::mem::swap(&mut scratch.partial, &mut *lock(&partials[piece]));
    });
    let mut start = 0;
    for index in 0..groups.len() {
        let group = groups.get(index);
        let scratch = &mut *lock(&workers[0]);
        merge_splits(groups.job.level, &group, &partials[start..], (scratch, out));
        start += group.splits().len();
    }
}

impl<'a, T: Element> Groups<'a, T> {
    fn len(&self) -> usize {
        self.tokens.len() * self.job.shape.num_kv_heads
    }

    fn get(&self, index: usize) -> Group<'a, T> {
        let num_kv_heads = self.job.shape.num_kv_heads;
        Group {
            job: self.job,
            kv: self.kv,
            tokens: self.tokens[index / num_kv_heads].clone(),
            kv_head: index % num_kv_heads,
        }
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
