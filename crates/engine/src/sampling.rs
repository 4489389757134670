//! A fixed pipeline from logits to a token; its order is part of its meaning.
//!
//! 1. logits must be finite;
//! 2. masks: `allowed_token_ids`, then end-of-sequence and stop tokens below `min_tokens`;
//! 3. `logit_bias`, repetition penalty (prompt and output), frequency and presence penalties (output alone);
//! 4. temperature; below [`GREEDY_BELOW`] the largest logit wins, ties to the lowest id;
//! 5. `min_p`, `top_k` (ties with the k-th stay), `top_p`;
//! 6. argmax of log-probability + Gumbel noise keyed by (seed, choice, position, token).
//!
//! The order is that of vLLM. A masked token stays masked whatever is added to it. No state lives here
//! but scratch memory: the token is a function of the logits, the request, the choice and the output
//! so far (A6). Nothing here knows batches, drafts or text.

mod adjust;
mod filter;
pub mod logprobs;
mod mass;
mod noise;
mod race;
mod sampler;
mod scan;
mod state;
#[cfg(test)]
mod tests;

pub use sampler::{GREEDY_BELOW, Sampler, probabilities};
pub use state::SamplingState;
