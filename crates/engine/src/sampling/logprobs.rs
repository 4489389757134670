//! Log-probabilities that are reported: log-softmax of the raw logits.
//!
//! Bias, penalties, masks and temperature have no part in them; nor has the choice, which is given.

use millpond_scheduler::{PositionLogprobs, TokenId, TokenLogprob};

use super::filter::{Candidate, by_likelihood};
use super::mass::log_sum_exp;
use super::scan::{gather, kth_largest, largest};

/// Log-probability and rank of `chosen` and the `num_top` most likely tokens of finite `logits` (vocabulary).
///
/// The rank is 1 + the number of larger logits. A `chosen` outside the vocabulary has probability 0 and the
/// last rank.
pub fn position_logprobs(logits: &[f32], chosen: TokenId, num_top: u32) -> PositionLogprobs {
    let normaliser = log_sum_exp(logits, largest(logits));
    let logprob = |token, logit| TokenLogprob {
        token,
        logprob: (f64::from(logit) - normaliser) as f32,
    };
    let chosen_logit = logits
        .get(chosen.0 as usize)
        .copied()
        .unwrap_or(f32::NEG_INFINITY);
    let top = most_likely(logits, num_top as usize);
    PositionLogprobs {
        chosen: logprob(chosen, chosen_logit),
        rank: 1 + num_larger(logits, chosen_logit),
        top: top.iter().map(|c| logprob(c.token, c.logit)).collect(),
    }
}

fn num_larger(logits: &[f32], logit: f32) -> u32 {
    logits.iter().map(|x| u32::from(*x > logit)).sum()
}

/// At most `num` candidates, most likely first, ties by lower id.
fn most_likely(logits: &[f32], num: usize) -> Vec<Candidate> {
    let num = num.min(logits.len());
    let mut top = Vec::new();
    if num > 0 {
        let floor = kth_largest(logits, num, &mut Vec::new());
        gather(logits, floor, &mut top);
        top.sort_unstable_by(by_likelihood);
        top.truncate(num);
    }
    top
}
