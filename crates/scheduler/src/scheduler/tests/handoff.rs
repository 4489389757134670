//! Hand-off, one worker at a time: every transition of an offer and of a reception, by hand.
//!
//! Blocks have four tokens. The runner chooses positions, so tokens are right whatever the blocks hold: what
//! they hold is the property tests' business.

use super::*;
use crate::config::Role;
use crate::sequence::Progress;
use crate::time::Span;
use crate::transfer::{Arrival, Source, Ticket, TransferId, TransferOutcome};

const LEASE: Span = Span(50 * STEP);

fn worker(role: Role) -> Bench {
    Bench::new(SchedulerConfig {
        role,
        transfer_lease: LEASE,
        ..config(16)
    })
}

fn ticket(transfer: u64) -> Ticket {
    Ticket {
        transfer: TransferId(transfer),
        generation: 1,
    }
}

/// Request `id` after its prompt and one output token were computed elsewhere.
fn begun(id: u64, prompt: impl IntoIterator<Item = u32>, max_tokens: u32) -> Arrival {
    let request = request(id, prompt, max_tokens);
    let num_prompt = request.prompt.len() as u32;
    Arrival {
        output: vec![TokenId(1000 + num_prompt)],
        choice: 0,
        source: Some(Source {
            ticket: ticket(id),
            num_tokens: num_prompt,
        }),
        num_reported: 0,
        progress: Progress {
            arrival: request.arrival,
            first_scheduled: Some(Timestamp(id + 1)),
            first_token: Some(Timestamp(id + 2)),
            num_cached_tokens: 3,
            num_preemptions: 0,
        },
        request: Arc::new(request),
    }
}

impl Bench {
    fn receive(&mut self, begun: Arrival) {
        self.scheduler.receive(begun, self.now).expect("receivable");
        self.check();
    }

    fn finish_transfer(&mut self, ticket: Ticket, outcome: TransferOutcome) -> bool {
        let is_known = self.scheduler.transfer_finished(ticket, outcome);
        self.check();
        is_known
    }

    fn release(&mut self, sequence: SequenceId) -> bool {
        let is_known = self.scheduler.release_offer(sequence);
        self.check();
        is_known
    }

    /// The sequence, valid tokens and choice of everything prefilled.
    fn prefilled(&self) -> Vec<(SequenceId, u32, u32)> {
        let prefilled = |event: &Event| match event {
            Event::Prefilled {
                sequence,
                num_tokens,
                choice,
                ..
            } => Some((*sequence, *num_tokens, *choice)),
            _ => None,
        };
        self.events.iter().filter_map(prefilled).collect()
    }

    /// Ticket, first index and number of blocks of everything reserved.
    fn reserved(&self) -> Vec<(Ticket, u32, usize)> {
        let reserved = |event: &Event| match event {
            Event::Reserved {
                ticket,
                first_block,
                blocks,
                ..
            } => Some((*ticket, *first_block, blocks.len())),
            _ => None,
        };
        self.events.iter().filter_map(reserved).collect()
    }

    fn in_transfer(&self) -> u32 {
        self.scheduler.stats().blocks.in_transfer
    }

    fn fenced(&self) -> u64 {
        self.scheduler.stats().counters.num_fenced
    }

    /// Nothing lives and every block can be had.
    #[track_caller]
    fn check_empty(&self) {
        let stats = self.scheduler.stats();
        assert!(!self.scheduler.has_work(), "{stats:?}");
        assert_eq!(stats.blocks.available(), 16, "{stats:?}");
        assert_eq!(self.scheduler.next_deadline(), None);
    }
}

