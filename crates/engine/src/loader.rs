//! Model files as found on disk become a `ModelConfig` and tensors under our own names.
//!
//! Nothing here computes; a type that the kernels cannot compute is an error when the tensor is used.

use std::fmt;
use std::path::Path;

pub mod error;
pub mod inspect;
pub mod metadata;
pub mod tensor;
pub mod weights;

#[cfg(test)]
mod fuzz;
#[cfg(test)]
mod tests;

mod checkpoint;
mod families;
mod gguf;
mod header;
mod hf;
mod hyperparameters;
mod model_config;
mod model_file;
mod ropes;
mod safetensors;
mod special_tokens;

pub use error::LoadError;
pub use inspect::{FileFormat, Inspection, TensorSummary, TokenizerSummary, TypeTotals, inspect};
pub use metadata::{Metadata, MetadataValue};
pub use tensor::{RawTensor, TensorType};
pub use weights::{TensorInfo, Weights};

use crate::config::ModelConfig;
use checkpoint::{Attributes, Checkpoint};
use weights::StoredWeights;

/// A model that can run: files open, everything checked, no tensor read.
#[derive(Debug)]
pub struct ModelFiles {
    /// What the file calls the model, else the name of file or folder.
    pub name: String,
    /// The decoder's configuration.
    pub config: ModelConfig,
    /// The tensors, to be read one at a time.
    pub weights: Weights,
    /// Where the tokenizer comes from.
    pub tokenizer: TokenizerSource,
    /// The chat template, if the model has one.
    pub chat_template: Option<String>,
    /// Hash of headers, tensor tables and settings: equal for equal models, whatever the path. 16 hex digits.
    pub fingerprint: String,
}

/// Where the tokenizer of a model comes from; `text::tokenizer` builds it.
#[derive(Clone)]
pub enum TokenizerSource {
    /// The metadata of a GGUF file.
    Gguf(Metadata),
    /// `tokenizer.json`, with `tokenizer_config.json` beside it when there is one.
    Json {
        /// Bytes of tokenizer.json.
        tokenizer: Vec<u8>,
        /// Bytes of tokenizer_config.json.
        settings: Option<Vec<u8>>,
    },
}

impl fmt::Debug for TokenizerSource {
    /// The kind alone: vocabularies fill screens.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TokenizerSource::Gguf(_) => f.write_str("Gguf(…)"),
            TokenizerSource::Json { .. } => f.write_str("Json { … }"),
        }
    }
}

/// Opens a GGUF file (or the first part of a split one), or a folder with config.json and safetensors files or with
/// one GGUF file. Checks headers, configuration and the presence, type and shape of every tensor; reads no tensor.
pub fn open(path: &Path) -> Result<ModelFiles, LoadError> {
    assemble(Checkpoint::open(path)?)
}

/// The model that a checkpoint holds.
fn assemble(checkpoint: Checkpoint) -> Result<ModelFiles, LoadError> {
    let (family, config) = model_config::read(&checkpoint)?;
    let name = inspect::model_name(&checkpoint);
    let stored = StoredWeights {
        naming: checkpoint.naming(),
        files: checkpoint.files,
        tensors: checkpoint.tensors,
    };
    let weights = Weights::map(stored, family, &config)?;
    let (tokenizer, chat_template) = text_parts(&checkpoint.path, checkpoint.attributes)?;
    Ok(ModelFiles {
        name,
        config,
        weights,
        tokenizer,
        chat_template,
        fingerprint: checkpoint.fingerprint,
    })
}

fn text_parts(
    path: &Path,
    attributes: Attributes,
) -> Result<(TokenizerSource, Option<String>), LoadError> {
    match attributes {
        Attributes::Gguf(metadata) => {
            if metadata.texts("tokenizer.ggml.tokens").is_none() {
                return Err(LoadError::config("tokenizer.ggml.tokens", "missing"));
            }
            let template = metadata.text("tokenizer.chat_template").map(str::to_owned);
            Ok((TokenizerSource::Gguf(metadata), template))
        }
        Attributes::Hub(folder) => {
            let Some(tokenizer) = folder.tokenizer else {
                return Err(LoadError::no_model(
                    path,
                    "the folder has no tokenizer.json",
                ));
            };
            let source = TokenizerSource::Json {
                tokenizer,
                settings: folder.tokenizer_settings,
            };
            Ok((source, folder.chat_template))
        }
        Attributes::None => Err(LoadError::no_model(path, "no tokenizer")),
    }
}
