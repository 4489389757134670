//! The state machine end to end, driven by a runner that knows no model: the next token is the position.

use std::sync::Arc;

use super::*;
use crate::plan::{BlockId, OutputRow, Row, RowVerdict, Span32};
use crate::request::{
    CacheSalt, DeadlineKind, Deadlines, SamplingParams, StopCause, StopConditions,
};

mod handoff;

const STEP: u64 = 1_000;

/// A scheduler, its caller and what the caller has seen. Invariants are checked after every call.
struct Bench {
    scheduler: Scheduler,
    plan: BatchPlan,
    events: Vec<Event>,
    now: Timestamp,
}

fn config(num_blocks: u32) -> SchedulerConfig {
    SchedulerConfig {
        block_size: 4,
        num_blocks,
        max_batch_tokens: 16,
        max_sequences: 8,
        max_waiting: 32,
        max_context: 256,
        prefix_cache: true,
        partial_copies: true,
        ..SchedulerConfig::default()
    }
}

fn request(id: u64, prompt: impl IntoIterator<Item = u32>, max_tokens: u32) -> Request {
    Request {
        id: RequestId(id),
        prompt: prompt.into_iter().map(TokenId).collect(),
        sampling: SamplingParams::default(),
        stop: StopConditions {
            max_tokens,
            min_tokens: 0,
            stop_token_ids: Vec::new(),
            eos_token_ids: Vec::new(),
            ignore_eos: false,
        },
        num_choices: 1,
        priority: 0,
        salt: CacheSalt::default(),
        arrival: Timestamp(id),
        deadlines: Deadlines::default(),
    }
}

/// The output of a plan: each sampling row chooses the position of its new token, offset by 1000.
fn run(plan: &BatchPlan) -> ModelOutput {
    let mut output = ModelOutput::default();
    for row in &plan.rows {
        let start = output.tokens.len() as u32;
        let next = row.first_position + row.tokens.len();
        output
            .tokens
            .extend(row.sample.then_some(TokenId(1000 + next)));
        output.rows.push(OutputRow {
            tokens: Span32 {
                start,
                end: output.tokens.len() as u32,
            },
            num_computed: row.tokens.len(),
            logprobs: Span32::default(),
            prompt_logprobs: Span32::default(),
            verdict: RowVerdict::Continue,
        });
    }
    output
}

impl Bench {
    fn new(config: SchedulerConfig) -> Self {
        Bench {
            scheduler: Scheduler::new(config).expect("valid"),
            plan: BatchPlan::default(),
            events: Vec::new(),
            now: Timestamp(STEP),
        }
    }

    fn add(&mut self, request: Request) {
        self.scheduler
            .add(Arc::new(request), self.now)
            .expect("acceptable");
        self.check();
    }

    fn schedule(&mut self) {
        self.now = self.now + crate::time::Span(STEP);
        self.scheduler
            .schedule(self.now, &mut self.plan, &mut self.events);
        self.check();
    }

    fn commit(&mut self, output: &ModelOutput) {
        self.scheduler
            .commit(&self.plan, output, self.now, &mut self.events);
        self.check();
    }

    fn step(&mut self) {
        self.schedule();
        if !self.plan.is_empty() {
            self.commit(&run(&self.plan));
        }
    }

    fn abort(&mut self, id: u64) {
        self.scheduler
            .abort(RequestId(id), self.now, &mut self.events);
        self.check();
    }

    fn finish_all(&mut self) {
        for _ in 0..10_000 {
            if !self.scheduler.has_work() {
                return;
            }
            self.step();
        }
        panic!("no end in sight: {:?}", self.scheduler.stats());
    }

    #[track_caller]
    fn check(&self) {
        let verdict = self.scheduler.check_invariants();
        assert_eq!(verdict, Ok(()), "at {:?}", self.now);
    }

    /// Reasons and summaries of a request's choices, in the order they ended.
    fn ends(&self, id: u64) -> Vec<(u32, FinishReason, crate::plan::Summary)> {
        let end = |event: &Event| match event {
            Event::Finished {
                request,
                choice,
                reason,
                summary,
            } if *request == RequestId(id) => Some((*choice, reason.clone(), *summary)),
            _ => None,
        };
        self.events.iter().filter_map(end).collect()
    }

