//! S03 and S04: whatever fails, whenever it fails, nobody else notices and nothing bad stays in the cache.

use millpond_scheduler::mock::StepFailure;
use millpond_scheduler::{FinishReason, RowError, SchedulerConfig};

use crate::harness::Harness;
use crate::ledger::ChoiceId;
use crate::workload::Ask;

/// A way to fail, tried at every step of a run.
#[derive(Clone, Copy, Debug)]
enum Failure {
    FirstRow,
    LastRow,
    EveryRow,
    StepError,
    StepPanic,
    AbortInFlight,
    AbortBetweenSteps,
}

const FAILURES: [Failure; 7] = [
    Failure::FirstRow,
    Failure::LastRow,
    Failure::EveryRow,
    Failure::StepError,
    Failure::StepPanic,
    Failure::AbortInFlight,
    Failure::AbortBetweenSteps,
];

fn config() -> SchedulerConfig {
    SchedulerConfig {
        block_size: 4,
        num_blocks: 48,
        max_batch_tokens: 12,
        max_sequences: 8,
        max_context: 128,
        ..SchedulerConfig::default()
    }
}

/// Prompts that share blocks with each other and outlast several chunks; one of them is forked.
fn asks() -> Vec<Ask> {
    [(19, 1), (19, 2), (30, 1)]
        .into_iter()
        .enumerate()
        .map(|(tail, (shared, num_choices))| {
            let mut ask = Ask::plain(tail as u8, 6, 9);
            ask.prompt.shared = shared;
            ask.num_choices = num_choices;
            ask
        })
        .collect()
}

fn submit_all(harness: &mut Harness, first_id: u64) {
    for (index, ask) in asks().into_iter().enumerate() {
        harness.submit(ask.request(first_id + index as u64, harness.now));
    }
}

/// Makes the planned step fail, or aborts in it.
fn strike(harness: &mut Harness, failure: Failure) {
    let last = harness.plan.rows.len() - 1;
    let nan = RowError::NonFiniteLogits;
    match failure {
        Failure::FirstRow => harness.fail_row(0, nan),
        Failure::LastRow => harness.fail_row(last, nan),
        Failure::EveryRow => (0..=last).for_each(|row| harness.fail_row(row, nan.clone())),
        Failure::StepError => harness.fail_step(StepFailure::Error("device lost".into())),
        Failure::StepPanic => harness.fail_step(StepFailure::Panic("injected".into())),
        Failure::AbortInFlight => {
            let request = harness.row_choice(last).request;
            harness.abort(request);
        }
        Failure::AbortBetweenSteps => {
            let request = harness.row_choice(0).request;
            harness.finish_step();
            harness.abort(request);
            harness.schedule();
        }
    }
}

/// Runs with one failure at step `at`; false when the run was over before.
fn run_with_failure(failure: Failure, at: usize) -> bool {
    let mut harness = Harness::new(config());
    submit_all(&mut harness, 0);
    for _ in 0..at {
        if !harness.step() {
            return false;
        }
    }
    if !harness.schedule() {
        return false;
    }
    strike(&mut harness, failure);
    if !harness.plan.is_empty() {
        harness.finish_step();
    }
    // The same prompts again: each block is either computed anew or was computed without error.
    submit_all(&mut harness, 100);
    harness.drain();
    submit_all(&mut harness, 200);
    harness.drain();
    true
}

#[test]
fn s03_a_fault_at_any_step_poisons_nothing() {
    for failure in FAILURES {
        let mut at = 0;
        while run_with_failure(failure, at) {
            at += 1;
        }
        assert!(at > 12, "{failure:?} met only {at} steps");
    }
}

#[test]
fn s04_a_nan_in_one_of_sixteen_rows_ends_that_row_alone() {
    const NUM_ROWS: u64 = 16;
    let config = SchedulerConfig {
        block_size: 4,
        num_blocks: 256,
        max_batch_tokens: 64,
        max_sequences: NUM_ROWS as u32,
        // So that cached tokens are whole blocks of the same prompt, not a chance agreement with another one.
        partial_copies: false,
        ..SchedulerConfig::default()
    };
    for (at, bad_row) in (0..12).flat_map(|at| [(at, 0), (at, 7), (at, 15)]) {
        let mut harness = Harness::new(config.clone());
        for id in 0..NUM_ROWS {
            harness.submit(Ask::plain(id as u8, 9, 12).request(id, harness.now));
        }
        for _ in 0..at {
            harness.step();
        }
        assert!(harness.schedule());
        let row = bad_row.min(harness.plan.rows.len() - 1);
        let victim = harness.row_choice(row);
        let num_computed = harness.plan.rows[row].first_position;
        harness.fail_row(row, RowError::NonFiniteLogits);
        harness.finish_step();
        harness.drain();
        for (id, record) in harness.ledger.records() {
            let reason = record.end.as_ref().map(|end| &end.reason);
            let failed = FinishReason::Error(RowError::NonFiniteLogits);
            let expected = if id == victim {
                failed
            } else {
                FinishReason::Length
            };
            assert_eq!(reason, Some(&expected), "{id:?}, NaN at step {at}");
        }
        check_absent(&mut harness, victim, num_computed);
    }
}

/// Asks for all that the victim had and finds no more of it cached than was computed before the NaN.
fn check_absent(harness: &mut Harness, victim: ChoiceId, num_computed: u32) {
    let record = harness.ledger.record(victim);
    let (full, _) = record.expected(0, harness.scheduler.config().max_context);
    let prompt: Vec<_> = record.request.prompt.iter().copied().chain(full).collect();
    let mut request = (*record.request).clone();
    request.id.0 += 1000;
    request.prompt = prompt.into();
    let again = harness.submit(request);
    harness.drain();
    let id = ChoiceId {
        request: again,
        choice: 0,
    };
    let end = harness.ledger.record(id).end.as_ref();
    let num_cached = end.map(|end| end.summary.num_cached_tokens);
    assert!(
        num_cached.is_some_and(|cached| cached <= num_computed),
        "{num_cached:?}"
    );
}