#[test]
fn a_prefill_worker_offers_what_goes_on_after_its_first_token() {
    let mut bench = worker(Role::Prefill);
    bench.add(request(1, 0..10, 8));
    bench.step();
    let (accepted, prefilled) = (&bench.events[0], &bench.events[1]);
    assert!(matches!(accepted, Event::Accepted { num_tokens: 1, .. }));
    let Event::Prefilled {
        sequence,
        num_tokens,
        progress,
        ..
    } = prefilled
    else {
        panic!("{prefilled:?}");
    };
    let sequence = *sequence;
    assert_eq!((*num_tokens, progress.arrival), (10, Timestamp(1)));
    assert_eq!(progress.first_token, Some(bench.now));
    let offered = bench.scheduler.offered_blocks(sequence).expect("offered");
    assert_eq!((offered.blocks.len(), offered.num_tokens), (3, 10));
    let stats = bench.scheduler.stats();
    assert_eq!((stats.num_running, stats.num_offered), (0, 1));
    assert_eq!(bench.blocks(), [13, 1, 0, 2], "full blocks are published");

    bench.add(request(2, 100..104, 8));
    bench.schedule();
    assert_eq!(bench.rows(), [(0, 4)], "the offered one has no row");
    assert_eq!(bench.plan.ended, [sequence]);
    bench.commit(&run(&bench.plan));
    assert!(bench.release(sequence));
    assert_eq!(bench.scheduler.offered_blocks(sequence), None);
    assert!(bench.release(bench.prefilled()[1].0));
    bench.check_empty();
    assert_eq!(bench.blocks(), [13, 0, 3, 0], "what was published stays");
    assert_eq!(bench.fenced(), 0);
    assert!(!bench.release(sequence), "an offer ends once");
    assert_eq!(bench.fenced(), 1);
    bench.add(request(3, 200..204, 8));
    bench.step();
    let told = &bench.plan.ended;
    assert!(!told.contains(&sequence), "an end is told once: {told:?}");
}

#[test]
fn what_ends_with_its_first_token_is_not_offered() {
    let mut bench = worker(Role::Prefill);
    bench.add(request(1, 0..10, 1));
    bench.step();
    assert_eq!(bench.reason(1), FinishReason::Length);
    assert_eq!(bench.prefilled(), []);
    bench.check_empty();
}

#[test]
fn an_offer_ends_with_its_lease() {
    let mut bench = worker(Role::Prefill);
    bench.add(request(1, 0..10, 8));
    bench.step();
    let (sequence, ..) = bench.prefilled()[0];
    assert_eq!(bench.scheduler.next_deadline(), Some(bench.now + LEASE));
    bench.now = bench.now + LEASE;
    bench.schedule();
    let gone = Event::OfferExpired {
        request: RequestId(1),
        choice: 0,
        sequence,
    };
    assert_eq!(bench.events.last(), Some(&gone));
    bench.check_empty();
    assert!(!bench.release(sequence));
    assert_eq!(bench.scheduler.stats().counters.num_expired_leases, 1);
}

#[test]
fn choices_share_the_prompt_of_an_offered_sibling() {
    let mut bench = worker(Role::Prefill);
    let mut three = request(1, 0..10, 8);
    three.num_choices = 3;
    bench.add(three);
    bench.step();
    assert_eq!(bench.rows(), [(0, 10)]);
    bench.step();
    assert_eq!(bench.rows(), [(9, 1), (9, 1)], "the last token of each");
    let offers = bench.prefilled();
    assert_eq!(offers.len(), 3);
    for (sequence, num_tokens, _) in offers {
        assert_eq!(num_tokens, 10);
        assert!(bench.release(sequence));
    }
    bench.check_empty();
}

#[test]
fn a_decode_worker_reserves_then_decodes_what_came() {
    let mut bench = worker(Role::Decode);
    bench.receive(begun(1, 0..10, 8));
    assert!(!bench.scheduler.is_receiving(ticket(1)), "it only waits");
    assert!(
        !bench.finish_transfer(ticket(1), TransferOutcome::Complete),
        "it has no blocks yet"
    );
    bench.step();
    assert!(bench.plan.is_empty());
    assert_eq!(bench.reserved(), [(ticket(1), 0, 3)]);
    assert!(bench.scheduler.is_receiving(ticket(1)));
    assert_eq!((bench.in_transfer(), bench.blocks()), (3, [13, 0, 0, 0]));
    bench.step();
    assert!(bench.plan.is_empty(), "it waits for its blocks");

    assert!(bench.finish_transfer(ticket(1), TransferOutcome::Complete));
    assert_eq!(bench.blocks(), [13, 1, 0, 2], "full blocks are published");
    assert!(!bench.scheduler.is_receiving(ticket(1)));
    bench.step();
    assert_eq!(bench.rows(), [(10, 1)], "it decodes at once");
    assert_eq!(bench.plan.started[0].output, [TokenId(1010)]);
    bench.finish_all();
    let (_, reason, summary) = bench.ends(1)[0].clone();
    assert_eq!(reason, FinishReason::Length);
    assert_eq!(summary.num_output_tokens, 8);
    assert_eq!(summary.num_cached_tokens, 3);
    assert_eq!(summary.arrival, Timestamp(1));
    assert_eq!(summary.first_token, Some(Timestamp(3)));
    bench.check_empty();
}

