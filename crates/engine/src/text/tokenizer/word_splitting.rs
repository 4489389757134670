//! How GGUF files name the word splitter of a byte-level vocabulary, one row per way.
//!
//! A name that is not here is an error: a wrong splitter gives plausible but wrong tokens, silently.

use tokenizers::normalizers::NFC;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{NormalizerWrapper, PreTokenizerWrapper, SplitDelimiterBehavior};

use super::super::TextError;

/// One way of splitting text into words before byte-pair encoding.
#[derive(Debug)]
pub(crate) struct WordSplitting {
    names: &'static [&'static str],
    words: Words,
    normalization: Normalization,
    /// A word that is a token as a whole is not put together by merges.
    pub whole_words: WholeWords,
    /// Prompts begin with a beginning-of-sequence token unless the file says otherwise.
    pub adds_bos: bool,
}

#[derive(Debug)]
enum Words {
    /// GPT-2's own expression.
    Gpt2,
    /// The same, after every digit has become a word of its own.
    Gpt2SingleDigits,
    /// Another expression.
    Expression(&'static str),
}

/// What happens to text before it is split.
#[derive(Debug)]
enum Normalization {
    None,
    /// Unicode's canonical composition.
    Nfc,
}

/// Are words looked up as a whole first?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WholeWords {
    LookedUp,
    Merged,
}

const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT_4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

const TABLE: &[WordSplitting] = &[
    WordSplitting {
        names: &[
            "smollm",
            "starcoder",
            "refact",
            "command-r",
            "codeshell",
            "exaone",
            "minerva-7b",
        ],
        words: Words::Gpt2SingleDigits,
        normalization: Normalization::None,
        whole_words: WholeWords::Merged,
        adds_bos: false,
    },
    WordSplitting {
        names: &[
            "llama-bpe",
            "llama3",
            "llama-v3",
            "falcon3",
            "lfm2",
            "pixtral",
        ],
        words: Words::Expression(LLAMA3),
        normalization: Normalization::None,
        whole_words: WholeWords::LookedUp,
        adds_bos: true,
    },
    WordSplitting {
        names: &["dbrx", "smaug-bpe", "chatglm-bpe"],
        words: Words::Expression(LLAMA3),
        normalization: Normalization::None,
        whole_words: WholeWords::Merged,
        adds_bos: false,
    },
    WordSplitting {
        names: &["glm4"],
        words: Words::Expression(LLAMA3),
        normalization: Normalization::None,
        whole_words: WholeWords::LookedUp,
        adds_bos: false,
    },
    WordSplitting {
        names: &["qwen2", "deepseek-r1-qwen"],
        words: Words::Expression(QWEN2),
        normalization: Normalization::Nfc,
        whole_words: WholeWords::Merged,
        adds_bos: false,
    },
    WordSplitting {
        names: &["stablelm2", "hunyuan", "megrez"],
        words: Words::Expression(QWEN2),
        normalization: Normalization::None,
        whole_words: WholeWords::Merged,
        adds_bos: false,
    },
    WordSplitting {
        names: &["tekken"],
        words: Words::Expression(TEKKEN),
        normalization: Normalization::None,
        whole_words: WholeWords::LookedUp,
        adds_bos: true,
    },
    WordSplitting {
        names: &["gpt-4o", "llama4"],
        words: Words::Expression(GPT_4O),
        normalization: Normalization::None,
        whole_words: WholeWords::Merged,
        adds_bos: false,
    },
    WordSplitting {
        names: &[
            "gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4", "default",
        ],
        words: Words::Gpt2,
        normalization: Normalization::None,
        whole_words: WholeWords::Merged,
        adds_bos: false,
    },
];

impl WordSplitting {
    /// The row with this name (`tokenizer.ggml.pre`).
    pub fn named(name: &str) -> Result<&'static Self, TextError> {
        TABLE
            .iter()
            .find(|row| row.names.contains(&name))
            .ok_or_else(|| TextError::UnknownWordSplitting {
                name: name.to_owned(),
            })
    }

    /// The step before the model: split, then spell bytes as characters.
    pub fn pre_tokenizer(&self) -> Result<PreTokenizerWrapper, TextError> {
        let no_prefix = ByteLevel::default().add_prefix_space(false);
        let step: PreTokenizerWrapper = match self.words {
            Words::Gpt2 => no_prefix.into(),
            Words::Gpt2SingleDigits => {
                Sequence::new(vec![Digits::new(true).into(), no_prefix.into()]).into()
            }
            Words::Expression(expression) => {
                let pattern = SplitPattern::Regex(expression.to_owned());
                let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false)
                    .map_err(|problem| TextError::TokenizerFile(problem.to_string()))?;
                Sequence::new(vec![split.into(), no_prefix.use_regex(false).into()]).into()
            }
        };
        Ok(step)
    }

    /// The step before splitting.
    pub fn normalizer(&self) -> Option<NormalizerWrapper> {
        match self.normalization {
            Normalization::None => None,
            Normalization::Nfc => Some(NFC.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_has_a_valid_expression() {
        for row in TABLE {
            assert!(row.pre_tokenizer().is_ok(), "{:?}", row.names);
        }
    }

    #[test]
    fn an_unknown_name_is_an_error_that_says_it() {
        let error = WordSplitting::named("flux-7").expect_err("no such row");
        assert!(error.to_string().contains("flux-7"), "{error}");
    }
}