    fn reason(&self, id: u64) -> FinishReason {
        let ends = self.ends(id);
        assert_eq!(ends.len(), 1, "request {id} ends once: {ends:?}");
        ends[0].1.clone()
    }

    /// First position and number of tokens of every row.
    fn rows(&self) -> Vec<(u32, u32)> {
        let shape = |row: &Row| (row.first_position, row.tokens.len());
        self.plan.rows.iter().map(shape).collect()
    }

    fn blocks(&self) -> [u32; 4] {
        let b = self.scheduler.stats().blocks;
        [b.free, b.active, b.cached_evictable, b.cached_pinned]
    }
}

#[test]
fn long_prompts_are_computed_in_chunks_and_decodes_never_wait() {
    let mut bench = Bench::new(config(64));
    bench.add(request(1, 0..3, 20));
    bench.step();
    bench.add(request(2, 100..140, 4));
    bench.step();
    assert_eq!(bench.rows(), [(3, 1), (0, 15)], "the decode comes first");
    assert!(bench.plan.rows[0].sample && !bench.plan.rows[1].sample);
    bench.step();
    assert_eq!(bench.rows(), [(4, 1), (15, 15)]);
    bench.step();
    assert_eq!(bench.rows(), [(5, 1), (30, 10)]);
    assert!(bench.plan.rows[1].sample);
    bench.finish_all();
    assert_eq!(bench.reason(1), FinishReason::Length);
    assert_eq!(bench.reason(2), FinishReason::Length);
    assert_eq!(bench.ends(1)[0].2.num_output_tokens, 20);
    let blocks = bench.blocks();
    assert_eq!((blocks[1], blocks[3]), (0, 0), "nothing is held any more");
}

#[test]
fn an_equal_prefix_is_shared_and_the_partly_equal_block_is_copied() {
    let mut bench = Bench::new(config(64));
    bench.add(request(1, 0..11, 1));
    bench.finish_all();
    // 8 tokens in whole blocks are cached, and the third block has only 3 prompt tokens and is not.
    bench.add(request(2, (0..7).chain(50..55), 1));
    bench.step();
    assert_eq!(bench.rows(), [(7, 5)]);
    let copy = bench.plan.copies[0];
    assert_eq!(copy.num_tokens, 3);
    assert_eq!(bench.plan.blocks[1], copy.to);
    assert_ne!(copy.from, copy.to);
    bench.finish_all();
    assert_eq!(bench.ends(2)[0].2.num_cached_tokens, 7);
    let counters = bench.scheduler.stats().counters;
    assert_eq!(counters.prefix_query_tokens, 11 + 12);
    assert_eq!(counters.prefix_hit_tokens, 7);
}

#[test]
fn a_match_leaves_at_least_the_last_prompt_token() {
    for length in 1..=13 {
        let mut bench = Bench::new(config(64));
        bench.add(request(1, 0..13, 3));
        bench.finish_all();
        bench.add(request(2, 0..length, 1));
        bench.step();
        // Positions 0 to 11 are in whole blocks.
        let expected = (length - 1).min(12);
        assert_eq!(
            bench.rows(),
            [(expected, length - expected)],
            "length {length}"
        );
    }
}

#[test]
fn without_partial_copies_hits_are_whole_blocks() {
    let mut bench = Bench::new(SchedulerConfig {
        partial_copies: false,
        ..config(64)
    });
    bench.add(request(1, 0..12, 1));
    bench.finish_all();
    bench.add(request(2, 0..11, 1));
    bench.step();
    assert_eq!(bench.rows(), [(8, 3)]);
    assert!(bench.plan.copies.is_empty());
}

#[test]
fn tenants_share_nothing() {
    let mut bench = Bench::new(config(64));
    bench.add(request(1, 0..12, 1));
    bench.finish_all();
    let mut stranger = request(2, 0..12, 1);
    stranger.salt = CacheSalt(Arc::from(b"other".as_slice()));
    bench.add(stranger);
    bench.step();
    assert_eq!(bench.rows(), [(0, 12)]);
}