#[test]
fn the_own_cache_comes_first_and_the_transfer_brings_the_rest() {
    for (num_cached, expected) in [(0, (0, 3)), (3, (0, 3)), (4, (1, 2)), (9, (2, 1))] {
        let mut bench = worker(Role::Decode);
        if num_cached > 0 {
            bench.add(request(1, 0..num_cached, 1));
            bench.finish_all();
        }
        bench.receive(begun(2, 0..10, 8));
        bench.step();
        let (first, num_blocks) = expected;
        assert_eq!(bench.reserved(), [(ticket(2), first, num_blocks)]);
        assert!(bench.finish_transfer(ticket(2), TransferOutcome::Complete));
        bench.step();
        assert_eq!(bench.rows(), [(10, 1)]);
        bench.finish_all();
        bench.check_empty();
    }
}

#[test]
fn what_lacks_nothing_runs_at_once_and_says_so() {
    for num_prompt in [7, 8, 9] {
        let mut bench = worker(Role::Decode);
        bench.add(request(1, 0..12, 1));
        bench.finish_all();
        bench.receive(begun(2, 0..num_prompt, 8));
        bench.step();
        assert_eq!(bench.reserved(), [(ticket(2), 0, 0)]);
        assert_eq!(bench.rows(), [(num_prompt, 1)]);
        assert!(!bench.finish_transfer(ticket(2), TransferOutcome::Complete));
        bench.finish_all();
        bench.check_empty();
    }
}

#[test]
fn what_comes_without_a_source_is_computed_again() {
    let mut bench = worker(Role::Decode);
    let mut orphan = begun(1, 0..10, 8);
    orphan.source = None;
    bench.receive(orphan);
    bench.step();
    assert_eq!(bench.rows(), [(0, 11)]);
    assert_eq!(bench.reserved(), []);
    bench.finish_all();
    assert_eq!(bench.ends(1)[0].2.num_output_tokens, 8);
}

#[test]
fn a_failed_transfer_is_computed_here_before_or_after_the_reservation() {
    for steps_before in [0, 1] {
        let mut bench = worker(Role::Decode);
        bench.add(request(9, 0..4, 1));
        bench.finish_all();
        bench.receive(begun(1, 0..10, 8));
        for _ in 0..steps_before {
            bench.step();
        }
        assert!(bench.finish_transfer(ticket(1), TransferOutcome::Failed));
        assert_eq!(bench.in_transfer(), 0);
        bench.step();
        assert_eq!(bench.rows(), [(4, 7)]);
        bench.finish_all();
        assert_eq!(bench.reason(1), FinishReason::Length);
        bench.check_empty();
    }
}

#[test]
fn a_reception_ends_with_its_lease() {
    let mut bench = worker(Role::Decode);
    bench.receive(begun(1, 0..10, 8));
    bench.step();
    assert_eq!(bench.scheduler.next_deadline(), Some(bench.now + LEASE));
    bench.now = bench.now + LEASE;
    bench.step();
    let expired = Event::TransferExpired {
        request: RequestId(1),
        choice: 0,
        ticket: ticket(1),
    };
    assert!(bench.events.contains(&expired));
    assert_eq!(bench.rows(), [(0, 11)]);
    assert!(!bench.finish_transfer(ticket(1), TransferOutcome::Complete));
    bench.finish_all();
    assert_eq!(bench.reason(1), FinishReason::Length);
    bench.check_empty();
}

