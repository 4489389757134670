//! Tokenizers against what Hugging Face's `tokenizers` makes of the same files.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::Value as Json;

use super::*;
use crate::loader;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures")
}

/// Folders of the tiny models.
fn tiny_models() -> Vec<PathBuf> {
    let entries = std::fs::read_dir(fixtures().join("tiny")).expect("the fixtures exist");
    let mut folders: Vec<PathBuf> = entries
        .map(|entry| entry.expect("an entry").path())
        .collect();
    folders.sort();
    folders
}

fn read_json(path: &Path) -> Json {
    let bytes = std::fs::read(path).expect("the fixture exists");
    serde_json::from_slice(&bytes).expect("JSON")
}

/// The tokenizer of a folder.
fn open_folder(folder: &Path) -> Tokenizer {
    let source = TokenizerSource::Json {
        tokenizer: std::fs::read(folder.join("tokenizer.json")).expect("a tokenizer"),
        settings: std::fs::read(folder.join("tokenizer_config.json")).ok(),
    };
    Tokenizer::open(&source).expect("a valid tokenizer")
}

fn ids(value: &Json) -> Vec<TokenId> {
    let ids = value.as_array().expect("a list of ids");
    let ids = ids.iter().map(|id| id.as_u64().expect("an id"));
    ids.map(|id| TokenId(u32::try_from(id).expect("a 32-bit id")))
        .collect()
}

#[test]
fn tiny_models_prompts_and_outputs() {
    for folder in tiny_models() {
        let tokenizer = open_folder(&folder);
        let expected = read_json(&folder.join("expected.json"));
        for prompt in expected["prompts"].as_array().expect("prompts") {
            let name = folder.display();
            let text = prompt["prompt_text"].as_str().expect("a text");
            let tokens = tokenizer.encode_prompt(text).expect("it encodes");
            assert_eq!(tokens, ids(&prompt["input_ids"]), "{name}: {text:?}");
            let output = ids(&prompt["greedy_ids"]);
            for (skip_special, key) in [(false, "greedy_text"), (true, "greedy_text_skip_special")] {
                let text = tokenizer.decode(&output, skip_special).expect("it decodes");
                assert_eq!(text, prompt[key], "{name}: {key}");
            }
        }
    }
}

/// Runs the cases of one file: what differs from the expected, one line each.
fn differences(tokenizer: &Tokenizer, cases: &Path) -> Vec<String> {
    let lines = std::fs::read_to_string(cases).expect("the cases exist");
    let cases = lines.lines();
    cases
        .filter_map(|line| {
            let case: Json = serde_json::from_str(line).expect("JSON");
            let difference = difference(tokenizer, &case)?;
            Some(format!("{}: {difference}", case["text"]))
        })
        .collect()
}

fn difference(tokenizer: &Tokenizer, case: &Json) -> Option<String> {
    let text = case["text"].as_str().expect("a text");
    let expected = ids(&case["ids"]);
    let or_plain = |key: &str| match &case[key] {
        Json::Null => expected.clone(),
        other => ids(other),
    };
    let encoded = [
        (tokenizer.encode(text, SpecialTokens::Parse), expected.clone()),
        (tokenizer.encode(text, SpecialTokens::AsText), or_plain("ids_specials_as_text")),
        (tokenizer.encode_prompt(text), or_plain("ids_with_special")),
    ];
    let wrong = encoded
        .into_iter()
        .find(|(actual, expected)| actual.as_ref() != Ok(expected));
    if let Some((actual, expected)) = wrong {
        return Some(format!("{actual:?} not {expected:?}"));
    }
    let decode = case["decode"].as_str().unwrap_or(text);
    let decode_skip_special = case["decode_skip_special"].as_str().unwrap_or(decode);
    [(false, decode), (true, decode_skip_special)]
        .into_iter()
        .map(|(skip_special, decoded)| (tokenizer.decode(&expected, skip_special), decoded))
        .find(|(actual, decoded)| actual.as_deref() != Ok(decoded))
        .map(|(actual, decoded)| format!("{actual:?} not {decoded:?}"))
}

fn open_gguf(path: &Path) -> Tokenizer {
    let files = loader::open(path).expect("a valid model file");
    Tokenizer::open(&files.tokenizer).expect("a supported tokenizer")
}

fn default_model() -> PathBuf {
    PathBuf::from("/tmp/m/SmolLM2-135M-Instruct.Q4_1.gguf")
}

#[test]
fn default_model_cases() {
    let tokenizer = open_gguf(&default_model());
    let cases = fixtures().join("tokenizers/smollm2/cases.jsonl");
    assert_eq!(differences(&tokenizer, &cases), [""; 0]);
}

#[test]
#[ignore = "reads third-party tokenizers (unpacked) from the folder that MILLPOND_ORACLES names"]
fn third_party_cases() {
    let folder = std::env::var_os("MILLPOND_ORACLES").expect("MILLPOND_ORACLES is set");
    for name in ["smollm2", "qwen3"] {
        let folder = PathBuf::from(&folder).join("tokenizers").join(name);
        let start = Instant::now();
        let tokenizer = open_folder(&folder);
        println!("{name}: {:?}", start.elapsed());
        let differences = differences(&tokenizer, &folder.join("cases.jsonl"));
        assert_eq!(differences, [""; 0], "{name}");
    }
}
