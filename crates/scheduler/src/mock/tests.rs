//! The mock is trusted by every other test, so its own tests drive it with plans written by hand.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::*;
use crate::plan::{BlockCopy, BlockId, RowVerdict, Span32};
use crate::request::{CacheSalt, Deadlines, RequestId, SamplingParams, SequenceId, StopConditions};
use crate::time::Timestamp;

const BLOCK_SIZE: u32 = 4;

fn nonzero(value: u32) -> NonZeroU32 {
    NonZeroU32::new(value).expect("tests ask for positive numbers")
}

fn vocabulary() -> NonZeroU32 {
    nonzero(1000)
}

fn oracle() -> MockModel {
    MockModel::oracle(vocabulary(), nonzero(BLOCK_SIZE), 8)
}

fn request(prompt: impl IntoIterator<Item = u32>, max_tokens: u32) -> Request {
    Request {
        id: RequestId(1),
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
        arrival: Timestamp(0),
        deadlines: Deadlines::default(),
    }
}

fn start(id: u64, request: &Request) -> StartedSequence {
    StartedSequence {
        id: SequenceId(id),
        request: Arc::new(request.clone()),
        choice: 0,
        output: Vec::new(),
    }
}

/// Adds a row of sequence `id` that computes `tokens` from `first` on.
fn push_row(plan: &mut BatchPlan, id: u64, first: u32, tokens: &[TokenId], blocks: &[u32]) {
    let tokens_start = plan.tokens.len() as u32;
    let blocks_start = plan.blocks.len() as u32;
    plan.tokens.extend(tokens);
    plan.blocks.extend(blocks.iter().copied().map(BlockId));
    plan.rows.push(Row {
        sequence: SequenceId(id),
        first_position: first,
        tokens: Span32 {
            start: tokens_start,
            end: plan.tokens.len() as u32,
        },
        blocks: Span32 {
            start: blocks_start,
            end: plan.blocks.len() as u32,
        },
        sample: false,
        prompt_logprobs: Span32::default(),
    });
}

/// Lets the last row sample.
fn sample_last(plan: &mut BatchPlan) {
    if let Some(row) = plan.rows.last_mut() {
        row.sample = true;
    }
}

fn step(model: &mut MockModel, plan: &mut BatchPlan) -> ModelOutput {
    plan.step += 1;
    let mut output = ModelOutput::default();
    model
        .execute(plan, &mut output)
        .expect("no step error was injected");
    let step = plan.step;
    plan.clear();
    plan.step = step;
    output
}

/// Runs `request` alone as sequence 0, in prefill chunks of at most `chunk` tokens.
fn run_solo(model: &mut MockModel, request: &Request, chunk: usize) -> Vec<TokenId> {
    let table: Vec<u32> = (0..8).collect();
    let mut known = request.prompt.to_vec();
    let mut computed = 0;
    let mut plan = BatchPlan::default();
    plan.started.push(start(0, request));
    loop {
        let end = known.len().min(computed + chunk);
        push_row(&mut plan, 0, computed as u32, &known[computed..end], &table);
        if end == known.len() {
            sample_last(&mut plan);
        }
        let output = step(model, &mut plan);
        assert_eq!(output.rows[0].verdict, RowVerdict::Continue);
        computed = end;
        known.extend(&output.tokens);
        let num_output = (known.len() - request.prompt.len()) as u32;
        if let Some(token) = output.tokens.last()
            && request.stop.finish_at(*token, num_output).is_some()
        {
            return known.split_off(request.prompt.len());
        }
    }
}

fn ids(tokens: &[TokenId]) -> Vec<u32> {
    tokens.iter().map(|token| token.0).collect()
}

/// The message of a row's inconsistency, if it has one.
fn problem(output: &ModelOutput, row: usize) -> Option<&str> {
    match &output.rows[row].verdict {
        RowVerdict::Failed(RowError::Inconsistent(message)) => Some(message),
        RowVerdict::Failed(_) | RowVerdict::Continue | RowVerdict::StopString => None,
    }
}

