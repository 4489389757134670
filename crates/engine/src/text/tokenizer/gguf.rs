//! Builds a tokenizer from the metadata of a GGUF file.
//!
//! Keys and numbers are those of the GGUF specification (`tokenizer.ggml.*`).

use std::sync::Arc;

use millpond_scheduler::TokenId;
use tokenizers::decoders::byte_fallback::ByteFallback;
use tokenizers::decoders::byte_level::ByteLevel;
use tokenizers::decoders::fuse::Fuse;
use tokenizers::decoders::sequence::Sequence as DecoderSequence;
use tokenizers::decoders::strip::Strip;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::normalizers::{Prepend, Replace, Sequence as NormalizerSequence};
use tokenizers::{AddedToken, DecoderWrapper, NormalizerWrapper};

use super::super::TextError;
use super::pipeline::{Frame, Model, Pipeline, Steps, guarded};
use super::scored_merges::{Fallback, ScoredMerges};
use super::vocabulary::{Spelling, TokenEntry, TokenKind, Vocabulary};
use super::word_splitting::{WholeWords, WordSplitting};
use super::{Parts, SequenceEnds};
use crate::loader::Metadata;

const MODEL: &str = "tokenizer.ggml.model";
const PRE: &str = "tokenizer.ggml.pre";
const TOKENS: &str = "tokenizer.ggml.tokens";
const TOKEN_TYPE: &str = "tokenizer.ggml.token_type";
const SCORES: &str = "tokenizer.ggml.scores";
const MERGES: &str = "tokenizer.ggml.merges";
const BOS: &str = "tokenizer.ggml.bos_token_id";
const EOS: &str = "tokenizer.ggml.eos_token_id";
const EOT: &str = "tokenizer.ggml.eot_token_id";
const EOM: &str = "tokenizer.ggml.eom_token_id";
const UNKNOWN: &str = "tokenizer.ggml.unknown_token_id";
const ADD_BOS: &str = "tokenizer.ggml.add_bos_token";
const ADD_EOS: &str = "tokenizer.ggml.add_eos_token";
const ADD_SPACE: &str = "tokenizer.ggml.add_space_prefix";

/// What the file says a token is, by GGUF's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TokenType {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

/// The vocabulary's own keys, checked.
struct File<'a> {
    metadata: &'a Metadata,
    tokens: &'a [String],
    types: Vec<TokenType>,
}

/// Builds the tokenizer that the metadata describe.
pub(crate) fn open(metadata: &Metadata) -> Result<Parts, TextError> {
    let file = File::new(metadata)?;
    match metadata.text(MODEL) {
        Some("gpt2") => file.open_byte_level(),
        Some("llama") => file.open_sentencepiece(),
        Some(other) => Err(TextError::UnknownTokenizer {
            name: other.to_owned(),
        }),
        None => Err(TextError::MissingMetadata(MODEL)),
    }
}

impl<'a> File<'a> {
    fn new(metadata: &'a Metadata) -> Result<Self, TextError> {
        let tokens = metadata
            .texts(TOKENS)
            .ok_or(TextError::MissingMetadata(TOKENS))?;
        let mut types = token_types(metadata, tokens.len())?;
        for key in [BOS, EOS, EOT, EOM] {
            if let Some(id) = token_at(metadata, key, tokens.len())? {
                types[id.0 as usize] = TokenType::Control;
            }
        }
        Ok(File {
            metadata,
            tokens,
            types,
        })
    }

    /// Ids, spellings and types of all tokens.
    fn iter(&self) -> impl Iterator<Item = (u32, &'a str, TokenType)> {
        (0..)
            .zip(self.tokens)
            .zip(&self.types)
            .map(|((id, token), &kind)| (id, token.as_str(), kind))
    }

    fn open_byte_level(&self) -> Result<Parts, TextError> {
        let name = self.metadata.text(PRE).unwrap_or_else(|| {
            tracing::warn!("the file does not name its word splitter ({PRE}): assuming GPT-2's");
            "default"
        });
        let words = WordSplitting::named(name)?;
        let steps = Steps {
            normalizer: words.normalizer(),
            pre_tokenizer: Some(words.pre_tokenizer()?),
            decoder: Some(ByteLevel::default().into()),
        };
        let model = self.byte_pairs(words.whole_words)?;
        self.assemble(model, steps, words.adds_bos, Spelling::ByteLevel)
    }

