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
        start.copy.map(|copy| BlockCopy {
            from: copy.block,
            to: table[start.shared.len()],
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
        while let Some(block) = self.copy_sources.pop() {
            self.let_go(block);
        }
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
        if self.counts().free == 0 {
            let block = self.radix.evict(&self.pool)?;
            self.pool.evict(block);
            self.num_evicted += 1;
        }
        self.pool.allocate()
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
