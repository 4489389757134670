//! A model's numbers by key, read the same way from GGUF metadata and from config.json.
//!
//! It knows names and ranges; what the numbers mean is `model_config`'s business.

use std::ops::RangeInclusive;

use serde_json::{Map, Value};

use super::LoadError;
use super::metadata::{Metadata, MetadataValue};

/// One hyper-parameter under the names of both formats (empty: that format lacks it) and its largest sane value.
#[derive(Clone, Copy, Debug)]
pub(super) struct Key {
    pub hub: &'static str,
    pub gguf: &'static str,
    pub max: u64,
}

const fn key(hub: &'static str, gguf: &'static str, max: u64) -> Key {
    Key { hub, gguf, max }
}

/// The keys that we read. Caps are some ten times the largest model known today; they keep products far from overflow.
#[rustfmt::skip]
pub(super) mod keys {
    use super::{Key, key};

    pub const VOCAB_SIZE: Key = key("vocab_size", "vocab_size", 1 << 22);
    pub const HIDDEN_SIZE: Key = key("hidden_size", "embedding_length", 1 << 17);
    pub const INTERMEDIATE_SIZE: Key = key("intermediate_size", "feed_forward_length", 1 << 20);
    pub const NUM_LAYERS: Key = key("num_hidden_layers", "block_count", 1 << 10);
    pub const NUM_HEADS: Key = key("num_attention_heads", "attention.head_count", 1 << 10);
    pub const NUM_KV_HEADS: Key = key("num_key_value_heads", "attention.head_count_kv", 1 << 10);
    pub const HEAD_DIM: Key = key("head_dim", "attention.key_length", 1 << 10);
    pub const VALUE_DIM: Key = key("", "attention.value_length", 1 << 10);
    pub const ROTARY_DIM: Key = key("", "rope.dimension_count", 1 << 10);
    pub const MAX_CONTEXT: Key = key("max_position_embeddings", "context_length", 1 << 27);
    pub const NORM_EPS: Key = key("rms_norm_eps", "attention.layer_norm_rms_epsilon", 0);
    pub const WINDOW: Key = key("sliding_window", "attention.sliding_window", 1 << 27);
    pub const WINDOW_PATTERN: Key = key("sliding_window_pattern", "attention.sliding_window_pattern", 1 << 10);
    pub const PRIVATE_WINDOW_PATTERN: Key = key("_sliding_window_pattern", "", 1 << 10);
    pub const QUERY_SCALAR: Key = key("query_pre_attn_scalar", "", 0);
    pub const ATTENTION_SCALE: Key = key("", "attention.scale", 0);
    pub const ATTENTION_SOFTCAP: Key = key("attn_logit_softcapping", "attn_logit_softcapping", 0);
    pub const LOGIT_SOFTCAP: Key = key("final_logit_softcapping", "final_logit_softcapping", 0);
    pub const ROPE_THETA: Key = key("rope_theta", "rope.freq_base", 0);
    pub const LOCAL_ROPE_THETA: Key = key("rope_local_base_freq", "rope.freq_base_swa", 0);
    pub const ATTENTION_BIAS: Key = key("attention_bias", "", 0);
    pub const TIED: Key = key("tie_word_embeddings", "", 0);
    pub const MLP_BIAS: Key = key("mlp_bias", "", 0);
    pub const BIDIRECTIONAL: Key = key("use_bidirectional_attention", "", 0);
    pub const CAUSAL: Key = key("", "attention.causal", 0);
    pub const NUM_EXPERTS: Key = key("num_local_experts", "expert_count", 1 << 16);
}

/// Numbers that a model may sensibly state: temperatures, scales, epsilons and bases all lie well inside.
pub(super) const SANE: RangeInclusive<f64> = 1e-15..=1e15;

/// Where the numbers come from.
pub(super) enum Hyperparameters<'a> {
    Gguf {
        metadata: &'a Metadata,
        architecture: &'a str,
    },
    Hub {
        config: &'a Map<String, Value>,
        defaults: &'static [(&'static str, f64)],
    },
}

impl Hyperparameters<'_> {
    /// The key as the file spells it.
    pub(super) fn name(&self, key: Key) -> String {
        match self {
            Hyperparameters::Gguf { architecture, .. } => format!("{architecture}.{}", key.gguf),
            Hyperparameters::Hub { .. } => key.hub.to_owned(),
        }
    }

    /// An error about a key.
    pub(super) fn error(&self, key: Key, problem: impl Into<String>) -> LoadError {
        LoadError::config(self.name(key), problem)
    }

    /// A finite number, if the file or the family states one.
    pub(super) fn number(&self, key: Key) -> Result<Option<f64>, LoadError> {
        match self {
            Hyperparameters::Gguf { metadata, .. } => {
                let name = self.name(key);
                let Some(value) = metadata.get(&name) else {
                    return Ok(None);
                };
                finite(name.clone(), metadata.float(&name), value.kind().to_owned())
            }
            Hyperparameters::Hub { config, defaults } => {
                let default = defaults.iter().find(|(name, _)| *name == key.hub);
                match config.get(key.hub) {
                    // Null means "none"; only an absent key means "as the family's code has it".
                    Some(Value::Null) => Ok(None),
                    None => Ok(default.map(|(_, value)| *value)),
                    Some(value) => finite(key.hub.to_owned(), value.as_f64(), value.to_string()),
                }
            }
        }
    }

    /// A number that must be greater than zero, and far enough from the ends of f32 that products stay finite.
    pub(super) fn positive(&self, key: Key) -> Result<Option<f64>, LoadError> {
        match self.number(key)? {
            Some(value) if !SANE.contains(&value) => {
                let problem = format!("{value}, must be positive and of a sane size");
                Err(self.error(key, problem))
            }
            value => Ok(value),
        }
    }

    /// A whole number from 1 to the key's cap.
    pub(super) fn count(&self, key: Key) -> Result<Option<usize>, LoadError> {
        let Some(value) = self.number(key)? else {
            return Ok(None);
        };
        if value.fract() != 0.0 || value < 1.0 || value > key.max as f64 {
            let problem = format!("{value}, must be a whole number from 1 to {}", key.max);
            return Err(self.error(key, problem));
        }
        Ok(Some(value as usize))
    }

    /// A count that must be stated.
    pub(super) fn required_count(&self, key: Key) -> Result<usize, LoadError> {
        self.count(key)?.ok_or_else(|| self.error(key, "missing"))
    }

    /// A truth value, if stated.
    pub(super) fn flag(&self, key: Key) -> Result<Option<bool>, LoadError> {
        match self {
            Hyperparameters::Gguf { metadata, .. } => match metadata.get(&self.name(key)) {
                None => Ok(None),
                Some(MetadataValue::Bool(value)) => Ok(Some(*value)),
                Some(_) => Err(self.error(key, "must be true or false")),
            },
            Hyperparameters::Hub { config, defaults } => match config.get(key.hub) {
                Some(Value::Bool(value)) => Ok(Some(*value)),
                Some(Value::Null) => Ok(None),
                Some(_) => Err(self.error(key, "must be true or false")),
                None => {
                    let default = defaults.iter().find(|(name, _)| *name == key.hub);
                    Ok(default.map(|(_, value)| *value != 0.0))
                }
            },
        }
    }
}

fn finite(name: String, number: Option<f64>, shown: String) -> Result<Option<f64>, LoadError> {
    match number {
        Some(value) if value.is_finite() => Ok(Some(value)),
        Some(_) | None => Err(LoadError::config(name, format!("{shown} is not a number"))),
    }
}
