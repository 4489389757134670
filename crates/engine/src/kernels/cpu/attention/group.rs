//! What shares loads of keys and values, and which positions it sees.

use std::ops::Range;

use super::super::kv::KvSlices;
use super::super::simd::{Element, Level};
use super::super::{AttentionBatch, KvShape, LANES, TokenPath};
use super::SPLIT;

/// Queries that share loads of keys and values: enough to hide them, few enough for their scores and sums to
/// stay in the second-level cache.
const MAX_GROUP_QUERIES: usize = 48;

/// One call of the kernel.
#[derive(Clone, Copy)]
pub(super) struct Job<'a> {
    pub level: Level,
    pub shape: KvShape,
    pub batch: &'a AttentionBatch<'a>,
}

/// What shares loads: neighbouring tokens of one path, the query heads of one KV head.
pub(super) struct Group<'a, T> {
    pub job: Job<'a>,
    pub kv: KvSlices<'a, T>,
    pub tokens: Range<usize>,
    pub kv_head: usize,
}

impl Job<'_> {
    /// Query heads of a KV head.
    fn heads_per_kv(&self) -> usize {
        self.batch.num_heads / self.shape.num_kv_heads
    }

    /// Fills `groups` with runs of tokens at consecutive positions of one block table.
    pub(super) fn token_groups(&self, groups: &mut Vec<Range<usize>>) {
        let max_tokens = (MAX_GROUP_QUERIES / self.heads_per_kv()).max(1);
        let paths = self.batch.paths;
        groups.clear();
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
    pub(super) fn num_queries(&self) -> usize {
        self.tokens.len() * self.job.heads_per_kv()
    }

    #[inline(always)]
    fn token(&self, query: usize) -> usize {
        self.tokens.start + query / self.job.heads_per_kv()
    }

    /// Where a query (and its output) lies in (tokens, heads, head_dim).
    #[inline(always)]
    pub(super) fn query_range(&self, query: usize) -> Range<usize> {
        let heads_per_kv = self.job.heads_per_kv();
        let head = self.kv_head * heads_per_kv + query % heads_per_kv;
        let row = self.token(query) * self.job.batch.num_heads + head;
        row * self.job.shape.head_dim..(row + 1) * self.job.shape.head_dim
    }

    #[inline(always)]
    pub(super) fn query(&self, query: usize) -> &[f32] {
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
    pub(super) fn visible_in(&self, query: usize, split: usize) -> Range<usize> {
        relative(self.job.visible(self.token(query)), split * SPLIT, SPLIT)
    }

    /// Blocks of the path that the group sees in a split, relative to the split.
    #[inline(always)]
    pub(super) fn blocks_in(&self, split: usize) -> Range<usize> {
        let seen = relative(self.visible(), split * SPLIT, SPLIT);
        seen.start / LANES..seen.end.div_ceil(LANES)
    }

    /// Splits that any token of the group sees.
    #[inline(always)]
    pub(super) fn splits(&self) -> Range<usize> {
        let seen = self.visible();
        seen.start / SPLIT..seen.end.div_ceil(SPLIT)
    }

    /// Keys or values of block `index` of the path in the pool; none where the tail scatters them.
    #[inline(always)]
    pub(super) fn pool_tile(&self, half: Half, index: usize) -> Option<&[T]> {
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
    pub(super) fn gather(&self, half: Half, index: usize, buffer: &mut Vec<f32>) {
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
pub(super) fn relative(range: Range<usize>, start: usize, len: usize) -> Range<usize> {
    let end = range.end.clamp(start, start + len) - start;
    (range.start.clamp(start, start + len) - start).min(end)..end
}

/// Keys or values.
#[derive(Clone, Copy)]
pub(super) enum Half {
    Keys,
    Values,
}
