//! Why a model could not be loaded: one line for people, naming file and field.

use std::io;
use std::path::{Path, PathBuf};

/// Why a model could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// A file could not be opened or read.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The path is no model: no such file, no config.json, several GGUF files, a device.
    #[error("{}: {problem}", path.display())]
    NoModel {
        /// The path as given.
        path: PathBuf,
        /// What is missing or ambiguous.
        problem: String,
    },
    /// A file breaks the rules of its format.
    #[error("{}: {field}: {problem}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The field, key or tensor at fault.
        field: String,
        /// The rule it breaks, with the numbers.
        problem: String,
    },
    /// A family that we do not run.
    #[error("architecture {architecture} is not supported yet (supported: {supported})")]
    UnsupportedArchitecture {
        /// As the file names it.
        architecture: String,
        /// The families we run.
        supported: String,
    },
    /// A hyper-parameter is absent, out of range or not supported.
    #[error("{key}: {problem}")]
    Config {
        /// The key as the file spells it.
        key: String,
        /// What is wrong with its value.
        problem: String,
    },
    /// A tensor that the architecture needs is not in the file.
    #[error("tensor {name} is missing")]
    MissingTensor {
        /// The name that the file should hold.
        name: String,
    },
    /// A tensor that the architecture does not have; leaving it out would change the answers.
    #[error("tensor {name} does not belong to architecture {architecture}")]
    UnexpectedTensor {
        /// As the file names it.
        name: String,
        /// The family.
        architecture: String,
    },
    /// A tensor's shape contradicts the configuration.
    #[error("tensor {name}: shape {found:?}, expected {expected:?}")]
    TensorShape {
        /// As the file names it.
        name: String,
        /// (out_features, in_features) or (width,) of the file.
        found: Vec<usize>,
        /// The same from the configuration.
        expected: Vec<usize>,
    },
    /// A tensor's type is valid and we cannot compute with it.
    #[error("tensor {name}: type {type_name} is not supported here")]
    TensorType {
        /// As the file names it.
        name: String,
        /// The type as its format names it.
        type_name: String,
    },
    /// Memory for a tensor could not be had.
    #[error("tensor {name}: no memory for {num_bytes} bytes")]
    OutOfMemory {
        /// Our name.
        name: String,
        /// Its size.
        num_bytes: u64,
    },
}

impl LoadError {
    pub(super) fn io(path: &Path, source: io::Error) -> Self {
        LoadError::Io {
            path: path.to_owned(),
            source,
        }
    }

    pub(super) fn no_model(path: &Path, problem: impl Into<String>) -> Self {
        LoadError::NoModel {
            path: path.to_owned(),
            problem: problem.into(),
        }
    }

    pub(super) fn malformed(
        path: &Path,
        field: impl Into<String>,
        problem: impl Into<String>,
    ) -> Self {
        LoadError::Malformed {
            path: path.to_owned(),
            field: printable(field.into()),
            problem: problem.into(),
        }
    }

    pub(super) fn config(key: impl Into<String>, problem: impl Into<String>) -> Self {
        LoadError::Config {
            key: printable(key.into()),
            problem: problem.into(),
        }
    }
}

/// Longest name that an error repeats.
const MAX_NAME_IN_ERROR: usize = 80;

/// A name from a file made fit for one line of a terminal: no control characters, not endless.
pub(super) fn printable(name: String) -> String {
    if name.len() <= MAX_NAME_IN_ERROR && !name.chars().any(char::is_control) {
        return name;
    }
    let mut shown: String = name
        .chars()
        .take(MAX_NAME_IN_ERROR)
        .flat_map(char::escape_debug)
        .collect();
    shown.push('…');
    shown
}
