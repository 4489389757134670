//! The families we run, one table row each: names of tensors and what the family's mathematics fixes.
//!
//! No reading and no checking in here: adding a family is adding a row.

use crate::config::{Activation, ModelConfig, NormPlacement};

use super::LoadError;

/// One family of models.
#[derive(Debug)]
pub(super) struct Family {
    /// Values of GGUF's `general.architecture`.
    pub gguf: &'static [&'static str],
    /// Values of `model_type` in config.json.
    pub hub: &'static [&'static str],
    pub math: FamilyMath,
    pub storage: FamilyStorage,
}

/// What no file of the family says, because the family's code fixes it.
#[derive(Debug)]
pub(super) struct FamilyMath {
    pub norms: NormPlacement,
    pub qk_norm: bool,
    /// Unless the file names another.
    pub activation: Activation,
    pub embedding_scale: EmbeddingScale,
    pub windows: Windows,
    /// Layers with a window turn by a rotation of their own, of this base unless the file names another.
    pub local_rope_theta: Option<f64>,
    /// The attention scale is that of hidden / heads, not of the head, in the model with this many layers.
    /// GGUF files of Gemma 3 do not state the scale; its 27B model is known by its layers alone.
    pub scale_by_hidden_at: Option<usize>,
}

/// Factor of the embeddings.
#[derive(Clone, Copy, Debug)]
pub(super) enum EmbeddingScale {
    One,
    SqrtHidden,
}

/// Which layers use the file's sliding window.
#[derive(Clone, Copy, Debug)]
pub(super) enum Windows {
    /// None, even if the file states a window.
    Never,
    /// Every layer.
    EveryLayer,
    /// All but every n-th layer (the n-th itself is global), n as given unless the file states it.
    AllButEvery(usize),
}

/// How the family's files hold it.
#[derive(Debug)]
pub(super) struct FamilyStorage {
    pub tensors: &'static [&'static [TensorRow]],
    /// Row order of q and k in GGUF files.
    pub gguf_rotation: Rotation,
    /// What safetensors files hold as weight of a norm.
    pub hub_norms: HubNorms,
    /// Values of config.json keys that files of this family may leave out.
    pub hub_defaults: &'static [(&'static str, f64)],
    /// Prefixes of stored names that stand for `model.`: text models inside multimodal ones.
    pub hub_prefixes: &'static [&'static str],
    /// Parts of the names of stored tensors that the text model does not use.
    pub ignored: &'static [&'static str],
}

/// Which dimensions of a head turn together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rotation {
    /// i with i + half: ours.
    HalfSplit,
    /// 2i with 2i + 1: rows are put in our order at load.
    Interleaved,
}

/// What a stored norm weight means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HubNorms {
    /// The factor.
    Factor,
    /// The factor less one.
    FactorLessOne,
}

/// Whose names a checkpoint uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Naming {
    Gguf,
    Hub,
}

/// One tensor, or one of every layer, under three names. `{i}` stands for the layer.
#[derive(Debug)]
pub(super) struct TensorRow {
    pub role: Role,
    ours: &'static str,
    gguf: &'static str,
    hub: &'static str,
}

/// What a tensor is for; its shape and whether a model needs it follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    Embedding,
    Head,
    Norm,
    HeadNorm,
    Query,
    Key,
    Value,
    AttentionOutput,
    QueryBias,
    KeyBias,
    ValueBias,
    OutputBias,
    MlpIn,
    MlpOut,
}

/// Whether a model must hold a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Need {
    Required,
    /// Used when the file holds it.
    Optional,
    /// Not used; the file may hold it.
    Unused,
    /// Would be used by another configuration; the file must not hold it.
    Forbidden,
}

impl TensorRow {
    /// Layers that have this tensor: all, or a single pass for one outside the layers.
    pub(super) fn repetitions(&self, num_layers: usize) -> usize {
        if self.ours.contains(LAYER) {
            num_layers
        } else {
            1
        }
    }

    pub(super) fn our_name(&self, layer: usize) -> String {
        self.ours.replace(LAYER, &layer.to_string())
    }

    pub(super) fn stored_name(&self, naming: Naming, layer: usize) -> String {
        let pattern = match naming {
            Naming::Gguf => self.gguf,
            Naming::Hub => self.hub,
        };
        pattern.replace(LAYER, &layer.to_string())
    }
}

impl Role {
    /// (out_features, in_features) of a matrix, (width,) of a vector.
    pub(super) fn shape(self, config: &ModelConfig) -> Vec<usize> {
        let hidden = config.hidden_size;
        let queries = config.num_heads * config.head_dim;
        let keys = config.num_kv_heads * config.head_dim;
        match self {
            Role::Embedding | Role::Head => vec![config.vocab_size, hidden],
            Role::Norm | Role::OutputBias => vec![hidden],
            Role::HeadNorm => vec![config.head_dim],
            Role::Query => vec![queries, hidden],
            Role::Key | Role::Value => vec![keys, hidden],
            Role::AttentionOutput => vec![hidden, queries],
            Role::QueryBias => vec![queries],
            Role::KeyBias | Role::ValueBias => vec![keys],
            Role::MlpIn => vec![config.intermediate_size, hidden],
            Role::MlpOut => vec![hidden, config.intermediate_size],
        }
    }