#[test]
fn two_that_compute_the_same_prefix_at_once_end_with_the_same_blocks() {
    let mut bench = Bench::new(config(64));
    bench.add(request(1, 0..8, 6));
    bench.add(request(2, 0..8, 6));
    bench.step();
    assert_eq!(bench.rows(), [(0, 8), (0, 8)]);
    bench.step();
    let tables: Vec<&[BlockId]> = bench
        .plan
        .rows
        .iter()
        .map(|r| bench.plan.row_blocks(r))
        .collect();
    assert_eq!(tables[0][..2], tables[1][..2]);
    assert_ne!(tables[0][2], tables[1][2]);
    bench.finish_all();
}

#[test]
fn who_shares_most_with_a_prefill_under_way_waits_for_it() {
    let mut bench = Bench::new(SchedulerConfig {
        max_batch_tokens: 100,
        ..config(64)
    });
    bench.add(request(1, 0..30, 2));
    bench.add(request(2, (0..25).chain(70..75), 2));
    bench.add(request(3, (0..9).chain(80..101), 2));
    bench.step();
    assert_eq!(bench.rows(), [(0, 30)], "the second waits for 24 of its 30");
    bench.step();
    assert_eq!(bench.rows(), [(30, 1), (25, 5), (9, 21)]);
    bench.add(request(4, 200..230, 2));
    bench.add(request(5, (200..209).chain(80..101), 2));
    bench.step();
    assert_eq!(
        bench.rows()[2..],
        [(0, 30), (0, 30)],
        "8 of 30 are not worth it"
    );
    bench.finish_all();
}

#[test]
fn choices_share_the_prompt_of_the_first() {
    for prefix_cache in [true, false] {
        let mut bench = Bench::new(SchedulerConfig {
            prefix_cache,
            ..config(64)
        });
        let mut ask = request(1, 0..7, 9);
        ask.num_choices = 3;
        bench.add(ask);
        bench.step();
        assert_eq!(bench.rows(), [(0, 7)], "the first computes the prompt");
        bench.step();
        assert_eq!(bench.rows(), [(7, 1), (6, 1), (6, 1)]);
        let leader = bench.plan.row_blocks(&bench.plan.rows[0]).to_vec();
        for (row, copy) in bench.plan.rows[1..].iter().zip(&bench.plan.copies) {
            let table = bench.plan.row_blocks(row);
            assert_eq!(table[0], leader[0], "whole blocks are shared");
            assert_eq!((copy.from, copy.to), (leader[1], table[1]));
            assert_eq!(copy.num_tokens, 2);
            assert!(row.sample);
        }
        assert_eq!(bench.scheduler.fork(RequestId(1), bench.now), Ok(3));
        bench.step();
        assert_eq!(bench.rows(), [(8, 1), (7, 1), (7, 1), (6, 1)]);
        assert_eq!(bench.plan.started[0].choice, 3);
        bench.finish_all();
        let mut choices: Vec<u32> = bench.ends(1).iter().map(|end| end.0).collect();
        choices.sort_unstable();
        assert_eq!(choices, [0, 1, 2, 3]);
    }
}

#[test]
fn when_the_first_choice_is_gone_the_next_one_leads() {
    let mut bench = Bench::new(SchedulerConfig {
        prefix_cache: false,
        ..config(64)
    });
    let mut ask = request(1, 0..7, 2);
    ask.num_choices = 3;
    bench.add(ask);
    bench.schedule();
    let mut output = run(&bench.plan);
    output.rows[0] = OutputRow::failed(RowError::NonFiniteLogits);
    bench.commit(&output);
    assert_eq!(bench.ends(1).len(), 1);
    bench.step();
    assert_eq!(bench.rows(), [(0, 7)]);
    assert_eq!(bench.plan.started[0].choice, 1);
    bench.finish_all();
    assert_eq!(bench.ends(1).len(), 3);
}

#[test]
fn a_fork_of_what_is_unknown_is_refused() {
    let mut bench = Bench::new(config(64));
    let request = RequestId(7);
    assert_eq!(
        bench.scheduler.fork(request, bench.now),
        Err(ForkError::UnknownRequest { request })
    );
}