#[test]
fn the_script_counts_up() {
    let check = |change: &dyn Fn(&mut Request), expected: &[u32]| {
        let mut request = request([5, 997], 4);
        change(&mut request);
        let mut model = MockModel::scripted(vocabulary());
        assert_eq!(ids(&run_solo(&mut model, &request, 16)), expected);
    };
    check(&|_| {}, &[998, 999, 0, 1]);
    check(&|r| r.stop.eos_token_ids = vec![TokenId(0)], &[998, 999, 0]);
    check(&|r| r.stop.stop_token_ids = vec![TokenId(998)], &[998]);
    let late = |r: &mut Request| {
        r.stop.stop_token_ids = vec![TokenId(998), TokenId(1)];
        r.stop.min_tokens = 2;
    };
    check(&late, &[999, 0, 1]);
    let allowed =
        |r: &mut Request| r.sampling.allowed_token_ids = Some(vec![TokenId(7), TokenId(3)]);
    check(&allowed, &[3, 7, 3, 7]);
}

#[test]
fn nothing_to_sample_fails_the_row() {
    let mut request = request([5], 4);
    request.sampling.allowed_token_ids = Some(vec![TokenId(1000)]);
    for mut model in [MockModel::scripted(vocabulary()), oracle()] {
        let mut plan = BatchPlan::default();
        plan.started.push(start(0, &request));
        push_row(&mut plan, 0, 0, &request.prompt, &[0]);
        sample_last(&mut plan);
        let output = step(&mut model, &mut plan);
        let failed = RowVerdict::Failed(RowError::NothingToSample);
        assert_eq!(output.rows[0].verdict, failed);
    }
}

#[test]
fn the_oracle_agrees_with_the_schedulerless_output_for_every_chunk_size() {
    let request = request(10..19, 12);
    let expected = oracle_output(&request, 0, vocabulary());
    assert_eq!(expected.len(), 12);
    for chunk in 1..10 {
        assert_eq!(run_solo(&mut oracle(), &request, chunk), expected);
    }
}

#[test]
fn the_oracles_output_depends_on_all_that_it_may_depend_on() {
    let output = |change: &dyn Fn(&mut Request), choice| {
        let mut request = request(10..19, 8);
        change(&mut request);
        oracle_output(&request, choice, vocabulary())
    };
    let base = output(&|_| {}, 0);
    assert_eq!(output(&|r| r.id = RequestId(9), 0), base);
    assert_ne!(output(&|_| {}, 1), base);
    assert_ne!(output(&|r| r.sampling.seed = 1, 0), base);
    assert_ne!(output(&|r| r.salt = CacheSalt(Arc::from([7])), 0), base);
    let other_prompt = |r: &mut Request| r.prompt = (11..20).map(TokenId).collect();
    assert_ne!(output(&other_prompt, 0), base);
}

/// The state on which every inconsistency below is tried: sequences 1 and 2 computed the same eight tokens,
/// blocks 0, 1 and 2, 3; 2 under another salt. Both sampled. Returns their known tokens.
fn two_running(model: &mut MockModel, plan: &mut BatchPlan) -> [Vec<TokenId>; 2] {
    let ask = request(10..18, 8);
    let mut foreign = ask.clone();
    foreign.salt = CacheSalt(Arc::from(*b"other"));
    plan.started.extend([start(1, &ask), start(2, &foreign)]);
    for (id, blocks) in [(1, [0, 1]), (2, [2, 3])] {
        push_row(plan, id, 0, &ask.prompt, &blocks);
        sample_last(plan);
    }
    let output = step(model, plan);
    let known = |token| ask.prompt.iter().copied().chain([token]).collect();
    [known(output.tokens[0]), known(output.tokens[1])]
}

