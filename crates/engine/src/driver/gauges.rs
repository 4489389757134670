//! Counters that the engine thread writes and anyone may read without stopping it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use millpond_scheduler::Timestamp;

use crate::llm::{EngineStats, IterationTokens};

/// Upper edges of the tokens-per-step histogram (vLLM's).
const ITERATION_EDGES: [u64; 13] = [
    1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384,
];

/// Stands for "nothing waits" and "no work".
const NONE: u64 = u64::MAX;

/// Counters and gauges; every field is independent of the others.
pub(crate) struct Gauges {
    origin: Instant,
    alive: AtomicBool,
    draining: AtomicBool,
    /// Sequences submitted and not yet scheduled, in the inbox or in the scheduler.
    queued: AtomicU64,
    pub(crate) num_running: AtomicU64,
    pub(crate) num_waiting: AtomicU64,
    pub(crate) num_used_blocks: AtomicU64,
    num_blocks: u64,
    num_steps: AtomicU64,
    /// Nanoseconds of the last sign of progress while there is work, else `NONE`.
    progress: AtomicU64,
    oldest_waiting: AtomicU64,
    pub(crate) prefix_query_tokens: AtomicU64,
    pub(crate) prefix_hit_tokens: AtomicU64,
    pub(crate) num_preemptions: AtomicU64,
    pub(crate) num_prompt_tokens: AtomicU64,
    pub(crate) num_generated_tokens: AtomicU64,
    iteration_buckets: [AtomicU64; ITERATION_EDGES.len()],
    iteration_sum: AtomicU64,
}

impl Gauges {
    pub(crate) fn new(num_blocks: u32) -> Self {
        Gauges {
            origin: Instant::now(),
            alive: AtomicBool::new(true),
            draining: AtomicBool::new(false),
            queued: AtomicU64::new(0),
            num_running: AtomicU64::new(0),
            num_waiting: AtomicU64::new(0),
            num_used_blocks: AtomicU64::new(0),
            num_blocks: u64::from(num_blocks),
            num_steps: AtomicU64::new(0),
            progress: AtomicU64::new(NONE),
            oldest_waiting: AtomicU64::new(NONE),
            prefix_query_tokens: AtomicU64::new(0),
            prefix_hit_tokens: AtomicU64::new(0),
            num_preemptions: AtomicU64::new(0),
            num_prompt_tokens: AtomicU64::new(0),
            num_generated_tokens: AtomicU64::new(0),
            iteration_buckets: Default::default(),
            iteration_sum: AtomicU64::new(0),
        }
    }

    /// The engine's clock: time since the engine was made.
    pub(crate) fn now(&self) -> Timestamp {
        Timestamp(u64::try_from(self.origin.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }

    pub(crate) fn is_alive(&self) -> bool {
        self.alive.load(Ordering::Acquire)
    }

    pub(crate) fn set_dead(&self) {
        self.alive.store(false, Ordering::Release);
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }

    pub(crate) fn set_draining(&self) {
        self.draining.store(true, Ordering::Release);
    }

    /// Takes `count` places of the queue if they leave it within `max`.
    pub(crate) fn enter_queue(&self, count: u64, max: u64) -> bool {
        let grown = |queued: u64| Some(queued + count).filter(|grown| *grown <= max);
        self.queued
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, grown)
            .is_ok()
    }

    /// Gives `count` places of the queue back.
    pub(crate) fn leave_queue(&self, count: u64) {
        self.queued.fetch_sub(count, Ordering::AcqRel);
    }

    /// The engine thread did something; `has_work` tells whether more is due.
    pub(crate) fn note_progress(&self, has_work: bool, oldest_waiting: Option<Timestamp>) {
        let progress = if has_work { self.now().0 } else { NONE };
        self.progress.store(progress, Ordering::Release);
        let oldest = oldest_waiting.map_or(NONE, |arrival| arrival.0);
        self.oldest_waiting.store(oldest, Ordering::Release);
    }

    /// A step computed `num_tokens` tokens.
    pub(crate) fn note_step(&self, num_tokens: u64) {
        self.num_steps.fetch_add(1, Ordering::Relaxed);
        self.iteration_sum.fetch_add(num_tokens, Ordering::Relaxed);
        if let Some(index) = ITERATION_EDGES.iter().position(|edge| num_tokens <= *edge) {
            self.iteration_buckets[index].fetch_add(1, Ordering::Relaxed);
        }
    }

    /// A copy for whoever asks.
    pub(crate) fn snapshot(&self) -> EngineStats {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        EngineStats {
            alive: self.is_alive(),
            draining: self.is_draining(),
            num_running: load(&self.num_running),
            num_waiting: load(&self.num_waiting).max(load(&self.queued)),
            num_used_blocks: load(&self.num_used_blocks),
            num_blocks: self.num_blocks,
            num_steps: load(&self.num_steps),
            stalled_for: self.since(&self.progress),
            oldest_waiting: self.since(&self.oldest_waiting),
            prefix_query_tokens: load(&self.prefix_query_tokens),
            prefix_hit_tokens: load(&self.prefix_hit_tokens),
            num_preemptions: load(&self.num_preemptions),
            num_prompt_tokens: load(&self.num_prompt_tokens),
            num_generated_tokens: load(&self.num_generated_tokens),
            iteration_tokens: self.iteration_tokens(),
        }
    }

    fn since(&self, moment: &AtomicU64) -> Duration {
        match moment.load(Ordering::Acquire) {
            NONE => Duration::ZERO,
            nanos => Duration::from_nanos((self.now() - Timestamp(nanos)).0),
        }
    }

    fn iteration_tokens(&self) -> IterationTokens {
        let mut cumulative = 0;
        let buckets = ITERATION_EDGES
            .iter()
            .zip(&self.iteration_buckets)
            .map(|(edge, steps)| {
                cumulative += steps.load(Ordering::Relaxed);
                (*edge as f64, cumulative)
            })
            .collect();
        IterationTokens {
            buckets,
            count: self.num_steps.load(Ordering::Relaxed),
            sum: self.iteration_sum.load(Ordering::Relaxed),
        }
    }
}
