//! Text to tokens and back, from tokenizer.json, GGUF metadata or plain bytes.
//!
//! It knows nothing of conversations; `chat_template` renders those.

use std::sync::Arc;

use millpond_scheduler::TokenId;
use tokenizers::AddedToken;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;

use super::TextError;
use super::pattern_set::PatternSet;
use crate::loader::TokenizerSource;

mod byte_level;
mod gguf;
mod json_file;
mod pipeline;
mod scored_merges;
#[cfg(test)]
mod tests;
mod vocabulary;
mod word_splitting;

use pipeline::{Frame, Model, Pipeline, Steps};
use vocabulary::{Spelling, TokenEntry, TokenKind, Vocabulary};

/// The end-of-sequence token of `Tokenizer::bytes`.
const BYTES_END: &str = "<|end|>";

/// A model's tokenizer. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Tokenizer {
    parts: Arc<Parts>,
}

/// What becomes of special tokens that are spelled out in a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpecialTokens {
    /// They become the tokens.
    Parse,
    /// They are text like any other.
    AsText,
}

#[derive(Debug)]
struct Parts {
    pipeline: Pipeline,
    vocabulary: Vocabulary,
    ends: SequenceEnds,
}

/// The tokens that begin and end a sequence.
#[derive(Clone, Copy, Debug, Default)]
struct SequenceEnds {
    bos: Option<TokenId>,
    eos: Option<TokenId>,
}

impl Tokenizer {
    /// Builds the tokenizer that the files of a model describe.
    ///
    /// # Errors
    /// A kind of tokenizer or a part of one that is not supported, or a file that contradicts itself.
    pub fn open(source: &TokenizerSource) -> Result<Self, TextError> {
        let parts = match source {
            TokenizerSource::Gguf(metadata) => gguf::open(metadata)?,
            TokenizerSource::Json {
                tokenizer,
                settings,
            } => json_file::open(tokenizer, settings.as_deref())?,
        };
        Ok(Tokenizer {
            parts: Arc::new(parts),
        })
    }

    /// Tokens 0 to 255 are bytes, 256 ends a sequence. For the mock model.
    pub fn bytes() -> Self {
        let parts = bytes_parts().expect("256 bytes and one special token are valid");
        Tokenizer {
            parts: Arc::new(parts),
        }
    }

    /// The tokens of `text`; none are added.
    ///
    /// # Errors
    /// Text longer than 8 MiB, or one that the vocabulary cannot express.
    pub fn encode(&self, text: &str, specials: SpecialTokens) -> Result<Vec<TokenId>, TextError> {
        self.parts.pipeline.encode(text, specials)
    }

    /// The tokens of a raw prompt: special tokens are parsed, and those that the tokenizer's settings put around every
    /// prompt (beginning of sequence, …) are added.
    ///
    /// # Errors
    /// As `encode`.
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<TokenId>, TextError> {
        let tokens = self.encode(text, SpecialTokens::Parse)?;
        Ok(self.parts.pipeline.frame(tokens))
    }

    /// The tokens of a text in which `breaker` has been put inside every special token that is to remain text; the
    /// breakers themselves are not encoded.
    pub(crate) fn encode_broken(
        &self,
        text: &str,
        breaker: char,
    ) -> Result<Vec<TokenId>, TextError> {
        self.parts.pipeline.encode_broken(text, breaker)
    }

    /// The text of a whole sequence, as Hugging Face's tokenizers decode it: a first space that the tokenizer itself adds
    /// is taken off again, invalid UTF-8 is replaced, ids without a token are passed over.
    pub fn decode(&self, tokens: &[TokenId], skip_special: bool) -> Result<String, TextError> {
        let spellings = tokens
            .iter()
            .filter(|&&token| !(skip_special && self.is_special(token)))
            .filter_map(|&token| self.parts.pipeline.spelling(token))
            .collect();
        self.parts.pipeline.decode(spellings)
    }

    /// The bytes that a token stands for in running text; a special token's are its spelling. `None` for an id without a
    /// token.
    pub fn token_bytes(&self, token: TokenId) -> Option<&[u8]> {
        self.parts.vocabulary.bytes(token)
    }

    /// Is the token structure rather than text?
    pub fn is_special(&self, token: TokenId) -> bool {
        self.parts.vocabulary.kind(token) == TokenKind::Special
    }

    /// All special tokens, ascending.
    pub fn special_tokens(&self) -> impl Iterator<Item = TokenId> {
        self.parts.vocabulary.special_tokens()
    }

    /// The highest token id and one. May differ from the width of the model's logits.
    pub fn num_tokens(&self) -> usize {
        self.parts.vocabulary.num_tokens()
    }

    /// Bytes of the longest token: a text of n bytes has about n divided by this many tokens at least, unless the tokenizer
    /// drops parts of it (runs of spaces, unknown characters).
    pub fn max_token_bytes(&self) -> usize {
        self.parts.vocabulary.max_token_bytes()
    }

    /// The token that begins a sequence.
    pub fn bos(&self) -> Option<TokenId> {
        self.parts.ends.bos
    }

    /// The token that ends a sequence.
    pub fn eos(&self) -> Option<TokenId> {
        self.parts.ends.eos
    }

    /// The token with exactly this spelling in the vocabulary.
    pub fn token_id(&self, spelling: &str) -> Option<TokenId> {
        self.parts.pipeline.token_id(spelling)
    }

    /// The spellings of all special tokens.
    pub(crate) fn special_spellings(&self) -> &PatternSet {
        self.parts.pipeline.special_spellings()
    }
}

/// A byte-level vocabulary without merges.
fn bytes_parts() -> Result<Parts, TextError> {
    let spellings = (0..=u8::MAX).map(|byte| (byte_level::spell(byte).to_string(), byte));
    let entry = |id: u32, spelling: String, kind| TokenEntry { id, spelling, kind };
    let mut entries: Vec<TokenEntry> = spellings
        .clone()
        .map(|(spelling, byte)| entry(byte.into(), spelling, TokenKind::Text))
        .collect();
    let end = TokenId(entries.len() as u32);
    entries.push(entry(end.0, BYTES_END.to_owned(), TokenKind::Special));

    let pieces: Vocab = spellings
        .map(|(spelling, byte)| (spelling, byte.into()))
        .collect();
    let model = BPE::builder()
        .vocab_and_merges(pieces, Vec::new())
        .build()
        .map_err(|problem| TextError::TokenizerFile(problem.to_string()))?;
    let no_words = ByteLevel::default()
        .add_prefix_space(false)
        .use_regex(false);
    let steps = Steps {
        normalizer: None,
        pre_tokenizer: Some(no_words.into()),
        decoder: Some(no_words.into()),
    };
    let added = vec![(end.0, AddedToken::from(BYTES_END, true))];
    Ok(Parts {
        pipeline: Pipeline::new(
            Model::Library(Box::new(model.into())),
            steps,
            Frame::default(),
            added,
        )?,
        vocabulary: Vocabulary::new(entries, &Spelling::ByteLevel)?,
        ends: SequenceEnds {
            bos: None,
            eos: Some(end),
        },
    })
}
