//! The only door to the block pool and the radix cache: match, allocate, extend, free, publish.
//!
//! It keeps the two in step and knows nothing of requests, queues or time; it moves no keys or values.

use crate::block_pool::{BlockPool, BlockState, Released};
use crate::config::SchedulerConfig;
use crate::plan::{BlockCopy, BlockId};
use crate::radix_cache::{InsertAt, Inserted, PartialMatch, RadixCache, Tick};
use crate::request::{CacheSalt, TokenId};
use crate::stats::BlockCounts;

/// What a sequence can start from instead of computing it: whole blocks to share, part of one to copy.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Start {
    /// Blocks whose every token is the sequence's own.
    pub shared: Vec<BlockId>,
    /// The block after them, if its leading tokens are the sequence's own.
    pub copy: Option<PartialMatch>,
}

impl Start {
    /// Forgets everything and keeps the memory.
    pub fn clear(&mut self) {
        self.shared.clear();
        self.copy = None;
    }

    /// Tokens that need not be computed.
    pub fn num_tokens(&self, block_size: u32) -> u32 {
        let copied = self.copy.map_or(0, |copy| copy.num_tokens);
        self.shared.len() as u32 * block_size + copied
    }
}

/// Blocks and cache of one worker.
pub struct KvManager {
    block_size: u32,
    prefix_cache: bool,
    partial_copies: bool,
    pool: BlockPool,
    radix: RadixCache,
    now: Tick,
    /// Sources of the copies in the plan in flight, held so that nobody overwrites them.
    copy_sources: Vec<BlockId>,
    /// Their targets, which no other copy of the same plan may read.
    copy_targets: Vec<BlockId>,
    num_evicted: u64,
}

impl KvManager {
    /// An empty pool and an empty cache.
    pub fn new(config: &SchedulerConfig) -> Self {
        KvManager {
            block_size: config.block_size,
            prefix_cache: config.prefix_cache,
            partial_copies: config.partial_copies,
            pool: BlockPool::new(config.num_blocks),
            radix: RadixCache::new(config.num_blocks, config.block_size),
            now: Tick(0),
            copy_sources: Vec::new(),
            copy_targets: Vec::new(),
            num_evicted: 0,
        }
    }

    /// Blocks for `num_tokens` tokens.
    pub fn blocks_for(&self, num_tokens: u32) -> u32 {
        num_tokens.div_ceil(self.block_size)
    }

    /// Tokens per block.
    pub fn block_size(&self) -> u32 {
        self.block_size
    }

    /// How many blocks are in each state.
    pub fn counts(&self) -> BlockCounts {
        self.pool.counts()
    }

    /// Cached blocks given up so far.
    pub fn num_evicted(&self) -> u64 {
        self.num_evicted
    }

    /// Fills `start` with what the cache has of `tokens`. Holds nothing: valid until the next change.
    pub fn find(&self, salt: &CacheSalt, tokens: &[TokenId], start: &mut Start) {
        start.clear();
        if self.prefix_cache {
            let partial = self.radix.find(salt, tokens, &mut start.shared);
            start.copy = partial.filter(|_| self.partial_copies);
        }
    }

    /// Fills `start` with the first `num_tokens` tokens of `table`, which another sequence holds.
    pub fn share(&self, table: &[BlockId], num_tokens: u32, start: &mut Start) {
        start.clear();
        let (num_shared, num_copied) = (num_tokens / self.block_size, num_tokens % self.block_size);
        start.shared.extend(table.iter().take(num_shared as usize));
        start.copy = table
            .get(num_shared as usize)
            .filter(|_| num_copied > 0)
            .map(|&block| PartialMatch {
                block,
                num_tokens: num_copied,
            });
    }

    /// Blocks that would be left for others after `claim(start, num_blocks, …)`; `None` if it would fail.
    pub fn left_after(&self, start: &Start, num_blocks: u32) -> Option<u32> {
        // Evictable blocks that the claim holds can no longer be evicted to make room.
        let held = start
            .shared
            .iter()
            .chain(start.copy.iter().map(|c| &c.block));
        let num_pinned = held.filter(|b| self.pool.is_evictable(**b)).count() as u32;
        let num_new = num_blocks - start.shared.len() as u32;
        self.counts().available().checked_sub(num_pinned + num_new)
    }

    /// Fills the empty `table` with `num_blocks` blocks that begin with `start`, and says which copy the
    /// step must perform. Panics unless `left_after` approved it just before.
    pub fn claim(
        &mut self,
        start: &Start,
        num_blocks: u32,
        table: &mut Vec<BlockId>,
    ) -> Option<BlockCopy> {
        for &block in &start.shared {
            self.hold(block);
        }
        if let Some(copy) = start.copy {
            self.hold(copy.block);
            self.copy_sources.push(copy.block);
        }
        table.extend(&start.shared);
        assert!(
            self.extend(table, num_blocks),
            "a claim is made only after left_after approved it"
        );
        let copy = start.copy?;
        let to = table[start.shared.len()];
        self.copy_targets.push(to);
        Some(BlockCopy {
            from: copy.block,
            to,
            num_tokens: copy.num_tokens,
        })
    }

