//! The real GGUF models, fed the reference's own tokens, against an f32 computation with the same weights.
//!
//! Our products quantise activations to int8, so the figures are those that another int8 implementation
//! reaches on the same files, with its measured spread as margin (`tests/fixtures/README.md`).

use std::path::Path;

use crate::session::{Expected, Feed, Session, Setup, fixture};
use millpond_engine::fetch;
use millpond_scheduler::{SamplingParams, TokenId};

const NUM_PROMPTS: usize = 6;
const NUM_STEPS: usize = 48;
/// Ids stored per step.
const NUM_STORED: usize = 8;
const CHUNK: usize = 512;

/// What a model must reach.
struct Accept {
    mean_kl: f64,
    /// Largest lead of the reference's first choice where ours differs.
    flipped_gap: f32,
}

const MIN_TOP1_AGREEMENT: f64 = 0.95;
const MAX_KL: f64 = 0.1;
const MAX_RELATIVE_NLL_DIFFERENCE: f64 = 0.005;
const MAX_MEAN_LOGPROB_DIFFERENCE: f64 = 0.12;
const MIN_TEXT_TOP1_AGREEMENT: f64 = 0.945;

fn check(card: &str, folder: &str, accept: &Accept) {
    let path = fetch::resolve(card, &mut |_| {}).expect("the model can be fetched");
    let expected = Expected::open(&fixture("real").join(folder));
    check_continuations(&path, &expected, accept);
    check_text(&path, &expected);
}

fn open(path: &Path) -> Session {
    let setup = Setup {
        num_threads: 2,
        num_blocks: 256,
        ..Setup::default()
    };
    Session::open(path, setup)
}

/// Figures over the steps of all continuations.
#[derive(Debug, Default)]
struct Continuations {
    num_steps: usize,
    num_agreeing: usize,
    total_kl: f64,
    max_kl: f64,
    flipped_gap: f32,
}

fn check_continuations(path: &Path, expected: &Expected, accept: &Accept) {
    let mut figures = Continuations::default();
    let mut session = open(path);
    for prompt in 0..NUM_PROMPTS {
        let mut tokens = expected.tokens(&format!("p{prompt}.input_ids"));
        let num_prompt = tokens.len();
        let continuation = expected.tokens(&format!("p{prompt}.greedy_ids"));
        tokens.extend(&continuation[..NUM_STEPS - 1]);
        let reference = Steps::of(expected, prompt);
        let mut step = 0;
        teacher_forced(&mut session, &tokens, num_prompt - 1, &mut |logits| {
            figures.add(&reference, step, logits);
            step += 1;
        });
        assert_eq!(step, NUM_STEPS);
    }
    println!("{figures:?}, mean KL {}", figures.mean_kl());
    assert!(figures.agreement() >= MIN_TOP1_AGREEMENT, "{figures:?}");
    assert!(figures.mean_kl() <= accept.mean_kl, "{figures:?}");
    assert!(figures.max_kl <= MAX_KL, "{figures:?}");
    assert!(figures.flipped_gap < accept.flipped_gap, "{figures:?}");
}

/// What the reference says of the steps of one continuation.
struct Steps {
    ids: Vec<u32>,
    logprobs: Vec<f32>,
    chosen: Vec<TokenId>,
    gaps: Vec<f32>,
}

impl Steps {
    fn of(expected: &Expected, prompt: usize) -> Self {
        Steps {
            ids: expected.ids(&format!("p{prompt}.step_top8_ids")),
            logprobs: expected.values(&format!("p{prompt}.step_top8_logprobs")),
            chosen: expected.tokens(&format!("p{prompt}.greedy_ids")),
            gaps: expected.values(&format!("p{prompt}.greedy_gaps")),
        }
    }
}

impl Continuations {
    fn add(&mut self, reference: &Steps, step: usize, logits: &[f32]) {
        let stored = step * NUM_STORED..(step + 1) * NUM_STORED;
        let logprobs = &reference.logprobs[stored.clone()];
        let kl = kl_divergence(&reference.ids[stored], logprobs, logits);
        self.num_steps += 1;
        self.total_kl += kl;
        self.max_kl = self.max_kl.max(kl);
        match argmax(logits) == reference.chosen[step] {
            true => self.num_agreeing += 1,
            false => self.flipped_gap = self.flipped_gap.max(reference.gaps[step]),
        }
    }

