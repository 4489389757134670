//! Promise A6: the logits of a row are the same bits whatever shares the batch, however it is chunked,
//! wherever its blocks lie and however many threads compute it.

use std::path::{Path, PathBuf};

use crate::session::{Feed, Random, Session, Setup, fixture, smollm2};
use millpond_engine::kernels::cpu::Isa;
use millpond_scheduler::{SamplingParams, TokenId};

/// Logits of one sequence, one row per token, as bits.
type Trace = Vec<Vec<u32>>;

const TINY: [&str; 5] = [
    "llama",
    "llama_rope_llama3",
    "llama_unigram_v5cfg",
    "mistral_sliding",
    "gemma3_text",
];

fn tiny(model: &str) -> PathBuf {
    fixture("tiny").join(model)
}

/// Token ids that need no meaning; all lie in every fixture's vocabulary.
fn tokens(seed: u64, len: usize) -> Vec<TokenId> {
    let mut random = Random(seed);
    (0..len)
        .map(|_| TokenId(3 + random.below(500) as u32))
        .collect()
}

/// The sequence alone, in chunks of `chunk` tokens.
fn alone(path: &Path, setup: Setup, tokens: &[TokenId], chunk: usize) -> Trace {
    let mut session = Session::open(path, setup);
    let track = session.add(tokens, SamplingParams::default());
    let mut trace = Trace::new();
    for piece in tokens.chunks(chunk) {
        trace.extend(bits(session.logits(&[Feed {
            track,
            num_tokens: piece.len(),
        }])));
    }
    trace
}

/// All sequences in one session, random chunks of random ones together, until all are computed.
fn together(session: &mut Session, sequences: &[Vec<TokenId>], random: &mut Random) -> Vec<Trace> {
    let mut traces = vec![Trace::new(); sequences.len()];
    for tokens in sequences {
        session.add(tokens, SamplingParams::default());
    }
    loop {
        let feeds = random_feeds(session, random);
        if feeds.is_empty() {
            return traces;
        }
        let mut logits = bits(session.logits(&feeds)).into_iter();
        for feed in feeds {
            traces[feed.track].extend(logits.by_ref().take(feed.num_tokens));
        }
    }
}

/// Mostly single tokens, as decode has them, and now and then a chunk; never nothing while work is left.
fn random_feeds(session: &Session, random: &mut Random) -> Vec<Feed> {
    let mut feeds = Vec::new();
    for (track, state) in session.tracks.iter().enumerate() {
        let left = state.num_uncomputed();
        let skip = random.below(4) == 0 && track + 1 < session.tracks.len();
        if left == 0 || skip {
            continue;
        }
        let num_tokens = match random.below(3) {
            0 => 1 + random.below(left.min(70)),
            _ => 1,
        };
        feeds.push(Feed { track, num_tokens });
    }
    let unfinished = session
        .tracks
        .iter()
        .position(|track| track.num_uncomputed() > 0);
    match (feeds.is_empty(), unfinished) {
        (true, Some(track)) => vec![Feed {
            track,
            num_tokens: 1,
        }],
        (true, None) | (false, _) => feeds,
    }
}

fn bits(rows: Vec<Vec<f32>>) -> Trace {
    let row_bits = |row: Vec<f32>| row.into_iter().map(f32::to_bits).collect();
    rows.into_iter().map(row_bits).collect()
}

fn assert_same(what: &str, ours: &Trace, reference: &Trace) {
    assert_eq!(ours.len(), reference.len(), "{what}: rows");
    let differs = ours.iter().zip(reference).position(|(a, b)| a != b);
    assert_eq!(differs, None, "{what}: first position whose logits differ");
    let finite = |row: &Vec<u32>| row.iter().all(|x| f32::from_bits(*x).is_finite());
    assert!(reference.iter().all(finite), "{what}: not finite");
}

/// Sequence lengths beside and beyond the borders of blocks, windows and attention splits.
fn sequences(count: usize, max_len: usize) -> Vec<Vec<TokenId>> {
    let mut random = Random(7);
    let len = |index: usize, random: &mut Random| match index {
        0 => max_len,
        1 => 1,
        2 => 16,
        3 => 17,
        _ => 1 + random.below(40),
    };
    (0..count)
        .map(|index| tokens(index as u64, len(index, &mut random)))
        .collect()
}

