//! Which block is free, private to sequences, in transfer, or cached. The only creator of block ids (A2).
//!
//! It knows no token and no sequence: who holds a block, and why a cached one may go, is decided above.

use crate::plan::BlockId;
use crate::stats::BlockCounts;

/// What a block is used for. Holders are sequences and copies in flight; the radix cache is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockState {
    /// Holds nothing of value.
    Free,
    /// Held by at least one sequence or copy, not matchable.
    Private {
        /// How many hold it; at least 1.
        holders: u32,
    },
    /// In the radix cache; evictable while nobody holds it.
    Cached {
        /// How many hold it; may be 0.
        holders: u32,
    },
    /// Held by one sequence and being filled from another worker; neither shared nor matchable.
    InTransfer,
}

/// What became of a block when one of its holders let go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Released {
    /// Others hold it still.
    StillHeld,
    /// Nobody holds it and it was private: it is free now.
    Freed,
    /// Nobody holds it and it is cached: it may be evicted now.
    Evictable,
}

/// The states of all blocks, their counts kept up to date, and the list of free ones.
///
/// The methods panic on transitions that no correct caller makes, such as holding a free block.
pub struct BlockPool {
    states: Vec<BlockState>,
    // A stack: the block freed last is reused first, while its memory may still be in a cache.
    free: Vec<BlockId>,
    counts: BlockCounts,
}

impl BlockPool {
    /// A pool of free blocks, handed out from id 0 on.
    pub fn new(num_blocks: u32) -> Self {
        BlockPool {
            states: vec![BlockState::Free; num_blocks as usize],
            free: (0..num_blocks).rev().map(BlockId).collect(),
            counts: BlockCounts {
                total: num_blocks,
                free: num_blocks,
                ..BlockCounts::default()
            },
        }
    }

    /// How many blocks are in each state.
    pub fn counts(&self) -> BlockCounts {
        self.counts
    }

    /// The state of `block`.
    pub fn state(&self, block: BlockId) -> BlockState {
        self.states[block.0 as usize]
    }

    /// Cached and held by nobody?
    pub fn is_evictable(&self, block: BlockId) -> bool {
        self.state(block) == BlockState::Cached { holders: 0 }
    }

    /// A free block, from now on private to one holder; `None` when all are taken.
    pub fn allocate(&mut self) -> Option<BlockId> {
        let block = self.free.pop()?;
        self.set(block, BlockState::Private { holders: 1 });
        Some(block)
    }

    /// One more holder for a block that is private or cached.
    pub fn hold(&mut self, block: BlockId) {
        let next = match self.state(block) {
            BlockState::Free | BlockState::InTransfer => {
                panic!("{block:?} has no contents and cannot be held by one more")
            }
            BlockState::Private { holders } => BlockState::Private {
                holders: holders + 1,
            },
            BlockState::Cached { holders } => BlockState::Cached {
                holders: holders + 1,
            },
        };
        self.set(block, next);
    }

    /// One holder less.
    pub fn release(&mut self, block: BlockId) -> Released {
        match self.state(block) {
            BlockState::Free | BlockState::Cached { holders: 0 } => {
                panic!("{block:?} has no holder to release it")
            }
            BlockState::Private { holders: 0 | 1 } | BlockState::InTransfer => {
                self.make_free(block);
                Released::Freed
            }
            BlockState::Private { holders } => {
                self.set(
                    block,
                    BlockState::Private {
                        holders: holders - 1,
                    },
                );
                Released::StillHeld
            }
            BlockState::Cached { holders } => {
                let holders = holders - 1;
                self.set(block, BlockState::Cached { holders });
                match holders {
                    0 => Released::Evictable,
                    _ => Released::StillHeld,
                }
            }
        }
    }

    /// A private block entered the radix cache; its holders keep it.
    pub fn publish(&mut self, block: BlockId) {
        match self.state(block) {
            BlockState::Private { holders } => self.set(block, BlockState::Cached { holders }),
            BlockState::Free | BlockState::Cached { .. } | BlockState::InTransfer => {
                panic!("{block:?} is not private and cannot be published")
            }
        }
    }

    /// A block that its only holder just got is to be filled from another worker.
    pub fn begin_transfer(&mut self, block: BlockId) {
        assert_eq!(
            self.state(block),
            BlockState::Private { holders: 1 },
            "{block:?} is not its holder's alone and cannot be filled from elsewhere"
        );
        self.set(block, BlockState::InTransfer);
    }

    /// Nothing is written to the block from elsewhere any more; its holder keeps it.
    pub fn end_transfer(&mut self, block: BlockId) {
        assert_eq!(
            self.state(block),
            BlockState::InTransfer,
            "{block:?} is not in transfer"
        );
        self.set(block, BlockState::Private { holders: 1 });
    }

