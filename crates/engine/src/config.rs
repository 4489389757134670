//! What the decoder needs to know of a model, normalised: nothing optional that need not be.

use millpond_scheduler::TokenId;

/// One decoder model, whatever family and file format it came from.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// The family as its file names it (`llama`, `gemma3`, …), for people.
    pub architecture: String,
    /// Width of the logits; token ids at or above it are invalid.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the gated MLP.
    pub intermediate_size: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// Longest sequence the model was trained for, prompt and output together.
    pub max_context: u32,
    /// Epsilon of every RMS norm.
    pub norm_eps: f32,
    /// Where the norms sit.
    pub norms: NormPlacement,
    /// RMS norm of each query and key head before the rotation.
    pub qk_norm: bool,
    /// q, k and v projections carry a bias.
    pub qkv_bias: bool,
    /// The gate of the MLP.
    pub activation: Activation,
    /// Embeddings are multiplied by this (1, or √hidden for Gemma).
    pub embedding_scale: f32,
    /// Dot products are multiplied by this before the softmax.
    pub attention_scale: f32,
    /// x → c·tanh(x/c) on attention scores.
    pub attention_softcap: Option<f32>,
    /// x → c·tanh(x/c) on logits.
    pub logit_softcap: Option<f32>,
    /// The output head is the embedding matrix.
    pub tied_embeddings: bool,
    /// The rotations that layers refer to.
    pub ropes: Vec<RopeConfig>,
    /// One per layer.
    pub layers: Vec<LayerConfig>,
    /// Put before a prompt when the tokenizer's settings say so.
    pub bos_token: Option<TokenId>,
    /// Any of these ends the output.
    pub eos_tokens: Vec<TokenId>,
}

impl ModelConfig {
    /// Width of the queries of one token: all heads side by side.
    pub fn query_size(&self) -> usize {
        self.num_heads * self.head_dim
    }

    /// Width of the keys, and of the values, of one token.
    pub fn kv_size(&self) -> usize {
        self.num_kv_heads * self.head_dim
    }
}

/// What differs from layer to layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerConfig {
    /// Sliding window: a token sees itself and window − 1 before it.
    pub window: Option<u32>,
    /// Index into `ModelConfig::ropes`.
    pub rope: usize,
}

/// One rotary position embedding (half-split pairs: dimension i turns with i + rotary_dim / 2).
#[derive(Clone, Debug, PartialEq)]
pub struct RopeConfig {
    /// Base of the frequencies.
    pub theta: f64,
    /// Leading dimensions of a head that turn.
    pub rotary_dim: usize,
    /// Change of the frequencies for longer contexts.
    pub scaling: RopeScaling,
}

/// Change of the rotary frequencies for longer contexts.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// As trained.
    None,
    /// Every frequency divided by the factor.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// Llama 3: low frequencies divided, high ones kept, a smooth ramp between.
    Llama3 {
        /// Divisor of low frequencies.
        factor: f64,
        /// Below original_max / this many turns a frequency is low.
        low_freq_factor: f64,
        /// Above original_max / this many turns a frequency is high.
        high_freq_factor: f64,
        /// Context before extension.
        original_max: u32,
    },
    /// GGUF: each frequency divided by its stored factor (rotary_dim / 2 of them).
    Factors(Vec<f32>),
}

/// Where the norms of a layer sit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormPlacement {
    /// Before attention and before the MLP.
    Pre,
    /// Before and after each (Gemma 2 and 3).
    Sandwich,
}

/// The gate of the MLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// x · sigmoid(x)
    Silu,
    /// Gaussian error linear unit, tanh form.
    GeluTanh,
}
