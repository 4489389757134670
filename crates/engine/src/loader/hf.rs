//! A folder as the Hub serves it: config.json and its companions beside the safetensors files.
//!
//! It finds and parses the small files; tensors and the meaning of keys are not its business.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::LoadError;
use super::model_file::ModelFile;

/// The small files of a folder.
#[derive(Debug)]
pub(super) struct HubFolder {
    /// config.json; of a multimodal model, its text half over the rest.
    pub config: Map<String, Value>,
    /// generation_config.json, empty if there is none.
    pub generation: Map<String, Value>,
    /// tokenizer.json.
    pub tokenizer: Option<Vec<u8>>,
    /// tokenizer_config.json.
    pub tokenizer_settings: Option<Vec<u8>>,
    /// The default chat template.
    pub chat_template: Option<String>,
}

pub(super) const CONFIG: &str = "config.json";
pub(super) const GENERATION: &str = "generation_config.json";
const TOKENIZER: &str = "tokenizer.json";
const TOKENIZER_SETTINGS: &str = "tokenizer_config.json";
const CHAT_TEMPLATE: &str = "chat_template.jinja";
const SINGLE_FILE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Largest settings file: templates and lists of added tokens take some hundred kilobytes.
const MAX_SETTINGS_BYTES: u64 = 16 << 20;
/// Largest tokenizer.json; that of a 262,144-token vocabulary takes 33 MB.
const MAX_TOKENIZER_BYTES: u64 = 100 << 20;
const MAX_SHARDS: usize = 1 << 10;

/// The weights of a folder.
#[derive(Debug)]
pub(super) struct WeightFiles {
    /// In order of their names.
    pub paths: Vec<PathBuf>,
    /// Tensors that the index promises; empty without an index.
    pub promised: BTreeSet<String>,
}

impl HubFolder {
    /// Reads the small files of `folder`.
    pub(super) fn read(folder: &Path) -> Result<Self, LoadError> {
        let tokenizer_settings = optional(&folder.join(TOKENIZER_SETTINGS), MAX_SETTINGS_BYTES)?;
        let template_file = optional(&folder.join(CHAT_TEMPLATE), MAX_SETTINGS_BYTES)?;
        let chat_template = match template_file {
            Some(bytes) => Some(text(&folder.join(CHAT_TEMPLATE), bytes)?),
            None => template_in_settings(folder, tokenizer_settings.as_deref())?,
        };
        Ok(HubFolder {
            config: text_half(object(&folder.join(CONFIG))?.unwrap_or_default()),
            generation: object(&folder.join(GENERATION))?.unwrap_or_default(),
            tokenizer: optional(&folder.join(TOKENIZER), MAX_TOKENIZER_BYTES)?,
            tokenizer_settings,
            chat_template,
        })
    }

    /// The family as config.json names it.
    pub(super) fn model_type(&self) -> Option<&str> {
        self.config.get("model_type").and_then(Value::as_str)
    }
}

/// True when the folder's weights are safetensors.
pub(super) fn has_safetensors(folder: &Path) -> bool {
    folder.join(SINGLE_FILE).exists() || folder.join(INDEX).exists()
}

/// The safetensors files of a folder.
pub(super) fn weight_files(folder: &Path) -> Result<WeightFiles, LoadError> {
    let index_path = folder.join(INDEX);
    let Some(index) = object(&index_path)? else {
        return Ok(WeightFiles {
            paths: vec![folder.join(SINGLE_FILE)],
            promised: BTreeSet::new(),
        });
    };
    let malformed = |problem: String| LoadError::malformed(&index_path, "weight_map", problem);
    let Some(Value::Object(map)) = index.get("weight_map") else {
        return Err(malformed("missing".to_owned()));
    };
    let mut names = BTreeSet::new();
    for value in map.values() {
        match value.as_str() {
            Some(name) if is_plain_name(name) => names.insert(name),
            Some(_) | None => return Err(malformed(format!("{value} is no file name"))),
        };
    }
    if names.is_empty() || names.len() > MAX_SHARDS {
        let problem = format!("{} files, must be 1 to {MAX_SHARDS}", names.len());
        return Err(malformed(problem));
    }
    Ok(WeightFiles {
        paths: names.into_iter().map(|name| folder.join(name)).collect(),
        promised: map.keys().cloned().collect(),
    })
}

/// One component without a way out of the folder.
fn is_plain_name(name: &str) -> bool {
    !name.is_empty() && name != ".." && name != "." && !name.contains(['/', '\\', '\0'])
}

/// The bytes of a file that need not exist.
fn optional(path: &Path, max_bytes: u64) -> Result<Option<Vec<u8>>, LoadError> {
    if !path.exists() {
        return Ok(None);
    }
    ModelFile::read_small(path, max_bytes).map(Some)
}

fn text(path: &Path, bytes: Vec<u8>) -> Result<String, LoadError> {
    String::from_utf8(bytes).map_err(|_| LoadError::malformed(path, "text", "not UTF-8"))
}

/// The JSON object in a file that need not exist.
fn object(path: &Path) -> Result<Option<Map<String, Value>>, LoadError> {
    let Some(bytes) = optional(path, MAX_SETTINGS_BYTES)? else {
        return Ok(None);
    };
    let parsed = serde_json::from_slice(&bytes);
    parsed
        .map(Some)
        .map_err(|error| LoadError::malformed(path, "JSON", error.to_string()))
}

/// A multimodal configuration keeps that of its language model under `text_config`.
fn text_half(mut config: Map<String, Value>) -> Map<String, Value> {
    if let Some(Value::Object(text)) = config.remove("text_config") {
        config.extend(text);
    }
    config
}

/// tokenizer_config.json holds one template, or a list of named ones.
fn template_in_settings(
    folder: &Path,
    settings: Option<&[u8]>,
) -> Result<Option<String>, LoadError> {
    let Some(bytes) = settings else {
        return Ok(None);
    };
    let settings: Value = serde_json::from_slice(bytes).map_err(|error| {
        LoadError::malformed(&folder.join(TOKENIZER_SETTINGS), "JSON", error.to_string())
    })?;
    let template = match settings.get("chat_template") {
        Some(Value::String(template)) => Some(template.as_str()),
        Some(Value::Array(named)) => named
            .iter()
            .find(|entry| entry.get("name").and_then(Value::as_str) == Some("default"))
            .and_then(|entry| entry.get("template").and_then(Value::as_str)),
        Some(_) | None => None,
    };
    Ok(template.map(str::to_owned))
}
