//! `ModelConfig` from a family's row and a file's numbers, checked once so that nobody need check again.
//!
//! It reads no tensor data except the stored rotary factors. Errors name the key as the file spells it.

use serde_json::Value;

use crate::config::{Activation, LayerConfig, ModelConfig};

use super::LoadError;
use super::checkpoint::{Attributes, Checkpoint};
use super::families::{EmbeddingScale, Family, Windows};
use super::hyperparameters::{Hyperparameters, Key, keys};
use super::ropes;
use super::special_tokens;

/// The kernels work on 16 lanes; a head is a whole number of them.
const HEAD_DIM_MULTIPLE: usize = 16;

/// The family that a checkpoint belongs to and its configuration.
pub(super) fn read(checkpoint: &Checkpoint) -> Result<(&'static Family, ModelConfig), LoadError> {
    let family = family(checkpoint)?;
    let numbers = hyperparameters(checkpoint, family)?;
    refuse_unsupported(&numbers, checkpoint)?;
    let sizes = Sizes::read(&numbers, family, checkpoint)?;
    let ropes = ropes::read(&numbers, family, sizes.head_dim, checkpoint)?;
    let special = special_tokens::read(checkpoint, sizes.vocab_size)?;
    let config = ModelConfig {
        architecture: checkpoint.architecture().unwrap_or_default().to_owned(),
        vocab_size: sizes.vocab_size,
        hidden_size: sizes.hidden_size,
        intermediate_size: numbers.required_count(keys::INTERMEDIATE_SIZE)?,
        num_heads: sizes.num_heads,
        num_kv_heads: sizes.num_kv_heads,
        head_dim: sizes.head_dim,
        max_context: max_context(&numbers)?,
        norm_eps: norm_eps(&numbers)?,
        norms: family.math.norms,
        qk_norm: family.math.qk_norm,
        qkv_bias: qkv_bias(&numbers, family, checkpoint)?,
        activation: activation(family, checkpoint)?,
        embedding_scale: embedding_scale(family, sizes.hidden_size),
        attention_scale: attention_scale(&numbers, family, &sizes)?,
        attention_softcap: single(numbers.positive(keys::ATTENTION_SOFTCAP)?),
        logit_softcap: single(numbers.positive(keys::LOGIT_SOFTCAP)?),
        tied_embeddings: tied(&numbers, family, checkpoint)?,
        layers: layers(
            &numbers,
            family,
            checkpoint,
            (sizes.num_layers, ropes.len()),
        )?,
        ropes,
        bos_token: special.bos,
        eos_tokens: special.eos,
    };
    Ok((family, config))
}

fn family(checkpoint: &Checkpoint) -> Result<&'static Family, LoadError> {
    match (&checkpoint.attributes, checkpoint.architecture()) {
        (Attributes::Gguf(_), Some(architecture)) => Family::of_gguf(architecture),
        (Attributes::Hub(_), Some(model_type)) => Family::of_hub(model_type),
        (Attributes::Gguf(_), None) => Err(LoadError::config("general.architecture", "missing")),
        (Attributes::Hub(_), None) => Err(LoadError::config("model_type", "missing")),
        (Attributes::None, _) => Err(checkpoint.no_config()),
    }
}

fn hyperparameters<'a>(
    checkpoint: &'a Checkpoint,
    family: &Family,
) -> Result<Hyperparameters<'a>, LoadError> {
    match &checkpoint.attributes {
        Attributes::Gguf(metadata) => Ok(Hyperparameters::Gguf {
            metadata,
            architecture: checkpoint.architecture().unwrap_or_default(),
        }),
        Attributes::Hub(folder) => Ok(Hyperparameters::Hub {
            config: &folder.config,
            defaults: family.storage.hub_defaults,
        }),
        Attributes::None => Err(checkpoint.no_config()),
    }
}

/// Flags that must have this value where a file states them.
const REQUIRED_FLAGS: [(Key, bool, &str); 3] = [
    (keys::MLP_BIAS, false, "MLP biases are not supported yet"),
    (
        keys::BIDIRECTIONAL,
        false,
        "bidirectional attention is not supported",
    ),
    (
        keys::CAUSAL,
        true,
        "bidirectional attention is not supported",
    ),
];

/// What would change the answers and is not computed here.
fn refuse_unsupported(
    numbers: &Hyperparameters<'_>,
    checkpoint: &Checkpoint,
) -> Result<(), LoadError> {
    if numbers
        .number(keys::NUM_EXPERTS)?
        .is_some_and(|experts| experts > 0.0)
    {
        return Err(numbers.error(
            keys::NUM_EXPERTS,
            "mixtures of experts are not supported yet",
        ));
    }
    for (key, wanted, problem) in REQUIRED_FLAGS {
        if numbers.flag(key)?.is_some_and(|stated| stated != wanted) {
            return Err(numbers.error(key, problem));
        }
    }
    match checkpoint.hub_value("quantization_config") {
        None | Some(Value::Null) => Ok(()),
        Some(_) => Err(LoadError::config(
            "quantization_config",
            "quantised safetensors are not supported, use a GGUF file",
        )),
    }
}

