//! S05 to S07: more work than room. Progress, bounded preemption, bounded overtaking.

use std::cmp::Reverse;

use millpond_scheduler::scheduler::AddError;
use millpond_scheduler::{FinishReason, SchedulerConfig};
use proptest::prelude::*;

use crate::harness::Harness;
use crate::ledger::{End, Record};
use crate::property::check_property;
use crate::workload::{Ask, VOCABULARY};

/// Waiting requests may be overtaken so often (I7).
const MAX_OVERTAKES: usize = 64;

#[test]
fn s05_two_requests_that_do_not_fit_together_both_finish() {
    let strategy = (
        prop::sample::select(vec![1u32, 2, 4, 16]),
        8u32..40,
        2u32..=8,
        1u32..40,
        any::<bool>(),
    );
    check_property(
        300,
        strategy,
        |(block_size, num_blocks, tenths, output, same)| {
            let num_tokens = block_size * num_blocks;
            // Each needs from 6 to 10 tenths of the pool, more than half.
            let total = num_tokens * (tenths.clamp(2, 5) + 5) / 10;
            let max_tokens = output.min(total - 1);
            let config = SchedulerConfig {
                block_size,
                num_blocks,
                max_batch_tokens: 32,
                max_sequences: 4,
                ..SchedulerConfig::default()
            };
            let mut harness = Harness::new(config);
            for id in 0..2 {
                let tail = if same { 0 } else { id as u8 };
                let ask = Ask::plain(tail, total - max_tokens, max_tokens);
                harness.submit(ask.request(id, harness.now));
            }
            harness.drain();
            assert!(harness.ledger.records().all(|(_, record)| finished(record)));
        },
    );
}

#[test]
fn l03_what_fits_alone_is_taken_and_finishes_and_what_cannot_is_refused_at_once() {
    let config = SchedulerConfig {
        block_size: 4,
        num_blocks: 8,
        max_batch_tokens: 16,
        max_sequences: 4,
        ..SchedulerConfig::default()
    };
    for (num_prompt, max_tokens, fits) in [
        (27, 1, true),
        (31, 1, true),
        (28, 4, true),
        (1, 31, true),
        (33, 1, false),
        (32, 2, false),
        (28, 6, false),
        (1, 40, false),
    ] {
        let mut harness = Harness::new(config.clone());
        let ask = Ask::plain(0, num_prompt, max_tokens);
        let added = harness.add(ask.request(0, harness.now));
        let refused = matches!(added, Err(AddError::NeverFits { .. }));
        assert_eq!(
            (added.is_ok(), refused),
            (fits, !fits),
            "{num_prompt} + {max_tokens}"
        );
        harness.submit(Ask::plain(1, 8, 4).request(1, harness.now));
        harness.drain();
        assert!(harness.ledger.records().all(|(_, record)| finished(record)));
    }
}

fn finished(record: &Record) -> bool {
    record
        .end
        .as_ref()
        .is_some_and(|end| end.reason == FinishReason::Length)
}

/// Requests that are always four times what the pool holds.
#[derive(Clone, Copy, Debug)]
struct Load {
    min_prompt: u32,
    prompt_spread: u32,
    min_output: u32,
    output_spread: u32,
}

#[test]
fn s06_fourfold_oversubscription_keeps_up_its_throughput() {
    // About 90 tokens each, 6 blocks.
    oversubscribe(Load {
        min_prompt: 17,
        prompt_spread: 48,
        min_output: 33,
        output_spread: 32,
    });
}

#[test]
fn s06_fourfold_oversubscription_by_outputs_that_grow_long() {
    // About 90 tokens each too, but hardly any of them known at admission.
    oversubscribe(Load {
        min_prompt: 1,
        prompt_spread: 8,
        min_output: 20,
        output_spread: 130,
    });
}

