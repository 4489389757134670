//! Between text and tokens: tokenizer, chat template, incremental detokenizer, stop strings.
//!
//! Nothing here computes logits, and nothing knows a wire protocol.

pub mod chat_template;
pub mod detokenizer;
#[cfg(test)]
mod fixtures;
mod pattern_set;
pub mod stop_strings;
pub mod tokenizer;

pub use chat_template::{ChatTemplate, Rendered};
pub use detokenizer::Detokenizer;
pub use stop_strings::{StopMatcher, StopStep};
pub use tokenizer::{SpecialTokens, Tokenizer};

/// Why text could not be made into tokens, or the other way round.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TextError {
    /// The file's kind of tokenizer is not one of ours.
    #[error("tokenizer.ggml.model: tokenizer {name:?} is not supported")]
    UnknownTokenizer {
        /// As the file names it.
        name: String,
    },
    /// The file's way of splitting words is not one of ours.
    #[error("tokenizer.ggml.pre: word splitter {name:?} is not supported")]
    UnknownWordSplitting {
        /// As the file names it.
        name: String,
    },
    /// The file lacks what its tokenizer needs.
    #[error("{0} is missing")]
    MissingMetadata(&'static str),
    /// The file contradicts itself.
    #[error("{key}: {problem}")]
    InvalidMetadata {
        /// The key.
        key: &'static str,
        /// What is wrong with its value.
        problem: String,
    },
    /// A token's id is beyond any real vocabulary.
    #[error("token id {id} is not below {max}")]
    TooManyTokens {
        /// The id.
        id: u32,
        /// The limit.
        max: usize,
    },
    /// `tokenizer.json` or `tokenizer_config.json` cannot be used.
    #[error("{0}")]
    TokenizerFile(String),
    /// A text is too long to be encoded at all.
    #[error("the text has {num_bytes} bytes; at most {max} can be encoded")]
    TextTooLong {
        /// Its length.
        num_bytes: usize,
        /// The limit.
        max: usize,
    },
    /// The vocabulary cannot express a text.
    #[error("the text cannot be encoded: {0}")]
    Encode(String),
    /// Tokens cannot be made into text.
    #[error("the tokens cannot be decoded: {0}")]
    Decode(String),
    /// The model's chat template cannot be parsed.
    #[error("the chat template cannot be parsed: {0}")]
    TemplateSyntax(String),
    /// The template refuses the conversation; these are its own words.
    #[error("{0}")]
    TemplateRefused(String),
    /// The template failed on the conversation.
    #[error("the chat template cannot render this conversation: {0}")]
    TemplateFailed(String),
    /// The template uses more than a template may.
    #[error("the chat template exceeds its limit of {limit}")]
    TemplateLimit {
        /// Which.
        limit: &'static str,
    },
    /// A template variable that belongs to the renderer.
    #[error("the template variable {name:?} cannot be set")]
    ReservedVariable {
        /// Its name.
        name: String,
    },
    /// There is no final message to continue, or the template does not show it.
    #[error("the final message cannot be continued: {0}")]
    CannotContinue(&'static str),
    /// A request holds so many noncharacters that none is left to mark its own text with.
    #[error("the conversation contains every Unicode noncharacter from U+FDD0 to U+FDEF")]
    NoMarkerLeft,
}
