//! `MemoryNeeds`: what a model will take, known from its file's header before anything is allocated.

use millpond_scheduler::config::BLOCK_SIZE;

use super::workspace::Workspace;
use crate::config::ModelConfig;
use crate::kv_pool::KvType;
use crate::llm::MemoryPlan;
use crate::loader::Weights;

/// The largest step and the longest sequence that room is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepLimits {
    /// Tokens computed in one step.
    pub max_batch_tokens: u32,
    /// Positions of one sequence.
    pub max_context: u32,
}

/// Memory of one model as a function of its file and the step limits; the number of blocks is still open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryNeeds {
    /// Packed matrices.
    pub weight_bytes: u64,
    /// Activations of the largest step, rotary tables included.
    pub workspace_bytes: u64,
    /// Keys and values of one token.
    pub kv_bytes_per_token: u64,
}

impl MemoryNeeds {
    /// Reads the header of the file only.
    pub fn of(config: &ModelConfig, weights: &Weights, limits: StepLimits) -> Self {
        let kv_type = KvType::F32;
        MemoryNeeds {
            weight_bytes: 0,
            workspace_bytes: Workspace::num_bytes(config, limits.max_batch_tokens as usize),
            kv_bytes_per_token: kv_type.bytes_per_token(config),
        }
    }

    /// The plan with a pool of `num_blocks` blocks.
    pub fn plan(&self, num_blocks: u32) -> MemoryPlan {
        let num_tokens = u64::from(num_blocks) * u64::from(BLOCK_SIZE);
        MemoryPlan {
            weight_bytes: self.weight_bytes,
            kv_bytes: num_tokens * self.kv_bytes_per_token,
            workspace_bytes: self.workspace_bytes,
            kv_bytes_per_token: self.kv_bytes_per_token,
            num_blocks,
            block_size: BLOCK_SIZE,
        }
    }
}
