//! Why a model could not be loaded: one line for people, naming file and field.

use std::io;
use std::path::{Path, PathBuf};

/// Why a model could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// A file could not be opened or read.
    #[error("{}: {problem}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        problem: io::Error,
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
    pub(super) fn io(path: &Path, problem: io::Error) -> Self {
        LoadError::Io {
            path: path.to_owned(),
            problem,
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
            problem: one_line(problem.into()),
        }
    }

    pub(super) fn config(key: impl Into<String>, problem: impl Into<String>) -> Self {
        LoadError::Config {
            key: printable(key.into()),
            problem: one_line(problem.into()),
        }
    }
}

/// Longest name and longest explanation that an error repeats.
const MAX_NAME_CHARS: usize = 80;
const MAX_PROBLEM_CHARS: usize = 300;

/// A name from a file made fit for one line of a terminal: no control characters, not endless.
pub(super) fn printable(name: String) -> String {
    shown(name, MAX_NAME_CHARS)
}

/// The same for an explanation, which may quote a value from a file.
pub(super) fn one_line(problem: String) -> String {
    shown(problem, MAX_PROBLEM_CHARS)
}

fn shown(text: String, max_chars: usize) -> String {
    // A text has at least as many bytes as characters, so the common case needs no counting.
    let is_short = text.len() <= max_chars;
    if is_short && !text.chars().any(char::is_control) {
        return text;
    }
    let head = text.chars().take(max_chars);
    let escaped = head.map(|c| match c {
        c if c.is_control() => c.escape_default().collect(),
        c => c.to_string(),
    });
    let mut shown: String = escaped.collect();
    if text.chars().nth(max_chars).is_some() {
        shown.push('…');
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_from_files_stay_on_one_line() {
        let check = |name: &str, expected: &str| assert_eq!(printable(name.to_owned()), expected);
        check("blk.0.attn_q.weight", "blk.0.attn_q.weight");
        check("a\nb\u{1b}[31m", "a\\nb\\u{1b}[31m");
        check(&"é".repeat(80), &"é".repeat(80));
        check(&"é".repeat(81), &format!("{}…", "é".repeat(80)));
    }
}
