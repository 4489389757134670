//! `KvPool`: the key and value tensors of every layer, in blocks of 16 positions.
//!
//! It knows where a block lies, never whose it is: that is the scheduler's `BlockPool` (A2).

use half::f16;
use half::vec::HalfBitsVecExt;
use millpond_scheduler::BlockCopy;
use millpond_scheduler::config::BLOCK_SIZE;

use crate::config::ModelConfig;
use crate::kernels::cpu::{CpuKernels, KvData, KvLayer, KvShape};

/// Element type of stored keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvType {
    /// For float weights: half precision alone would move their logits by 1e-3.
    F32,
    /// For quantised weights, whose own error is far larger.
    F16,
}

impl KvType {
    /// The type that does not add to the error of the weights.
    pub fn for_weights(quantised: bool) -> Self {
        if quantised { KvType::F16 } else { KvType::F32 }
    }

    /// Bytes per element.
    pub fn num_bytes(self) -> usize {
        match self {
            KvType::F32 => size_of::<f32>(),
            KvType::F16 => size_of::<f16>(),
        }
    }

    /// Bytes of keys and values of one token in all layers.
    pub fn bytes_per_token(self, config: &ModelConfig) -> u64 {
        let per_layer = 2 * config.kv_size() * self.num_bytes();
        (config.layers.len() * per_layer) as u64
    }

    fn zeroed(self, len: usize) -> KvData {
        match self {
            KvType::F32 => KvData::F32(vec![0.0; len]),
            // Zero words, reinterpreted: the system hands out zero pages only as they are touched.
            KvType::F16 => KvData::F16(vec![0_u16; len].reinterpret_into()),
        }
    }
}

/// Keys and values of every layer. Its size is fixed at construction.
pub struct KvPool {
    shape: KvShape,
    layers: Vec<KvLayer>,
}

impl KvPool {
    /// Zeroed blocks for every layer of `config`: `KvType::bytes_per_token` × 16 × `num_blocks` bytes.
    pub fn new(config: &ModelConfig, kv_type: KvType, num_blocks: u32) -> Self {
        let shape = KvShape {
            num_blocks: num_blocks as usize,
            num_kv_heads: config.num_kv_heads,
            head_dim: config.head_dim,
        };
        let len = shape.num_blocks * shape.num_kv_heads * shape.head_dim * BLOCK_SIZE as usize;
        let layer = |_| KvLayer {
            keys: kv_type.zeroed(len),
            values: kv_type.zeroed(len),
        };
        KvPool {
            shape,
            layers: (0..config.layers.len()).map(layer).collect(),
        }
    }

    /// Shape of every layer.
    pub fn shape(&self) -> KvShape {
        self.shape
    }

    /// All layers, in the model's order.
    pub fn layers_mut(&mut self) -> &mut [KvLayer] {
        &mut self.layers
    }

    /// Copies whole blocks in every layer, one copy after the other.
    ///
    /// Panics in the kernel if a block lies outside the pool.
    pub fn copy_blocks(&mut self, kernels: &CpuKernels, copies: &[BlockCopy]) {
        if copies.is_empty() {
            return;
        }
        for layer in &mut self.layers {
            kernels.copy_blocks(self.shape, layer, copies);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Activation, LayerConfig, NormPlacement};

    fn config(num_layers: usize) -> ModelConfig {
        let layer = LayerConfig {
            window: None,
            rope: 0,
        };
        ModelConfig {
            architecture: "llama".into(),
            vocab_size: 32,
            hidden_size: 64,
            intermediate_size: 128,
            num_heads: 4,
            num_kv_heads: 2,
            head_dim: 16,
            max_context: 128,
            norm_eps: 1e-5,
            norms: NormPlacement::Pre,
            qk_norm: false,
            qkv_bias: false,
            activation: Activation::Silu,
            embedding_scale: 1.0,
            attention_scale: 0.25,
            attention_softcap: None,
            logit_softcap: None,
            tied_embeddings: true,
            ropes: Vec::new(),
            layers: vec![layer; num_layers],
            bos_token: None,
            eos_tokens: Vec::new(),
        }
    }

    fn num_bytes(data: &KvData) -> usize {
        match data {
            KvData::F32(values) => size_of_val(values.as_slice()),
            KvData::F16(values) => size_of_val(values.as_slice()),
        }
    }

    #[test]
    fn the_pool_takes_the_bytes_that_the_plan_says() {
        for kv_type in [KvType::F32, KvType::F16] {
            let config = config(3);
            let mut pool = KvPool::new(&config, kv_type, 5);
            let layers = pool.layers_mut().iter();
            let bytes: usize = layers
                .map(|l| num_bytes(&l.keys) + num_bytes(&l.values))
                .sum();
            let planned = kv_type.bytes_per_token(&config) * 5 * u64::from(BLOCK_SIZE);
            assert_eq!(bytes as u64, planned, "{kv_type:?}");
        }
    }
}
