//! Log-probabilities in the shapes of the wire: chat's, legacy completions', and vLLM's for prompts.

use millpond_engine::llm::Llm;
use millpond_scheduler::{PositionLogprobs, TokenId, TokenLogprob};
use serde::ser::{SerializeMap, SerializeSeq};
use serde::{Serialize, Serializer};

/// JSON has no infinity; vLLM's stand-in for the logarithm of zero.
const LOG_OF_ZERO: f32 = -9999.0;

/// How tokens are spelled.
#[derive(Clone)]
pub struct Spelling {
    llm: Llm,
}

impl Spelling {
    /// Spells tokens as `llm` does.
    pub fn new(llm: Llm) -> Self {
        Spelling { llm }
    }

    fn bytes(&self, token: TokenId) -> Vec<u8> {
        self.llm.token_bytes(token)
    }
}

/// JSON knows finite numbers only.
fn finite(logprob: f32) -> f32 {
    if logprob.is_finite() {
        logprob.max(LOG_OF_ZERO)
    } else {
        LOG_OF_ZERO
    }
}

/// A token as text, with replacement characters where its bytes are no UTF-8 by themselves.
fn lossy(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A token as text that differs from every other token's: bytes that are no UTF-8 are written out.
fn distinct(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes).unwrap_or_else(|error| {
        let escaped = error.as_bytes().iter().map(|byte| format!("\\x{byte:02x}"));
        format!("bytes:{}", escaped.collect::<String>())
    })
}

/// Chat's `logprobs` of one choice.
#[derive(Debug, Default, Serialize)]
pub struct ChatLogprobs {
    content: Vec<ChatTokenLogprob>,
    refusal: Option<()>,
}

#[derive(Debug, Serialize)]
struct ChatTokenLogprob {
    #[serde(flatten)]
    chosen: ChatAlternative,
    top_logprobs: Vec<ChatAlternative>,
}

#[derive(Debug, Serialize)]
struct ChatAlternative {
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
}

impl ChatLogprobs {
    /// Appends the positions of a delta.
    pub fn extend(&mut self, positions: &[PositionLogprobs], spelling: &Spelling) {
        let alternative = |entry: &TokenLogprob| {
            let bytes = spelling.bytes(entry.token);
            ChatAlternative {
                token: lossy(&bytes),
                logprob: finite(entry.logprob),
                bytes,
            }
        };
        let entries = positions.iter().map(|position| ChatTokenLogprob {
            chosen: alternative(&position.chosen),
            top_logprobs: position.top.iter().map(alternative).collect(),
        });
        self.content.extend(entries);
    }
}

/// Legacy completions' `logprobs` of one choice.
#[derive(Debug, Default, Serialize)]
pub struct LegacyLogprobs {
    text_offset: Vec<usize>,
    token_logprobs: Vec<Option<f32>>,
    tokens: Vec<String>,
    top_logprobs: Vec<Option<Alternatives>>,
}

/// Alternatives of one position, spelled as an object.
#[derive(Debug)]
struct Alternatives(Vec<(String, f32)>);

impl Serialize for Alternatives {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(token, logprob)| (token, logprob)))
    }
}

impl LegacyLogprobs {
    /// Appends a token that has no log-probability: the first of a prompt.
    pub fn push_first(&mut self, token: TokenId, offset: &mut TextOffset, spelling: &Spelling) {
        let bytes = spelling.bytes(token);
        self.text_offset.push(offset.advance(&bytes));
        self.tokens.push(distinct(bytes));
        self.token_logprobs.push(None);
        self.top_logprobs.push(None);
    }

    /// No position was appended.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Appends positions with `num_top` alternatives; `offset` counts the characters before them.
    pub fn extend(
        &mut self,
        positions: &[PositionLogprobs],
        num_top: usize,
        offset: &mut TextOffset,
        spelling: &Spelling,
    ) {
        for position in positions {
            let bytes = spelling.bytes(position.chosen.token);
            self.text_offset.push(offset.advance(&bytes));
            self.tokens.push(distinct(bytes));
            self.token_logprobs
                .push(Some(finite(position.chosen.logprob)));
            self.top_logprobs
                .push(Some(Alternatives::of(position, num_top, spelling)));
        }
    }
}

