//! Log-probabilities of prompt tokens: logits in small tiles, each reduced before the next is computed.

use std::sync::OnceLock;

use millpond_scheduler::{PositionLogprobs, Request, Row, RowError, Span32, TokenId};

use super::forward_pass::ForwardPass;
use crate::kernels::cpu::CpuKernels;
use crate::sampling::logprobs::position_logprobs;

/// Rows of logits alive at once: a whole prompt's would not fit in memory.
const TILE_ROWS: usize = 16;

/// The prompt tokens that a row scores.
pub(super) struct ScoredPrompt<'a> {
    /// Index into the batch of the token before the first target.
    first_token: u32,
    /// The scored tokens, each the successor of one token of the batch.
    targets: &'a [TokenId],
    num_top: u32,
}

impl<'a> ScoredPrompt<'a> {
    /// `span` is the row's range in the batch. Fails when the row asks for what it does not compute.
    pub fn new(row: &Row, span: Span32, request: &'a Request) -> Result<Self, RowError> {
        let scored = row.prompt_logprobs;
        let computed = row.first_position..row.first_position + span.len();
        let targets = request
            .prompt
            .get(scored.start as usize + 1..scored.end as usize + 1);
        match targets {
            Some(targets) if scored.start >= computed.start && scored.end <= computed.end => {
                Ok(ScoredPrompt {
                    first_token: span.start + scored.start - row.first_position,
                    targets,
                    num_top: request.sampling.prompt_logprobs.unwrap_or(0),
                })
            }
            Some(_) | None => Err(RowError::Inconsistent(format!(
                "prompt log-probabilities after positions {scored:?} of a row that computes {computed:?}"
            ))),
        }
    }
}

/// Appends one entry per target. On failure some may have been appended.
pub(super) fn score(
    pass: &mut ForwardPass,
    kernels: &CpuKernels,
    prompt: &ScoredPrompt<'_>,
    scores: &mut Vec<PositionLogprobs>,
) -> Result<(), RowError> {
    let vocab_size = pass.config().vocab_size;
    let mut token = prompt.first_token;
    for targets in prompt.targets.chunks(TILE_ROWS) {
        let end = token + targets.len() as u32;
        let logits = pass.logits(kernels, token..end);
        let tile: [OnceLock<_>; TILE_ROWS] = std::array::from_fn(|_| OnceLock::new());
        kernels.for_each(targets.len(), &|index| {
            let row = &logits[index * vocab_size..][..vocab_size];
            tile[index].get_or_init(|| score_token(row, targets[index], prompt.num_top));
        });
        for score in tile.into_iter().filter_map(OnceLock::into_inner) {
            scores.push(score?);
        }
        token = end;
    }
    Ok(())
}

fn score_token(
    logits: &[f32],
    target: TokenId,
    num_top: u32,
) -> Result<PositionLogprobs, RowError> {
    if !logits.iter().all(|logit| logit.is_finite()) {
        return Err(RowError::NonFiniteLogits);
    }
    Ok(position_logprobs(logits, target, num_top))
}