#[test]
fn another_generation_changes_nothing_and_is_counted() {
    let mut bench = worker(Role::Decode);
    bench.receive(begun(1, 0..10, 8));
    bench.step();
    let second = ticket(1).next();
    assert!(!bench.finish_transfer(second, TransferOutcome::Complete));
    assert!(bench.scheduler.retry_transfer(second));
    assert!(
        !bench.scheduler.retry_transfer(second),
        "no try is repeated"
    );
    assert!(!bench.scheduler.retry_transfer(ticket(7)));
    assert!(!bench.scheduler.is_receiving(ticket(1)));
    assert!(bench.scheduler.is_receiving(second));
    for outcome in [TransferOutcome::Complete, TransferOutcome::Failed] {
        assert!(!bench.finish_transfer(ticket(1), outcome));
        assert!(!bench.finish_transfer(ticket(7), outcome));
    }
    assert_eq!((bench.in_transfer(), bench.fenced()), (3, 7));
    assert!(bench.finish_transfer(second, TransferOutcome::Complete));
    bench.finish_all();
    bench.check_empty();
}

#[test]
fn d06_an_abort_in_any_phase_gives_the_blocks_back() {
    let offering = |num_steps: u32| {
        let mut bench = worker(Role::Prefill);
        let mut two = request(1, 0..40, 8);
        two.num_choices = 2;
        bench.add(two);
        (0..num_steps).for_each(|_| bench.step());
        bench
    };
    // Waiting, prefilling, one choice offered, both offered.
    for num_steps in 0..5 {
        let mut bench = offering(num_steps);
        bench.abort(1);
        assert_eq!(bench.ends(1).len(), 2);
        bench.check_empty();
        bench.step();
    }
    let receiving = |change: &dyn Fn(&mut Bench)| {
        let mut bench = worker(Role::Decode);
        bench.receive(begun(1, 0..10, 8));
        change(&mut bench);
        bench.abort(1);
        assert_eq!(bench.reason(1), FinishReason::Cancelled);
        bench.check_empty();
        assert!(!bench.scheduler.is_receiving(ticket(1)));
        assert!(!bench.finish_transfer(ticket(1), TransferOutcome::Complete));
    };
    receiving(&|_| {});
    receiving(&Bench::step);
    receiving(&|bench| {
        bench.step();
        bench.finish_transfer(ticket(1), TransferOutcome::Complete);
    });
    receiving(&|bench| {
        bench.step();
        bench.finish_transfer(ticket(1), TransferOutcome::Failed);
        bench.step();
    });
}

#[test]
fn an_abort_while_the_last_prompt_chunk_runs_leaves_no_offer() {
    let mut bench = worker(Role::Prefill);
    bench.add(request(1, 0..10, 8));
    bench.schedule();
    bench.abort(1);
    bench.commit(&run(&bench.plan));
    assert_eq!(bench.prefilled(), []);
    bench.check_empty();
}

#[test]
fn deadlines_end_offers_and_receptions() {
    let deadlines = |at| Deadlines {
        total: Some(Timestamp(at)),
        ..Deadlines::default()
    };
    let mut bench = worker(Role::Prefill);
    let mut late = request(1, 0..10, 8);
    late.deadlines = deadlines(20 * STEP);
    bench.add(late);
    bench.step();
    bench.now = Timestamp(20 * STEP);
    bench.step();
    let timeout = FinishReason::Timeout(DeadlineKind::Total);
    assert_eq!(bench.reason(1), timeout);
    bench.check_empty();

    let mut bench = worker(Role::Decode);
    let mut late = begun(1, 0..10, 8);
    let mut ask = request(1, 0..10, 8);
    ask.deadlines = deadlines(20 * STEP);
    // Both were met elsewhere.
    ask.deadlines.queue = Some(Timestamp(2 * STEP));
    ask.deadlines.first_token = Some(Timestamp(2 * STEP));
    late.request = Arc::new(ask);
    bench.receive(late);
    bench.step();
    bench.step();
    assert_eq!(bench.in_transfer(), 3);
    bench.now = Timestamp(20 * STEP);
    bench.step();
    assert_eq!(bench.reason(1), timeout);
    bench.check_empty();
}

