//! Attention over some of the positions: maximum, sum of exponentials, weighted values; and how parts merge.

use super::super::LANES;
use super::super::disjoint::Disjoint;
use super::super::math::exp_lanes;
use super::super::simd::{Element, Simd};
use super::group::Group;

/// Softmax-weighted values of a group's queries over some positions.
#[derive(Default)]
pub(super) struct Partial {
    /// By query.
    pub stats: Vec<Stats>,
    /// (queries, head_dim), not yet divided by the sum.
    pub values: Vec<f32>,
}

/// Largest score and sum of exponentials.
#[derive(Clone, Copy)]
pub(super) struct Stats {
    pub max: f32,
    pub sum: f32,
}

impl Partial {
    #[inline(always)]
    pub(super) fn reset<T: Element>(&mut self, group: &Group<'_, T>) {
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

/// Adds a split to what was merged before it.
#[inline(always)]
pub(super) fn merge<S: Simd, T: Element>(
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
pub(super) fn finish<S: Simd, T: Element>(
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
