//! Model files as found on disk become a `ModelConfig` and tensors under our own names.
//!
//! Nothing here computes; a type that the kernels cannot compute is an error when the tensor is used.

pub mod metadata;
pub mod tensor;

pub use metadata::{Metadata, MetadataValue};
pub use tensor::{RawTensor, TensorType};

/// Where the tokenizer of a model comes from; `text::tokenizer` builds it.
#[derive(Clone, Debug)]
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