#[test]
fn of_several_choices_one_fetches_the_prompt_for_all() {
    let mut bench = worker(Role::Decode);
    let mut ask = request(1, 0..10, 8);
    ask.num_choices = 3;
    let ask = Arc::new(ask);
    for choice in [2, 0, 1] {
        let mut begun = begun(1, 0..10, 8);
        begun.request = Arc::clone(&ask);
        begun.choice = choice;
        begun.source = Some(Source {
            ticket: ticket(u64::from(choice)),
            num_tokens: 10,
        });
        bench.receive(begun);
    }
    bench.step();
    assert_eq!(bench.reserved(), [(ticket(2), 0, 3)]);
    assert!(bench.finish_transfer(ticket(2), TransferOutcome::Complete));
    bench.step();
    assert_eq!(bench.rows(), [(10, 1), (10, 1), (10, 1)]);
    assert_eq!(
        bench.plan.copies.len(),
        2,
        "of the block that is filled in part"
    );
    assert_eq!(
        bench.reserved()[1..],
        [(ticket(0), 0, 0), (ticket(1), 0, 0)]
    );
    bench.finish_all();
    assert_eq!(bench.ends(1).len(), 3);
    bench.check_empty();
}

#[test]
fn choices_whose_prompt_is_cached_do_not_wait_for_each_other() {
    let mut bench = worker(Role::Decode);
    bench.add(request(9, 0..12, 1));
    bench.finish_all();
    for choice in 0..3 {
        let mut begun = begun(1, 0..10, 8);
        begun.choice = choice;
        begun.source = None;
        bench.receive(begun);
    }
    bench.step();
    assert_eq!(bench.rows(), [(10, 1), (10, 1), (10, 1)]);
    bench.finish_all();
    bench.check_empty();
}

/// The target of a copy has its contents only when the step runs: copying from it gave whatever came first.
#[test]
fn a_sibling_that_gets_the_prompt_by_a_copy_is_no_source_in_the_same_plan() {
    let mut bench = Bench::new(SchedulerConfig {
        role: Role::Decode,
        max_sequences: 3,
        prefix_cache: false,
        ..config(16)
    });
    bench.add(request(8, [1], 4));
    bench.add(request(9, [2], 4));
    bench.step();
    // Known here in another order than they are let in.
    for (choice, arrival) in [(0, 500), (1, 100), (2, 600)] {
        let mut late = begun(1, [7], 8);
        late.choice = choice;
        late.source = None;
        late.progress.arrival = Timestamp(arrival);
        bench.receive(late);
    }
    bench.step();
    assert_eq!(bench.plan.started[0].choice, 1, "one place was left");
    let source = bench.plan.row_blocks(&bench.plan.rows[2])[0];
    while bench.plan.copies.is_empty() {
        bench.step();
    }
    let sources: Vec<BlockId> = bench.plan.copies.iter().map(|copy| copy.from).collect();
    assert_eq!(sources, [source, source]);
    bench.finish_all();
}

#[test]
fn a_reception_has_a_place_and_leaves_room_to_grow() {
    let mut bench = Bench::new(SchedulerConfig {
        role: Role::Decode,
        max_sequences: 2,
        ..config(7)
    });
    bench.receive(begun(1, 0..10, 8));
    bench.receive(begun(2, 20..23, 8));
    bench.receive(begun(3, 40..43, 8));
    bench.step();
    let stats = bench.scheduler.stats();
    assert_eq!((stats.num_receiving, stats.num_waiting), (2, 1));
    assert!(bench.finish_transfer(ticket(1), TransferOutcome::Complete));
    bench.step();
    assert_eq!(bench.scheduler.stats().num_receiving, 1, "no place is free");
    assert!(bench.finish_transfer(ticket(2), TransferOutcome::Complete));
    for _ in 0..100 {
        bench.step();
        bench.finish_transfer(ticket(3), TransferOutcome::Complete);
    }
    for id in 1..=3 {
        assert_eq!(bench.reason(id), FinishReason::Length);
    }
}

#[test]
fn tokens_that_a_grammar_forced_elsewhere_are_computed_here() {
    let mut bench = worker(Role::Decode);
    let mut forced = begun(1, 0..10, 8);
    forced.output.extend([TokenId(5), TokenId(6)]);
    bench.receive(forced);
    bench.step();
    assert!(bench.finish_transfer(ticket(1), TransferOutcome::Complete));
    bench.step();
    assert_eq!(bench.rows(), [(10, 3)]);
    bench.finish_all();
    assert_eq!(bench.ends(1)[0].2.num_output_tokens, 8);
}