    /// Special tokens stay outside, so that no text can become one.
    fn byte_pairs(&self, whole_words: WholeWords) -> Result<Model, TextError> {
        let vocabulary: Vocab = self
            .iter()
            .filter(|(_, _, kind)| !kind.is_special())
            .map(|(id, token, _)| (token.to_owned(), id))
            .collect();
        let merges = self
            .metadata
            .texts(MERGES)
            .ok_or(TextError::MissingMetadata(MERGES))?;
        let merges = merges
            .iter()
            .map(|merge| {
                let (left, right) = merge.split_once(' ')?;
                Some((left.to_owned(), right.to_owned()))
            })
            .collect::<Option<Vec<_>>>()
            .ok_or_else(|| invalid(MERGES, "a merge has no space"))?;
        let model = guarded(|| {
            BPE::builder()
                .vocab_and_merges(vocabulary, merges)
                .ignore_merges(whole_words == WholeWords::LookedUp)
                .build()
        })
        .map_err(|problem| invalid(MERGES, problem))?;
        Ok(Model::Library(Box::new(model.into())))
    }

    fn open_sentencepiece(&self) -> Result<Parts, TextError> {
        let has_prefix = self.metadata.bool(ADD_SPACE).unwrap_or(true);
        let steps = Steps {
            normalizer: Some(spaces_as_underscores(has_prefix)?),
            pre_tokenizer: None,
            decoder: Some(underscores_as_spaces(has_prefix)?),
        };
        let model = self.scored_merges()?;
        self.assemble(model, steps, true, Spelling::sentencepiece())
    }

    fn scored_merges(&self) -> Result<Model, TextError> {
        let scores = self
            .metadata
            .floats(SCORES)
            .ok_or(TextError::MissingMetadata(SCORES))?;
        if scores.len() != self.tokens.len() {
            return Err(invalid(SCORES, "not one per token"));
        }
        let spellings: Vec<Arc<str>> = self
            .tokens
            .iter()
            .map(|token| token.as_str().into())
            .collect();
        let pieces = self
            .iter()
            .zip(&spellings)
            .zip(scores)
            .filter(|(((_, _, kind), _), _)| kind.is_piece())
            .map(|(((id, _, _), token), &score)| (Arc::clone(token), id, score as f32));
        Ok(Model::Scored {
            merges: ScoredMerges::new(pieces, self.fallback()?),
            spellings,
        })
    }

    fn fallback(&self) -> Result<Fallback, TextError> {
        let mut bytes = Box::new([None; 256]);
        for (id, token, kind) in self.iter() {
            if kind == TokenType::Byte
                && let [byte] = Spelling::sentencepiece().bytes_of(token)[..]
            {
                bytes[usize::from(byte)] = Some(id);
            }
        }
        if bytes.iter().all(Option::is_some) {
            return Ok(Fallback::Bytes(Box::new(
                bytes.map(Option::unwrap_or_default),
            )));
        }
        let unknown = token_at(self.metadata, UNKNOWN, self.tokens.len())?
            .ok_or(TextError::MissingMetadata(UNKNOWN))?;
        Ok(Fallback::Unknown(unknown.0))
    }

    fn assemble(
        &self,
        model: Model,
        steps: Steps,
        adds_bos: bool,
        spelling: Spelling,
    ) -> Result<Parts, TextError> {
        let entries = self.iter().map(|(id, token, kind)| TokenEntry {
            id,
            spelling: token.to_owned(),
            kind: if kind.is_special() {
                TokenKind::Special
            } else {
                TokenKind::Text
            },
        });
        let vocabulary = Vocabulary::new(entries.collect(), &spelling)?;
        let added = self
            .iter()
            .filter(|(_, _, kind)| kind.is_special() || *kind == TokenType::UserDefined)
            .map(|(id, token, kind)| {
                let token = AddedToken::from(token, kind.is_special()).normalized(false);
                (id, token)
            });
        let ends = SequenceEnds {
            bos: token_at(self.metadata, BOS, self.tokens.len())?,
            eos: token_at(self.metadata, EOS, self.tokens.len())?,
        };
        let frame = self.frame(&ends, adds_bos);
        Ok(Parts {
            pipeline: Pipeline::new(model, steps, frame, added.collect())?,
            vocabulary,
            ends,
        })
    }

