//! How fast the pure part runs: steps per second of scheduler and scripted mock, printed and not judged.
//!
//! `cargo test --release -p millpond-scheduler --test properties throughput -- --nocapture` prints the table.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use millpond_scheduler::mock::MockModel;
use millpond_scheduler::scheduler::Scheduler;
use millpond_scheduler::{BatchPlan, Event, ModelOutput, ModelRunner, SchedulerConfig, Timestamp};

use crate::workload::Ask;

const OUTPUT_LEN: u32 = 128;

/// What a run took.
#[derive(Default)]
struct Times {
    num_steps: u64,
    total: Duration,
    num_steady_steps: u32,
    /// In steps in which every sequence decodes.
    steady: Duration,
}

#[expect(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "a measurement reads a clock; the code that it measures may not"
)]
fn clock() -> std::time::Instant {
    std::time::Instant::now()
}

fn filled_scheduler(num_sequences: u32) -> Scheduler {
    let config = SchedulerConfig {
        num_blocks: num_sequences * 16,
        max_batch_tokens: num_sequences.max(512),
        max_sequences: num_sequences,
        max_waiting: num_sequences,
        ..SchedulerConfig::default()
    };
    let mut scheduler = Scheduler::new(config).expect("the limits are positive");
    for id in 0..num_sequences {
        let request = Ask::plain(id as u8, 32, OUTPUT_LEN).request(u64::from(id), Timestamp(0));
        scheduler
            .add(Arc::new(request), Timestamp(0))
            .expect("the pool has room for all");
    }
    scheduler
}

/// Runs `num_sequences` from first prompt token to last output token.
fn run(num_sequences: u32) -> Times {
    let mut scheduler = filled_scheduler(num_sequences);
    let vocabulary = NonZeroU32::new(32_000).expect("it is not zero");
    let mut model = MockModel::scripted(vocabulary);
    let (mut plan, mut output) = (BatchPlan::default(), ModelOutput::default());
    let mut events: Vec<Event> = Vec::new();
    let mut times = Times::default();
    while scheduler.has_work() {
        let now = Timestamp(plan.step);
        events.clear();
        let start = clock();
        scheduler.schedule(now, &mut plan, &mut events);
        model
            .execute(&plan, &mut output)
            .expect("no fault was injected");
        scheduler.commit(&plan, &output, now, &mut events);
        let took = start.elapsed();
        times.total += took;
        if plan.tokens.len() == num_sequences as usize {
            times.steady += took;
            times.num_steady_steps += 1;
        }
    }
    times.num_steps = plan.step;
    let num_tokens = scheduler.stats().counters.num_output_tokens;
    assert_eq!(num_tokens, u64::from(num_sequences * OUTPUT_LEN));
    times
}

#[test]
fn throughput_of_scheduler_and_scripted_mock() {
    println!("sequences  steps/s  output tokens/s  µs per steady step");
    for num_sequences in [1, 32, 256, 1024] {
        let times = run(num_sequences);
        let seconds = times.total.as_secs_f64();
        let num_tokens = f64::from(num_sequences * OUTPUT_LEN);
        println!(
            "{num_sequences:9} {:8.0} {:16.0} {:19.2}",
            times.num_steps as f64 / seconds,
            num_tokens / seconds,
            times.steady.as_secs_f64() * 1e6 / f64::from(times.num_steady_steps.max(1))
        );
    }
}
