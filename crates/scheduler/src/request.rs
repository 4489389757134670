//! What was asked: an immutable request, its sampling and stop conditions, and how it may end.
//!
//! No progress lives here; that is `Sequence`.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::time::Timestamp;

/// A token of the model's vocabulary.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
#[repr(transparent)]
pub struct TokenId(pub u32);

/// Names one request for its whole life. Minted by whoever submits it; never reused.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct RequestId(pub u64);

/// Names one sequence (one choice of one request). Minted by the scheduler in order; never reused.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct SequenceId(pub u64);

/// Separates prefix caches: blocks are shared only between requests whose salts are equal, byte for byte.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct CacheSalt(pub Arc<[u8]>);

/// An immutable ask. Output depends on `prompt`, `sampling`, `stop` and the model, on nothing else (A6).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Request {
    /// The request's name, unique among live requests.
    pub id: RequestId,
    /// Prompt tokens; never empty.
    pub prompt: Arc<[TokenId]>,
    /// How the next token is chosen.
    pub sampling: SamplingParams,
    /// When generation ends.
    pub stop: StopConditions,
    /// Number of choices: independent continuations of the same prompt, each a sequence of its own.
    pub num_choices: u32,
    /// Larger runs earlier and is preempted later.
    pub priority: i32,
    /// Who may share cached prefixes with this request.
    pub salt: CacheSalt,
    /// When it was submitted.
    pub arrival: Timestamp,
    /// When it gives up.
    pub deadlines: Deadlines,
}

/// Points in time after which a request ends with `FinishReason::Timeout`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Deadlines {
    /// It must have been scheduled once by then.
    pub queue: Option<Timestamp>,
    /// Its first token must have been committed by then.
    pub first_token: Option<Timestamp>,
    /// It must have finished by then.
    pub total: Option<Timestamp>,
}

/// Which deadline passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DeadlineKind {
    /// Still waiting when `Deadlines::queue` passed.
    Queue,
    /// No token committed when `Deadlines::first_token` passed.
    FirstToken,
    /// Not finished when `Deadlines::total` passed.
    Total,
}

/// How the next token is chosen: plain data, read by the runner's fixed sampling pipeline.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SamplingParams {
    /// Key of the noise, together with choice, position and token id.
    pub seed: u64,
    /// 0 is greedy.
    pub temperature: f32,
    /// Keep the k most likely tokens; 0 keeps all.
    pub top_k: u32,
    /// Keep the smallest set of tokens with at least this probability; 1 keeps all.
    pub top_p: f32,
    /// Drop tokens less likely than this fraction of the most likely one; 0 drops none.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens in prompt or output; 1 is off.
    pub repetition_penalty: f32,
    /// Subtracted once per occurrence in the output.
    pub frequency_penalty: f32,
    /// Subtracted once if the token occurs in the output.
    pub presence_penalty: f32,
    /// Added to the raw logits.
    pub logit_bias: Vec<(TokenId, f32)>,
    /// If given, nothing else may be chosen.
    pub allowed_token_ids: Option<Vec<TokenId>>,
    /// Report the chosen token's log-probability and this many alternatives (0: the chosen one alone).
    pub logprobs: Option<u32>,
    /// The same for every prompt token after the first.
    pub prompt_logprobs: Option<u32>,
}

impl Default for SamplingParams {
    /// Greedy, nothing reported.
    fn default() -> Self {
        SamplingParams {
            seed: 0,
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            logit_bias: Vec::new(),
            allowed_token_ids: None,
            logprobs: None,
            prompt_logprobs: None,
        }
    }
}

/// When generation ends, as far as tokens tell (stop strings belong to the engine's text pipeline).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StopConditions {
    /// Generate at most this many tokens; at least 1.
    pub max_tokens: u32,
    /// Neither end-of-sequence nor stop tokens may be chosen before this many tokens.
    pub min_tokens: u32,
    /// Tokens that end the output, wherever they occur.
    pub stop_token_ids: Vec<TokenId>,
    /// The model's end-of-sequence tokens.
    pub eos_token_ids: Vec<TokenId>,
    /// Let end-of-sequence tokens pass like any other.
    pub ignore_eos: bool,
}

impl StopConditions {
    /// Does choosing `token` as the `num_output`-th output token (counted from 1) end the sequence?
    ///
    /// A stop token wins over the length limit. Below `min_tokens` no token stops.
    pub fn finish_at(&self, token: TokenId, num_output: u32) -> Option<FinishReason> {
        if num_output >= self.min_tokens {
            if !self.ignore_eos && self.eos_token_ids.contains(&token) {
                return Some(FinishReason::Stop(StopCause::EndOfSequence(token)));
            }
            if self.stop_token_ids.contains(&token) {
                return Some(FinishReason::Stop(StopCause::Token(token)));
            }
        }
        (num_output >= self.max_tokens).then_some(FinishReason::Length)
    }
}

/// Why a sequence ended. Every admitted sequence reaches exactly one of these, once (invariant I4).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FinishReason {
    /// It came to its own end.
    Stop(StopCause),
    /// `max_tokens` or the context length was reached.
    Length,
    /// Somebody called `abort`.
    Cancelled,
    /// A deadline passed.
    Timeout(DeadlineKind),
    /// Its row failed.
    Error(RowError),
}

/// What made a sequence stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum StopCause {
    /// An end-of-sequence token of the model.
    EndOfSequence(TokenId),
    /// One of the request's own stop tokens.
    Token(TokenId),
    /// A stop string, found by the driver between execute and commit.
    StopString,
}

/// Why one row of a batch failed. The other rows go on (A3).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum RowError {
    /// The model produced NaN or an infinity.
    #[error("the model produced non-finite logits")]
    NonFiniteLogits,
    /// No token was left to choose from.
    #[error("no token may be chosen: every token is masked")]
    NothingToSample,
    /// The whole step failed or panicked; the rows in it ended with it.
    #[error("the engine step failed: {0}")]
    StepFailed(String),
    /// No worker could finish it: those that began were lost, or none would have it.
    #[error("no worker could finish it: {0}")]
    Abandoned(String),
    /// The runner reported an inconsistency (the mock model: a wrong, stale or foreign block).
    #[error("inconsistent state: {0}")]
    Inconsistent(String),
}