#[test]
fn every_inconsistency_is_found_and_named() {
    type Change<'a> = &'a dyn Fn(&mut BatchPlan, &[Vec<TokenId>; 2]);
    let check = |change: Change<'_>, expected: Option<&str>| {
        let mut model = oracle();
        let mut plan = BatchPlan::default();
        let known = two_running(&mut model, &mut plan);
        change(&mut plan, &known);
        let output = step(&mut model, &mut plan);
        match (problem(&output, 0), expected) {
            (None, None) => assert_eq!(output.rows[0].verdict, RowVerdict::Continue),
            (Some(found), Some(part)) => assert!(found.contains(part), "{found:?} lacks {part:?}"),
            (found, _) => panic!("expected {expected:?}, found {found:?}"),
        }
    };
    // One decode row of sequence 1, as it should be but for `first` and `blocks`.
    let decode = |first: u32, blocks: &'static [u32]| {
        move |plan: &mut BatchPlan, known: &[Vec<TokenId>; 2]| {
            push_row(plan, 1, first, &known[0][8..], blocks);
            sample_last(plan);
        }
    };
    let continued = |id: u64, blocks: &'static [u32]| {
        move |plan: &mut BatchPlan, known: &[Vec<TokenId>; 2]| {
            push_row(plan, id, 8, &known[id as usize - 1][8..], blocks);
            sample_last(plan);
        }
    };
    check(&decode(8, &[0, 1, 4]), None);
    check(
        &decode(7, &[0, 1, 4]),
        Some("computes from position 7, but 8"),
    );
    check(&decode(8, &[0, 1]), Some("no block for position 8"));
    check(&decode(8, &[0, 1, 8]), Some("outside the pool"));
    check(&decode(8, &[0, 1, 0]), Some("twice"));
    check(
        &decode(8, &[0, 5, 4]),
        Some("position 4 in BlockId(5), which holds Unwritten"),
    );
    check(
        &decode(8, &[1, 0, 4]),
        Some("position 0 in BlockId(1), which holds Written"),
    );
    check(
        &decode(8, &[2, 1, 4]),
        Some("position 0 in BlockId(2), which holds Written"),
    );
    let unsampled = |plan: &mut BatchPlan, known: &[Vec<TokenId>; 2]| {
        push_row(plan, 1, 8, &known[0][8..], &[0, 1, 4]);
    };
    check(&unsampled, Some("sample = false"));
    let wrong_token = |plan: &mut BatchPlan, known: &[Vec<TokenId>; 2]| {
        push_row(plan, 1, 8, &known[0][..1], &[0, 1, 4]);
    };
    check(&wrong_token, Some("feeds TokenId(10) at position 8"));
    let empty = |plan: &mut BatchPlan, _: &[Vec<TokenId>; 2]| {
        push_row(plan, 1, 8, &[], &[0, 1, 4]);
    };
    check(&empty, Some("without tokens"));
    let ended = |plan: &mut BatchPlan, known: &[Vec<TokenId>; 2]| {
        plan.ended.push(SequenceId(1));
        continued(1, &[0, 1, 4])(plan, known);
    };
    check(&ended, Some("not running"));
    let restarted = |plan: &mut BatchPlan, known: &[Vec<TokenId>; 2]| {
        plan.started.push(start(1, &request(10..18, 8)));
        continued(1, &[0, 1, 4])(plan, known);
    };
    check(&restarted, Some("started twice"));
    let shared = |plan: &mut BatchPlan, known: &[Vec<TokenId>; 2]| {
        continued(1, &[0, 1, 4])(plan, known);
        continued(2, &[2, 3, 4])(plan, known);
    };
    check(&shared, Some("shares BlockId(4)"));
    let handed_over_too_early = |plan: &mut BatchPlan, known: &[Vec<TokenId>; 2]| {
        plan.started
            .push(start(3, &request((10..18).chain([0, 1, 2, 3, 4]), 8)));
        push_row(plan, 3, 12, &[TokenId(4)], &[0, 1, 4, 5]);
        sample_last(plan);
        continued(1, &[0, 1, 6])(plan, known);
    };
    check(
        &handed_over_too_early,
        Some("position 8 in BlockId(4), which holds Unwritten"),
    );
}

#[test]
fn copies_carry_the_slots_that_matter_and_no_others() {
    let check = |copies: &[(u32, u32, u32)], first: u32, expected: Option<&str>| {
        let mut model = oracle();
        let mut plan = BatchPlan::default();
        two_running(&mut model, &mut plan);
        let copies = copies.iter().map(|(from, to, num_tokens)| BlockCopy {
            from: BlockId(*from),
            to: BlockId(*to),
            num_tokens: *num_tokens,
        });
        plan.copies.extend(copies);
        let forked = request(10..18, 8);
        plan.started.push(start(3, &forked));
        push_row(
            &mut plan,
            3,
            first,
            &forked.prompt[first as usize..],
            &[0, 4],
        );
        sample_last(&mut plan);
        let output = step(&mut model, &mut plan);
        match expected {
            None => assert_eq!(problem(&output, 0), None),
            Some(part) => assert!(problem(&output, 0).is_some_and(|found| found.contains(part))),
        }
    };
    check(&[(1, 4, 3)], 7, None);
    check(
        &[(1, 4, 2)],
        7,
        Some("position 6 in BlockId(4), which holds Unwritten"),
    );
    check(&[(1, 4, 2)], 6, None);
    check(
        &[(3, 4, 3)],
        7,
        Some("position 4 in BlockId(4), which holds Written"),
    );
    check(&[(1, 5, 3), (5, 4, 3)], 7, Some("CopyUndefined"));
    check(&[(1, 4, 3), (3, 4, 3)], 7, Some("CopyUndefined"));
    check(
        &[(1, 4, 3), (4, 5, 4)],
        7,
        Some("writes position 7 in BlockId(4), the source of a copy"),
    );
}

