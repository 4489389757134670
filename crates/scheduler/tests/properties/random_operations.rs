//! S01: any operations in any order, in pools of any size, with every check after every operation.
//!
//! Preemption and eviction are not operations: small pools bring them about.

use std::collections::BTreeMap;

use millpond_scheduler::mock::{Bursts, StepFailure};
use millpond_scheduler::{
    DeadlineKind, FinishReason, RequestId, RowError, SchedulerConfig, StopCause,
};
use proptest::prelude::*;

use crate::harness::{Harness, StopString};
use crate::ledger::{ChoiceId, Record};
use crate::property::{check_property, sample_cases};
use crate::workload::{Ask, asks};

/// What a world does next. Numbers pick among what there is.
#[derive(Clone, Debug)]
pub enum Operation {
    Add(Ask),
    /// A conversation goes on: the prompt is a finished one with its output and some more.
    Continue {
        which: usize,
        with: Ask,
    },
    Fork(usize),
    Abort(usize),
    Step(Interlude),
}

/// What happens between `schedule` and `commit`.
#[derive(Clone, Debug)]
pub enum Interlude {
    Nothing,
    Abort(usize),
    Add(Ask),
    FailRow { row: usize, error: RowError },
    FailStep(StepFailure),
    StopString(StopString),
}

/// A pool and what happens in it.
#[derive(Clone, Debug)]
pub struct World {
    pub config: SchedulerConfig,
    pub bursts: Bursts,
    pub operations: Vec<Operation>,
}

pub fn configs() -> impl Strategy<Value = SchedulerConfig> {
    let block_size = prop_oneof![
        Just(1u32),
        Just(2u32),
        Just(3u32),
        Just(4u32),
        Just(8u32),
        Just(16u32),
        Just(32u32)
    ];
    let num_blocks = prop_oneof![3 => 8u32..32, 2 => 32u32..128, 1 => 128u32..=512];
    let batch = (1u32..12, 0u32..64);
    let switches = (prop::bool::weighted(0.9), prop::bool::weighted(0.8));
    (
        block_size,
        num_blocks,
        batch,
        1u32..24,
        24u32..160,
        switches,
    )
        .prop_map(
            |(block_size, num_blocks, batch, max_waiting, max_context, switches)| SchedulerConfig {
                block_size,
                num_blocks,
                max_batch_tokens: batch.0 + batch.1,
                max_sequences: batch.0,
                max_waiting,
                max_context,
                prefix_cache: switches.0,
                partial_copies: switches.1,
                ..SchedulerConfig::default()
            },
        )
}

fn bursts() -> impl Strategy<Value = Bursts> {
    let any = (0u32..4, 0u32..4).prop_map(|(max_drafts, max_forced)| Bursts {
        max_drafts,
        max_forced,
    });
    prop_oneof![2 => Just(Bursts::default()), 1 => any]
}

fn interludes() -> impl Strategy<Value = Interlude> {
    let error = prop_oneof![
        Just(RowError::NonFiniteLogits),
        Just(RowError::NothingToSample)
    ];
    let failure = prop_oneof![
        Just(StepFailure::Error("device lost".into())),
        Just(StepFailure::Panic("injected".into()))
    ];
    prop_oneof![
        24 => Just(Interlude::Nothing),
        2 => any::<usize>().prop_map(Interlude::Abort),
        1 => asks().prop_map(Interlude::Add),
        1 => (any::<usize>(), error).prop_map(|(row, error)| Interlude::FailRow { row, error }),
        1 => failure.prop_map(Interlude::FailStep),
        1 => (any::<usize>(), 1u32..4)
            .prop_map(|(row, num_tokens)| StopString { row, num_tokens })
            .prop_map(Interlude::StopString),
    ]
}

fn operations() -> impl Strategy<Value = Operation> {
    prop_oneof![
        5 => asks().prop_map(Operation::Add),
        1 => (any::<usize>(), asks())
            .prop_map(|(which, with)| Operation::Continue { which, with }),
        1 => any::<usize>().prop_map(Operation::Fork),
        1 => any::<usize>().prop_map(Operation::Abort),
        16 => interludes().prop_map(Operation::Step),
    ]
}

pub fn worlds(max_operations: usize) -> impl Strategy<Value = World> {
    let operations = prop::collection::vec(operations(), 1..max_operations);
    (configs(), bursts(), operations).prop_map(|(config, bursts, operations)| World {
        config,
        bursts,
        operations,
    })
}

/// Lives through the world, runs what is left to its end, and returns the harness.
pub fn live(world: &World) -> Harness {
    let mut harness = Harness::with_bursts(world.config.clone(), world.bursts);
    let mut next_id = 0;
    for operation in &world.operations {
        perform(&mut harness, operation, &mut next_id);
    }
    harness.drain();
    harness
}