#[test]
fn the_latest_of_the_lowest_priority_is_preempted_and_keeps_its_output() {
    let mut bench = Bench::new(config(9));
    for id in 1..=3 {
        let mut ask = request(id, (0..7).map(|t| t + 100 * id as u32), 12);
        ask.priority = -i32::from(id == 2);
        bench.add(ask);
    }
    let mut preempted = Vec::new();
    while bench.scheduler.has_work() {
        let before = bench.scheduler.stats().counters.num_preemptions;
        bench.step();
        if bench.scheduler.stats().counters.num_preemptions > before {
            preempted.extend(bench.plan.ended.clone());
        }
        for started in &bench.plan.started {
            assert_eq!(
                started.output.is_empty(),
                !preempted.contains(&started.id),
                "only a preempted sequence brings output"
            );
        }
    }
    assert_eq!(preempted.first(), Some(&SequenceId(1)), "priority -1 first");
    for id in 1..=3 {
        assert_eq!(bench.ends(id)[0].2.num_output_tokens, 12);
    }
    assert!(bench.ends(2)[0].2.num_preemptions >= 1);
    assert_eq!(bench.ends(1)[0].2.num_preemptions, 0);
}

#[test]
fn two_that_need_more_than_half_of_the_pool_each_finish_one_after_the_other() {
    let mut bench = Bench::new(config(8));
    bench.add(request(1, 0..12, 18));
    bench.add(request(2, 100..112, 18));
    let mut num_idle = 0;
    while bench.scheduler.has_work() {
        bench.step();
        let stats = bench.scheduler.stats();
        num_idle = match stats.num_running {
            0 if stats.num_waiting > 0 => num_idle + 1,
            _ => 0,
        };
        assert!(num_idle <= 2);
    }
    assert_eq!(bench.reason(1), FinishReason::Length);
    assert_eq!(bench.reason(2), FinishReason::Length);
}

#[test]
fn the_cache_gives_way_to_the_living_oldest_first() {
    let mut bench = Bench::new(config(8));
    bench.add(request(1, 0..8, 1));
    bench.finish_all();
    bench.add(request(2, 100..108, 1));
    bench.finish_all();
    assert_eq!(bench.blocks(), [4, 0, 4, 0]);
    bench.add(request(3, 200..220, 1));
    bench.finish_all();
    assert_eq!(bench.scheduler.stats().counters.num_evicted_blocks, 1);
    bench.add(request(4, 100..109, 1));
    bench.step();
    assert_eq!(bench.rows(), [(8, 1)], "the younger prefix is whole");
    bench.finish_all();
    // Its ninth token took the last block of the older prefix.
    assert_eq!(bench.scheduler.stats().counters.num_evicted_blocks, 2);
    bench.add(request(5, 0..9, 1));
    bench.step();
    assert_eq!(bench.rows(), [(0, 9)], "the older prefix is gone");
}

#[test]
fn abort_is_safe_at_every_point() {
    for abort_at in 0..24 {
        let mut bench = Bench::new(config(12));
        for id in 1..=3 {
            let mut ask = request(id, (0..9).map(|t| t + id as u32 / 3), 5);
            ask.num_choices = 2;
            bench.add(ask);
        }
        for point in 0..200 {
            bench.schedule();
            if point * 2 == abort_at {
                bench.abort(2);
            }
            if bench.plan.is_empty() {
                break;
            }
            bench.commit(&run(&bench.plan));
            if point * 2 + 1 == abort_at {
                bench.abort(2);
                bench.abort(2);
            }
        }
        for id in 1..=3 {
            assert_eq!(bench.ends(id).len(), 2, "request {id}, abort at {abort_at}");
        }
        let blocks = bench.blocks();
        assert_eq!((blocks[1], blocks[3]), (0, 0), "abort at {abort_at}");
    }
}

#[test]
fn blocks_of_an_aborted_row_stay_until_its_step_is_over() {
    let mut bench = Bench::new(config(8));
    bench.add(request(1, 0..8, 4));
    bench.schedule();
    let held = bench.blocks();
    bench.abort(1);
    assert_eq!(bench.reason(1), FinishReason::Cancelled);
    assert_eq!(bench.blocks(), held);
    let num_events = bench.events.len();
    bench.commit(&run(&bench.plan));
    assert_eq!(bench.events.len(), num_events, "nothing follows the end");
    assert_eq!(bench.blocks(), [8, 0, 0, 0]);
    bench.add(request(2, 0..8, 4));
    bench.step();
    assert_eq!(bench.plan.ended, [SequenceId(0)]);
    assert_eq!(bench.rows(), [(0, 8)], "nothing of it was published");
}

