//! Turns what the mock chose into an `OutputRow`, with made-up log-probabilities where they were asked for.
//!
//! The made-up distribution is geometric and depends on the tokens alone: rank r has log-probability −0.7 r, so
//! that probabilities sum to less than 1 and the same token at the same position always reports the same.

use std::num::NonZeroU32;

use super::chain::mix;
use super::{Answer, Asked, end_position, sampling};
use crate::plan::{
    ModelOutput, OutputRow, PositionLogprobs, Row, RowVerdict, Span32, TokenLogprob,
};
use crate::request::TokenId;

/// Natural log-probability lost from one rank to the next.
const LOGPROB_PER_RANK: f32 = -0.7;

/// Prompt tokens rank among the first so many.
const MAX_PROMPT_RANK: u64 = 32;

/// Appends the log-probabilities of a row to `output`, and returns the row that refers to them and to its new
/// tokens, those of `output` from `tokens_start` on.
pub(super) fn row(
    answer: Answer<'_>,
    row: &Row,
    tokens_start: usize,
    vocabulary: NonZeroU32,
    output: &mut ModelOutput,
) -> OutputRow {
    let asked = answer.asked;
    let logprobs_start = output.logprobs.len();
    let prompt_start = output.prompt_logprobs.len();
    if let Some(num_top) = asked.request.sampling.logprobs {
        let chosen = output.tokens[tokens_start..].iter().copied();
        let reported = chosen
            .map(|token| Ranked { token, rank: 1 })
            .map(|ranked| ranked.logprobs(num_top, vocabulary));
        output.logprobs.extend(reported);
    }
    if let Some(num_top) = asked.request.sampling.prompt_logprobs {
        let reported = prompt_tokens(asked, row)
            .map(|(token, position)| Ranked::of_prompt(token, position, vocabulary))
            .map(|ranked| ranked.logprobs(num_top, vocabulary));
        output.prompt_logprobs.extend(reported);
    }
    OutputRow {
        tokens: span(tokens_start, output.tokens.len()),
        num_computed: answer.num_computed,
        logprobs: span(logprobs_start, output.logprobs.len()),
        prompt_logprobs: span(prompt_start, output.prompt_logprobs.len()),
        verdict: RowVerdict::Continue,
    }
}

fn span(start: usize, end: usize) -> Span32 {
    Span32 {
        start: start as u32,
        end: end as u32,
    }
}

/// The prompt tokens that follow the positions the row is to report, with their own positions.
fn prompt_tokens<'a>(asked: &'a Asked, row: &Row) -> impl Iterator<Item = (TokenId, u32)> + 'a {
    let Span32 { start, end } = row.prompt_logprobs;
    let followed = start.max(row.first_position)..end.min(end_position(row));
    followed.filter_map(|position| {
        let token = asked.request.prompt.get(position as usize + 1)?;
        Some((*token, position + 1))
    })
}

/// A token and its rank in the made-up distribution.
#[derive(Clone, Copy)]
struct Ranked {
    token: TokenId,
    /// From 1.
    rank: u32,
}

impl Ranked {
    fn of_prompt(token: TokenId, position: u32, vocabulary: NonZeroU32) -> Self {
        let num_ranks = MAX_PROMPT_RANK.min(u64::from(vocabulary.get()));
        let hash = mix(u64::from(token.0) << 32 | u64::from(position));
        let rank = 1 + (hash % num_ranks) as u32;
        Ranked { token, rank }
    }

    /// The distribution in which the tokens of ranks 1, 2, … follow each other round the vocabulary.
    fn logprobs(self, num_top: u32, vocabulary: NonZeroU32) -> PositionLogprobs {
        let size = vocabulary.get();
        let first = sampling::after(self.token, size - (self.rank - 1) % size, vocabulary);
        let top = (0..num_top.min(size)).map(|steps| TokenLogprob {
            token: sampling::after(first, steps, vocabulary),
            logprob: logprob(steps + 1),
        });
        PositionLogprobs {
            chosen: TokenLogprob {
                token: self.token,
                logprob: logprob(self.rank),
            },
            rank: self.rank,
            top: top.collect(),
        }
    }
}

fn logprob(rank: u32) -> f32 {
    LOGPROB_PER_RANK * rank as f32
}
