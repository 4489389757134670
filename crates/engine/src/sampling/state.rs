//! `SamplingState`: what the pipeline needs to know of a sequence besides its logits.
//!
//! A cache and nothing more: rebuilt from (request, choice, output) it equals one that followed the output
//! token by token, so that preemption and hand-off lose nothing.

use std::sync::Arc;

use millpond_scheduler::{Request, SamplingParams, StopConditions, TokenId};

/// One sequence as the sampler sees it.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingState {
    request: Arc<Request>,
    choice: u32,
    num_output: u32,
    /// Distinct tokens of prompt and output by ascending id; empty while no penalty reads them.
    occurrences: Vec<Occurrence>,
}

/// A token that occurred in the prompt or in the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Occurrence {
    /// The token.
    pub token: TokenId,
    /// How often it occurred in the output; 0: in the prompt alone.
    pub num_in_output: u32,
}

impl SamplingState {
    /// The state of choice `choice` of `request` after `output`.
    pub fn new(request: &Arc<Request>, choice: u32, output: &[TokenId]) -> Self {
        let occurrences = if penalises(&request.sampling) {
            count_occurrences(&request.prompt, output)
        } else {
            Vec::new()
        };
        SamplingState {
            request: Arc::clone(request),
            choice,
            num_output: u32::try_from(output.len()).unwrap_or(u32::MAX),
            occurrences,
        }
    }

    /// `token` was appended to the output.
    pub fn accept(&mut self, token: TokenId) {
        self.num_output = self.num_output.saturating_add(1);
        if penalises(&self.request.sampling) {
            self.count(token);
        }
    }

    /// Output tokens so far.
    pub fn num_output(&self) -> u32 {
        self.num_output
    }

    pub(super) fn params(&self) -> &SamplingParams {
        &self.request.sampling
    }

    pub(super) fn choice(&self) -> u32 {
        self.choice
    }

    pub(super) fn occurrences(&self) -> &[Occurrence] {
        &self.occurrences
    }

    /// The stop conditions while they forbid their own tokens.
    pub(super) fn unmet_minimum(&self) -> Option<&StopConditions> {
        let stop = &self.request.stop;
        (self.num_output < stop.min_tokens).then_some(stop)
    }

    fn count(&mut self, token: TokenId) {
        match self
            .occurrences
            .binary_search_by_key(&token, |seen| seen.token)
        {
            Ok(at) => {
                if let Some(seen) = self.occurrences.get_mut(at) {
                    seen.num_in_output += 1;
                }
            }
            Err(at) => self.occurrences.insert(
                at,
                Occurrence {
                    token,
                    num_in_output: 1,
                },
            ),
        }
    }
}

/// True when some penalty makes past tokens count.
fn penalises(params: &SamplingParams) -> bool {
    params.repetition_penalty != 1.0
        || params.frequency_penalty != 0.0
        || params.presence_penalty != 0.0
}

fn count_occurrences(prompt: &[TokenId], output: &[TokenId]) -> Vec<Occurrence> {
    let occurrence = |num_in_output| {
        move |&token| Occurrence {
            token,
            num_in_output,
        }
    };
    let prompt = prompt.iter().map(occurrence(0));
    let output = output.iter().map(occurrence(1));
    let mut all: Vec<_> = prompt.chain(output).collect();
    all.sort_unstable_by_key(|seen| seen.token);
    all.dedup_by(|next, kept| {
        let same = next.token == kept.token;
        if same {
            kept.num_in_output += next.num_in_output;
        }
        same
    });
    all
}
