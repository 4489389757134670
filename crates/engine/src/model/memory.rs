//! `MemoryNeeds`: what a model will take, known from its file's header before anything is allocated.

use millpond_scheduler::config::BLOCK_SIZE;

use super::workspace::Workspace;
use crate::config::ModelConfig;
use crate::kernels::cpu::PackedMatrix;
use crate::kv_pool::KvType;
use crate::llm::MemoryPlan;
use crate::loader::{TensorInfo, Weights};

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
    /// Activations of the largest step, and the rotary tables.
    pub workspace_bytes: u64,
    /// Keys and values of one token.
    pub kv_bytes_per_token: u64,
}

impl MemoryNeeds {
    /// Reads no tensor. A matrix of a type that no kernel computes counts as it lies in the file; loading it
    /// will be an error.
    pub fn of(config: &ModelConfig, weights: &Weights, limits: StepLimits) -> Self {
        let kv_type = KvType::for_weights(weights.list().any(is_quantised_in_layer));
        MemoryNeeds {
            weight_bytes: weights.list().map(packed_bytes).sum(),
            workspace_bytes: Workspace::num_bytes(config, limits.max_batch_tokens as usize)
                + rope_bytes(config, limits.max_context as usize),
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

/// The types of the layers decide, as in `Decoder::kv_type`.
fn is_quantised_in_layer(tensor: TensorInfo) -> bool {
    tensor.name.starts_with("layers.") && tensor.dtype.is_quantised()
}

/// A matrix as it will be packed, a vector in f32.
pub(super) fn packed_bytes(tensor: TensorInfo) -> u64 {
    let as_stored = tensor.num_bytes;
    match tensor.shape.as_slice() {
        [out_features, in_features] => {
            let packed = PackedMatrix::packed_bytes(tensor.dtype, *out_features, *in_features);
            packed.unwrap_or(as_stored)
        }
        vector => vector.iter().product::<usize>() as u64 * size_of::<f32>() as u64,
    }
}

/// A cosine and a sine per pair and position.
fn rope_bytes(config: &ModelConfig, max_context: usize) -> u64 {
    let values: usize = config
        .ropes
        .iter()
        .map(|rope| rope.rotary_dim * max_context)
        .sum();
    (values * size_of::<f32>()) as u64
}