#[test]
fn prompt_logprobs_that_were_reported_elsewhere_are_not_reported_again() {
    let mut bench = worker(Role::Decode);
    let mut begun = begun(1, 0..10, 8);
    let mut ask = request(1, 0..10, 8);
    ask.sampling.prompt_logprobs = Some(0);
    begun.request = Arc::new(ask);
    begun.num_reported = 9;
    begun.source = None;
    bench.receive(begun);
    bench.step();
    assert_eq!(bench.rows(), [(0, 11)]);
    assert!(bench.plan.rows[0].prompt_logprobs.is_empty());
}

#[test]
fn what_can_never_be_received_is_refused_with_its_numbers() {
    let check = |change: &dyn Fn(&mut Arrival), expected: &str| {
        let mut bench = worker(Role::Decode);
        bench.receive(begun(1, 0..10, 8));
        let mut begun = begun(2, 0..10, 8);
        change(&mut begun);
        let refused = bench.scheduler.receive(begun, bench.now);
        bench.check();
        let error = refused.expect_err("it cannot be received");
        assert_eq!(error.to_string(), expected);
        assert!(!error.is_busy());
    };
    check(
        &|b| b.request = Arc::new(request(1, 0..10, 8)),
        "request RequestId(1): choice 0 is here already",
    );
    check(
        &|b| b.output = vec![TokenId(1); 8],
        "request RequestId(2): choice 0 has 18 tokens and is at its end",
    );
    check(
        &|b| b.output = vec![TokenId(1); 300],
        "request RequestId(2): choice 0 has 310 tokens and is at its end",
    );
    let source = |num_tokens, transfer| {
        move |b: &mut Arrival| {
            b.source = Some(Source {
                ticket: ticket(transfer),
                num_tokens,
            });
        }
    };
    check(
        &source(11, 2),
        "request RequestId(2): a source of 11 tokens for a sequence of 11",
    );
    check(
        &source(0, 2),
        "request RequestId(2): a source of 0 tokens for a sequence of 11",
    );
    check(
        &source(10, 1),
        "request RequestId(2): TransferId(1) is another sequence's",
    );
    check(
        &|b| b.request = Arc::new(request(2, 0..10, 100)),
        "request RequestId(2): 110 tokens need 28 blocks, but the pool has 16",
    );
    let mut bench = Bench::new(SchedulerConfig {
        role: Role::Decode,
        max_waiting: 1,
        ..config(16)
    });
    bench.receive(begun(1, 0..10, 8));
    let refused = bench.scheduler.receive(begun(2, 0..10, 8), bench.now);
    assert!(refused.is_err_and(|error| error.is_busy()));
}

#[test]
fn a_prefill_worker_needs_room_for_the_prompt_alone() {
    let mut bench = worker(Role::Prefill);
    bench.add(request(1, 0..64, 100));
    bench.finish_prefill();
    let refused = bench
        .scheduler
        .add(Arc::new(request(2, 0..65, 1)), bench.now);
    assert!(matches!(
        refused,
        Err(AddError::NeverFits {
            needed_blocks: 17,
            ..
        })
    ));
}

impl Bench {
    fn finish_prefill(&mut self) {
        for _ in 0..10 {
            self.step();
        }
        assert_eq!(self.prefilled().len(), 1);
    }
}

#[test]
fn time_that_cannot_be_is_put_right() {
    let mut bench = worker(Role::Decode);
    let mut odd = begun(1, 0..10, 2);
    odd.progress = Progress {
        arrival: Timestamp(u64::MAX),
        ..Progress::default()
    };
    odd.source = None;
    let mut ask = request(1, 0..10, 2);
    ask.deadlines.first_token = Some(Timestamp(100 * STEP));
    odd.request = Arc::new(ask);
    bench.receive(odd);
    assert_eq!(bench.scheduler.next_deadline(), None);
    let received = bench.now;
    bench.finish_all();
    let summary = bench.ends(1)[0].2;
    assert_eq!(summary.arrival, received);
    assert_eq!(summary.first_token, Some(received));
}