    /// Makes `table` at least `num_blocks` long. When blocks run out it keeps what it got and returns false.
    pub fn extend(&mut self, table: &mut Vec<BlockId>, num_blocks: u32) -> bool {
        while table.len() < num_blocks as usize {
            match self.allocate() {
                Some(block) => table.push(block),
                None => return false,
            }
        }
        true
    }

    /// Makes block `index` of `table`, full of `tokens` and computed without error, matchable.
    ///
    /// If the cache has an equal block already (two sequences computed the same prefix at once), the
    /// table takes that one and gives its own back, so that a table's published part is a path of the tree.
    pub fn publish(
        &mut self,
        salt: &CacheSalt,
        table: &mut [BlockId],
        index: usize,
        tokens: &[TokenId],
        num_following: usize,
    ) {
        let block = table[index];
        let at = match index.checked_sub(1) {
            None => InsertAt::Root(salt),
            Some(previous) => InsertAt::After(table[previous]),
        };
        match self.radix.insert(at, block, tokens, num_following) {
            Inserted::New => self.pool.publish(block),
            Inserted::Present(cached) => {
                self.hold(cached);
                self.let_go(block);
                table[index] = cached;
            }
        }
    }

    /// Evicts until at most `num_blocks` blocks are cached, or nothing that is cached may go.
    pub fn shrink_cache(&mut self, num_blocks: u32) {
        let num_cached = |counts: BlockCounts| counts.cached_evictable + counts.cached_pinned;
        while num_cached(self.counts()) > num_blocks && self.evict() {}
    }

    /// The `blocks`, just claimed and nobody else's, are to be filled from another worker.
    pub fn begin_transfer(&mut self, blocks: &[BlockId]) {
        for &block in blocks {
            self.pool.begin_transfer(block);
        }
    }

    /// Nothing is written to the `blocks` from elsewhere any more.
    pub fn end_transfer(&mut self, blocks: &[BlockId]) {
        for &block in blocks {
            self.pool.end_transfer(block);
        }
    }

    /// Does this manager publish at all?
    pub fn publishes(&self) -> bool {
        self.prefix_cache
    }

    /// Gives back every block of `table`; cached ones count as used now, all at once.
    pub fn release(&mut self, table: &[BlockId]) {
        self.now.0 += 1;
        for &block in table {
            self.let_go(block);
        }
    }

    /// The copies of the last plan are done or void.
    pub fn release_copy_sources(&mut self) {
        self.now.0 += 1;
        self.copy_targets.clear();
        while let Some(block) = self.copy_sources.pop() {
            self.let_go(block);
        }
    }

    /// Does a copy of the plan in flight write to `block`? Then its contents cannot be copied yet.
    pub fn is_copy_target(&self, block: BlockId) -> bool {
        self.copy_targets.contains(&block)
    }

    /// Sources of the copies in flight.
    pub fn copy_sources(&self) -> &[BlockId] {
        &self.copy_sources
    }

    /// The state of `block`.
    pub fn state(&self, block: BlockId) -> BlockState {
        self.pool.state(block)
    }

    /// I1 and I8.
    pub fn check(&self) -> Result<(), String> {
        self.pool.check()?;
        self.radix.check(&self.pool)
    }

    fn allocate(&mut self) -> Option<BlockId> {
        if self.counts().free == 0 && !self.evict() {
            return None;
        }
        self.pool.allocate()
    }

    /// Frees the cached block that the policy gives up first; false when none may go.
    fn evict(&mut self) -> bool {
        let Some(block) = self.radix.evict(&self.pool) else {
            return false;
        };
        self.pool.evict(block);
        self.num_evicted += 1;
        true
    }

    fn hold(&mut self, block: BlockId) {
        if self.pool.is_evictable(block) {
            self.radix.pin(block);
        }
        self.pool.hold(block);
    }