#[test]
fn a_failed_row_voids_its_own_slots_alone() {
    let sites = [
        RowSite::Index { step: 2, row: 0 },
        RowSite::Position {
            sequence: SequenceId(1),
            position: 8,
        },
        RowSite::Token(TokenId(77)),
    ];
    for site in sites {
        let mut model = oracle();
        let mut plan = BatchPlan::default();
        let ask = request((10..18).chain([77]), 8);
        let control = request(20..28, 8);
        let expected = oracle_output(&control, 0, vocabulary());
        plan.started.extend([start(1, &ask), start(2, &control)]);
        push_row(&mut plan, 1, 0, &ask.prompt[..8], &[0, 1]);
        push_row(&mut plan, 2, 0, &control.prompt, &[2, 3]);
        sample_last(&mut plan);
        step(&mut model, &mut plan);

        model.inject(Fault::Row {
            site,
            error: RowError::NonFiniteLogits,
        });
        push_row(&mut plan, 1, 8, &ask.prompt[8..], &[0, 1, 4]);
        sample_last(&mut plan);
        push_row(&mut plan, 2, 8, &expected[..1], &[2, 3, 5]);
        sample_last(&mut plan);
        let output = step(&mut model, &mut plan);
        assert_eq!(output.rows[0], OutputRow::failed(RowError::NonFiniteLogits));
        assert_eq!(output.row_tokens(&output.rows[1]), &expected[1..2]);

        model.clear_faults();
        let longer = request(ids(&ask.prompt).into_iter().chain([1]), 8);
        plan.started.push(start(3, &longer));
        push_row(&mut plan, 3, 9, &longer.prompt[9..], &[0, 1, 4]);
        sample_last(&mut plan);
        let output = step(&mut model, &mut plan);
        assert!(problem(&output, 0).is_some_and(|found| found.contains("RowFailed")));
    }
}

#[test]
fn a_failed_step_voids_all_it_was_to_write_and_leaves_the_model_usable() {
    let failures = [
        StepFailure::Error("device lost".into()),
        StepFailure::Panic("injected".into()),
    ];
    for failure in failures {
        let panics = matches!(failure, StepFailure::Panic(_));
        let mut model = oracle();
        let mut plan = BatchPlan::default();
        let known = two_running(&mut model, &mut plan);
        model.inject(Fault::Step { step: 2, failure });
        plan.step = 2;
        push_row(&mut plan, 1, 8, &known[0][8..], &[0, 1, 4]);
        sample_last(&mut plan);
        let mut output = ModelOutput::default();
        let outcome = catch_unwind(AssertUnwindSafe(|| model.execute(&plan, &mut output)));
        assert_eq!(outcome.is_err(), panics);
        assert!(outcome.map_or(true, |result| result.is_err()));

        plan.clear();
        let longer = request(ids(&known[0]).into_iter().chain([1]), 8);
        plan.started.push(start(3, &longer));
        push_row(&mut plan, 3, 9, &longer.prompt[9..], &[0, 1, 4]);
        sample_last(&mut plan);
        let output = step(&mut model, &mut plan);
        assert!(problem(&output, 0).is_some_and(|found| found.contains("StepFailed")));
    }
}

#[test]
fn slow_steps_are_reported_once() {
    let mut model = MockModel::scripted(vocabulary());
    let failure = StepFailure::Slow(Span::from_millis(5));
    model.inject(Fault::Step { step: 1, failure });
    let mut plan = BatchPlan::default();
    step(&mut model, &mut plan);
    assert_eq!(model.take_delay(), Span::from_millis(5));
    step(&mut model, &mut plan);
    assert_eq!(model.take_delay(), Span(0));
}

