//! Which token the mock may choose: the masks of a request, without logits.
//!
//! Temperature, filters, penalties and bias have no meaning here and are not looked at.

use std::num::NonZeroU32;

use crate::request::{Request, RowError, TokenId};

/// The first token at or after `start`, going round the vocabulary, that may be the `num_output`-th output token.
pub(super) fn first_allowed(
    request: &Request,
    start: TokenId,
    num_output: u32,
    vocabulary: NonZeroU32,
) -> Result<TokenId, RowError> {
    let free = |token: &TokenId| !is_too_early(request, *token, num_output);
    let found = match &request.sampling.allowed_token_ids {
        None => (0..vocabulary.get())
            .map(|steps| after(start, steps, vocabulary))
            .find(free),
        Some(allowed) => allowed
            .iter()
            .copied()
            .filter(|token| token.0 < vocabulary.get())
            .filter(free)
            .min_by_key(|token| distance(start, *token, vocabulary)),
    };
    found.ok_or(RowError::NothingToSample)
}

/// Neither end-of-sequence nor stop tokens may be among the first `min_tokens`.
fn is_too_early(request: &Request, token: TokenId, num_output: u32) -> bool {
    let stop = &request.stop;
    num_output <= stop.min_tokens
        && (stop.eos_token_ids.contains(&token) || stop.stop_token_ids.contains(&token))
}

/// The token `steps` after `token`, going round the vocabulary.
pub(super) fn after(token: TokenId, steps: u32, vocabulary: NonZeroU32) -> TokenId {
    let sum = u64::from(token.0) + u64::from(steps);
    TokenId((sum % u64::from(vocabulary.get())) as u32)
}

/// Steps from `start` to `token`, going round the vocabulary; both lie in it.
fn distance(start: TokenId, token: TokenId, vocabulary: NonZeroU32) -> u32 {
    let round = u64::from(vocabulary.get()) + u64::from(token.0) - u64::from(start.0);
    (round % u64::from(vocabulary.get())) as u32
}