/// The sizes that others depend on.
struct Sizes {
    vocab_size: usize,
    hidden_size: usize,
    num_layers: usize,
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
}

impl Sizes {
    fn read(
        numbers: &Hyperparameters<'_>,
        family: &Family,
        checkpoint: &Checkpoint,
    ) -> Result<Self, LoadError> {
        let num_heads = numbers.required_count(keys::NUM_HEADS)?;
        let hidden_size = numbers.required_count(keys::HIDDEN_SIZE)?;
        let sizes = Sizes {
            vocab_size: vocab_size(numbers, family, checkpoint)?,
            hidden_size,
            num_layers: numbers.required_count(keys::NUM_LAYERS)?,
            num_heads,
            num_kv_heads: numbers.count(keys::NUM_KV_HEADS)?.unwrap_or(num_heads),
            head_dim: head_dim(numbers, hidden_size, num_heads)?,
        };
        if !sizes.num_heads.is_multiple_of(sizes.num_kv_heads) {
            let problem = format!("{} does not divide {num_heads} heads", sizes.num_kv_heads);
            return Err(numbers.error(keys::NUM_KV_HEADS, problem));
        }
        Ok(sizes)
    }
}

fn head_dim(
    numbers: &Hyperparameters<'_>,
    hidden_size: usize,
    num_heads: usize,
) -> Result<usize, LoadError> {
    let head_dim = match numbers.count(keys::HEAD_DIM)? {
        Some(head_dim) => head_dim,
        None if hidden_size.is_multiple_of(num_heads) => hidden_size / num_heads,
        None => {
            let problem = format!("{num_heads} does not divide a hidden size of {hidden_size}");
            return Err(numbers.error(keys::NUM_HEADS, problem));
        }
    };
    if !head_dim.is_multiple_of(HEAD_DIM_MULTIPLE) {
        let problem = format!("{head_dim}, must be a multiple of {HEAD_DIM_MULTIPLE}");
        return Err(numbers.error(keys::HEAD_DIM, problem));
    }
    if numbers
        .count(keys::VALUE_DIM)?
        .is_some_and(|dim| dim != head_dim)
    {
        let problem = format!("differs from the {head_dim} of keys, which is not supported");
        return Err(numbers.error(keys::VALUE_DIM, problem));
    }
    Ok(head_dim)
}

/// As stated, else the rows of the embedding (GGUF may leave it out). The embedding's shape is checked against it.
fn vocab_size(
    numbers: &Hyperparameters<'_>,
    family: &Family,
    checkpoint: &Checkpoint,
) -> Result<usize, LoadError> {
    if let Some(stated) = numbers.count(keys::VOCAB_SIZE)? {
        return Ok(stated);
    }
    let rows = checkpoint
        .named(family, "embed.weight")
        .and_then(|tensor| tensor.shape.first().copied());
    match rows {
        Some(rows) if rows as u64 <= keys::VOCAB_SIZE.max => Ok(rows),
        Some(rows) => Err(numbers.error(keys::VOCAB_SIZE, format!("{rows}, too large"))),
        None => Err(numbers.error(keys::VOCAB_SIZE, "missing, and so is the embedding")),
    }
}

fn max_context(numbers: &Hyperparameters<'_>) -> Result<u32, LoadError> {
    let tokens = numbers.required_count(keys::MAX_CONTEXT)?;
    // The key's cap lies below u32::MAX.
    u32::try_from(tokens).map_err(|_| numbers.error(keys::MAX_CONTEXT, "too large"))
}

fn norm_eps(numbers: &Hyperparameters<'_>) -> Result<f32, LoadError> {
    let eps = numbers
        .positive(keys::NORM_EPS)?
        .ok_or_else(|| numbers.error(keys::NORM_EPS, "missing"))?;
    if eps >= 1.0 {
        return Err(numbers.error(keys::NORM_EPS, format!("{eps}, must be below 1")));
    }
    Ok(eps as f32)
}

fn single(number: Option<f64>) -> Option<f32> {
    number.map(|number| number as f32)
}

/// config.json states it; GGUF files show it by holding the tensors.
fn qkv_bias(
    numbers: &Hyperparameters<'_>,
    family: &Family,
    checkpoint: &Checkpoint,
) -> Result<bool, LoadError> {
    let stated = numbers.flag(keys::ATTENTION_BIAS)?;
    let stored = checkpoint.named(family, "layers.0.q.bias").is_some();
    Ok(stated.unwrap_or(stored))
}

fn tied(
    numbers: &Hyperparameters<'_>,
    family: &Family,
    checkpoint: &Checkpoint,
) -> Result<bool, LoadError> {
    let stored = checkpoint.named(family, "lm_head.weight").is_some();
    match (&checkpoint.attributes, numbers.flag(keys::TIED)?) {
        (Attributes::Hub(_), stated) => Ok(stated.unwrap_or(false)),
        (Attributes::Gguf(_) | Attributes::None, _) => Ok(!stored),
    }
}

