//! The steps from text to tokens, in the order in which the `tokenizers` crate takes them: cut out added tokens, normalise,
//! split into words, apply the model.
//!
//! It takes them itself because the crate's `Tokenizer` keeps whether special tokens are parsed as a setting, not an
//! argument, and knows no third way: text in which only the template's special tokens count.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use millpond_scheduler::TokenId;
use tokenizers::models::wordlevel::WordLevel;
use tokenizers::{
    AddedToken, AddedVocabulary, Decoder, DecoderWrapper, Model as _, ModelWrapper,
    NormalizerWrapper, OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer,
    PreTokenizerWrapper, Token,
};

use super::super::TextError;
use super::super::pattern_set::PatternSet;
use super::scored_merges::ScoredMerges;
use super::{SpecialTokens, byte_level};

/// A request body is at most this long, and the regular expressions of word splitters give up, by a panic, after ten
/// million steps back over white space.
const MAX_TEXT_BYTES: usize = 8 << 20;

/// How words become tokens.
#[derive(Debug)]
pub(crate) enum Model {
    /// One of the crate's.
    Library(Box<ModelWrapper>),
    /// SentencePiece's merges by score.
    Scored {
        merges: ScoredMerges,
        /// By id; of byte tokens and special tokens too, which are no pieces.
        spellings: Vec<Arc<str>>,
    },
}

/// The steps around the model; any may be missing.
#[derive(Debug, Default)]
pub(crate) struct Steps {
    pub normalizer: Option<NormalizerWrapper>,
    pub pre_tokenizer: Option<PreTokenizerWrapper>,
    pub decoder: Option<DecoderWrapper>,
}

/// Tokens that every prompt begins and ends with.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Frame {
    pub before: Vec<TokenId>,
    pub after: Vec<TokenId>,
}

/// All that is needed to encode and decode.
#[derive(Debug)]
pub(crate) struct Pipeline {
    model: Model,
    steps: Steps,
    frame: Frame,
    added: AddedVocabulary,
    /// The same tokens, of which special ones are not recognised.
    added_as_text: AddedVocabulary,
    special_spellings: PatternSet,
}

impl Pipeline {
    /// Joins the parts. Of added tokens with equal spelling the later counts.
    pub fn new(
        model: Model,
        steps: Steps,
        frame: Frame,
        added: Vec<(u32, AddedToken)>,
    ) -> Result<Self, TextError> {
        let specials = added.iter().filter(|(_, token)| token.special);
        let special_spellings = PatternSet::new(specials.map(|(_, token)| &token.content));
        let added = guarded(|| added_vocabulary(added, steps.normalizer.as_ref()))
            .map_err(TextError::TokenizerFile)?;
        let mut added_as_text = added.clone();
        added_as_text.set_encode_special_tokens(true);
        Ok(Pipeline {
            model,
            steps,
            frame,
            added,
            added_as_text,
            special_spellings,
        })
    }

    /// The spellings of all special tokens.
    pub fn special_spellings(&self) -> &PatternSet {
        &self.special_spellings
    }

    /// Tokens of `text` and nothing else.
    pub fn encode(&self, text: &str, specials: SpecialTokens) -> Result<Vec<TokenId>, TextError> {
        let added = match specials {
            SpecialTokens::Parse => &self.added,
            SpecialTokens::AsText => &self.added_as_text,
        };
        self.guarded_encode(text, |text| {
            let parts = added.extract_and_normalize(self.steps.normalizer.as_ref(), text);
            self.encode_parts(parts)
        })
    }

    /// Tokens of `text` from which every `breaker` is taken out, after special tokens have been looked for: those that
    /// have one inside remain text.
    pub fn encode_broken(&self, text: &str, breaker: char) -> Result<Vec<TokenId>, TextError> {
        let breaker = match &self.steps.normalizer {
            Some(normalizer) if spells_bytes(normalizer) => spell_bytes(breaker),
            _ => breaker.to_string(),
        };
        self.guarded_encode(text, |text| {
            let normalizer = self.steps.normalizer.as_ref();
            let mut parts = self.added.extract_and_normalize(normalizer, text);
            parts.normalize(|part| part.replace(breaker.as_str(), ""))?;
            self.encode_parts(parts)
        })
    }

    /// Adds what every prompt begins and ends with.
    pub fn frame(&self, tokens: Vec<TokenId>) -> Vec<TokenId> {
        [&self.frame.before, &tokens, &self.frame.after]
            .into_iter()
            .flatten()
            .copied()
            .collect()
    }

    /// The text of token spellings.
    pub fn decode(&self, spellings: Vec<String>) -> Result<String, TextError> {
        match &self.steps.decoder {
            Some(decoder) => guarded(|| decoder.decode(spellings)).map_err(TextError::Decode),
            None => Ok(spellings.join(" ")),
        }
    }

    /// A token by its exact spelling.
    pub fn token_id(&self, spelling: &str) -> Option<TokenId> {
        let added = self.added.get_vocab().get(spelling).copied();
        added
            .or_else(|| match &self.model {
                Model::Library(model) => model.token_to_id(spelling),
                Model::Scored { merges, .. } => merges.id(spelling),
            })
            .map(TokenId)
    }