#[test]
fn a_failed_row_ends_alone_and_publishes_nothing_of_its_step() {
    let mut bench = Bench::new(config(64));
    bench.add(request(1, 0..8, 4));
    bench.add(request(2, 100..108, 4));
    bench.schedule();
    let mut output = run(&bench.plan);
    output.rows[0] = OutputRow::failed(RowError::NonFiniteLogits);
    bench.commit(&output);
    assert_eq!(
        bench.reason(1),
        FinishReason::Error(RowError::NonFiniteLogits)
    );
    assert_eq!(bench.blocks(), [62, 0, 0, 2]);
    bench.add(request(3, 0..8, 4));
    bench.finish_all();
    assert_eq!(bench.ends(3)[0].2.num_cached_tokens, 0);
    assert_eq!(bench.reason(2), FinishReason::Length);
}

#[test]
fn a_failed_step_ends_its_rows_and_the_rest_goes_on() {
    let mut bench = Bench::new(SchedulerConfig {
        max_sequences: 1,
        ..config(64)
    });
    bench.add(request(1, 0..8, 4));
    bench.add(request(2, 0..8, 4));
    bench.schedule();
    bench
        .scheduler
        .fail_step(&bench.plan, "device lost", bench.now, &mut bench.events);
    bench.check();
    let error = RowError::StepFailed("device lost".into());
    assert_eq!(bench.reason(1), FinishReason::Error(error));
    bench.step();
    assert_eq!(bench.rows(), [(0, 8)]);
    bench.finish_all();
    assert_eq!(bench.reason(2), FinishReason::Length);
}

/// What a hostile or broken runner may return for the only row of a decode step.
#[test]
fn a_row_that_contradicts_its_plan_ends_with_an_error() {
    let broken: [fn(&mut ModelOutput); 5] = [
        |output| output.rows.clear(),
        |output| output.tokens.clear(),
        |output| output.rows[0].tokens.end = 0,
        |output| output.rows[0].num_computed = 0,
        |output| output.rows[0].num_computed = u32::MAX,
    ];
    for (number, break_it) in broken.into_iter().enumerate() {
        let mut bench = Bench::new(config(64));
        bench.add(request(1, 0..8, 4));
        bench.step();
        bench.schedule();
        let mut output = run(&bench.plan);
        break_it(&mut output);
        bench.commit(&output);
        let reason = bench.reason(1);
        let is_inconsistent = matches!(reason, FinishReason::Error(RowError::Inconsistent(ref text)) if text.starts_with("row 0"));
        assert!(is_inconsistent, "case {number}: {reason:?}");
    }
}

#[test]
fn deadlines_end_what_is_late_and_the_next_one_is_known() {
    let cases = [
        (DeadlineKind::Queue, [Some(3_500), None, None]),
        (DeadlineKind::FirstToken, [None, Some(4_500), None]),
        (DeadlineKind::Total, [Some(9_000), Some(8_000), Some(5_500)]),
    ];
    for (kind, [queue, first_token, total]) in cases {
        let mut bench = Bench::new(SchedulerConfig {
            max_sequences: 1,
            ..config(64)
        });
        bench.add(request(1, 0..4, 50));
        let mut ask = request(2, 0..4, 50);
        ask.deadlines = Deadlines {
            queue: queue.map(Timestamp),
            first_token: first_token.map(Timestamp),
            total: total.map(Timestamp),
        };
        bench.add(ask);
        let due = [queue, first_token, total].into_iter().flatten().min();
        assert_eq!(bench.scheduler.next_deadline(), due.map(Timestamp));
        while bench.ends(2).is_empty() {
            bench.step();
        }
        assert_eq!(bench.reason(2), FinishReason::Timeout(kind));
        assert!(bench.now.0 - due.expect("one") < STEP);
        assert_eq!(bench.scheduler.next_deadline(), None);
    }
}