    fn frame(&self, ends: &SequenceEnds, adds_bos: bool) -> Frame {
        let adds_bos = self.metadata.bool(ADD_BOS).unwrap_or(adds_bos);
        let adds_eos = self.metadata.bool(ADD_EOS).unwrap_or(false);
        Frame {
            before: ends.bos.filter(|_| adds_bos).into_iter().collect(),
            after: ends.eos.filter(|_| adds_eos).into_iter().collect(),
        }
    }
}

impl TokenType {
    fn from_number(number: u64) -> Option<Self> {
        match number {
            1 => Some(TokenType::Normal),
            2 => Some(TokenType::Unknown),
            3 => Some(TokenType::Control),
            4 => Some(TokenType::UserDefined),
            5 => Some(TokenType::Unused),
            6 => Some(TokenType::Byte),
            _ => None,
        }
    }

    fn is_special(self) -> bool {
        match self {
            TokenType::Unknown | TokenType::Control => true,
            TokenType::Normal | TokenType::UserDefined | TokenType::Unused | TokenType::Byte => {
                false
            }
        }
    }

    /// May text become this token by merging? A byte token stands for a byte, not for its own spelling.
    fn is_piece(self) -> bool {
        match self {
            TokenType::Normal | TokenType::UserDefined => true,
            TokenType::Unknown | TokenType::Control | TokenType::Unused | TokenType::Byte => false,
        }
    }
}

/// Files without types have normal tokens only.
fn token_types(metadata: &Metadata, num_tokens: usize) -> Result<Vec<TokenType>, TextError> {
    if metadata.get(TOKEN_TYPE).is_none() {
        return Ok(vec![TokenType::Normal; num_tokens]);
    }
    let types: Option<Vec<TokenType>> = metadata
        .unsigneds(TOKEN_TYPE)
        .and_then(|numbers| numbers.into_iter().map(TokenType::from_number).collect());
    let types = types.ok_or_else(|| invalid(TOKEN_TYPE, "not a list of token types"))?;
    if types.len() != num_tokens {
        return Err(invalid(TOKEN_TYPE, "not one per token"));
    }
    Ok(types)
}

/// The token that `key` names, if the file has the key.
fn token_at(
    metadata: &Metadata,
    key: &'static str,
    num_tokens: usize,
) -> Result<Option<TokenId>, TextError> {
    if metadata.get(key).is_none() {
        return Ok(None);
    }
    let id = metadata.unsigned(key).and_then(|id| u32::try_from(id).ok());
    match id {
        Some(id) if (id as usize) < num_tokens => Ok(Some(TokenId(id))),
        Some(_) | None => Err(invalid(key, "outside the vocabulary")),
    }
}

fn invalid(key: &'static str, problem: impl Into<String>) -> TextError {
    TextError::InvalidMetadata {
        key,
        problem: problem.into(),
    }
}

fn spaces_as_underscores(has_prefix: bool) -> Result<NormalizerWrapper, TextError> {
    let replace: NormalizerWrapper = Replace::new(" ", "▁").map_err(step_problem)?.into();
    if !has_prefix {
        return Ok(replace);
    }
    let prepend = Prepend::new("▁".to_owned());
    Ok(NormalizerSequence::new(vec![prepend.into(), replace]).into())
}

fn underscores_as_spaces(has_prefix: bool) -> Result<DecoderWrapper, TextError> {
    let replace = Replace::new("▁", " ").map_err(step_problem)?;
    let mut steps: Vec<DecoderWrapper> = vec![
        replace.into(),
        ByteFallback::new().into(),
        Fuse::new().into(),
    ];
    if has_prefix {
        steps.push(Strip::new(' ', 1, 0).into());
    }
    Ok(DecoderSequence::new(steps).into())
}

fn step_problem(problem: tokenizers::Error) -> TextError {
    TextError::TokenizerFile(problem.to_string())
}
