//! A steady decode step of scheduler and scripted mock takes nothing from the heap, counted by the allocator.
//!
//! The only test of this binary: the count is global, and a neighbour would disturb it.

use std::alloc::{GlobalAlloc, Layout, System};
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use millpond_scheduler::mock::MockModel;
use millpond_scheduler::{
    BatchPlan, CacheSalt, Deadlines, Event, ModelOutput, ModelRunner, Request, RequestId,
    SamplingParams, Scheduler, SchedulerConfig, StopConditions, Timestamp, TokenId,
};

/// The system's allocator, counting.
struct Counting;

static NUM_ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[expect(unsafe_code, reason = "a global allocator can only be written so")]
// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        NUM_ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        NUM_ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `realloc`.
        unsafe { System.realloc(pointer, layout, new_size) }
    }
}

const NUM_SEQUENCES: u32 = 256;
const NUM_STEPS: u32 = 512;
const VOCABULARY: NonZeroU32 = NonZeroU32::new(1 << 20).expect("it is not zero");

fn request(id: u32) -> Request {
    Request {
        id: RequestId(u64::from(id)),
        prompt: (0..40).map(|t| TokenId(t + 1_000 * id)).collect(),
        sampling: SamplingParams::default(),
        stop: StopConditions {
            max_tokens: 2 * NUM_STEPS,
            min_tokens: 0,
            stop_token_ids: vec![TokenId(1)],
            eos_token_ids: vec![TokenId(0)],
            ignore_eos: false,
        },
        num_choices: 1,
        priority: 0,
        salt: CacheSalt::default(),
        arrival: Timestamp(0),
        deadlines: Deadlines {
            total: Some(Timestamp(u64::MAX)),
            ..Deadlines::default()
        },
    }
}

#[test]
fn steady_decode_allocates_nothing() {
    // The second pool is so small that each new block pushes one out of the cache.
    for (num_blocks, num_cold) in [(24_000, 0), (9_600, 1)] {
        let mut scheduler = Scheduler::new(SchedulerConfig {
            num_blocks,
            max_sequences: NUM_SEQUENCES,
            ..SchedulerConfig::default()
        })
        .expect("valid");
        // Counts on from each prompt and meets no stop token.
        let mut model = MockModel::scripted(VOCABULARY);
        let mut plan = BatchPlan::default();
        let mut output = ModelOutput::default();
        let mut events: Vec<Event> = Vec::new();
        let mut now = 0;
        let mut step = |scheduler: &mut Scheduler, events: &mut Vec<Event>| {
            now += 1;
            events.clear();
            scheduler.schedule(Timestamp(now), &mut plan, events);
            if !plan.is_empty() {
                model
                    .execute(&plan, &mut output)
                    .expect("no fault was injected");
                scheduler.commit(&plan, &output, Timestamp(now), events);
            }
            plan.rows.iter().filter(|row| row.sample).count() as u32
        };
        for cold in 0..num_cold {
            let mut filler = request(9_999 + cold);
            filler.prompt = (0..8_000).map(TokenId).collect();
            filler.stop.max_tokens = 1;
            scheduler
                .add(Arc::new(filler), Timestamp(0))
                .expect("acceptable");
            while scheduler.has_work() {
                step(&mut scheduler, &mut events);
            }
        }
        for id in 0..NUM_SEQUENCES {
            scheduler
                .add(Arc::new(request(id)), Timestamp(0))
                .expect("acceptable");
        }
        while step(&mut scheduler, &mut events) < NUM_SEQUENCES {}
        step(&mut scheduler, &mut events);
        let before = NUM_ALLOCATIONS.load(Ordering::Relaxed);
        for _ in 0..NUM_STEPS {
            assert_eq!(step(&mut scheduler, &mut events), NUM_SEQUENCES);
        }
        let num_allocations = NUM_ALLOCATIONS.load(Ordering::Relaxed) - before;
        assert_eq!(num_allocations, 0, "in {NUM_STEPS} steps");
        let num_evicted = scheduler.stats().counters.num_evicted_blocks;
        assert_eq!(num_evicted > 0, num_cold > 0, "{num_evicted} evicted");
    }
}