    /// How the vocabulary spells a token.
    pub fn spelling(&self, token: TokenId) -> Option<String> {
        let added = self.added.simple_id_to_token(token.0);
        added.or_else(|| match &self.model {
            Model::Library(model) => model.id_to_token(token.0),
            Model::Scored { spellings, .. } => Some(spellings.get(token.0 as usize)?.to_string()),
        })
    }

    fn guarded_encode(
        &self,
        text: &str,
        encode: impl FnOnce(&str) -> tokenizers::Result<Vec<TokenId>>,
    ) -> Result<Vec<TokenId>, TextError> {
        if text.len() > MAX_TEXT_BYTES {
            return Err(TextError::TextTooLong {
                num_bytes: text.len(),
                max: MAX_TEXT_BYTES,
            });
        }
        guarded(|| encode(text)).map_err(TextError::Encode)
    }

    fn encode_parts(&self, mut parts: PreTokenizedString) -> tokenizers::Result<Vec<TokenId>> {
        if let Some(pre_tokenizer) = &self.steps.pre_tokenizer {
            pre_tokenizer.pre_tokenize(&mut parts)?;
        }
        parts.tokenize(|word| self.encode_word(word.get()))?;
        let splits = parts.get_splits(OffsetReferential::Normalized, OffsetType::None);
        let tokens = splits.iter().filter_map(|(_, _, tokens)| tokens.as_ref());
        Ok(tokens.flatten().map(|token| TokenId(token.id)).collect())
    }

    /// A unigram model holds special tokens as pieces like any other and would find them in text: then their spellings
    /// are cut in two.
    fn encode_word(&self, word: &str) -> tokenizers::Result<Vec<Token>> {
        let tokens = self.apply_model(word)?;
        let specials = self.added.get_added_tokens_decoder();
        let is_special = |token: &Token| specials.get(&token.id).is_some_and(|found| found.special);
        if !tokens.iter().any(is_special) {
            return Ok(tokens);
        }
        let mut pieces = Vec::new();
        for piece in split_inside(word, &self.special_spellings) {
            pieces.extend(self.apply_model(piece)?);
        }
        Ok(pieces)
    }

    fn apply_model(&self, word: &str) -> tokenizers::Result<Vec<Token>> {
        match &self.model {
            Model::Library(model) => model.tokenize(word),
            Model::Scored { merges, .. } => Ok(merges
                .encode(word)
                .into_iter()
                .map(|id| Token::new(id, String::new(), (0, 0)))
                .collect()),
        }
    }
}

/// The crate looks up the ids of added tokens in a model; this one knows these tokens only.
fn added_vocabulary(
    tokens: Vec<(u32, AddedToken)>,
    normalizer: Option<&NormalizerWrapper>,
) -> tokenizers::Result<AddedVocabulary> {
    let ids = tokens
        .iter()
        .map(|(id, token)| (token.content.clone(), *id))
        .collect();
    let model = WordLevel::builder().vocab(ids).build()?;
    let mut added = AddedVocabulary::new();
    let tokens = tokens.into_iter().map(|(_, token)| token);
    added.add_tokens(tokens, &model, normalizer)?;
    Ok(added)
}

/// Runs the crate's code, whose panics on odd files and texts must end one request only.
pub(crate) fn guarded<T>(run: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(result) => result.map_err(|error| error.to_string()),
        Err(_) => Err("the tokenizer library failed an internal check".to_owned()),
    }
}

/// Does the normaliser write text in the byte-level alphabet?
fn spells_bytes(normalizer: &NormalizerWrapper) -> bool {
    match normalizer {
        NormalizerWrapper::ByteLevel(_) => true,
        NormalizerWrapper::Sequence(steps) => steps.as_ref().iter().any(spells_bytes),
        NormalizerWrapper::BertNormalizer(_)
        | NormalizerWrapper::StripNormalizer(_)
        | NormalizerWrapper::StripAccents(_)
        | NormalizerWrapper::NFC(_)
        | NormalizerWrapper::NFD(_)
        | NormalizerWrapper::NFKC(_)
        | NormalizerWrapper::NFKD(_)
        | NormalizerWrapper::Lowercase(_)
        | NormalizerWrapper::Nmt(_)
        | NormalizerWrapper::Precompiled(_)
        | NormalizerWrapper::Replace(_)
        | NormalizerWrapper::Prepend(_) => false,
    }
}

fn spell_bytes(character: char) -> String {
    let mut buffer = [0; 4];
    let bytes = character.encode_utf8(&mut buffer).bytes();
    bytes.map(byte_level::spell).collect()
}

/// Cuts `text` after the first character of everything that may begin one of `patterns`.
fn split_inside<'a>(text: &'a str, patterns: &PatternSet) -> Vec<&'a str> {
    let mut pieces = Vec::new();
    let mut start = 0;
    for (index, character) in text.char_indices() {
        if patterns.may_begin(&text[index..]) {
            let end = index + character.len_utf8();
            pieces.push(&text[start..end]);
            start = end;
        }
    }
    pieces.push(&text[start..]);
    pieces
}
