//! S08 and S10: one request, one output, whatever the cache holds, whoever shares the batch, whenever it comes.
//!
//! The ledger compares every output with the oracle's. What these tests add is the proof that the conditions
//! they are about did occur: hits, evictions, preemptions, full batches.

use std::collections::BTreeMap;

use millpond_scheduler::scheduler::AddError;
use millpond_scheduler::{RequestId, SchedulerConfig, TokenId};
use proptest::prelude::*;

use crate::harness::Harness;
use crate::ledger::ChoiceId;
use crate::property::check_property;
use crate::workload::{Ask, Prompt, prompts};

/// The request all conditions are tried on: 50 tokens of prompt, three whole blocks and a bit.
fn subject() -> Ask {
    let mut ask = Ask::plain(1, 10, 20);
    ask.prompt.shared = 40;
    ask
}

fn config() -> SchedulerConfig {
    SchedulerConfig {
        num_blocks: 64,
        max_batch_tokens: 64,
        max_sequences: 32,
        max_context: 256,
        ..SchedulerConfig::default()
    }
}

/// Runs `ask` to its end; returns its tokens and how many of its prompt were cached.
fn run(harness: &mut Harness, ask: &Ask, id: u64) -> (Vec<TokenId>, u32) {
    let request = harness.submit(ask.request(id, harness.now));
    harness.drain();
    result(harness, request)
}

fn result(harness: &Harness, request: RequestId) -> (Vec<TokenId>, u32) {
    let record = harness.ledger.record(ChoiceId { request, choice: 0 });
    let end = record.end.as_ref().expect("the harness was drained");
    (record.tokens.clone(), end.summary.num_cached_tokens)
}

#[test]
fn s08_cold_warm_and_partly_warm_give_the_same_tokens() {
    let (cold, num_cached) = run(&mut Harness::new(config()), &subject(), 0);
    assert_eq!(num_cached, 0);

    let mut harness = Harness::new(config());
    run(&mut harness, &subject(), 0);
    let (warm, num_cached) = run(&mut harness, &subject(), 1);
    assert_eq!((warm, num_cached), (cold.clone(), 49));

    let mut harness = Harness::new(config());
    let mut sibling = subject();
    sibling.prompt.tail = 2;
    run(&mut harness, &sibling, 0);
    let (partial, num_cached) = run(&mut harness, &subject(), 1);
    assert_eq!(partial, cold);
    // 40 tokens are shared, of which 8 lie in a partly matching block; the tails may agree by chance on one more.
    assert!((40..=42).contains(&num_cached), "{num_cached}");

    for switch in [false, true] {
        let config = SchedulerConfig {
            prefix_cache: switch,
            partial_copies: false,
            ..config()
        };
        let mut harness = Harness::new(config);
        run(&mut harness, &sibling, 0);
        let expected = (cold.clone(), if switch { 32 } else { 0 });
        assert_eq!(run(&mut harness, &subject(), 1), expected);
    }
}

#[test]
fn s08_after_eviction_the_tokens_are_the_same() {
    let mut harness = Harness::new(config());
    let (cold, _) = run(&mut harness, &subject(), 0);
    for id in 1..12 {
        run(&mut harness, &Ask::plain(100 + id as u8, 100, 10), id);
    }
    assert!(harness.scheduler.stats().counters.num_evicted_blocks > 0);
    let (again, num_cached) = run(&mut harness, &subject(), 99);
    assert_eq!(again, cold);
    assert!(
        num_cached < 16,
        "{num_cached} cached: nothing of it was evicted"
    );
}

#[test]
fn s08_after_preemption_the_tokens_are_the_same() {
    let mut subject = subject();
    subject.stop.max_tokens = 60;
    let (cold, _) = run(&mut Harness::new(config()), &subject, 0);
    for prefix_cache in [false, true] {
        let config = SchedulerConfig {
            num_blocks: 12,
            prefix_cache,
            ..config()
        };
        let mut harness = Harness::new(config);
        // More important, small at first and growing: in the end they need all twelve blocks.
        let subject = harness.submit(subject.request(0, harness.now));
        harness.step();
        harness.step();
        for id in 1..3 {
            let mut rival = Ask::plain(50 + id as u8, 2, 90);
            rival.priority = 1;
            harness.submit(rival.request(id, harness.now));
        }
        harness.drain();
        let (tokens, _) = result(&harness, subject);
        assert_eq!(tokens, cold);
        let record = harness.ledger.record(ChoiceId {
            request: subject,
            choice: 0,
        });
        let preempted = record.end.as_ref().map(|end| end.summary.num_preemptions);
        assert!(preempted > Some(0), "{:?}", harness.scheduler.stats());
    }
}

