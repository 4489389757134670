//! What happens to a row of a batch: it fails alone, survives preemption, and reports what it was asked for.

use crate::session::{Feed, Session, Setup, fixture, prompt_logprobs};
use millpond_scheduler::{RowError, RowVerdict, SamplingParams, TokenId};

fn session(block_seed: u64) -> Session {
    let setup = Setup {
        num_threads: 2,
        block_seed,
        ..Setup::default()
    };
    Session::open(&fixture("tiny").join("gemma3_text"), setup)
}

fn prompt(seed: u32, len: u32) -> Vec<TokenId> {
    (0..len)
        .map(|index| TokenId(3 + (index * 37 + seed * 11) % 500))
        .collect()
}

fn sampling(seed: u64) -> SamplingParams {
    SamplingParams {
        seed,
        temperature: 1.0,
        top_p: 0.9,
        repetition_penalty: 1.2,
        frequency_penalty: 0.3,
        logprobs: Some(2),
        ..SamplingParams::default()
    }
}

const NUM_SEQUENCES: u32 = 16;

fn add_all(session: &mut Session) {
    for index in 0..NUM_SEQUENCES {
        session.add(&prompt(index, 5 + index * 3), sampling(u64::from(index)));
    }
}

#[test]
fn a_row_with_nan_in_its_keys_ends_alone() {
    let control = {
        let mut session = session(0);
        add_all(&mut session);
        session.generate(4)
    };
    let mut session = session(1);
    add_all(&mut session);
    session.generate(1);
    let victim = 5;
    session.poison(victim);
    let feeds: Vec<_> = (0..session.tracks.len())
        .map(|track| Feed {
            track,
            num_tokens: 1,
        })
        .collect();
    let output = session.execute(&feeds);
    for (index, row) in output.rows.iter().enumerate() {
        let expected = match index == victim {
            true => RowVerdict::Failed(RowError::NonFiniteLogits),
            false => RowVerdict::Continue,
        };
        assert_eq!(row.verdict, expected, "row {index}");
    }
    assert_eq!(output.row_tokens(&output.rows[victim]), []);
    session.end(victim);
    session.tracks.remove(victim);
    let survivors = session.generate(4);
    let expected = control
        .iter()
        .enumerate()
        .filter(|(index, _)| *index != victim);
    for (ours, (index, expected)) in survivors.iter().zip(expected) {
        assert_eq!(ours, expected, "sequence {index}");
    }
}

#[test]
fn a_damaged_prefill_chunk_is_found_though_nobody_samples_it() {
    let mut session = session(0);
    let track = session.add(&prompt(1, 60), sampling(1));
    session.execute(&[Feed {
        track,
        num_tokens: 20,
    }]);
    session.poison(track);
    let output = session.execute(&[Feed {
        track,
        num_tokens: 20,
    }]);
    assert_eq!(
        output.rows[0].verdict,
        RowVerdict::Failed(RowError::NonFiniteLogits)
    );
}

#[test]
fn preemption_changes_no_token() {
    let run = |preempted: &[usize]| {
        let mut session = session(3);
        add_all(&mut session);
        session.generate(7);
        for track in preempted {
            session.preempt(*track);
        }
        session.generate(20)
    };
    assert_eq!(run(&[0, 4, 15]), run(&[]));
}

#[test]
fn a_single_row_failure_names_what_is_wrong() {
    let mut session = session(0);
    let good = session.add(&prompt(1, 9), SamplingParams::default());
    let bad = session.add(&[TokenId(1), TokenId(512)], SamplingParams::default());
    let feeds = [(bad, 2), (good, 9)].map(|(track, num_tokens)| Feed { track, num_tokens });
    let output = session.execute(&feeds);
    let RowVerdict::Failed(RowError::Inconsistent(message)) = &output.rows[0].verdict else {
        panic!("{:?}", output.rows[0]);
    };
    assert!(message.contains("512"), "{message}");
    assert_eq!(output.rows[1].verdict, RowVerdict::Continue);
    assert_eq!(output.row_tokens(&output.rows[1]).len(), 1);
}

#[test]
fn log_probabilities_come_in_order_for_the_rows_that_asked() {
    let mut session = session(0);
    let scored = |n| SamplingParams {
        prompt_logprobs: Some(n),
        ..SamplingParams::default()
    };
    let quiet = session.add(&prompt(1, 12), SamplingParams::default());
    let first = session.add(&prompt(2, 40), scored(0));
    let second = session.add(
        &prompt(3, 25),
        SamplingParams {
            logprobs: Some(3),
            ..scored(2)
        },
    );
    let whole: Vec<_> = [(quiet, 12), (first, 40), (second, 25)]
        .map(|(track, num_tokens)| Feed { track, num_tokens })
        .to_vec();
    let output = session.execute(&whole);
    let counts = output
        .rows
        .iter()
        .map(|row| (row.logprobs.len(), row.prompt_logprobs.len()));
    assert_eq!(counts.collect::<Vec<_>>(), [(0, 0), (0, 39), (1, 24)]);
    let chosen = &output.logprobs[output.rows[2].logprobs.range()][0];
    assert_eq!(chosen.chosen.token, output.row_tokens(&output.rows[2])[0]);
    assert_eq!((chosen.rank, chosen.top.len()), (1, 3));
    let expected: Vec<_> = prompt(3, 25)[1..].to_vec();
    let scores = &output.prompt_logprobs[output.rows[2].prompt_logprobs.range()];
    assert_eq!(
        scores
            .iter()
            .map(|score| score.chosen.token)
            .collect::<Vec<_>>(),
        expected
    );

    let in_chunks = {
        let track = session.add(&prompt(2, 40), scored(0));
        let mut scores = Vec::new();
        for num_tokens in [17, 1, 21, 1] {
            let output = session.execute(&[Feed { track, num_tokens }]);
            scores.extend(prompt_logprobs(&output, &output.rows[0]));
        }
        scores
    };
    assert_eq!(in_chunks, prompt_logprobs(&output, &output.rows[1]));
}
