//! The tensors of a model under our own names, read one at a time.
//!
//! Differences between formats end here: names, row order of rotated heads, what a norm's weight means.
//! Nothing is dequantised: a quantised row moves whole.

use std::collections::BTreeMap;

use half::{bf16, f16};

use crate::config::ModelConfig;

use super::LoadError;
use super::checkpoint;
use super::families::{Family, HubNorms, Naming, Need, Role, Rotation, TensorRow};
use super::header::{StoredTensor, StoredType};
use super::model_file::ModelFile;
use super::ropes::FACTORS_TENSOR;
use super::tensor::{RawTensor, TensorType};

/// The tensors of a model. Reading takes `&self`; nothing is cached.
#[derive(Debug)]
pub struct Weights {
    files: Vec<ModelFile>,
    /// By our name.
    entries: BTreeMap<String, Entry>,
}

/// Tensors under the names that the files give them.
pub(super) struct StoredWeights {
    pub naming: Naming,
    pub files: Vec<ModelFile>,
    pub tensors: BTreeMap<String, StoredTensor>,
}

/// What is known of a tensor without reading it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Our name.
    pub name: String,
    /// Type of the tensor as it will be read.
    pub dtype: TensorType,
    /// As it will be read; (out_features, in_features) for a weight matrix.
    pub shape: Vec<usize>,
    /// Bytes as it will be read.
    pub num_bytes: u64,
}

#[derive(Debug)]
struct Entry {
    stored: StoredTensor,
    dtype: TensorType,
    change: Change,
}

/// What is done to a tensor after reading.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    None,
    /// Rows of each head go from interleaved to half-split order.
    SplitHeads {
        num_heads: usize,
    },
    /// The factor less one becomes the factor, in f32.
    AddOne,
}

impl Weights {
    /// Finds every tensor of the family and checks type and shape; reads none.
    pub(super) fn map(
        stored: StoredWeights,
        family: &Family,
        config: &ModelConfig,
    ) -> Result<Self, LoadError> {
        let naming = stored.naming;
        let mut tensors = canonical_names(family, stored.tensors);
        let mut entries = BTreeMap::new();
        for row in family.rows() {
            for layer in 0..row.repetitions(config.layers.len()) {
                let stored_name = row.stored_name(naming, layer);
                let Some(stored) = take(&mut tensors, row, &stored_name, config)? else {
                    continue;
                };
                let entry = Entry::new(stored, row.role, change(row.role, family, naming, config))?;
                entry.check_shape(&row.role.shape(config))?;
                entries.insert(row.our_name(layer), entry);
            }
        }
        refuse_leftovers(family, config, tensors)?;
        Ok(Weights {
            files: stored.files,
            entries,
        })
    }

    /// Reads the tensor with one of our names.
    pub fn tensor(&self, our_name: &str) -> Result<RawTensor, LoadError> {
        let entry = self
            .entries
            .get(our_name)
            .ok_or_else(|| LoadError::MissingTensor {
                name: our_name.to_owned(),
            })?;
        let bytes = checkpoint::read_tensor(&self.files, &entry.stored)?;
        let bytes = match entry.change {
            Change::None => bytes,
            Change::SplitHeads { num_heads } => split_heads(&bytes, entry.num_rows(), num_heads),
            Change::AddOne => add_one(&bytes, entry.dtype),
        };
        let info = entry.info(our_name);
        Ok(RawTensor {
            name: info.name,
            dtype: info.dtype,
            shape: info.shape,
            bytes,
        })
    }

    /// What the tensor with one of our names will be, if the model has it.
    pub fn find(&self, our_name: &str) -> Option<TensorInfo> {
        self.entries.get(our_name).map(|entry| entry.info(our_name))
    }

    /// All tensors, in order of our names.
    pub fn list(&self) -> impl Iterator<Item = TensorInfo> + '_ {
        self.entries.iter().map(|(name, entry)| entry.info(name))
    }

    /// Bytes of all tensors as they will be read.
    pub fn num_bytes(&self) -> u64 {
        self.list().map(|tensor| tensor.num_bytes).sum()
    }
}