#[test]
fn logprobs_come_as_asked_and_chunks_do_not_change_them() {
    let mut ask = request(10..19, 1);
    ask.sampling.logprobs = Some(2);
    ask.sampling.prompt_logprobs = Some(0);
    let prompt_logprobs = |chunk: usize| {
        let mut model = oracle();
        let mut plan = BatchPlan::default();
        plan.started.push(start(1, &ask));
        let mut reported = Vec::new();
        for first in (0..9).step_by(chunk) {
            let end = 9.min(first + chunk);
            push_row(
                &mut plan,
                1,
                first as u32,
                &ask.prompt[first..end],
                &[0, 1, 2],
            );
            plan.rows[0].sample = end == 9;
            plan.rows[0].prompt_logprobs = Span32 {
                start: first as u32,
                end: end.min(8) as u32,
            };
            let output = step(&mut model, &mut plan);
            if end == 9 {
                let chosen = &output.logprobs[output.rows[0].logprobs.range()][0];
                assert_eq!((chosen.chosen.token, chosen.rank), (output.tokens[0], 1));
                assert_eq!(chosen.top.len(), 2);
                assert_eq!(chosen.top[0], chosen.chosen);
                assert!(chosen.top[1].logprob < chosen.top[0].logprob);
            }
            reported.extend(output.prompt_logprobs);
        }
        reported
    };
    let whole = prompt_logprobs(9);
    let tokens: Vec<TokenId> = whole.iter().map(|at| at.chosen.token).collect();
    assert_eq!(tokens, ask.prompt[1..]);
    assert!(
        whole
            .iter()
            .all(|at| at.top.is_empty() && at.chosen.logprob < 0.0)
    );
    assert_eq!(prompt_logprobs(4), whole);
}

/// A prompt computed by one oracle, decoded by another from its blocks.
fn export_prompt() -> (MockModel, Request, BlockImage) {
    let request = request(10..19, 4);
    let mut model = oracle();
    let mut plan = BatchPlan::default();
    plan.started.push(start(0, &request));
    push_row(&mut plan, 0, 0, &request.prompt, &[2, 5, 3]);
    sample_last(&mut plan);
    step(&mut model, &mut plan);
    let image = model.export_blocks(&[BlockId(2), BlockId(5), BlockId(3)]);
    (model, request, image.expect("they are in the pool"))
}

#[test]
fn what_one_oracle_exports_another_goes_on_with() {
    let (_, request, image) = export_prompt();
    let expected = oracle_output(&request, 0, vocabulary());
    let decode = |blocks: [u32; 3]| {
        let mut model = oracle();
        let imported = model.import_blocks(&[BlockId(0), BlockId(1), BlockId(4)], &image);
        assert_eq!(imported, Ok(()));
        let mut begun = start(7, &request);
        begun.output.push(expected[0]);
        let mut plan = BatchPlan::default();
        plan.started.push(begun);
        push_row(&mut plan, 7, 9, &expected[..1], &blocks);
        sample_last(&mut plan);
        step(&mut model, &mut plan)
    };
    assert_eq!(decode([0, 1, 4]).tokens, [expected[1]]);
    let wrong = decode([1, 0, 4]);
    let message = problem(&wrong, 0).expect("the blocks are exchanged");
    assert!(message.contains("needs its position 0"), "{message}");
}

#[test]
fn a_damaged_image_changes_nothing() {
    let (mut model, _, image) = export_prompt();
    let targets = [BlockId(0), BlockId(1), BlockId(4)];
    let before = model.export_blocks(&targets);
    for bit in 0..300 {
        let mut damaged = image.clone();
        damaged.flip_bit(bit);
        let imported = model.import_blocks(&targets, &damaged);
        assert_eq!(imported, Err(ImageError::Checksum), "bit {bit}");
    }
    let imported = model.import_blocks(&targets[..2], &image);
    assert!(matches!(imported, Err(ImageError::WrongSize { .. })));
    let outside = [BlockId(0), BlockId(1), BlockId(8)];
    let imported = model.import_blocks(&outside, &image);
    assert_eq!(imported, Err(ImageError::OutsidePool { block: BlockId(8) }));
    let exported = model.export_blocks(&outside);
    assert_eq!(exported, Err(ImageError::OutsidePool { block: BlockId(8) }));
    assert_eq!(model.export_blocks(&targets), before);
}

#[test]
fn a_script_passes_empty_images() {
    let mut model = MockModel::scripted(vocabulary());
    let image = model.export_blocks(&[BlockId(7)]).expect("it has no pool");
    assert_eq!(model.import_blocks(&[BlockId(9)], &image), Ok(()));
    let imported = model.import_blocks(&[], &image);
    assert!(matches!(imported, Err(ImageError::WrongSize { .. })));
}