fn activation(family: &Family, checkpoint: &Checkpoint) -> Result<Activation, LoadError> {
    let stated = ["hidden_activation", "hidden_act"]
        .into_iter()
        .find_map(|key| {
            let value = checkpoint.hub_value(key).filter(|value| !value.is_null())?;
            Some((key, value))
        });
    let Some((key, value)) = stated else {
        return Ok(family.math.activation);
    };
    match value.as_str() {
        Some("silu" | "swish") => Ok(Activation::Silu),
        Some("gelu_pytorch_tanh" | "gelu_new" | "gelu_fast") => Ok(Activation::GeluTanh),
        Some(_) | None => Err(LoadError::config(
            key,
            format!("{value} is not supported yet"),
        )),
    }
}

fn embedding_scale(family: &Family, hidden_size: usize) -> f32 {
    match family.math.embedding_scale {
        EmbeddingScale::One => 1.0,
        EmbeddingScale::SqrtHidden => (hidden_size as f64).sqrt() as f32,
    }
}

fn attention_scale(
    numbers: &Hyperparameters<'_>,
    family: &Family,
    sizes: &Sizes,
) -> Result<f32, LoadError> {
    if let Some(scale) = numbers.positive(keys::ATTENTION_SCALE)? {
        return Ok(scale as f32);
    }
    let stated = numbers.positive(keys::QUERY_SCALAR)?;
    let unstated = match family.math.scale_by_hidden_at {
        Some(num_layers) if num_layers == sizes.num_layers => {
            sizes.hidden_size as f64 / sizes.num_heads as f64
        }
        Some(_) | None => sizes.head_dim as f64,
    };
    Ok(stated.unwrap_or(unstated).sqrt().recip() as f32)
}

fn layers(
    numbers: &Hyperparameters<'_>,
    family: &Family,
    checkpoint: &Checkpoint,
    (num_layers, num_ropes): (usize, usize),
) -> Result<Vec<LayerConfig>, LoadError> {
    let window = numbers
        .count(keys::WINDOW)?
        .and_then(|window| u32::try_from(window).ok());
    let windowed = windowed_layers(numbers, family, checkpoint, num_layers)?;
    let local_rope = num_ropes.saturating_sub(1);
    windowed
        .into_iter()
        .map(|is_windowed| match (is_windowed, window) {
            (false, _) => Ok(LayerConfig {
                window: None,
                rope: 0,
            }),
            (true, Some(_)) => Ok(LayerConfig {
                window,
                rope: local_rope,
            }),
            // Mistral says so by leaving the window out or null.
            (true, None) if matches!(family.math.windows, Windows::EveryLayer) => Ok(LayerConfig {
                window: None,
                rope: 0,
            }),
            (true, None) => Err(numbers.error(keys::WINDOW, "missing")),
        })
        .collect()
}

/// For each layer, whether it uses the window.
fn windowed_layers(
    numbers: &Hyperparameters<'_>,
    family: &Family,
    checkpoint: &Checkpoint,
    num_layers: usize,
) -> Result<Vec<bool>, LoadError> {
    if let Some(stated) = stated_windows(numbers, checkpoint, num_layers)? {
        return Ok(stated);
    }
    match family.math.windows {
        Windows::Never => Ok(vec![false; num_layers]),
        Windows::EveryLayer => Ok(vec![true; num_layers]),
        Windows::AllButEvery(default) => {
            let public = numbers.count(keys::WINDOW_PATTERN)?;
            let private = numbers.count(keys::PRIVATE_WINDOW_PATTERN)?;
            let period = public.or(private).unwrap_or(default);
            Ok((1..=num_layers)
                .map(|layer| !layer.is_multiple_of(period))
                .collect())
        }
    }
}

/// The windows where the file lists them layer by layer.
fn stated_windows(
    numbers: &Hyperparameters<'_>,
    checkpoint: &Checkpoint,
    num_layers: usize,
) -> Result<Option<Vec<bool>>, LoadError> {
    let (key, listed) = match &checkpoint.attributes {
        Attributes::Gguf(metadata) => {
            let key = numbers.name(keys::WINDOW_PATTERN);
            let listed = metadata.bools(&key).map(<[bool]>::to_vec);
            (key, listed)
        }
        Attributes::Hub(folder) => {
            let key = "layer_types";
            let listed = match folder.config.get(key) {
                None | Some(Value::Null) => None,
                Some(value) => Some(layer_types(key, value)?),
            };
            (key.to_owned(), listed)
        }
        Attributes::None => return Ok(None),
    };
    match listed {
        Some(layers) if layers.len() != num_layers => {
            let problem = format!("{} entries for {num_layers} layers", layers.len());
            Err(LoadError::config(key, problem))
        }
        listed => Ok(listed),
    }
}

fn layer_types(key: &str, value: &Value) -> Result<Vec<bool>, LoadError> {
    let types = value.as_array().map(Vec::as_slice).unwrap_or_default();
    types
        .iter()
        .map(|layer| match layer.as_str() {
            Some("full_attention") => Ok(false),
            Some("sliding_attention") => Ok(true),
            Some(_) | None => Err(LoadError::config(
                key,
                format!("{layer} is not supported yet"),
            )),
        })
        .collect()
}