impl Entry {
    fn new(stored: StoredTensor, role: Role, change: Change) -> Result<Self, LoadError> {
        let dtype = match stored.dtype {
            StoredType::Ggml(dtype) if is_usable(dtype, role) => dtype,
            StoredType::Ggml(_) | StoredType::Safetensors(_) => {
                return Err(LoadError::TensorType {
                    name: stored.name,
                    type_name: stored.dtype.name().to_owned(),
                });
            }
        };
        Ok(Entry {
            stored,
            dtype,
            change,
        })
    }

    fn check_shape(&self, expected: &[usize]) -> Result<(), LoadError> {
        if self.stored.shape == expected {
            return Ok(());
        }
        Err(LoadError::TensorShape {
            name: self.stored.name.clone(),
            found: self.stored.shape.clone(),
            expected: expected.to_vec(),
        })
    }

    /// Rows that heads are made of; a bias counts its elements.
    fn num_rows(&self) -> usize {
        self.stored.shape.first().copied().unwrap_or(1)
    }

    fn info(&self, our_name: &str) -> TensorInfo {
        let num_elements: usize = self.stored.shape.iter().product();
        let (dtype, num_bytes) = match self.change {
            Change::None | Change::SplitHeads { .. } => (self.dtype, self.stored.num_bytes),
            Change::AddOne => (TensorType::F32, num_elements as u64 * 4),
        };
        TensorInfo {
            name: our_name.to_owned(),
            dtype,
            shape: self.stored.shape.clone(),
            num_bytes,
        }
    }
}

/// Matrices may be of any type that the kernels compute; vectors are plain floats.
fn is_usable(dtype: TensorType, role: Role) -> bool {
    match role {
        Role::Embedding
        | Role::Head
        | Role::Query
        | Role::Key
        | Role::Value
        | Role::AttentionOutput
        | Role::MlpIn
        | Role::MlpOut => dtype.is_computed(),
        Role::Norm
        | Role::HeadNorm
        | Role::QueryBias
        | Role::KeyBias
        | Role::ValueBias
        | Role::OutputBias => dtype.is_computed() && !dtype.is_quantised(),
    }
}

fn change(role: Role, family: &Family, naming: Naming, config: &ModelConfig) -> Change {
    match (naming, role) {
        (Naming::Gguf, Role::Query | Role::QueryBias) => {
            rotated(family.storage.gguf_rotation, config.num_heads)
        }
        (Naming::Gguf, Role::Key | Role::KeyBias) => {
            rotated(family.storage.gguf_rotation, config.num_kv_heads)
        }
        (Naming::Hub, Role::Norm | Role::HeadNorm) => match family.storage.hub_norms {
            HubNorms::Factor => Change::None,
            HubNorms::FactorLessOne => Change::AddOne,
        },
        (Naming::Gguf | Naming::Hub, _) => Change::None,
    }
}

fn rotated(rotation: Rotation, num_heads: usize) -> Change {
    match rotation {
        Rotation::HalfSplit => Change::None,
        Rotation::Interleaved => Change::SplitHeads { num_heads },
    }
}

/// Stored names with the family's prefixes for text models inside larger ones replaced.
fn canonical_names(
    family: &Family,
    tensors: BTreeMap<String, StoredTensor>,
) -> BTreeMap<String, StoredTensor> {
    let canonical = |name: &str| {
        let prefixes = family.storage.hub_prefixes.iter();
        let rest = prefixes
            .filter_map(|prefix| name.strip_prefix(prefix))
            .next();
        rest.map(|rest| format!("model.{rest}"))
    };
    tensors
        .into_iter()
        .map(|(name, tensor)| (canonical(&name).unwrap_or(name), tensor))
        .collect()
}