    /// A cached block that nobody holds left the radix cache.
    pub fn evict(&mut self, block: BlockId) {
        assert!(
            self.is_evictable(block),
            "{block:?} is held or not cached and cannot be evicted"
        );
        self.make_free(block);
    }

    fn make_free(&mut self, block: BlockId) {
        self.set(block, BlockState::Free);
        self.free.push(block);
    }

    fn set(&mut self, block: BlockId, next: BlockState) {
        let previous = std::mem::replace(&mut self.states[block.0 as usize], next);
        *count_of(&mut self.counts, previous) -= 1;
        *count_of(&mut self.counts, next) += 1;
    }

    /// I1: the counts agree with the states, and the free list names every free block once.
    pub fn check(&self) -> Result<(), String> {
        let mut counts = BlockCounts {
            total: self.states.len() as u32,
            ..BlockCounts::default()
        };
        for state in &self.states {
            *count_of(&mut counts, *state) += 1;
        }
        if counts != self.counts {
            return Err(format!("counts {:?}, by walking {counts:?}", self.counts));
        }
        let mut free = self.free.clone();
        free.sort_unstable();
        free.dedup();
        let all_free = free.iter().all(|b| self.state(*b) == BlockState::Free);
        if !all_free || free.len() != counts.free as usize || free.len() != self.free.len() {
            return Err("the free list and the free blocks differ".into());
        }
        Ok(())
    }
}

fn count_of(counts: &mut BlockCounts, state: BlockState) -> &mut u32 {
    match state {
        BlockState::Free => &mut counts.free,
        BlockState::Private { .. } => &mut counts.active,
        BlockState::Cached { holders: 0 } => &mut counts.cached_evictable,
        BlockState::Cached { .. } => &mut counts.cached_pinned,
        BlockState::InTransfer => &mut counts.in_transfer,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(pool: &BlockPool) -> [u32; 4] {
        pool.check().expect("I1");
        let c = pool.counts();
        [c.free, c.active, c.cached_evictable, c.cached_pinned]
    }

    #[test]
    fn a_block_passes_through_every_state() {
        let mut pool = BlockPool::new(2);
        let block = pool.allocate().expect("two are free");
        assert_eq!(block, BlockId(0));
        assert_eq!(counts(&pool), [1, 1, 0, 0]);
        pool.hold(block);
        pool.publish(block);
        assert_eq!(counts(&pool), [1, 0, 0, 1]);
        assert_eq!(pool.release(block), Released::StillHeld);
        assert_eq!(pool.release(block), Released::Evictable);
        assert_eq!(counts(&pool), [1, 0, 1, 0]);
        pool.evict(block);
        assert_eq!(counts(&pool), [2, 0, 0, 0]);
    }

    #[test]
    fn a_private_block_is_free_when_its_last_holder_lets_go() {
        let mut pool = BlockPool::new(1);
        let block = pool.allocate().expect("one is free");
        assert_eq!(pool.allocate(), None);
        pool.hold(block);
        assert_eq!(pool.release(block), Released::StillHeld);
        assert_eq!(pool.release(block), Released::Freed);
        assert_eq!(pool.allocate(), Some(block));
    }

    #[test]
    fn a_block_in_transfer_is_its_holders_alone() {
        let mut pool = BlockPool::new(2);
        let kept = pool.allocate().expect("two are free");
        let lost = pool.allocate().expect("one is free");
        pool.begin_transfer(kept);
        pool.begin_transfer(lost);
        assert_eq!(pool.counts().in_transfer, 2);
        assert_eq!(counts(&pool), [0, 0, 0, 0]);
        pool.end_transfer(kept);
        assert_eq!(pool.release(lost), Released::Freed);
        assert_eq!(counts(&pool), [1, 1, 0, 0]);
        pool.publish(kept);
        assert_eq!(counts(&pool), [1, 0, 0, 1]);
    }

    #[test]
    #[should_panic(expected = "cannot be published")]
    fn a_block_in_transfer_is_not_published() {
        let mut pool = BlockPool::new(1);
        let block = pool.allocate().expect("one is free");
        pool.begin_transfer(block);
        pool.publish(block);
    }

    #[test]
    #[should_panic(expected = "no holder")]
    fn a_double_free_is_caught() {
        let mut pool = BlockPool::new(1);
        let block = pool.allocate().expect("one is free");
        pool.release(block);
        pool.release(block);
    }

    #[test]
    #[should_panic(expected = "cannot be evicted")]
    fn a_held_block_is_not_evicted() {
        let mut pool = BlockPool::new(1);
        let block = pool.allocate().expect("one is free");
        pool.publish(block);
        pool.evict(block);
    }
}