    pub(super) fn need(self, config: &ModelConfig) -> Need {
        match self {
            Role::Embedding
            | Role::Norm
            | Role::HeadNorm
            | Role::Query
            | Role::Key
            | Role::Value
            | Role::AttentionOutput
            | Role::MlpIn
            | Role::MlpOut => Need::Required,
            Role::Head if config.tied_embeddings => Need::Unused,
            Role::Head => Need::Required,
            Role::QueryBias | Role::KeyBias | Role::ValueBias if config.qkv_bias => Need::Required,
            Role::QueryBias | Role::KeyBias | Role::ValueBias => Need::Forbidden,
            Role::OutputBias => Need::Optional,
        }
    }
}

impl Family {
    /// The family of a GGUF file.
    pub(super) fn of_gguf(architecture: &str) -> Result<&'static Family, LoadError> {
        let found = FAMILIES.iter().find(|row| row.gguf.contains(&architecture));
        found.ok_or_else(|| unsupported(architecture))
    }

    /// The family of a folder from the Hub.
    pub(super) fn of_hub(model_type: &str) -> Result<&'static Family, LoadError> {
        let found = FAMILIES.iter().find(|row| row.hub.contains(&model_type));
        found.ok_or_else(|| unsupported(model_type))
    }

    pub(super) fn rows(&self) -> impl Iterator<Item = &'static TensorRow> {
        self.storage.tensors.iter().copied().flatten()
    }

    /// The name that files use for one of our tensors.
    pub(super) fn stored_name(&self, naming: Naming, our_name: &str) -> Option<String> {
        let row = self.rows().find(|row| row.our_name(0) == our_name)?;
        Some(row.stored_name(naming, 0))
    }
}

fn unsupported(architecture: &str) -> LoadError {
    let names = FAMILIES
        .iter()
        .flat_map(|row| row.hub.iter().chain(row.gguf));
    let mut names: Vec<&str> = names.copied().collect();
    names.sort_unstable();
    names.dedup();
    LoadError::UnsupportedArchitecture {
        architecture: super::error::printable(architecture.to_owned()),
        supported: names.join(", "),
    }
}

const LAYER: &str = "{i}";

const fn row(role: Role, ours: &'static str, gguf: &'static str, hub: &'static str) -> TensorRow {
    TensorRow {
        role,
        ours,
        gguf,
        hub,
    }
}

/// The frame of every decoder.
#[rustfmt::skip]
const FRAME: &[TensorRow] = &[
    row(Role::Embedding, "embed.weight", "token_embd.weight", "model.embed_tokens.weight"),
    row(Role::Norm, "final_norm.weight", "output_norm.weight", "model.norm.weight"),
    row(Role::Head, "lm_head.weight", "output.weight", "lm_head.weight"),
];

#[rustfmt::skip]
const ATTENTION: &[TensorRow] = &[
    row(Role::Norm, "layers.{i}.attn_norm.weight", "blk.{i}.attn_norm.weight", "model.layers.{i}.input_layernorm.weight"),
    row(Role::Query, "layers.{i}.q.weight", "blk.{i}.attn_q.weight", "model.layers.{i}.self_attn.q_proj.weight"),
    row(Role::Key, "layers.{i}.k.weight", "blk.{i}.attn_k.weight", "model.layers.{i}.self_attn.k_proj.weight"),
    row(Role::Value, "layers.{i}.v.weight", "blk.{i}.attn_v.weight", "model.layers.{i}.self_attn.v_proj.weight"),
    row(Role::AttentionOutput, "layers.{i}.o.weight", "blk.{i}.attn_output.weight", "model.layers.{i}.self_attn.o_proj.weight"),
];

#[rustfmt::skip]
const ATTENTION_BIASES: &[TensorRow] = &[
    row(Role::QueryBias, "layers.{i}.q.bias", "blk.{i}.attn_q.bias", "model.layers.{i}.self_attn.q_proj.bias"),
    row(Role::KeyBias, "layers.{i}.k.bias", "blk.{i}.attn_k.bias", "model.layers.{i}.self_attn.k_proj.bias"),
    row(Role::ValueBias, "layers.{i}.v.bias", "blk.{i}.attn_v.bias", "model.layers.{i}.self_attn.v_proj.bias"),
    row(Role::OutputBias, "layers.{i}.o.bias", "blk.{i}.attn_output.bias", "model.layers.{i}.self_attn.o_proj.bias"),
];

#[rustfmt::skip]
const QUERY_KEY_NORMS: &[TensorRow] = &[
    row(Role::HeadNorm, "layers.{i}.q_norm.weight", "blk.{i}.attn_q_norm.weight", "model.layers.{i}.self_attn.q_norm.weight"),
    row(Role::HeadNorm, "layers.{i}.k_norm.weight", "blk.{i}.attn_k_norm.weight", "model.layers.{i}.self_attn.k_norm.weight"),
];