/// Removes a row's tensor from `tensors` if the model uses it.
fn take(
    tensors: &mut BTreeMap<String, StoredTensor>,
    row: &TensorRow,
    stored_name: &str,
    config: &ModelConfig,
) -> Result<Option<StoredTensor>, LoadError> {
    match row.role.need(config) {
        Need::Required => tensors.remove(stored_name).map(Some).ok_or_else(|| {
            let name = stored_name.to_owned();
            LoadError::MissingTensor { name }
        }),
        Need::Optional => Ok(tensors.remove(stored_name)),
        Need::Unused => {
            tensors.remove(stored_name);
            Ok(None)
        }
        // Left where it is, it becomes an error with the other leftovers.
        Need::Forbidden => Ok(None),
    }
}

/// A tensor that we would leave out changes the answers without a word, so it is an error instead.
fn refuse_leftovers(
    family: &Family,
    config: &ModelConfig,
    tensors: BTreeMap<String, StoredTensor>,
) -> Result<(), LoadError> {
    let is_known = |name: &str| {
        let mut ignored = family.storage.ignored.iter();
        name == FACTORS_TENSOR || ignored.any(|part| name.contains(part))
    };
    match tensors.into_keys().find(|name| !is_known(name)) {
        None => Ok(()),
        Some(name) => Err(LoadError::UnexpectedTensor {
            name: super::error::printable(name),
            architecture: config.architecture.clone(),
        }),
    }
}

/// Rows of each head from interleaved order (pair p at 2p and 2p + 1) to half-split order (p and p + half).
fn split_heads(bytes: &[u8], num_rows: usize, num_heads: usize) -> Vec<u8> {
    let rows_per_head = num_rows / num_heads.max(1);
    let row_bytes = bytes.len() / num_rows.max(1);
    if rows_per_head == 0 || row_bytes == 0 {
        return bytes.to_vec();
    }
    let mut split = Vec::with_capacity(bytes.len());
    for head in bytes.chunks(rows_per_head * row_bytes) {
        let rows = || head.chunks(row_bytes);
        rows()
            .step_by(2)
            .for_each(|row| split.extend_from_slice(row));
        rows()
            .skip(1)
            .step_by(2)
            .for_each(|row| split.extend_from_slice(row));
    }
    split
}

/// 1 + w in f32, from any plain float type.
fn add_one(bytes: &[u8], dtype: TensorType) -> Vec<u8> {
    let pairs = || bytes.as_chunks::<2>().0.iter().copied();
    let one_more = |weight: f32| (weight + 1.0).to_le_bytes();
    match dtype {
        TensorType::F16 => pairs().flat_map(|pair| one_more(f16::from_le_bytes(pair).to_f32())).collect(),
        TensorType::BF16 => pairs().flat_map(|pair| one_more(bf16::from_le_bytes(pair).to_f32())).collect(),
        TensorType::F32
        | TensorType::Q4_0
        | TensorType::Q4_1
        | TensorType::Q5_0
        | TensorType::Q5_1
        | TensorType::Q8_0
        | TensorType::Q2K
        | TensorType::Q3K
        | TensorType::Q4K
        | TensorType::Q5K
        | TensorType::Q6K
        // `Entry::new` lets plain floats alone become norms.
        | TensorType::Other(_) => {
            let quads = bytes.as_chunks::<4>().0.iter().copied();
            quads.flat_map(|quad| one_more(f32::from_le_bytes(quad))).collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_are_split_by_whole_rows() {
        // Two heads of four rows of two bytes; pairs (0, 1), (2, 3) become (0, 2), (1, 3).
        let bytes: Vec<u8> = (0..16).collect();
        let expected = [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15];
        assert_eq!(split_heads(&bytes, 8, 2), expected);
    }

    #[test]
    fn one_is_added_in_f32() {
        let check = |bytes: &[u8], dtype: TensorType| {
            assert_eq!(add_one(bytes, dtype), 1.5_f32.to_le_bytes(), "{dtype}");
        };
        check(&0.5_f32.to_le_bytes(), TensorType::F32);
        check(&f16::from_f32(0.5).to_le_bytes(), TensorType::F16);
        check(&bf16::from_f32(0.5).to_le_bytes(), TensorType::BF16);
    }
}