#[test]
fn deadlines_that_were_met_no_longer_count() {
    let mut bench = Bench::new(config(64));
    let mut ask = request(1, 0..20, 5);
    ask.deadlines = Deadlines {
        queue: Some(Timestamp(2_500)),
        first_token: Some(Timestamp(3_500)),
        total: Some(Timestamp(50_000)),
    };
    bench.add(ask);
    bench.step();
    assert_eq!(bench.scheduler.next_deadline(), Some(Timestamp(3_500)));
    bench.step();
    assert_eq!(bench.scheduler.next_deadline(), Some(Timestamp(50_000)));
    bench.finish_all();
    assert_eq!(bench.reason(1), FinishReason::Length);
    let summary = bench.ends(1)[0].2;
    assert_eq!(summary.first_scheduled, Some(Timestamp(2_000)));
    assert_eq!(summary.first_token, Some(Timestamp(3_000)));
}

/// Several tokens from one row: `num_drafts` accepted ones, the sampled one, then forced ones.
fn many(plan: &BatchPlan, tokens: &[u32], num_drafts: u32) -> ModelOutput {
    let mut output = run(plan);
    output.tokens = tokens.iter().copied().map(TokenId).collect();
    output.rows[0].tokens.end = tokens.len() as u32;
    output.rows[0].num_computed += num_drafts;
    output
}

#[test]
fn forced_tokens_are_fed_in_the_next_step() {
    let mut bench = Bench::new(config(64));
    bench.add(request(1, 0..4, 20));
    bench.step();
    bench.schedule();
    bench.commit(&many(&bench.plan, &[7, 8, 9], 0));
    bench.schedule();
    assert_eq!(bench.rows(), [(5, 3)]);
    assert_eq!(bench.plan.tokens, [7, 8, 9].map(TokenId));
    assert!(bench.plan.rows[0].sample);
    bench.commit(&run(&bench.plan));
    bench.step();
    assert_eq!(bench.rows(), [(8, 1)]);
}

#[test]
fn accepted_drafts_count_as_computed() {
    let mut bench = Bench::new(config(64));
    bench.add(request(1, 0..4, 20));
    bench.step();
    bench.schedule();
    bench.commit(&many(&bench.plan, &[7, 8, 9], 2));
    bench.schedule();
    assert_eq!(bench.rows(), [(7, 1)]);
    assert_eq!(bench.plan.tokens, [TokenId(9)]);
}

#[test]
fn tokens_behind_a_stop_are_neither_accepted_nor_published() {
    let mut bench = Bench::new(config(64));
    let mut ask = request(1, 0..4, 20);
    ask.stop.stop_token_ids = vec![TokenId(8)];
    bench.add(ask);
    bench.step();
    bench.schedule();
    bench.commit(&many(&bench.plan, &[7, 8, 9], 2));
    let stop = FinishReason::Stop(StopCause::Token(TokenId(8)));
    assert_eq!(bench.reason(1), stop);
    assert_eq!(bench.ends(1)[0].2.num_output_tokens, 3);
    // Four of the prompt are whole; position 7 would be the fourth of the second block.
    assert_eq!(bench.blocks(), [63, 0, 1, 0]);
}

#[test]
fn a_stop_string_ends_after_its_tokens_and_wins_over_the_length() {
    let mut bench = Bench::new(config(64));
    bench.add(request(1, 0..4, 2));
    bench.step();
    bench.schedule();
    let mut output = run(&bench.plan);
    output.rows[0].verdict = RowVerdict::StopString;
    bench.commit(&output);
    assert_eq!(bench.reason(1), FinishReason::Stop(StopCause::StopString));
    assert_eq!(bench.ends(1)[0].2.num_output_tokens, 2);
}

#[test]
fn the_context_ends_what_would_outgrow_it() {
    let mut bench = Bench::new(SchedulerConfig {
        max_context: 10,
        ..config(64)
    });
    bench.add(request(1, 0..4, 1_000));
    bench.finish_all();
    assert_eq!(bench.reason(1), FinishReason::Length);
    assert_eq!(bench.ends(1)[0].2.num_output_tokens, 6);
}