/// 10,000 steps with 64 live requests in a pool for 16 of them.
fn oversubscribe(load: Load) {
    const NUM_STEPS: usize = 10_000;
    let config = SchedulerConfig {
        block_size: 16,
        num_blocks: 96,
        max_batch_tokens: 128,
        max_sequences: 64,
        max_context: 512,
        ..SchedulerConfig::default()
    };
    let mut harness = Harness::new(config);
    let mut next_id = 0;
    let mut barren_steps = 0;
    for step in 0..NUM_STEPS {
        while harness.ledger.num_live() < 64 {
            harness.submit(load.ask(next_id).request(next_id, harness.now));
            next_id += 1;
        }
        let before = harness.scheduler.stats().counters.num_output_tokens;
        crowded_step(&mut harness, step);
        let produced = harness.scheduler.stats().counters.num_output_tokens - before;
        barren_steps = if produced == 0 { barren_steps + 1 } else { 0 };
        assert!(
            barren_steps <= 20,
            "step {step}: {:?}",
            harness.scheduler.stats()
        );
    }
    harness.drain();
    report_preemptions(&harness);
}

/// One step; in some, the client of a row in flight is gone, and its blocks come back with the commit.
fn crowded_step(harness: &mut Harness, step: usize) {
    if harness.schedule() {
        if step % 50 == 49 {
            let gone = harness.row_choice(step % harness.plan.rows.len());
            harness.abort(gone.request);
        }
        harness.finish_step();
    }
}