    fn agreement(&self) -> f64 {
        self.num_agreeing as f64 / self.num_steps as f64
    }

    fn mean_kl(&self) -> f64 {
        self.total_kl / self.num_steps as f64
    }
}

fn check_text(path: &Path, expected: &Expected) {
    let tokens = expected.tokens("ppl.input_ids");
    let reference = expected.values("ppl.token_logprobs");
    let first_choices = expected.tokens("ppl.argmax");
    let (mut ours, mut num_agreeing) = (Vec::new(), 0);
    teacher_forced(&mut open(path), &tokens, 0, &mut |logits| {
        num_agreeing += usize::from(argmax(logits) == first_choices[ours.len()]);
        // The last token has no successor; its log-probability is not compared.
        let next = tokens.get(ours.len() + 1).map_or(0, |next| next.0 as usize);
        ours.push(f64::from(logits[next]) - log_sum_exp(logits));
    });
    ours.truncate(reference.len());
    assert_eq!(ours.len(), reference.len());
    let total: f64 = ours.iter().sum();
    let reference_total: f64 = reference.iter().map(|x| f64::from(*x)).sum();
    let nll_difference = (total - reference_total) / reference_total;
    let differences = ours
        .iter()
        .zip(&reference)
        .map(|(a, b)| (a - f64::from(*b)).abs());
    let mean_difference = differences.sum::<f64>() / ours.len() as f64;
    let agreement = num_agreeing as f64 / tokens.len() as f64;
    println!("NLL {nll_difference:+.5}, logprobs {mean_difference:.4}, top-1 {agreement:.4}");
    assert!(
        nll_difference.abs() <= MAX_RELATIVE_NLL_DIFFERENCE,
        "{nll_difference}"
    );
    assert!(
        mean_difference <= MAX_MEAN_LOGPROB_DIFFERENCE,
        "{mean_difference}"
    );
    assert!(agreement >= MIN_TEXT_TOP1_AGREEMENT, "{agreement}");
}

/// Shows the logits after each of `tokens` from index `first` on, computed in chunks.
fn teacher_forced(
    session: &mut Session,
    tokens: &[TokenId],
    first: usize,
    visit: &mut dyn FnMut(&[f32]),
) {
    let track = session.add(tokens, SamplingParams::default());
    for start in (0..tokens.len()).step_by(CHUNK) {
        let num_tokens = CHUNK.min(tokens.len() - start);
        let wanted = first.saturating_sub(start).min(num_tokens) as u32..num_tokens as u32;
        session.visit_logits(&[Feed { track, num_tokens }], wanted, visit);
    }
    session.end(track);
}

/// KL(reference, ours) over the stored ids, the remaining mass as one bucket.
fn kl_divergence(ids: &[u32], logprobs: &[f32], logits: &[f32]) -> f64 {
    let normaliser = log_sum_exp(logits);
    let (mut kl, mut rest, mut our_rest) = (0.0, 1.0, 1.0);
    for (id, logprob) in ids.iter().zip(logprobs) {
        let reference = f64::from(*logprob);
        let ours = f64::from(logits[*id as usize]) - normaliser;
        kl += reference.exp() * (reference - ours);
        rest -= reference.exp();
        our_rest -= ours.exp();
    }
    // Where the stored ids hold all the mass, rounding leaves a rest around zero that means nothing.
    const NO_MASS: f64 = 1e-6;
    match rest > NO_MASS && our_rest > NO_MASS {
        true => kl + rest * (rest / our_rest).ln(),
        false => kl,
    }
}

fn log_sum_exp(logits: &[f32]) -> f64 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|x| f64::from(x - max).exp()).sum();
    f64::from(max) + sum.ln()
}

fn argmax(logits: &[f32]) -> TokenId {
    let best = (0..logits.len()).reduce(|a, b| if logits[b] > logits[a] { b } else { a });
    TokenId(best.expect("a vocabulary") as u32)
}

#[test]
fn smollm2_q4_1() {
    check(
        "smollm2-135m-instruct",
        "smollm2",
        &Accept {
            mean_kl: 0.008,
            flipped_gap: 0.4,
        },
    );
}

#[test]
fn gemma3_q4_k_m() {
    check(
        "gemma-3-270m",
        "gemma3",
        &Accept {
            mean_kl: 0.014,
            flipped_gap: 1.0,
        },
    );
}
