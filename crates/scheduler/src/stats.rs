//! Counters of the scheduler, returned as data.
//!
//! Nothing here is published anywhere; whoever owns the loop decides what to do with the numbers.

use serde::{Deserialize, Serialize};

use crate::time::Timestamp;

/// How many blocks are in each state; the five add up to `total` (invariant I1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockCounts {
    /// Blocks in the pool.
    pub total: u32,
    /// Hold nothing of value.
    pub free: u32,
    /// Held by sequences, not matchable.
    pub active: u32,
    /// Matchable and held by nobody: taken back when blocks run out.
    pub cached_evictable: u32,
    /// Matchable and held by at least one sequence or copy.
    pub cached_pinned: u32,
    /// Held by a sequence and being filled from another worker.
    pub in_transfer: u32,
}

impl BlockCounts {
    /// I1, as far as counts can tell.
    pub fn adds_up(&self) -> bool {
        let held = self.active + self.in_transfer + self.cached_pinned;
        self.free + self.cached_evictable + held == self.total
    }

    /// Blocks that can be allocated now, by eviction if need be.
    pub fn available(&self) -> u32 {
        self.free + self.cached_evictable
    }
}

/// A snapshot of a `Scheduler`, taken in constant time. Counters only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SchedulerStats {
    /// Sequences that are part of every step.
    pub num_running: u32,
    /// Sequences that wait, choices that wait for a sibling's prompt included.
    pub num_waiting: u32,
    /// Sequences whose blocks are being filled from another worker.
    pub num_receiving: u32,
    /// Sequences whose blocks are held for another worker to fetch.
    pub num_offered: u32,
    /// Arrival of the sequence that waits longest.
    pub oldest_waiting_arrival: Option<Timestamp>,
    /// The pool.
    pub blocks: BlockCounts,
    /// What happened since the start.
    pub counters: Counters,
}

/// What happened since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counters {
    /// Steps that were planned and had at least one row.
    pub num_steps: u64,
    /// Sequences that reached their end.
    pub num_finished: u64,
    /// Sequences sent back to the queue for want of blocks.
    pub num_preemptions: u64,
    /// Cached blocks given up for new ones.
    pub num_evicted_blocks: u64,
    /// Prompt tokens looked up in the prefix cache, once per sequence.
    pub prefix_query_tokens: u64,
    /// Those of them that were found.
    pub prefix_hit_tokens: u64,
    /// Tokens computed in prefill rows, recomputation after preemption included.
    pub num_prefill_tokens: u64,
    /// Output tokens accepted.
    pub num_output_tokens: u64,
    /// Sequences offered to another worker.
    pub num_offers: u64,
    /// Sequences that were let in to wait for blocks from another worker.
    pub num_reservations: u64,
    /// Offers and reservations that their lease ended.
    pub num_expired_leases: u64,
    /// Words about transfers that were late, unknown or of another generation, and changed nothing.
    pub num_fenced: u64,
}