#[test]
fn s08_batches_of_1_8_and_32_give_the_same_tokens() {
    let tokens = |max_sequences: u32| -> Vec<Vec<TokenId>> {
        let config = SchedulerConfig {
            num_blocks: 512,
            max_sequences,
            ..config()
        };
        let mut harness = Harness::new(config);
        for id in 0..32 {
            let mut ask = subject();
            ask.prompt.tail = id as u8;
            ask.seed = id;
            harness.submit(ask.request(id, harness.now));
        }
        let mut most_rows = 0;
        while harness.schedule() {
            most_rows = most_rows.max(harness.plan.rows.len());
            harness.finish_step();
        }
        assert_eq!(most_rows, max_sequences as usize);
        (0..32)
            .map(|id| result(&harness, RequestId(id)).0)
            .collect()
    };
    let alone = tokens(1);
    assert_eq!(tokens(8), alone);
    assert_eq!(tokens(32), alone);
}

/// Requests that matter, the order they come in, and the load that comes between them.
#[derive(Clone, Debug)]
struct Rearranged {
    subjects: Vec<Prompt>,
    order: Vec<usize>,
    load: Vec<(Prompt, u32)>,
    num_blocks: u32,
}

fn rearranged() -> impl Strategy<Value = Rearranged> {
    let load = prop::collection::vec((prompts(), 1u32..30), 0..20);
    (prop::collection::vec(prompts(), 1..12), load, 10u32..80)
        .prop_flat_map(|(subjects, load, num_blocks)| {
            let order: Vec<usize> = (0..subjects.len()).collect();
            let order = Just(order).prop_shuffle();
            (Just(subjects), order, Just(load), Just(num_blocks))
        })
        .prop_map(|(subjects, order, load, num_blocks)| Rearranged {
            subjects,
            order,
            load,
            num_blocks,
        })
}

/// The outputs of the subjects by index, arriving in `order` with `load` between them.
fn outputs(
    case: &Rearranged,
    order: impl Iterator<Item = usize>,
    load: &[(Prompt, u32)],
) -> BTreeMap<usize, Vec<TokenId>> {
    let mut harness = Harness::new(SchedulerConfig {
        num_blocks: case.num_blocks,
        max_sequences: 6,
        ..config()
    });
    let mut load = load.iter().zip(1000..);
    let mut accepted = Vec::new();
    for subject in order {
        for ((prompt, max_tokens), id) in load.by_ref().take(2) {
            let mut ask = Ask::plain(0, 1, *max_tokens);
            ask.prompt = *prompt;
            expect_size(harness.add(ask.request(id, harness.now)));
        }
        let mut ask = Ask::plain(0, 1, 15);
        ask.prompt = case.subjects[subject];
        ask.seed = subject as u64;
        if expect_size(harness.add(ask.request(subject as u64, harness.now))) {
            accepted.push(subject);
        }
        harness.step();
    }
    harness.drain();
    let output = |subject: usize| result(&harness, RequestId(subject as u64)).0;
    accepted
        .into_iter()
        .map(|subject| (subject, output(subject)))
        .collect()
}

/// Whether it was taken; the only reason not to is its size, which is the same in every order.
fn expect_size(added: Result<(), AddError>) -> bool {
    match added {
        Ok(()) => true,
        Err(AddError::NeverFits { .. }) => false,
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn s10_neither_order_nor_unrelated_load_changes_an_output() {
    check_property(250, rearranged(), |case| {
        let base = outputs(&case, 0..case.subjects.len(), &[]);
        let permuted = outputs(&case, case.order.iter().copied(), &[]);
        let loaded = outputs(&case, case.order.iter().copied(), &case.load);
        assert_eq!(permuted, base);
        assert_eq!(loaded, base);
    });
}