fn check_chunks(path: &Path, len: usize, chunks: &[usize]) {
    let tokens = tokens(1, len);
    let reference = alone(path, Setup::default(), &tokens, len);
    for chunk in chunks {
        let ours = alone(path, Setup::default(), &tokens, *chunk);
        assert_same(&format!("{path:?} in chunks of {chunk}"), &ours, &reference);
    }
}

fn check_neighbours(path: &Path, batch_sizes: &[usize], max_len: usize) {
    let largest = batch_sizes.iter().copied().max().unwrap_or(0);
    let sequences = sequences(largest, max_len);
    let solo = |tokens: &Vec<TokenId>| alone(path, Setup::default(), tokens, tokens.len());
    let references: Vec<Trace> = sequences.iter().map(solo).collect();
    for size in batch_sizes {
        for num_threads in [1, 2] {
            let seed = (size * 2 + num_threads) as u64;
            let setup = Setup {
                num_threads,
                block_seed: seed,
                ..Setup::default()
            };
            let mut session = Session::open(path, setup);
            let traces = together(&mut session, &sequences[..*size], &mut Random(seed));
            for (index, (ours, reference)) in traces.iter().zip(&references).enumerate() {
                let what = format!("{path:?}, sequence {index} of {size}, {setup:?}");
                assert_same(&what, ours, reference);
            }
        }
    }
}

/// A fork at every offset of a block: full blocks shared, the partial one copied, both sides go on.
fn check_forks(path: &Path) {
    let common = tokens(2, 48);
    let reference_of = |tail: u64| {
        let all = [common.clone(), tokens(tail, 20)].concat();
        alone(path, Setup::default(), &all, all.len())
    };
    for at in [1, 15, 16, 17, 33, 47] {
        let mut session = Session::open(
            path,
            Setup {
                block_seed: at,
                ..Setup::default()
            },
        );
        let at = at as usize;
        let parent = session.add(&common, SamplingParams::default());
        session.logits(&[Feed {
            track: parent,
            num_tokens: at,
        }]);
        let child = session.fork(parent);
        for (track, tail) in [(parent, 3), (child, 4)] {
            session.tracks[track].tokens.extend(tokens(tail, 20));
        }
        let num_tokens = common.len() + 20 - at;
        let feeds = [parent, child].map(|track| Feed { track, num_tokens });
        let traces = bits(session.logits(&feeds));
        for (trace, tail) in traces.chunks_exact(num_tokens).zip([3, 4]) {
            let what = format!("{path:?} forked at {at}, tail {tail}");
            assert_same(&what, &trace.to_vec(), &reference_of(tail)[at..].to_vec());
        }
    }
}

#[test]
fn chunks_change_no_bit() {
    for model in TINY {
        check_chunks(&tiny(model), 300, &[1, 7, 16, 64]);
    }
}

#[test]
fn neighbours_threads_and_block_order_change_no_bit() {
    for model in TINY {
        check_neighbours(&tiny(model), &[1, 2, 3, 5, 8, 16, 31, 64], 290);
    }
}

#[test]
fn forks_and_copies_change_no_bit() {
    for model in TINY {
        check_forks(&tiny(model));
    }
}

#[test]
fn the_real_model_keeps_its_bits() {
    let path = smollm2();
    check_chunks(&path, 70, &[1, 16, 33]);
    check_neighbours(&path, &[12], 280);
    check_forks(&path);
}

/// On a quantised model every float operation has one definition, so that instruction sets agree too.
#[test]
fn instruction_sets_agree_on_the_real_model() {
    let path = smollm2();
    let tokens = tokens(5, 40);
    let on = |isa| {
        alone(
            &path,
            Setup {
                isa: Some(isa),
                ..Setup::default()
            },
            &tokens,
            40,
        )
    };
    let portable = on(Isa::Portable);
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
        assert_same(&format!("{isa:?} against portable"), &on(isa), &portable);
    }
}