    fn let_go(&mut self, block: BlockId) {
        if let BlockState::Cached { .. } = self.pool.state(block) {
            self.radix.touch(block, self.now);
        }
        match self.pool.release(block) {
            Released::StillHeld | Released::Freed => {}
            Released::Evictable => self.radix.unpin(block),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK_SIZE: usize = 4;

    /// The cache as a list of prefixes, each with the tick of its last use: slow and plainly right.
    struct Twin {
        num_blocks: usize,
        entries: Vec<(CacheSalt, Vec<TokenId>, u64)>,
    }

    impl Twin {
        fn num_matching(&self, salt: &CacheSalt, tokens: &[TokenId]) -> usize {
            let of_salt = self.entries.iter().filter(|e| e.0 == *salt);
            let common = |entry: &[TokenId]| {
                let pairs = entry.iter().zip(tokens);
                pairs.take_while(|(a, b)| a == b).count()
            };
            of_salt.map(|e| common(&e.1)).max().unwrap_or(0)
        }

        fn evict(&mut self, salt: &CacheSalt, keep: &[TokenId]) {
            let is_leaf = |entry: &(CacheSalt, Vec<TokenId>, u64)| {
                let extends = |other: &(CacheSalt, Vec<TokenId>, u64)| {
                    other.0 == entry.0
                        && other.1.len() > entry.1.len()
                        && other.1.starts_with(&entry.1)
                };
                let is_kept = entry.0 == *salt && keep.starts_with(&entry.1);
                !is_kept && !self.entries.iter().any(extends)
            };
            let leaves = (0..self.entries.len()).filter(|i| is_leaf(&self.entries[*i]));
            let oldest = leaves
                .min_by_key(|i| self.entries[*i].2)
                .expect("the pool is larger than any request");
            self.entries.remove(oldest);
        }

        /// One request comes, is computed, and goes.
        fn serve(&mut self, salt: &CacheSalt, tokens: &[TokenId], tick: u64) {
            let num_shared = self.num_matching(salt, tokens) / BLOCK_SIZE;
            let num_new = tokens.len().div_ceil(BLOCK_SIZE) - num_shared;
            while self.entries.len() + num_new > self.num_blocks {
                self.evict(salt, &tokens[..num_shared * BLOCK_SIZE]);
            }
            for end in (BLOCK_SIZE..=tokens.len()).step_by(BLOCK_SIZE) {
                let prefix = tokens[..end].to_vec();
                self.entries.retain(|e| (&e.0, &e.1) != (salt, &prefix));
                self.entries.push((salt.clone(), prefix, tick));
            }
        }
    }

    fn serve(kv: &mut KvManager, salt: &CacheSalt, tokens: &[TokenId]) {
        let mut start = Start::default();
        kv.find(salt, tokens, &mut start);
        start.copy = None;
        let num_blocks = kv.blocks_for(tokens.len() as u32);
        kv.left_after(&start, num_blocks).expect("it fits");
        let mut table = Vec::new();
        kv.claim(&start, num_blocks, &mut table);
        for index in start.shared.len()..tokens.len() / BLOCK_SIZE {
            let block = &tokens[index * BLOCK_SIZE..(index + 1) * BLOCK_SIZE];
            kv.publish(salt, &mut table, index, block, 0);
        }
        kv.release(&table);
    }

    /// A fixed sequence of small numbers, different for each seed.
    struct Dice(u64);

    impl Dice {
        fn roll(&mut self, sides: u64) -> u64 {
            self.0 = self
                .0
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 33) % sides
        }

        /// Few distinct tokens, so that prefixes are often shared and part anywhere.
        fn tokens(&mut self) -> Vec<TokenId> {
            let length = 1 + self.roll(23);
            let token = |_| TokenId((self.roll(8) == 0).into());
            (0..length).map(token).collect()
        }
    }

    #[test]
    fn matches_and_evictions_agree_with_the_naive_twin() {
        for seed in 0..20 {
            let num_blocks = 6 + seed as u32;
            let mut kv = KvManager::new(&SchedulerConfig {
                block_size: BLOCK_SIZE as u32,
                num_blocks,
                ..SchedulerConfig::default()
            });
            let mut twin = Twin {
                num_blocks: num_blocks as usize,
                entries: Vec::new(),
            };
            let mut dice = Dice(seed);
            for tick in 0..300 {
                let salt = CacheSalt([dice.roll(2) as u8].as_slice().into());
                let tokens = dice.tokens();
                let mut start = Start::default();
                kv.find(&salt, &tokens, &mut start);
                let found = start.num_tokens(BLOCK_SIZE as u32) as usize;
                let expected = twin.num_matching(&salt, &tokens);
                assert_eq!(found, expected, "seed {seed}, tick {tick}: {tokens:?}");
                serve(&mut kv, &salt, &tokens);
                twin.serve(&salt, &tokens, tick);
                assert_eq!(kv.check(), Ok(()), "seed {seed}, tick {tick}");
                assert_eq!(kv.counts().cached_evictable as usize, twin.entries.len());
            }
            assert!(kv.num_evicted() > 0, "seed {seed} never filled the pool");
        }
    }

    #[test]
    fn a_cache_that_is_off_finds_nothing() {
        let kv = KvManager::new(&SchedulerConfig {
            prefix_cache: false,
            ..SchedulerConfig::default()
        });
        let mut start = Start::default();
        kv.find(&CacheSalt::default(), &[TokenId(1); 64], &mut start);
        assert_eq!(start, Start::default());
        assert!(!kv.publishes());
    }

    #[test]
    fn what_a_claim_holds_cannot_also_make_room_for_it() {
        let mut kv = KvManager::new(&SchedulerConfig {
            block_size: BLOCK_SIZE as u32,
            num_blocks: 3,
            ..SchedulerConfig::default()
        });
        let salt = CacheSalt::default();
        let tokens: Vec<TokenId> = (0..12).map(TokenId).collect();
        serve(&mut kv, &salt, &tokens);
        let mut start = Start::default();
        kv.find(&salt, &tokens[..10], &mut start);
        assert_eq!(start.num_tokens(BLOCK_SIZE as u32), 10);
        assert_eq!(
            kv.left_after(&start, 3),
            None,
            "the source of the copy is held"
        );
        start.copy = None;
        assert_eq!(kv.left_after(&start, 3), Some(0));
    }
}