fn perform(harness: &mut Harness, operation: &Operation, next_id: &mut u64) {
    match operation {
        Operation::Add(ask) => add(harness, ask, next_id),
        Operation::Continue { which, with } => go_on(harness, *which, with, next_id),
        Operation::Fork(which) => {
            if let Some(request) = pick(harness, *which) {
                harness.fork(request);
            }
        }
        Operation::Abort(which) => {
            if let Some(request) = pick(harness, *which) {
                harness.abort(request);
            }
        }
        Operation::Step(interlude) => {
            if harness.schedule() {
                play(harness, interlude, next_id);
            }
        }
    }
}

fn add(harness: &mut Harness, ask: &Ask, next_id: &mut u64) {
    let request = ask.request(*next_id, harness.now);
    *next_id += 1;
    // A refusal is as good as an admission: the harness checks that it is right.
    let _ = harness.add(request);
}

fn go_on(harness: &mut Harness, which: usize, with: &Ask, next_id: &mut u64) {
    let finished: Vec<_> = harness
        .ledger
        .records()
        .filter(|(_, record)| record.end.is_some())
        .map(|(_, record)| record)
        .collect();
    let Some(before) = finished.get(which % finished.len().max(1)) else {
        return;
    };
    let so_far = before.request.prompt.iter().chain(&before.tokens);
    let prompt = so_far.copied().chain(with.prompt.tokens()).collect();
    let mut request = with.request_with_prompt(prompt, *next_id, harness.now);
    request.salt = before.request.salt.clone();
    *next_id += 1;
    let _ = harness.add(request);
}

/// Some request that was ever taken in, ended or not.
fn pick(harness: &Harness, which: usize) -> Option<RequestId> {
    let ids: Vec<RequestId> = harness.ledger.records().map(|(id, _)| id.request).collect();
    ids.get(which % ids.len().max(1)).copied()
}

fn play(harness: &mut Harness, interlude: &Interlude, next_id: &mut u64) {
    let num_rows = harness.plan.rows.len();
    let mut stop_string = None;
    match interlude {
        Interlude::Nothing => {}
        Interlude::Abort(which) => {
            if let Some(request) = pick(harness, *which) {
                harness.abort(request);
            }
        }
        Interlude::Add(ask) => add(harness, ask, next_id),
        Interlude::FailRow { row, error } => harness.fail_row(row % num_rows, error.clone()),
        Interlude::FailStep(failure) => harness.fail_step(failure.clone()),
        Interlude::StopString(found) => {
            let row = found.row % num_rows;
            stop_string = Some(StopString { row, ..*found });
        }
    }
    harness.finish_step_with(stop_string);
}

#[test]
fn s01_random_operations_keep_every_invariant_and_every_output() {
    check_property(3000, worlds(120), |world| {
        live(&world);
    });
}

#[test]
fn a1_the_same_operations_give_the_same_ends_at_the_same_times() {
    check_property(150, worlds(60), |world| {
        let ends = |harness: &Harness| {
            let records = harness.ledger.records();
            let ends = records.map(|(id, record)| (id, record.tokens.clone(), record.end.clone()));
            format!(
                "{:?} {:?}",
                ends.collect::<Vec<_>>(),
                harness.scheduler.stats()
            )
        };
        assert_eq!(ends(&live(&world)), ends(&live(&world)));
    });
}

/// What a property never meets it does not test: every way to end, and every way to come by blocks.
#[test]
fn the_worlds_of_s01_meet_everything_they_are_about() {
    let mut met: BTreeMap<&str, u64> = BTreeMap::new();
    let mut meet = |what, times: u64| *met.entry(what).or_default() += times;
    for world in sample_cases(400, worlds(120)) {
        let harness = live(&world);
        for (id, record) in harness.ledger.records() {
            meet(way_to_end(record), 1);
            meet(way_to_begin(id, record), 1);
        }
        let counters = harness.scheduler.stats().counters;
        meet("preemption", counters.num_preemptions);
        meet("eviction", counters.num_evicted_blocks);
        meet("cached token", counters.prefix_hit_tokens);
    }
    println!("{met:?}");
    assert_eq!(met.len(), 16, "{met:?}");
    assert!(met.values().all(|times| *times >= 10), "{met:?}");
}

fn way_to_begin(id: ChoiceId, record: &Record) -> &'static str {
    match id.choice {
        0 => "first choice",
        choice if choice < record.request.num_choices => "later choice",
        _ => "fork",
    }
}

fn way_to_end(record: &Record) -> &'static str {
    match record.end.as_ref().map(|end| &end.reason) {
        None => "no end",
        Some(FinishReason::Stop(StopCause::EndOfSequence(_))) => "end of sequence",
        Some(FinishReason::Stop(StopCause::Token(_))) => "stop token",
        Some(FinishReason::Stop(StopCause::StopString)) => "stop string",
        Some(FinishReason::Length) => "length",
        Some(FinishReason::Cancelled) => "cancelled",
        Some(FinishReason::Timeout(DeadlineKind::Queue)) => "queue timeout",
        Some(FinishReason::Timeout(DeadlineKind::FirstToken)) => "first token timeout",
        Some(FinishReason::Timeout(DeadlineKind::Total)) => "total timeout",
        Some(FinishReason::Error(RowError::StepFailed(_))) => "failed step",
        Some(FinishReason::Error(_)) => "failed row",
    }
}
