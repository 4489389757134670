//! Which tokens begin and end a text, as the model's files say.
//!
//! What a tokenizer adds to a prompt is not decided here.

use serde_json::Value;

use millpond_scheduler::TokenId;

use super::LoadError;
use super::checkpoint::{Attributes, Checkpoint};
use super::hf::HubFolder;
use super::metadata::Metadata;

/// Tokens with a meaning for generation.
pub(super) struct SpecialTokens {
    pub bos: Option<TokenId>,
    /// Sorted, each once.
    pub eos: Vec<TokenId>,
}

/// Control tokens that end a turn in the families' chat formats. Converters often keep only the end-of-text token
/// in the metadata; a chat would then run past the end of its answer.
const TURN_ENDS: [&str; 5] = [
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<end_of_turn>",
];
/// GGUF's token type of control tokens.
const CONTROL: u64 = 3;

/// Reads them; every id lies below `vocab_size`.
pub(super) fn read(checkpoint: &Checkpoint, vocab_size: usize) -> Result<SpecialTokens, LoadError> {
    let vocab = Vocabulary { size: vocab_size };
    match &checkpoint.attributes {
        Attributes::Gguf(metadata) => of_gguf(metadata, &vocab),
        Attributes::Hub(folder) => of_hub(folder, &vocab),
        Attributes::None => Err(checkpoint.no_config()),
    }
}

struct Vocabulary {
    size: usize,
}

impl Vocabulary {
    fn token(&self, key: &str, id: Option<u64>) -> Result<TokenId, LoadError> {
        match id.and_then(|id| u32::try_from(id).ok()) {
            Some(id) if (id as usize) < self.size => Ok(TokenId(id)),
            Some(_) | None => {
                let problem = format!("no id of a vocabulary of {}", self.size);
                Err(LoadError::config(key, problem))
            }
        }
    }
}

fn of_gguf(metadata: &Metadata, vocab: &Vocabulary) -> Result<SpecialTokens, LoadError> {
    let stated = |key: &str| match metadata.get(key) {
        None => Ok(None),
        Some(_) => vocab.token(key, metadata.unsigned(key)).map(Some),
    };
    let bos = stated("tokenizer.ggml.bos_token_id")?;
    let ends = ["eos", "eot", "eom"].map(|name| format!("tokenizer.ggml.{name}_token_id"));
    let mut eos = Vec::new();
    for key in &ends {
        eos.extend(stated(key)?);
    }
    eos.extend(turn_ends(metadata, vocab));
    Ok(SpecialTokens {
        bos,
        eos: sorted(eos),
    })
}

fn turn_ends(metadata: &Metadata, vocab: &Vocabulary) -> Vec<TokenId> {
    let tokens = metadata.texts("tokenizer.ggml.tokens").unwrap_or_default();
    let types = metadata
        .unsigneds("tokenizer.ggml.token_type")
        .unwrap_or_default();
    let ids = tokens.iter().zip(types).enumerate();
    ids.filter(|(_, (token, kind))| *kind == CONTROL && TURN_ENDS.contains(&token.as_str()))
        .filter_map(|(id, _)| u32::try_from(id).ok())
        .filter(|id| (*id as usize) < vocab.size)
        .map(TokenId)
        .collect()
}

/// generation_config.json knows more ends than config.json; where it lists any, they are the ones.
fn of_hub(folder: &HubFolder, vocab: &Vocabulary) -> Result<SpecialTokens, LoadError> {
    let stated = |key: &str| {
        let generation = folder.generation.get(key).filter(|value| !value.is_null());
        generation.or_else(|| folder.config.get(key).filter(|value| !value.is_null()))
    };
    let bos = match stated("bos_token_id") {
        None => None,
        Some(value) => ids("bos_token_id", value, vocab)?.first().copied(),
    };
    let eos = match stated("eos_token_id") {
        None => Vec::new(),
        Some(value) => ids("eos_token_id", value, vocab)?,
    };
    Ok(SpecialTokens {
        bos,
        eos: sorted(eos),
    })
}

/// One id or a list of them.
fn ids(key: &str, value: &Value, vocab: &Vocabulary) -> Result<Vec<TokenId>, LoadError> {
    let values = match value {
        Value::Array(values) => values.as_slice(),
        single => std::slice::from_ref(single),
    };
    let tokens = values.iter().map(|id| vocab.token(key, id.as_u64()));
    tokens.collect()
}

fn sorted(mut tokens: Vec<TokenId>) -> Vec<TokenId> {
    tokens.sort_unstable();
    tokens.dedup();
    tokens
}
