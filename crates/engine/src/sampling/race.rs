//! The draw: argmax of log-probability + Gumbel noise over the tokens that the filters left.
//!
//! The winner of that race has exactly the law of the probabilities (Gumbel-max; Maddison, Tarlow and
//! Minka, "A* Sampling", NeurIPS 2014, whose bounds inspire ours). Noise costs two logarithms, so it is
//! computed only for tokens that a cheap upper bound lets win: a few dozen of a vocabulary. The bound
//! decides about work, never about the winner.

use millpond_scheduler::TokenId;

use super::mass::Law;
use super::noise::NoiseStream;

/// Covers the rounding of the f32 bound: scores that could win are above −41, whose errors are below 1e-4.
const SLACK: f64 = 1e-3;

/// The token that wins among (token, logit) pairs; none when all are masked.
pub(super) fn winner(
    law: Law,
    noise: NoiseStream,
    runners: impl Iterator<Item = (TokenId, f32)>,
) -> Option<TokenId> {
    let inverse = law.temperature.recip();
    let mut leader: Option<(f64, TokenId)> = None;
    let mut bar = f32::NEG_INFINITY;
    for (token, logit) in runners {
        let bits = noise.bits(token);
        let bound = (logit - law.peak) * inverse + bits.ceiling();
        if bound > bar {
            let score = law.score(logit) + bits.gumbel();
            if leads(score, token, leader) {
                leader = Some((score, token));
                bar = (score - SLACK) as f32;
            }
        }
    }
    leader.map(|(_, token)| token)
}

/// Ties go to the lower id, so that the order of the runners does not matter.
fn leads(score: f64, token: TokenId, leader: Option<(f64, TokenId)>) -> bool {
    leader.is_none_or(|(best, id)| score > best || (score == best && token < id))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bound_never_changes_the_winner() {
        for (position, temperature) in (0..400).zip([0.01, 0.3, 1.0, 3.0, 1e4].into_iter().cycle())
        {
            let logits = (0..5000_u32).map(|i| (i * 7919 % 4999) as f32 * 0.005 - 20.0);
            let runners: Vec<_> = (0..).map(TokenId).zip(logits).collect();
            let peak = runners.iter().map(|r| r.1).fold(f32::MIN, f32::max);
            let law = Law { peak, temperature };
            let noise = NoiseStream::new(9, 0, position);
            let slow = runners
                .iter()
                .map(|&(token, logit)| (law.score(logit) + noise.bits(token).gumbel(), token))
                .max_by(|a, b| a.0.total_cmp(&b.0).then(b.1.cmp(&a.1)))
                .map(|(_, token)| token);
            assert_eq!(winner(law, noise, runners.iter().copied()), slow);
            assert_eq!(winner(law, noise, runners.into_iter().rev()), slow);
        }
    }
}
