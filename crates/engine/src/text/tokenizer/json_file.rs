//! Reads `tokenizer.json`, and the special tokens of `tokenizer_config.json` beside it.
//!
//! The first alone decides how text is encoded, beginning-of-sequence tokens included; the second names them.

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;
use tokenizers::{
    AddedToken, DecoderWrapper, Encoding, Model as _, ModelWrapper, NormalizerWrapper,
    PostProcessor, PostProcessorWrapper, PreTokenizerWrapper, Token,
};

use millpond_scheduler::TokenId;

use super::super::TextError;
use super::pipeline::{Frame, Model, Pipeline, Steps, guarded};
use super::vocabulary::{Spelling, TokenEntry, TokenKind, Vocabulary};
use super::{Parts, SequenceEnds};

#[derive(Deserialize)]
struct TokenizerFile {
    #[serde(default)]
    added_tokens: Vec<AddedEntry>,
    normalizer: Option<NormalizerWrapper>,
    pre_tokenizer: Option<PreTokenizerWrapper>,
    post_processor: Option<PostProcessorWrapper>,
    decoder: Option<Value>,
    model: ModelWrapper,
}

#[derive(Deserialize)]
struct AddedEntry {
    id: u32,
    #[serde(flatten)]
    token: AddedToken,
}

/// Decoders as far as a single token's bytes depend on them; all others only join or trim.
#[derive(Deserialize)]
#[serde(tag = "type")]
enum DecoderStep {
    ByteLevel,
    ByteFallback,
    Metaspace {
        replacement: char,
    },
    Replace {
        pattern: ReplacedText,
        content: String,
    },
    #[serde(rename = "BPEDecoder")]
    WordEnd {
        suffix: String,
    },
    Sequence {
        decoders: Vec<DecoderStep>,
    },
    #[serde(other)]
    Other,
}

#[derive(Deserialize)]
enum ReplacedText {
    String(String),
    /// Only ever trims or joins; needed so that the step can be read at all.
    Regex(IgnoredAny),
}

#[derive(Default, Deserialize)]
struct Settings {
    bos_token: Option<SettingsToken>,
    eos_token: Option<SettingsToken>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum SettingsToken {
    Spelling(String),
    Object { content: String },
}

/// Builds the tokenizer that the files describe.
pub(crate) fn open(tokenizer: &[u8], settings: Option<&[u8]>) -> Result<Parts, TextError> {
    let file: TokenizerFile = guarded(|| Ok(serde_json::from_slice(tokenizer)?))
        .map_err(|problem| TextError::TokenizerFile(format!("tokenizer.json: {problem}")))?;
    let settings = match settings {
        Some(bytes) => serde_json::from_slice(bytes).map_err(|problem| {
            TextError::TokenizerFile(format!("tokenizer_config.json: {problem}"))
        })?,
        None => Settings::default(),
    };
    file.into_parts(settings)
}

impl TokenizerFile {
    fn into_parts(self, settings: Settings) -> Result<Parts, TextError> {
        let frame = match &self.post_processor {
            Some(post_processor) => frame_of(post_processor)?,
            None => Frame::default(),
        };
        let vocabulary = Vocabulary::new(self.entries(), &spelling_of(self.decoder.as_ref())?)?;
        let steps = Steps {
            normalizer: self.normalizer,
            pre_tokenizer: self.pre_tokenizer,
            decoder: self.decoder.map(parse_decoder).transpose()?,
        };
        let added = self.added_tokens.into_iter();
        let added = added.map(|entry| (entry.id, entry.token)).collect();
        let model = Model::Library(Box::new(self.model));
        let pipeline = Pipeline::new(model, steps, frame, added)?;
        let id_of = |token: Option<SettingsToken>| pipeline.token_id(&token?.into_spelling());
        Ok(Parts {
            ends: SequenceEnds {
                bos: id_of(settings.bos_token),
                eos: id_of(settings.eos_token),
            },
            vocabulary,
            pipeline,
        })
    }

    /// Added tokens come last, because they replace what the model calls by the same id.
    fn entries(&self) -> Vec<TokenEntry> {
        let pieces = self.model.get_vocab().into_iter();
        let pieces = pieces.map(|(spelling, id)| TokenEntry {
            id,
            spelling,
            kind: TokenKind::Text,
        });
        let added = self.added_tokens.iter().map(|entry| TokenEntry {
            id: entry.id,
            spelling: entry.token.content.clone(),
            kind: if entry.token.special {
                TokenKind::Special
            } else {
                TokenKind::Text
            },
        });
        pieces.chain(added).collect()
    }
}

impl SettingsToken {
    fn into_spelling(self) -> String {
        match self {
            SettingsToken::Spelling(spelling) => spelling,
            SettingsToken::Object { content } => content,
        }
    }
}

fn parse_decoder(decoder: Value) -> Result<DecoderWrapper, TextError> {
    serde_json::from_value(decoder)
        .map_err(|problem| TextError::TokenizerFile(format!("tokenizer.json: decoder: {problem}")))
}

fn spelling_of(decoder: Option<&Value>) -> Result<Spelling, TextError> {
    let mut spelling = Spelling::Text {
        replacements: Vec::new(),
        byte_fallback: false,
    };
    if let Some(decoder) = decoder {
        let step = DecoderStep::deserialize(decoder).map_err(|problem| {
            TextError::TokenizerFile(format!("tokenizer.json: decoder: {problem}"))
        })?;
        step.apply_to(&mut spelling);
    }
    Ok(spelling)
}

impl DecoderStep {
    fn apply_to(self, spelling: &mut Spelling) {
        let replacement = match self {
            DecoderStep::ByteLevel => {
                *spelling = Spelling::ByteLevel;
                None
            }
            DecoderStep::ByteFallback => {
                if let Spelling::Text { byte_fallback, .. } = spelling {
                    *byte_fallback = true;
                }
                None
            }
            DecoderStep::Sequence { decoders } => {
                for step in decoders {
                    step.apply_to(spelling);
                }
                None
            }
            DecoderStep::Metaspace { replacement } => {
                Some((replacement.to_string(), " ".to_owned()))
            }
            DecoderStep::Replace {
                pattern: ReplacedText::String(pattern),
                content,
            } => Some((pattern, content)),
            DecoderStep::WordEnd { suffix } => Some((suffix, " ".to_owned())),
            DecoderStep::Replace {
                pattern: ReplacedText::Regex(IgnoredAny),
                ..
            }
            | DecoderStep::Other => None,
        };
        if let Spelling::Text { replacements, .. } = spelling {
            replacements.extend(replacement);
        }
    }
}

/// What the post-processor puts around a sequence, found by showing it one.
fn frame_of(post_processor: &PostProcessorWrapper) -> Result<Frame, TextError> {
    const SEQUENCE: u32 = u32::MAX;
    let token = Token::new(SEQUENCE, String::new(), (0, 0));
    let framed = guarded(|| {
        let sequence = Encoding::from_tokens(vec![token], 0);
        post_processor.process(sequence, None, true)
    })
    .map_err(|problem| TextError::TokenizerFile(format!("post-processor: {problem}")))?;
    let mut parts = framed.get_ids().split(|&id| id == SEQUENCE);
    match (parts.next(), parts.next(), parts.next()) {
        (Some(before), Some(after), None) => Ok(Frame {
            before: before.iter().copied().map(TokenId).collect(),
            after: after.iter().copied().map(TokenId).collect(),
        }),
        _ => Err(TextError::TokenizerFile(
            "tokenizer.json: the post-processor does not keep the text once".to_owned(),
        )),
    }
}
