//! `Sampler`: the pipeline in order, with its scratch memory.
//!
//! Each step lives in its own module; this one only says what follows what.

use millpond_scheduler::{RowError, TokenId};

use super::adjust::{adjust, is_identity};
use super::filter::{Filter, Kept};
use super::mass::Law;
use super::noise::NoiseStream;
use super::race::winner;
use super::scan::{all_finite, first_equal, largest};
use super::state::SamplingState;

/// Temperatures below this are greedy: dividing by them would only overflow.
pub const GREEDY_BELOW: f32 = 1e-5;

/// Chooses tokens. One per worker thread: it owns scratch memory and nothing that a result depends on.
#[derive(Debug)]
pub struct Sampler {
    adjusted: Vec<f32>,
    filter: Filter,
}

impl Sampler {
    /// A sampler for logits of width `vocab_size`; other widths work too, after an allocation.
    pub fn new(vocab_size: usize) -> Self {
        Sampler {
            adjusted: Vec::with_capacity(vocab_size),
            filter: Filter::with_capacity(vocab_size),
        }
    }

    /// The token at absolute `position`, given the raw `logits` (vocabulary) of the position before.
    ///
    /// Fails when a logit is not finite or when every token is masked.
    pub fn sample(
        &mut self,
        logits: &[f32],
        state: &SamplingState,
        position: u32,
    ) -> Result<TokenId, RowError> {
        let logits = adjusted(logits, state, &mut self.adjusted)?;
        let law = law(logits, state)?;
        if is_greedy(law) {
            return first_equal(logits, law.peak).ok_or(RowError::NothingToSample);
        }
        let params = state.params();
        let noise = NoiseStream::new(params.seed, state.choice(), position);
        let token = match self.filter.keep(logits, law, params) {
            Kept::Unmasked => {
                let runners = (0..).map(TokenId).zip(logits.iter().copied());
                winner(law, noise, runners)
            }
            Kept::Candidates(candidates) => {
                winner(law, noise, candidates.iter().map(|c| (c.token, c.logit)))
            }
        };
        token.ok_or(RowError::NothingToSample)
    }
}

/// The law that `Sampler::sample` draws from: a probability per token, exactly 0 for tokens that were
/// masked or filtered. For tests and tools; it allocates.
pub fn probabilities(logits: &[f32], state: &SamplingState) -> Result<Vec<f32>, RowError> {
    let mut scratch = Vec::new();
    let logits = adjusted(logits, state, &mut scratch)?;
    let law = law(logits, state)?;
    let mut weights = vec![0.0; logits.len()];
    let mut weigh = |index: usize, weight: f64| {
        if let Some(slot) = weights.get_mut(index) {
            *slot = weight;
        }
    };
    if is_greedy(law) {
        let token = first_equal(logits, law.peak).ok_or(RowError::NothingToSample)?;
        weigh(token.0 as usize, 1.0);
    } else {
        match Filter::default().keep(logits, law, state.params()) {
            Kept::Unmasked => (logits.iter().enumerate())
                .for_each(|(index, logit)| weigh(index, libm::exp(law.score(*logit)))),
            Kept::Candidates(candidates) => (candidates.iter())
                .for_each(|c| weigh(c.token.0 as usize, libm::exp(law.score(c.logit)))),
        }
    }
    let total: f64 = weights.iter().sum();
    Ok(weights
        .iter()
        .map(|weight| (weight / total) as f32)
        .collect())
}

/// Steps 1 to 3: the raw logits themselves when nothing changes them.
fn adjusted<'a>(
    logits: &'a [f32],
    state: &SamplingState,
    scratch: &'a mut Vec<f32>,
) -> Result<&'a [f32], RowError> {
    if !all_finite(logits) {
        return Err(RowError::NonFiniteLogits);
    }
    if is_identity(state) {
        return Ok(logits);
    }
    adjust(logits, state, scratch);
    Ok(scratch)
}

/// Peak and temperature; an error when every token is masked.
fn law(logits: &[f32], state: &SamplingState) -> Result<Law, RowError> {
    let peak = largest(logits);
    if peak == f32::NEG_INFINITY {
        return Err(RowError::NothingToSample);
    }
    Ok(Law {
        peak,
        temperature: state.params().temperature,
    })
}

fn is_greedy(law: Law) -> bool {
    law.temperature < GREEDY_BELOW
}