#[test]
fn prompt_logprobs_match_nothing_are_reported_once_and_publish() {
    let mut bench = Bench::new(config(64));
    bench.add(request(1, 0..20, 1));
    bench.finish_all();
    let mut ask = request(2, 0..20, 2);
    ask.sampling.prompt_logprobs = Some(1);
    ask.num_choices = 2;
    bench.add(ask);
    let mut reported = Vec::new();
    while bench.scheduler.has_work() {
        bench.step();
        reported.extend(
            bench
                .plan
                .rows
                .iter()
                .flat_map(|r| r.prompt_logprobs.range()),
        );
    }
    assert_eq!(reported, (0..19).collect::<Vec<usize>>());
    assert_eq!(bench.ends(2)[0].2.num_cached_tokens, 0);
    let chunk = Event::Accepted {
        request: RequestId(2),
        choice: 0,
        row: 0,
        num_tokens: 0,
    };
    assert!(
        bench.events.contains(&chunk),
        "a chunk that reports is told"
    );
}

#[test]
fn what_can_never_run_is_refused_with_its_numbers() {
    let mut bench = Bench::new(SchedulerConfig {
        num_blocks: 8,
        max_waiting: 3,
        max_context: 40,
        ..config(8)
    });
    bench.add(request(9, 0..4, 1));
    let id = RequestId(1);
    let refused = |edit: fn(&mut Request), expected: AddError| {
        let mut ask = request(1, 0..4, 4);
        edit(&mut ask);
        (ask, expected)
    };
    let cases = [
        refused(
            |r| r.prompt = Arc::from([]),
            AddError::EmptyPrompt { request: id },
        ),
        refused(|r| r.num_choices = 0, AddError::NoChoices { request: id }),
        refused(
            |r| r.stop.max_tokens = 0,
            AddError::NoOutput { request: id },
        ),
        refused(
            |r| r.num_choices = 4,
            AddError::TooManyChoices {
                request: id,
                num_choices: 4,
                max_waiting: 3,
            },
        ),
        refused(
            |r| r.prompt = (0..40).map(TokenId).collect(),
            AddError::PromptTooLong {
                request: id,
                num_prompt_tokens: 40,
                max_context: 40,
            },
        ),
        refused(
            |r| r.stop.max_tokens = 30,
            AddError::NeverFits {
                request: id,
                num_tokens: 34,
                needed_blocks: 9,
                num_blocks: 8,
            },
        ),
        refused(
            |r| r.num_choices = 3,
            AddError::QueueFull {
                request: id,
                num_waiting: 1,
                num_choices: 3,
                max_waiting: 3,
            },
        ),
        refused(
            |r| r.id = RequestId(9),
            AddError::DuplicateId {
                request: RequestId(9),
            },
        ),
    ];
    for (ask, expected) in cases {
        assert_eq!(bench.scheduler.add(Arc::new(ask), bench.now), Err(expected));
        assert_eq!(bench.scheduler.stats().num_waiting, 1);
    }
    // The last token needs no slot: 33 tokens fit 32 slots.
    bench.add(request(1, 0..4, 29));
    bench.finish_all();
    assert_eq!(bench.ends(1)[0].2.num_output_tokens, 29);
}

#[test]
fn four_times_more_than_fits_is_served_with_few_preemptions() {
    let mut bench = Bench::new(SchedulerConfig {
        max_sequences: 32,
        max_batch_tokens: 64,
        max_waiting: 64,
        ..config(64)
    });
    let mut most = 0;
    for id in 0..200 {
        while bench.scheduler.stats().num_waiting > 24 {
            bench.step();
        }
        let length = 20 + (id as u32 * 7) % 23;
        bench.add(request(id, (0..length).map(|t| t + 997 * id as u32), 60));
    }
    bench.finish_all();
    for id in 0..200 {
        most = most.max(bench.ends(id)[0].2.num_preemptions);
    }
    assert!(most <= 3, "{most} preemptions of one request");
}

#[test]
#[should_panic(expected = "in flight")]
fn a_second_plan_before_the_commit_of_the_first_is_a_bug() {
    let mut bench = Bench::new(config(64));
    bench.add(request(1, 0..4, 4));
    bench.schedule();
    bench.schedule();
}

#[test]
fn what_ended_is_told_with_the_next_rows() {
    let mut bench = Bench::new(config(64));
    bench.add(request(1, 0..4, 1));
    bench.step();
    bench.step();
    assert!(bench.plan.is_empty() && bench.plan.ended.is_empty());
    bench.add(request(2, 0..4, 1));
    bench.step();
    assert_eq!(bench.plan.ended, [SequenceId(0)]);
}
