//! The rotations of a model, from the many ways in which files state them.
//!
//! Kinds of scaling that we do not compute are errors, never ignored.

use serde_json::{Map, Value};

use crate::config::{RopeConfig, RopeScaling};

use super::LoadError;
use super::checkpoint::{Attributes, Checkpoint};
use super::families::Family;
use super::header::{StoredTensor, StoredType};
use super::hyperparameters::{Hyperparameters, SANE, keys};
use super::metadata::Metadata;
use super::tensor::TensorType;

/// Base when neither file nor family states one.
const DEFAULT_THETA: f64 = 10_000.0;
/// GGUF's tensor of one divisor per frequency.
pub(super) const FACTORS_TENSOR: &str = "rope_freqs.weight";

/// The rotation of global layers first, then that of windowed ones where the family has one of its own.
pub(super) fn read(
    numbers: &Hyperparameters<'_>,
    family: &Family,
    head_dim: usize,
    checkpoint: &Checkpoint,
) -> Result<Vec<RopeConfig>, LoadError> {
    let mut ropes = match &checkpoint.attributes {
        Attributes::Gguf(metadata) => vec![of_gguf(numbers, metadata, head_dim, checkpoint)?],
        Attributes::Hub(folder) => of_hub(numbers, &folder.config, head_dim)?,
        Attributes::None => Vec::new(),
    };
    match family.math.local_rope_theta {
        None => ropes.truncate(1),
        Some(_) if ropes.len() > 1 => {}
        Some(default) => ropes.push(RopeConfig {
            theta: numbers.positive(keys::LOCAL_ROPE_THETA)?.unwrap_or(default),
            rotary_dim: head_dim,
            scaling: RopeScaling::None,
        }),
    }
    Ok(ropes)
}

fn of_gguf(
    numbers: &Hyperparameters<'_>,
    metadata: &Metadata,
    head_dim: usize,
    checkpoint: &Checkpoint,
) -> Result<RopeConfig, LoadError> {
    let theta = numbers.positive(keys::ROPE_THETA)?.unwrap_or(DEFAULT_THETA);
    let rotary_dim = numbers.count(keys::ROTARY_DIM)?.unwrap_or(head_dim);
    if rotary_dim != head_dim {
        let problem = format!("{rotary_dim}, only whole heads of {head_dim} are supported");
        return Err(numbers.error(keys::ROTARY_DIM, problem));
    }
    let scaling = match stored_factors(checkpoint, rotary_dim / 2)? {
        Some(factors) => RopeScaling::Factors(factors),
        None => gguf_scaling(metadata, numbers)?,
    };
    Ok(RopeConfig {
        theta,
        rotary_dim,
        scaling,
    })
}

fn gguf_scaling(
    metadata: &Metadata,
    numbers: &Hyperparameters<'_>,
) -> Result<RopeScaling, LoadError> {
    let Hyperparameters::Gguf { architecture, .. } = numbers else {
        return Ok(RopeScaling::None);
    };
    let kind_key = format!("{architecture}.rope.scaling.type");
    let factor_key = format!("{architecture}.rope.scaling.factor");
    let old_factor_key = format!("{architecture}.rope.scale_linear");
    let factor = metadata
        .float(&factor_key)
        .or_else(|| metadata.float(&old_factor_key));
    match (metadata.text(&kind_key), factor) {
        (Some("none"), _) | (Some("linear") | None, None) => Ok(RopeScaling::None),
        (Some("linear") | None, Some(factor)) => linear(&factor_key, factor),
        (Some(kind), _) => Err(LoadError::config(
            kind_key,
            format!("{kind:?} is not supported yet"),
        )),
    }
}

fn linear(key: &str, factor: f64) -> Result<RopeScaling, LoadError> {
    if !SANE.contains(&factor) {
        return Err(LoadError::config(
            key,
            format!("{factor}, must be positive"),
        ));
    }
    Ok(if factor == 1.0 {
        RopeScaling::None
    } else {
        RopeScaling::Linear { factor }
    })
}

/// The divisors that a GGUF file stores as a tensor, one per frequency.
fn stored_factors(
    checkpoint: &Checkpoint,
    num_frequencies: usize,
) -> Result<Option<Vec<f32>>, LoadError> {
    let Some(tensor) = checkpoint.tensors.get(FACTORS_TENSOR) else {
        return Ok(None);
    };
    check_factors(tensor, num_frequencies)?;
    let bytes = checkpoint.read(tensor)?;
    let quads = bytes.as_chunks::<4>().0.iter().copied();
    let factors: Vec<f32> = quads.map(f32::from_le_bytes).collect();
    if factors
        .iter()
        .all(|factor| SANE.contains(&f64::from(*factor)))
    {
        Ok(Some(factors))
    } else {
        Err(LoadError::config(
            FACTORS_TENSOR,
            "a factor is not positive",
        ))
    }
}

