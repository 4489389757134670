//! How fast the pure part runs: steps per second of scheduler and scripted mock, printed and not judged.
//!
//! `cargo test --release -p millpond-scheduler --test properties throughput -- --nocapture` prints the table.

use std::num::NonZeroU32;
use std::sync::Arc;

use millpond_scheduler::mock::MockModel;
use millpond_scheduler::scheduler::Scheduler;
use millpond_scheduler::{BatchPlan, Event, ModelOutput, ModelRunner, SchedulerConfig, Timestamp};

use crate::workload::Ask;

/// Runs `num_sequences` from first prompt token to last output token; returns the steps it took.
fn run(num_sequences: u32) -> u64 {
    let config = SchedulerConfig {
        num_blocks: num_sequences * 16,
        max_batch_tokens: num_sequences.max(512),
        max_sequences: num_sequences,
        max_waiting: num_sequences,
        ..SchedulerConfig::default()
    };
    let vocabulary = NonZeroU32::new(32_000).expect("it is not zero");
    let mut model = MockModel::scripted(vocabulary);
    let mut scheduler = Scheduler::new(config).expect("the limits are positive");
    for id in 0..num_sequences {
        let request = Ask::plain(id as u8, 32, 128).request(u64::from(id), Timestamp(0));
        scheduler
            .add(Arc::new(request), Timestamp(0))
            .expect("the pool has room for all");
    }
    let (mut plan, mut output) = (BatchPlan::default(), ModelOutput::default());
    let mut events: Vec<Event> = Vec::new();
    while scheduler.has_work() {
        let now = Timestamp(plan.step);
        scheduler.schedule(now, &mut plan, &mut events);
        model
            .execute(&plan, &mut output)
            .expect("no fault was injected");
        scheduler.commit(&plan, &output, now, &mut events);
        events.clear();
    }
    assert_eq!(
        scheduler.stats().counters.num_output_tokens,
        u64::from(num_sequences) * 128
    );
    plan.step
}

#[expect(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "a measurement reads a clock; the code that it measures may not"
)]
fn clock() -> std::time::Instant {
    std::time::Instant::now()
}

#[test]
fn throughput_of_scheduler_and_scripted_mock() {
    println!("sequences   steps/s   sequence-steps/s   µs/step");
    for num_sequences in [1, 32, 256, 1024] {
        let start = clock();
        let num_steps = run(num_sequences) as f64;
        let seconds = start.elapsed().as_secs_f64();
        let rate = num_steps / seconds;
        println!(
            "{num_sequences:9} {rate:9.0} {:18.0} {:9.2}",
            rate * f64::from(num_sequences),
            1e6 / rate
        );
    }
}
