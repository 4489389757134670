//! `TokenCost`: what one token costs at least, known from the file's header: weights to read, products to compute.
//!
//! Measured speeds are judged by it. Attention is left out: it depends on the sequence, and a short one costs
//! little of either.

use super::memory::packed_bytes;
use crate::config::ModelConfig;
use crate::loader::{TensorInfo, Weights};

/// What one token costs at least.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TokenCost {
    /// Packed bytes of all matrices that a product reads, the head included: one step reads each once, for however
    /// many tokens.
    pub weight_bytes: u64,
    /// Multiply-adds of the layers' products.
    pub layer_macs: u64,
    /// Multiply-adds of the head, paid only for tokens whose logits are needed.
    pub head_macs: u64,
    /// Most products are of int8 activations with quantised weights.
    pub is_quantised: bool,
}

impl TokenCost {
    /// Reads no tensor.
    pub fn of(config: &ModelConfig, weights: &Weights) -> Self {
        let mut cost = TokenCost::default();
        let mut quantised_macs = 0;
        for tensor in weights.list() {
            let Some(macs) = num_elements_of_matrix(&tensor) else {
                continue;
            };
            match tensor.name.as_str() {
                // Looked up, not multiplied, unless it is the head as well.
                "embed.weight" if !config.tied_embeddings => continue,
                "embed.weight" | "lm_head.weight" => cost.head_macs += macs,
                _ => cost.layer_macs += macs,
            }
            if tensor.dtype.is_quantised() {
                quantised_macs += macs;
            }
            cost.weight_bytes += packed_bytes(tensor);
        }
        cost.is_quantised = 2 * quantised_macs > cost.layer_macs + cost.head_macs;
        cost
    }

    /// Multiply-adds of a token whose logits are needed.
    pub fn macs(&self) -> u64 {
        self.layer_macs + self.head_macs
    }
}

/// Elements of a matrix; none for vectors.
fn num_elements_of_matrix(tensor: &TensorInfo) -> Option<u64> {
    match tensor.shape.as_slice() {
        [out_features, in_features] => Some(*out_features as u64 * *in_features as u64),
        _ => None,
    }
}
