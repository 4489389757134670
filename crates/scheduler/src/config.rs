//! Every limit of the scheduler, validated once.

use serde::{Deserialize, Serialize};

use crate::request::Request;
use crate::time::Span;

/// Tokens per KV block. The kernels' key layout depends on it (16 virtual lanes).
pub const BLOCK_SIZE: u32 = 16;

/// How long blocks are held for a transfer that does not end.
const TRANSFER_LEASE: Span = Span::from_secs(30);

/// What a worker does with a sequence whose prompt is computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// It goes on to the end.
    #[default]
    Aggregated,
    /// It stops after the first token and holds the blocks for another worker to fetch.
    Prefill,
    /// It goes on to the end, and mostly gets sequences that a prefill worker began.
    Decode,
}

/// Limits and switches of a `Scheduler`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SchedulerConfig {
    /// Tokens per block; 16 everywhere except in simulations of other systems.
    pub block_size: u32,
    /// Blocks in the pool.
    pub num_blocks: u32,
    /// Tokens computed in one step, prefill and decode together.
    pub max_batch_tokens: u32,
    /// Sequences running at once.
    pub max_sequences: u32,
    /// Sequences waiting at once; beyond it `add` refuses.
    pub max_waiting: u32,
    /// Prompt plus output tokens of one sequence.
    pub max_context: u32,
    /// Reuse the blocks of equal prefixes.
    pub prefix_cache: bool,
    /// Copy the matching part of a partly matching block, so that hits count in tokens.
    pub partial_copies: bool,
    /// What it does with a sequence whose prompt is computed.
    #[serde(default)]
    pub role: Role,
    /// Blocks offered to another worker, or reserved for what comes from one, are held no longer than this.
    #[serde(default = "transfer_lease")]
    pub transfer_lease: Span,
}

fn transfer_lease() -> Span {
    TRANSFER_LEASE
}

impl Default for SchedulerConfig {
    fn default() -> Self {
        SchedulerConfig {
            block_size: BLOCK_SIZE,
            num_blocks: 1024,
            max_batch_tokens: 512,
            max_sequences: 256,
            max_waiting: 1024,
            max_context: 8192,
            prefix_cache: true,
            partial_copies: true,
            role: Role::Aggregated,
            transfer_lease: TRANSFER_LEASE,
        }
    }
}

impl SchedulerConfig {
    /// Refuses limits with which no request could ever finish.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let positive = [
            ("block_size", self.block_size),
            ("num_blocks", self.num_blocks),
            ("max_batch_tokens", self.max_batch_tokens),
            ("max_sequences", self.max_sequences),
            ("max_waiting", self.max_waiting),
            ("max_context", self.max_context),
        ];
        match positive.into_iter().find(|(_, value)| *value == 0) {
            Some((name, _)) => Err(ConfigError::Zero { name }),
            None if self.max_batch_tokens < self.max_sequences => {
                Err(ConfigError::BudgetBelowSequences {
                    max_batch_tokens: self.max_batch_tokens,
                    max_sequences: self.max_sequences,
                })
            }
            None => Ok(()),
        }
    }
}

impl SchedulerConfig {
    /// The most tokens of prompt and output that `ask` can reach.
    pub fn max_len(&self, ask: &Request) -> u32 {
        (ask.prompt.len() as u32)
            .saturating_add(ask.stop.max_tokens)
            .min(self.max_context)
    }

    /// Blocks that one choice of `ask` needs at the worst, if it comes with `num_output` output tokens.
    pub fn needed_blocks(&self, ask: &Request, num_output: u32) -> u32 {
        let num_slots = match self.role {
            // The last token is never fed back, so it needs no slot.
            Role::Aggregated | Role::Decode => self.max_len(ask).saturating_sub(1),
            // What it samples is fed back elsewhere.
            Role::Prefill => (ask.prompt.len() as u32).saturating_add(num_output),
        };
        num_slots.div_ceil(self.block_size)
    }

    /// Would a scheduler with these limits take `ask` if it had nothing else to do?
    pub fn can_take(&self, ask: &Request) -> bool {
        !ask.prompt.is_empty()
            && ask.prompt.len() < self.max_context as usize
            && ask.stop.max_tokens > 0
            && (1..=self.max_waiting).contains(&ask.num_choices)
            && self.needed_blocks(ask, 0) <= self.num_blocks
    }
}

/// A configuration that cannot work.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// A limit is zero.
    #[error("{name} must be at least 1")]
    Zero {
        /// The field.
        name: &'static str,
    },
    /// Every running sequence needs at least one token of the step's budget.
    #[error(
        "max_batch_tokens ({max_batch_tokens}) is below max_sequences ({max_sequences}): running sequences would stall"
    )]
    BudgetBelowSequences {
        /// The budget.
        max_batch_tokens: u32,
        /// The sequences it must feed.
        max_sequences: u32,
    },
    /// Blocks of one worker do not fit into those of another.
    #[error("workers that hand over to each other need one block size, not {first} and {other}")]
    MixedBlockSizes {
        /// The first worker's.
        first: u32,
        /// Another one's.
        other: u32,
    },
}