#[rustfmt::skip]
const GATED_MLP: &[TensorRow] = &[
    row(Role::MlpIn, "layers.{i}.gate.weight", "blk.{i}.ffn_gate.weight", "model.layers.{i}.mlp.gate_proj.weight"),
    row(Role::MlpIn, "layers.{i}.up.weight", "blk.{i}.ffn_up.weight", "model.layers.{i}.mlp.up_proj.weight"),
    row(Role::MlpOut, "layers.{i}.down.weight", "blk.{i}.ffn_down.weight", "model.layers.{i}.mlp.down_proj.weight"),
];

/// Norm before the MLP alone; the Hub's name says "post attention" and means this one.
#[rustfmt::skip]
const PRE_NORM: &[TensorRow] = &[
    row(Role::Norm, "layers.{i}.mlp_norm.weight", "blk.{i}.ffn_norm.weight", "model.layers.{i}.post_attention_layernorm.weight"),
];

/// Norms around attention and MLP; here the Hub's "post attention" is what it says.
#[rustfmt::skip]
const SANDWICH_NORMS: &[TensorRow] = &[
    row(Role::Norm, "layers.{i}.post_attn_norm.weight", "blk.{i}.post_attention_norm.weight", "model.layers.{i}.post_attention_layernorm.weight"),
    row(Role::Norm, "layers.{i}.mlp_norm.weight", "blk.{i}.ffn_norm.weight", "model.layers.{i}.pre_feedforward_layernorm.weight"),
    row(Role::Norm, "layers.{i}.post_mlp_norm.weight", "blk.{i}.post_ffw_norm.weight", "model.layers.{i}.post_feedforward_layernorm.weight"),
];

const LLAMA_TENSORS: &[&[TensorRow]] = &[FRAME, ATTENTION, ATTENTION_BIASES, GATED_MLP, PRE_NORM];

const GEMMA3_TENSORS: &[&[TensorRow]] = &[
    FRAME,
    ATTENTION,
    ATTENTION_BIASES,
    QUERY_KEY_NORMS,
    GATED_MLP,
    SANDWICH_NORMS,
];

/// Frequencies that old versions of transformers saved with the weights; they follow from the configuration.
const ROTARY_BUFFERS: &[&str] = &["rotary_emb.inv_freq"];

const FAMILIES: &[Family] = &[
    Family {
        gguf: &["llama"],
        hub: &["llama"],
        math: FamilyMath {
            norms: NormPlacement::Pre,
            qk_norm: false,
            activation: Activation::Silu,
            embedding_scale: EmbeddingScale::One,
            windows: Windows::Never,
            local_rope_theta: None,
            scale_by_hidden_at: None,
        },
        storage: FamilyStorage {
            tensors: LLAMA_TENSORS,
            gguf_rotation: Rotation::Interleaved,
            hub_norms: HubNorms::Factor,
            hub_defaults: &[("max_position_embeddings", 2048.0), ("rms_norm_eps", 1e-6)],
            hub_prefixes: &[],
            ignored: ROTARY_BUFFERS,
        },
    },
    Family {
        // Converters write Mistral as `llama`.
        gguf: &[],
        hub: &["mistral"],
        math: FamilyMath {
            norms: NormPlacement::Pre,
            qk_norm: false,
            activation: Activation::Silu,
            embedding_scale: EmbeddingScale::One,
            windows: Windows::EveryLayer,
            local_rope_theta: None,
            scale_by_hidden_at: None,
        },
        storage: FamilyStorage {
            tensors: LLAMA_TENSORS,
            gguf_rotation: Rotation::Interleaved,
            hub_norms: HubNorms::Factor,
            hub_defaults: &[
                ("max_position_embeddings", 131_072.0),
                ("num_key_value_heads", 8.0),
                ("rms_norm_eps", 1e-6),
                ("sliding_window", 4096.0),
            ],
            hub_prefixes: &[],
            ignored: ROTARY_BUFFERS,
        },
    },
    Family {
        gguf: &["gemma3"],
        hub: &["gemma3_text", "gemma3"],
        math: FamilyMath {
            norms: NormPlacement::Sandwich,
            qk_norm: true,
            activation: Activation::GeluTanh,
            embedding_scale: EmbeddingScale::SqrtHidden,
            windows: Windows::AllButEvery(6),
            local_rope_theta: Some(10_000.0),
            scale_by_hidden_at: Some(62),
        },
        storage: FamilyStorage {
            tensors: GEMMA3_TENSORS,
            gguf_rotation: Rotation::HalfSplit,
            hub_norms: HubNorms::FactorLessOne,
            // The text half of the multimodal files states little more than its sizes.
            hub_defaults: &[
                ("vocab_size", 262_208.0),
                ("num_attention_heads", 8.0),
                ("num_key_value_heads", 4.0),
                ("head_dim", 256.0),
                ("max_position_embeddings", 131_072.0),
                ("rms_norm_eps", 1e-6),
                ("rope_theta", 1e6),
                ("query_pre_attn_scalar", 256.0),
                ("sliding_window", 4096.0),
                ("tie_word_embeddings", 1.0),
            ],
            hub_prefixes: &["language_model.model.", "model.language_model."],
            ignored: &["vision_tower.", "multi_modal_projector."],
        },
    },
];
