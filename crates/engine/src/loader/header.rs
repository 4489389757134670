//! What reading a file header yields, whatever the format, and the errors it ends with.
//!
//! No path and no tensor bytes in here.

use std::io;
use std::path::Path;

use super::LoadError;
use super::error::{one_line, printable};
use super::tensor::TensorType;

/// A tensor as a header describes it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct StoredTensor {
    /// As the file names it.
    pub name: String,
    /// Its element type.
    pub dtype: StoredType,
    /// Row-major, last dimension contiguous.
    pub shape: Vec<usize>,
    /// Which of the model's files holds it.
    pub part: usize,
    /// First byte, from the start of that file.
    pub offset: u64,
    /// Length of its data.
    pub num_bytes: u64,
}

/// Element type of a stored tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StoredType {
    /// One that GGML numbers.
    Ggml(TensorType),
    /// One that only safetensors has, by its name there.
    Safetensors(&'static str),
}

impl StoredType {
    /// The name in its own format.
    pub(super) fn name(self) -> &'static str {
        match self {
            StoredType::Ggml(dtype) => dtype.name(),
            StoredType::Safetensors(name) => name,
        }
    }
}

/// Why a header was refused.
#[derive(Debug)]
pub(super) enum HeaderError {
    /// The file could not be read.
    Io(io::Error),
    /// A rule of the format is broken.
    Malformed {
        /// The field at fault.
        field: String,
        /// The rule and the numbers.
        problem: String,
    },
}

impl HeaderError {
    pub(super) fn new(field: impl Into<String>, problem: impl Into<String>) -> Self {
        HeaderError::Malformed {
            field: printable(field.into()),
            problem: one_line(problem.into()),
        }
    }

    /// The same error, naming the file.
    pub(super) fn in_file(self, path: &Path) -> LoadError {
        match self {
            HeaderError::Io(source) => LoadError::io(path, source),
            HeaderError::Malformed { field, problem } => LoadError::malformed(path, field, problem),
        }
    }
}

impl From<io::Error> for HeaderError {
    fn from(source: io::Error) -> Self {
        HeaderError::Io(source)
    }
}
