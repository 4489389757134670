//! What is in a model's files, as plain data for people: works for models that we cannot run, too.
//!
//! It reads headers and settings, no tensor data, and prints nothing.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::Value;

use crate::config::ModelConfig;

use super::LoadError;
use super::checkpoint::{Attributes, Checkpoint};
use super::error::printable;
use super::header::StoredTensor;
use super::metadata::Metadata;

/// What is in a model's files.
#[derive(Clone, Debug)]
pub struct Inspection {
    /// As given.
    pub path: PathBuf,
    /// Container of the tensors.
    pub format: FileFormat,
    /// What the file calls the model, else the name of file or folder.
    pub name: String,
    /// The family as the file names it.
    pub architecture: Option<String>,
    /// As the file states it.
    pub license: Option<String>,
    /// Longest sequence the model was trained for.
    pub context_length: Option<u64>,
    /// By name as stored.
    pub tensors: Vec<TensorSummary>,
    /// Kind and size of the vocabulary.
    pub tokenizer: Option<TokenizerSummary>,
    /// The files hold a chat template.
    pub has_chat_template: bool,
    /// As in `ModelFiles`.
    pub fingerprint: String,
    /// The configuration if we can run the model, else why not.
    pub model: Result<ModelConfig, String>,
}

/// Container of the tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileFormat {
    /// One GGUF file or the parts of a split one.
    Gguf,
    /// One or more safetensors files.
    Safetensors,
}

/// A tensor as stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSummary {
    /// As the file names it.
    pub name: String,
    /// Type as its format names it: `Q4_1`, `BF16`.
    pub type_name: &'static str,
    /// Row-major, last dimension contiguous.
    pub shape: Vec<usize>,
    /// Length of its data.
    pub num_bytes: u64,
}

/// Tensors of one type together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TypeTotals {
    /// Tensors.
    pub num_tensors: u64,
    /// Their elements.
    pub num_parameters: u64,
    /// Their data.
    pub num_bytes: u64,
}

/// A vocabulary.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenizerSummary {
    /// As the file names it: `gpt2`, `llama`, `BPE`, `Unigram`.
    pub kind: String,
    /// Tokens.
    pub num_tokens: usize,
}

impl Inspection {
    /// Elements of all tensors.
    pub fn num_parameters(&self) -> u64 {
        self.tensors.iter().map(TensorSummary::num_parameters).sum()
    }

    /// Data of all tensors.
    pub fn num_bytes(&self) -> u64 {
        self.tensors.iter().map(|tensor| tensor.num_bytes).sum()
    }

    /// Totals by type name: the quantisation of the model.
    pub fn types(&self) -> BTreeMap<&'static str, TypeTotals> {
        let mut types: BTreeMap<&'static str, TypeTotals> = BTreeMap::new();
        for tensor in &self.tensors {
            let totals = types.entry(tensor.type_name).or_default();
            totals.num_tensors += 1;
            totals.num_parameters += tensor.num_parameters();
            totals.num_bytes += tensor.num_bytes;
        }
        types
    }
}

impl TensorSummary {
    /// Elements; headers were checked, so the product does not overflow.
    pub fn num_parameters(&self) -> u64 {
        self.shape.iter().map(|dim| *dim as u64).product()
    }

    fn new(tensor: &StoredTensor) -> Self {
        TensorSummary {
            name: printable(tensor.name.clone()),
            type_name: tensor.dtype.name(),
            shape: tensor.shape.clone(),
            num_bytes: tensor.num_bytes,
        }
    }
}

/// Reads headers and settings of what `open` takes, and of a safetensors file alone.
pub fn inspect(path: &Path) -> Result<Inspection, LoadError> {
    let checkpoint = Checkpoint::open(path)?;
    Ok(Inspection {
        path: path.to_owned(),
        format: match checkpoint.attributes {
            Attributes::Gguf(_) => FileFormat::Gguf,
            Attributes::Hub(_) | Attributes::None => FileFormat::Safetensors,
        },
        name: model_name(&checkpoint),
        architecture: checkpoint
            .architecture()
            .map(|name| printable(name.to_owned())),
        license: license(&checkpoint),
        context_length: context_length(&checkpoint),
        tensors: checkpoint
            .tensors
            .values()
            .map(TensorSummary::new)
            .collect(),
        tokenizer: tokenizer(&checkpoint),
        has_chat_template: has_chat_template(&checkpoint),
        fingerprint: checkpoint.fingerprint.clone(),
        model: super::assemble(checkpoint)
            .map(|model| model.config)
            .map_err(|error| error.to_string()),
    })
}

