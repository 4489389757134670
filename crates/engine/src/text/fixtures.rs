//! What the tests of text read: fixtures, tiny models and the models of the cards.

use std::path::{Path, PathBuf};

use millpond_scheduler::TokenId;
use serde_json::Value as Json;

use super::tokenizer::Tokenizer;
use crate::fetch;
use crate::loader::{self, ModelFiles, TokenizerSource};

/// A path below the fixtures.
pub(crate) fn fixture(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/fixtures")
        .join(path)
}

/// A folder of third-party files that are not in the repository.
pub(crate) fn third_party(name: &str) -> PathBuf {
    let folder = std::env::var_os("MILLPOND_ORACLES").expect("MILLPOND_ORACLES names the folder");
    PathBuf::from(folder).join(name)
}

/// The entries of a folder, in order.
pub(crate) fn entries(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).expect("the folder exists");
    let mut paths: Vec<PathBuf> = entries
        .map(|entry| entry.expect("an entry").path())
        .collect();
    paths.sort();
    paths
}

pub(crate) fn read_json(path: &Path) -> Json {
    let bytes = std::fs::read(path).expect("the fixture exists");
    serde_json::from_slice(&bytes).expect("JSON")
}

/// A file with one value per line.
pub(crate) fn read_json_lines(path: &Path) -> Vec<Json> {
    let text = std::fs::read_to_string(path).expect("the fixture exists");
    let lines = text.lines();
    lines
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect()
}

pub(crate) fn ids(value: &Json) -> Vec<TokenId> {
    let ids = value.as_array().expect("a list of ids");
    let ids = ids.iter().map(|id| id.as_u64().expect("an id"));
    ids.map(|id| TokenId(u32::try_from(id).expect("a 32-bit id")))
        .collect()
}

/// The tokenizer of a folder.
pub(crate) fn folder_tokenizer(folder: &Path) -> Tokenizer {
    let source = TokenizerSource::Json {
        tokenizer: std::fs::read(folder.join("tokenizer.json")).expect("a tokenizer"),
        settings: std::fs::read(folder.join("tokenizer_config.json")).ok(),
    };
    Tokenizer::open(&source).expect("a supported tokenizer")
}

/// The files of a model card, fetched if need be.
pub(crate) fn card_files(card: &str) -> ModelFiles {
    let path = fetch::resolve(card, &mut |_| {}).expect("the model can be fetched");
    loader::open(&path).expect("a valid model file")
}

/// The tokenizer of a model card.
pub(crate) fn card_tokenizer(card: &str) -> Tokenizer {
    Tokenizer::open(&card_files(card).tokenizer).expect("a supported tokenizer")
}