impl Alternatives {
    /// The most likely tokens, and the chosen one when it is not among them.
    fn of(position: &PositionLogprobs, num_top: usize, spelling: &Spelling) -> Self {
        let is_chosen = |entry: &&TokenLogprob| entry.token == position.chosen.token;
        let top = &position.top[..num_top.min(position.top.len())];
        let extra = match top.iter().find(is_chosen) {
            Some(_) => None,
            None => Some(&position.chosen),
        };
        let spell =
            |entry: &TokenLogprob| (distinct(spelling.bytes(entry.token)), finite(entry.logprob));
        Alternatives(top.iter().chain(extra).map(spell).collect())
    }
}

/// Characters before a token, counted from the start of a choice's text.
#[derive(Clone, Copy, Debug, Default)]
pub struct TextOffset(usize);

impl TextOffset {
    /// The offset of a token with these bytes; moves on past it. A character counts where it begins.
    fn advance(&mut self, bytes: &[u8]) -> usize {
        let offset = self.0;
        let begins_character = |byte: &&u8| (**byte & 0xC0) != 0x80;
        self.0 += bytes.iter().filter(begins_character).count();
        offset
    }
}

/// vLLM's `prompt_logprobs`: one entry per prompt token, `null` for the first.
#[derive(Debug, Default)]
pub struct PromptLogprobs(Vec<PromptPosition>);

/// Entries of one position by token id, ranks included.
#[derive(Debug)]
struct PromptPosition(Vec<(TokenId, RankedLogprob)>);

#[derive(Debug, Serialize)]
struct RankedLogprob {
    logprob: f32,
    rank: usize,
    decoded_token: String,
}

impl PromptLogprobs {
    /// From positions 1 and on.
    pub fn new(positions: &[PositionLogprobs], spelling: &Spelling) -> Self {
        let of = |position| PromptPosition::of(position, spelling);
        PromptLogprobs(positions.iter().map(of).collect())
    }
}

impl PromptPosition {
    fn of(position: &PositionLogprobs, spelling: &Spelling) -> Self {
        let ranked = |rank: usize, entry: &TokenLogprob| {
            let logprob = RankedLogprob {
                logprob: finite(entry.logprob),
                rank,
                decoded_token: lossy(&spelling.bytes(entry.token)),
            };
            (entry.token, logprob)
        };
        let mut entries = vec![ranked(position.rank as usize, &position.chosen)];
        for (rank, entry) in (1..).zip(&position.top) {
            if entry.token != position.chosen.token {
                entries.push(ranked(rank, entry));
            }
        }
        PromptPosition(entries)
    }
}

impl Serialize for PromptLogprobs {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut list = serializer.serialize_seq(Some(self.0.len() + 1))?;
        list.serialize_element(&None::<()>)?;
        for position in &self.0 {
            list.serialize_element(position)?;
        }
        list.end()
    }
}

impl Serialize for PromptPosition {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (token, entry) in &self.0 {
            map.serialize_entry(&token.0.to_string(), entry)?;
        }
        map.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_json_cannot_say_is_clamped() {
        for (logprob, expected) in [
            (-0.5, -0.5),
            (f32::NEG_INFINITY, LOG_OF_ZERO),
            (f32::NAN, LOG_OF_ZERO),
            (-1e30, LOG_OF_ZERO),
        ] {
            assert_eq!(finite(logprob), expected);
        }
    }

    #[test]
    fn tokens_that_are_no_text_stay_distinct() {
        assert_eq!(distinct(b"ab".to_vec()), "ab");
        assert_eq!(distinct(vec![0xE2, 0x80]), "bytes:\\xe2\\x80");
        assert_eq!(lossy(&[0xE2, 0x80]), "\u{FFFD}");
    }

    #[test]
    fn offsets_count_characters() {
        let mut offset = TextOffset::default();
        let split = "é".as_bytes();
        let offsets = [
            offset.advance(b"ab"),
            offset.advance(&split[..1]),
            offset.advance(&split[1..]),
            offset.advance("€".as_bytes()),
            offset.advance(b"x"),
        ];
        assert_eq!(offsets, [0, 2, 3, 3, 4]);
    }
}