fn check_factors(tensor: &StoredTensor, num_frequencies: usize) -> Result<(), LoadError> {
    if tensor.dtype != StoredType::Ggml(TensorType::F32) {
        return Err(LoadError::TensorType {
            name: tensor.name.clone(),
            type_name: tensor.dtype.name().to_owned(),
        });
    }
    if tensor.shape != [num_frequencies] {
        return Err(LoadError::TensorShape {
            name: tensor.name.clone(),
            found: tensor.shape.clone(),
            expected: vec![num_frequencies],
        });
    }
    Ok(())
}

/// config.json states rotations in one of three ways: `rope_theta` and `rope_scaling` (transformers 4), one
/// `rope_parameters` (transformers 5), or `rope_parameters` by layer type (transformers 5, Gemma 3).
fn of_hub(
    numbers: &Hyperparameters<'_>,
    config: &Map<String, Value>,
    head_dim: usize,
) -> Result<Vec<RopeConfig>, LoadError> {
    let theta = numbers.positive(keys::ROPE_THETA)?;
    let block = |value: &Value, key: &str| hub_rope(value, key, theta, head_dim);
    let Some(parameters) = config
        .get("rope_parameters")
        .filter(|value| !value.is_null())
    else {
        let scaling = config.get("rope_scaling").unwrap_or(&Value::Null);
        return Ok(vec![block(scaling, "rope_scaling")?]);
    };
    match (
        parameters.get("full_attention"),
        parameters.get("sliding_attention"),
    ) {
        (Some(global), Some(local)) => Ok(vec![
            block(global, "rope_parameters.full_attention")?,
            block(local, "rope_parameters.sliding_attention")?,
        ]),
        (_, _) => Ok(vec![block(parameters, "rope_parameters")?]),
    }
}

/// One rotation; `key` names its object, null is the plain rotation.
fn hub_rope(
    value: &Value,
    key: &str,
    outer_theta: Option<f64>,
    head_dim: usize,
) -> Result<RopeConfig, LoadError> {
    let block = ScalingBlock { value, key };
    let theta = block.positive("rope_theta")?.or(outer_theta);
    if block
        .positive("partial_rotary_factor")?
        .is_some_and(|fraction| fraction != 1.0)
    {
        let problem = "only whole heads are supported";
        return Err(block.error("partial_rotary_factor", problem));
    }
    Ok(RopeConfig {
        theta: theta.unwrap_or(DEFAULT_THETA),
        rotary_dim: head_dim,
        scaling: block.scaling()?,
    })
}

/// An object of config.json that describes a change of frequencies.
struct ScalingBlock<'a> {
    value: &'a Value,
    key: &'a str,
}

impl ScalingBlock<'_> {
    fn error(&self, field: &str, problem: impl Into<String>) -> LoadError {
        LoadError::config(format!("{}.{field}", self.key), problem)
    }

    fn positive(&self, field: &str) -> Result<Option<f64>, LoadError> {
        match self.value.get(field) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => match value.as_f64() {
                Some(number) if SANE.contains(&number) => Ok(Some(number)),
                Some(_) | None => Err(self.error(field, "must be a positive number")),
            },
        }
    }

    fn required(&self, field: &str) -> Result<f64, LoadError> {
        self.positive(field)?
            .ok_or_else(|| self.error(field, "missing"))
    }

    fn scaling(&self) -> Result<RopeScaling, LoadError> {
        // Early files say `type`.
        let kind = self
            .value
            .get("rope_type")
            .or_else(|| self.value.get("type"));
        match kind.map(Value::as_str) {
            None | Some(Some("default")) => Ok(RopeScaling::None),
            Some(Some("linear")) => linear(self.key, self.required("factor")?),
            Some(Some("llama3")) => self.llama3(),
            Some(Some(kind)) => {
                Err(self.error("rope_type", format!("{kind:?} is not supported yet")))
            }
            Some(None) => Err(self.error("rope_type", "must be a text")),
        }
    }

    fn llama3(&self) -> Result<RopeScaling, LoadError> {
        let low_freq_factor = self.required("low_freq_factor")?;
        let high_freq_factor = self.required("high_freq_factor")?;
        if high_freq_factor <= low_freq_factor {
            return Err(self.error("high_freq_factor", "must be above low_freq_factor"));
        }
        let original_max = self.required("original_max_position_embeddings")?;
        if !(1.0..=f64::from(u32::MAX)).contains(&original_max) {
            return Err(self.error("original_max_position_embeddings", "out of range"));
        }
        Ok(RopeScaling::Llama3 {
            factor: self.required("factor")?,
            low_freq_factor,
            high_freq_factor,
            original_max: original_max as u32,
        })
    }
}