/// What the file calls the model, else the name of file or folder.
pub(super) fn model_name(checkpoint: &Checkpoint) -> String {
    let stated = match &checkpoint.attributes {
        Attributes::Gguf(metadata) => metadata.text("general.name"),
        Attributes::Hub(_) | Attributes::None => None,
    };
    let stem = || {
        checkpoint
            .path
            .file_stem()
            .map(|stem| stem.to_string_lossy().into_owned())
    };
    match stated {
        Some(name) if !name.trim().is_empty() => printable(name.to_owned()),
        Some(_) | None => stem().unwrap_or_else(|| "model".to_owned()),
    }
}

fn license(checkpoint: &Checkpoint) -> Option<String> {
    match &checkpoint.attributes {
        Attributes::Gguf(metadata) => metadata
            .text("general.license")
            .map(|license| printable(license.to_owned())),
        Attributes::Hub(_) | Attributes::None => None,
    }
}

fn context_length(checkpoint: &Checkpoint) -> Option<u64> {
    match &checkpoint.attributes {
        Attributes::Gguf(metadata) => {
            let architecture = checkpoint.architecture()?;
            metadata.unsigned(&format!("{architecture}.context_length"))
        }
        Attributes::Hub(folder) => folder
            .config
            .get("max_position_embeddings")
            .and_then(Value::as_u64),
        Attributes::None => None,
    }
}

fn has_chat_template(checkpoint: &Checkpoint) -> bool {
    match &checkpoint.attributes {
        Attributes::Gguf(metadata) => metadata.text("tokenizer.chat_template").is_some(),
        Attributes::Hub(folder) => folder.chat_template.is_some(),
        Attributes::None => false,
    }
}

fn tokenizer(checkpoint: &Checkpoint) -> Option<TokenizerSummary> {
    match &checkpoint.attributes {
        Attributes::Gguf(metadata) => gguf_tokenizer(metadata),
        Attributes::Hub(folder) => json_tokenizer(folder.tokenizer.as_deref()?),
        Attributes::None => None,
    }
}

fn gguf_tokenizer(metadata: &Metadata) -> Option<TokenizerSummary> {
    Some(TokenizerSummary {
        kind: printable(metadata.text("tokenizer.ggml.model")?.to_owned()),
        num_tokens: metadata.texts("tokenizer.ggml.tokens")?.len(),
    })
}

/// tokenizer.json without its 30 MB of vocabulary kept.
#[derive(Deserialize)]
struct TokenizerFile {
    model: TokenizerModel,
}

#[derive(Deserialize)]
struct TokenizerModel {
    #[serde(rename = "type", default)]
    kind: Option<String>,
    vocab: Counted,
}

/// The number of entries of a list or an object.
struct Counted(usize);

impl<'de> Deserialize<'de> for Counted {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(CountedVisitor)
    }
}

struct CountedVisitor;

impl<'de> Visitor<'de> for CountedVisitor {
    type Value = Counted;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list or an object of tokens")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Counted, A::Error> {
        let mut count = 0;
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {
            count += 1;
        }
        Ok(Counted(count))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Counted, A::Error> {
        let mut count = 0;
        while seq.next_element::<IgnoredAny>()?.is_some() {
            count += 1;
        }
        Ok(Counted(count))
    }
}

fn json_tokenizer(bytes: &[u8]) -> Option<TokenizerSummary> {
    let file: TokenizerFile = serde_json::from_slice(bytes).ok()?;
    Some(TokenizerSummary {
        kind: printable(file.model.kind.unwrap_or_else(|| "unnamed".to_owned())),
        num_tokens: file.model.vocab.0,
    })
}
