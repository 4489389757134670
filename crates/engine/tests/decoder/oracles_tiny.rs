//! Tiny random models against logits and continuations that another implementation computed in f32.

use crate::session::{Expected, Feed, Session, Setup, fixture, prompt_logprobs};
use millpond_scheduler::{SamplingParams, TokenId};

const NUM_PROMPTS: usize = 4;
const NUM_OUTPUT: usize = 24;

/// Relative L2 distance allowed between our f32 logits and the reference's.
const MAX_RELATIVE_DISTANCE: f64 = 1e-5;
const MAX_LOGPROB_DIFFERENCE: f32 = 1e-4;

fn check(model: &str) {
    let oracle = Oracle::open(model);
    for prompt in 0..NUM_PROMPTS {
        oracle.check_prompt_logits(prompt);
        oracle.check_prompt_logprobs(prompt);
        oracle.check_decode_logits(prompt);
    }
    oracle.check_greedy_together();
}

struct Oracle {
    model: String,
    expected: Expected,
}

impl Oracle {
    fn open(model: &str) -> Self {
        let expected = Expected::open(&fixture("tiny").join(model));
        Oracle {
            model: model.to_owned(),
            expected,
        }
    }

    fn session(&self) -> Session {
        Session::open(&fixture("tiny").join(&self.model), Setup::default())
    }

    fn prompt(&self, prompt: usize) -> Vec<TokenId> {
        self.expected.tokens(&format!("p{prompt}.input_ids"))
    }

    fn check_prompt_logits(&self, prompt: usize) {
        let mut session = self.session();
        let tokens = self.prompt(prompt);
        let track = session.add(&tokens, SamplingParams::default());
        let logits = session.logits(&[Feed {
            track,
            num_tokens: tokens.len(),
        }]);
        let expected = self.expected.values(&format!("p{prompt}.logits"));
        let positions = self.expected.ids(&format!("p{prompt}.positions"));
        let width = expected.len() / positions.len();
        for (position, expected) in positions.into_iter().zip(expected.chunks_exact(width)) {
            let what = format!("{} prompt {prompt} position {position}", self.model);
            assert_close(&what, &logits[position as usize], expected);
        }
    }

    fn check_prompt_logprobs(&self, prompt: usize) {
        let tokens = self.prompt(prompt);
        if tokens.len() == 1 {
            return;
        }
        let mut session = self.session();
        let sampling = SamplingParams {
            prompt_logprobs: Some(0),
            ..SamplingParams::default()
        };
        let track = session.add(&tokens, sampling);
        let output = session.execute(&[Feed {
            track,
            num_tokens: tokens.len(),
        }]);
        let ours = prompt_logprobs(&output, &output.rows[0]);
        let expected = self.expected.values(&format!("p{prompt}.prompt_logprobs"));
        assert_eq!(ours.len(), expected.len());
        for (index, (ours, expected)) in ours.iter().zip(&expected).enumerate() {
            let difference = (ours - expected).abs();
            assert!(
                difference <= MAX_LOGPROB_DIFFERENCE,
                "{} prompt {prompt} token {index}: {ours}, expected {expected}",
                self.model
            );
        }
    }

    /// Teacher-forced, one token at a time after the prompt.
    fn check_decode_logits(&self, prompt: usize) {
        let mut session = self.session();
        let mut tokens = self.prompt(prompt);
        let num_prompt = tokens.len();
        tokens.extend(&self.expected.tokens(&format!("p{prompt}.greedy_ids"))[..NUM_OUTPUT - 1]);
        let track = session.add(&tokens, SamplingParams::default());
        let mut logits = session.logits(&[Feed {
            track,
            num_tokens: num_prompt,
        }]);
        for _ in num_prompt..tokens.len() {
            logits = session.logits(&[Feed {
                track,
                num_tokens: 1,
            }]);
        }
        let expected = self
            .expected
            .values(&format!("p{prompt}.decode_last_logits"));
        let what = format!("{} prompt {prompt}, last decode step", self.model);
        assert_close(&what, logits.last().expect("one row"), &expected);
    }

    fn check_greedy_together(&self) {
        let mut session = self.session();
        for prompt in 0..NUM_PROMPTS {
            session.add(&self.prompt(prompt), SamplingParams::default());
        }
        for (prompt, ours) in session.generate(NUM_OUTPUT).into_iter().enumerate() {
            let expected = self.expected.tokens(&format!("p{prompt}.greedy_ids"));
            assert_eq!(ours, expected, "{} prompt {prompt}", self.model);
        }
    }
}

fn assert_close(what: &str, ours: &[f32], expected: &[f32]) {
    let square = |x: f64| x * x;
    let pairs = ours.iter().zip(expected);
    let distance: f64 = pairs
        .map(|(a, b)| square(f64::from(*a) - f64::from(*b)))
        .sum();
    let norm: f64 = expected.iter().map(|b| square(f64::from(*b))).sum();
    let relative = (distance / norm).sqrt();

    assert!(
        ours.len() == expected.len() && relative <= MAX_RELATIVE_DISTANCE,
        "{what}: relative distance {relative:e}"
    );
}

#[test]
fn llama() {
    check("llama");
}

#[test]
fn llama_with_llama3_rope_scaling() {
    check("llama_rope_llama3");
}

#[test]
fn llama_with_attention_biases() {
    check("llama_unigram_v5cfg");
}

#[test]
fn mistral_with_a_sliding_window() {
    check("mistral_sliding");
}

#[test]
fn gemma3_with_local_and_global_layers() {
    check("gemma3_text");
}