impl Load {
    /// The `id`-th ask; lengths are spread evenly and hardly any two prompts are alike.
    fn ask(&self, id: u64) -> Ask {
        let spread = (id.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as u32;
        let num_prompt = self.min_prompt + spread % self.prompt_spread;
        let max_tokens = self.min_output + spread / 64 % self.output_spread;
        let mut ask = Ask::plain((spread % 251) as u8, num_prompt, max_tokens);
        ask.seed = id;
        ask
    }
}

fn report_preemptions(harness: &Harness) {
    let records = harness.ledger.records();
    let ends = records.filter_map(|(_, record)| record.end.as_ref());
    let times: Vec<u32> = ends.map(|end| end.summary.num_preemptions).collect();
    let (total, most) = (times.iter().sum::<u32>(), times.iter().max());
    println!(
        "{} requests, {total} preemptions, at most {most:?}",
        times.len()
    );
    println!("{:?}", harness.scheduler.stats().counters);
    assert!(total > 0, "the pool was meant to be too small");
    assert!(most <= Some(&3), "a request was preempted {most:?} times");
}

#[test]
fn s06_no_request_is_preempted_more_than_three_times() {
    let requests = prop::collection::vec((1u32..40, 1u32..120), 8..40);
    let strategy = (
        prop::sample::select(vec![1u32, 2, 4, 16]),
        2u32..4,
        requests,
    );
    check_property(150, strategy, |(block_size, pool_of, requests)| {
        // Room for two or three of the longest.
        let config = SchedulerConfig {
            block_size,
            num_blocks: pool_of * 160u32.div_ceil(block_size),
            max_batch_tokens: 64,
            max_sequences: 40,
            ..SchedulerConfig::default()
        };
        let mut harness = Harness::new(config);
        for (id, (num_prompt, max_tokens)) in requests.into_iter().enumerate() {
            harness.submit(
                Ask::plain(id as u8, num_prompt, max_tokens).request(id as u64, harness.now),
            );
            harness.step();
        }
        harness.drain();
        let ends = harness
            .ledger
            .records()
            .filter_map(|(_, record)| record.end.as_ref());
        let most = ends.map(|end| end.summary.num_preemptions).max();
        assert!(most <= Some(3), "preempted {most:?} times");
    });
}

#[test]
fn s07_endless_short_requests_do_not_starve_a_long_one() {
    let mut harness = Harness::new(crowded());
    let mut next_id = 0;
    let mut long = None;
    for step in 0..400 {
        for _ in 0..2 {
            harness.submit(Ask::plain(next_id as u8, 12, 8).request(next_id, harness.now));
            next_id += 1;
        }
        if step == 20 {
            long = Some(harness.submit(Ask::plain(77, 700, 40).request(next_id, harness.now)));
            next_id += 1;
        }
        harness.step();
    }
    harness.drain();
    let long = long.expect("it was submitted at step 20");
    let overtakes = overtakes(&harness);
    let worst = overtakes.iter().map(|(_, times)| *times).max().unwrap_or(0);
    assert!(worst <= MAX_OVERTAKES, "{overtakes:?}");
    let waited = harness.ledger.choices(long).find_map(|(_, record)| {
        let end = record.end.as_ref()?;
        Some(end.summary.queue().as_secs_f64())
    });
    // 40 requests were before it; at one admission per step and two milliseconds a step it starts long before this.
    assert!(
        waited.is_some_and(|seconds| seconds < 0.4),
        "waited {waited:?} s"
    );
}

#[test]
fn s07_a_long_request_does_not_hold_up_the_short_ones() {
    let with_long = |long: bool| {
        let mut harness = Harness::new(crowded());
        let mut next_id = 0;
        for step in 0..300 {
            if long && step % 60 == 10 {
                harness.submit(Ask::plain(77, 700, 40).request(next_id, harness.now));
                next_id += 1;
            }
            if step % 4 == 0 {
                harness.submit(Ask::plain(next_id as u8, 12, 20).request(next_id, harness.now));
                next_id += 1;
            }
            harness.step();
        }
        harness.drain();
        let ends = harness
            .ledger
            .records()
            .filter_map(|(_, record)| short_end(record));
        let mut latencies: Vec<u64> = ends
            .map(|end| (end.summary.finished - end.summary.arrival).0)
            .collect();
        latencies.sort_unstable();
        latencies[latencies.len() * 99 / 100]
    };
    let (alone, together) = (with_long(false), with_long(true));
    assert!(
        together <= 3 * alone,
        "p99 {alone} ns alone, {together} ns beside long ones"
    );
}

fn short_end(record: &Record) -> Option<&End> {
    record
        .end
        .as_ref()
        .filter(|_| record.request.prompt.len() < 100)
}

fn crowded() -> SchedulerConfig {
    SchedulerConfig {
        block_size: 16,
        num_blocks: 128,
        max_batch_tokens: 64,
        max_sequences: 16,
        ..SchedulerConfig::default()
    }
}

/// For each request, how many that came later were scheduled before it.
fn overtakes(harness: &Harness) -> Vec<(u64, usize)> {
    let times: Vec<_> = harness
        .ledger
        .records()
        .filter_map(|(id, record)| Some((id.request.0, record.end.as_ref()?.summary)))
        .collect();
    let overtaken = |id: u64, first| {
        let passed = times
            .iter()
            .filter(|(other, summary)| *other > id && summary.first_scheduled < first);
        passed.count()
    };
    times
        .iter()
        .map(|(id, summary)| (*id, overtaken(*id, summary.first_scheduled)))
        .collect()
}

#[test]
fn i7_nobody_is_overtaken_whatever_the_sizes() {
    let requests = prop::collection::vec((1u32..200, 1u32..30), 10..60);
    check_property(60, requests, |requests| {
        let mut harness = Harness::new(crowded());
        for (id, (num_prompt, max_tokens)) in requests.into_iter().enumerate() {
            let tail = (id as u32 % VOCABULARY) as u8;
            harness
                .submit(Ask::plain(tail, num_prompt, max_tokens).request(id as u64, harness.now));
            harness.step();
        }
        harness.drain();
        let worst = overtakes(&harness)
            .into_iter()
            .map(|(_, times)| times)
            .max();
        assert!(worst <= Some(MAX_OVERTAKES), "overtaken {worst:?} times");
    });
}

#[test]
fn the_queue_goes_by_priority_then_by_arrival() {
    let requests = prop::collection::vec((-2i32..=2, 1u32..40, 1u32..8), 2..20);
    check_property(60, requests, |requests| {
        let mut harness = Harness::new(SchedulerConfig {
            max_sequences: 1,
            ..crowded()
        });
        for (id, (priority, num_prompt, max_tokens)) in requests.into_iter().enumerate() {
            let mut ask = Ask::plain(id as u8, num_prompt, max_tokens);
            ask.priority = priority;
            harness.submit(ask.request(id as u64, harness.now));
        }
        harness.drain();
        let records = harness.ledger.records();
        let mut turns: Vec<_> = records
            .map(|(id, record)| {
                let end = record.end.as_ref().expect("the harness was drained");
                (
                    Reverse(record.request.priority),
                    id,
                    end.summary.first_scheduled,
                )
            })
            .collect();
        turns.sort_unstable();
        let times = turns.iter().map(|(_, _, first_scheduled)| first_scheduled);
        assert!(times.is_sorted(), "{turns:?}");
    });
}
