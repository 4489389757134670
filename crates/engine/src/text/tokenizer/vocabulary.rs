//! What every token id stands for, as one flat table made when the tokenizer is opened.
//!
//! It neither encodes nor decodes text.

use millpond_scheduler::TokenId;

use super::super::TextError;
use super::byte_level;

/// The table grows with the highest id, so a file must not be able to name any number.
const MAX_TOKENS: usize = 1 << 22;

/// How the spelling of a token in a vocabulary stands for bytes of text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Spelling {
    /// Each character is a byte, see `byte_level`.
    ByteLevel,
    /// Text in which the first string of each pair means the second.
    Text {
        /// SentencePiece writes a space as '▁'.
        replacements: Vec<(String, String)>,
        /// `<0x41>` means that byte.
        byte_fallback: bool,
    },
}

impl Spelling {
    /// SentencePiece's way.
    pub fn sentencepiece() -> Self {
        Spelling::Text {
            replacements: vec![("▁".to_owned(), " ".to_owned())],
            byte_fallback: true,
        }
    }

    /// The bytes that a token with this spelling stands for.
    pub fn bytes_of(&self, spelling: &str) -> Vec<u8> {
        match self {
            Spelling::ByteLevel => byte_level::bytes_of(spelling),
            Spelling::Text {
                replacements,
                byte_fallback,
            } => {
                if let Some(byte) = parse_byte(spelling).filter(|_| *byte_fallback) {
                    return vec![byte];
                }
                let text = replacements
                    .iter()
                    .fold(spelling.to_owned(), |text, (from, to)| {
                        text.replace(from, to)
                    });
                text.into_bytes()
            }
        }
    }
}

/// The byte that `<0x41>` spells.
fn parse_byte(spelling: &str) -> Option<u8> {
    let digits = spelling.strip_prefix("<0x")?.strip_suffix('>')?;
    let both_hex = digits.len() == 2 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    both_hex
        .then(|| u8::from_str_radix(digits, 16).ok())
        .flatten()
}

/// A token as the file has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TokenEntry {
    pub id: u32,
    pub spelling: String,
    pub kind: TokenKind,
}

/// What a token is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum TokenKind {
    /// The id belongs to no token.
    #[default]
    Absent,
    /// A piece of text.
    Text,
    /// Structure of a conversation, end of sequence and the like.
    Special,
}

/// Bytes and kind of every token.
#[derive(Debug, Default)]
pub(crate) struct Vocabulary {
    kinds: Vec<TokenKind>,
    /// Token i is `bytes[ends[i - 1]..ends[i]]`.
    ends: Vec<usize>,
    bytes: Vec<u8>,
    max_token_bytes: usize,
}

impl Vocabulary {
    /// Of two entries with the same id the later counts. A special token's bytes are its spelling.
    pub fn new(mut entries: Vec<TokenEntry>, spelling: &Spelling) -> Result<Self, TextError> {
        entries.sort_by_key(|entry| entry.id);
        let mut table = Vocabulary::default();
        for (index, entry) in entries.iter().enumerate() {
            let is_replaced = entries
                .get(index + 1)
                .is_some_and(|next| next.id == entry.id);
            if !is_replaced {
                table.push(entry, spelling)?;
            }
        }
        Ok(table)
    }

    fn push(&mut self, entry: &TokenEntry, spelling: &Spelling) -> Result<(), TextError> {
        let id = entry.id as usize;
        if id >= MAX_TOKENS {
            return Err(TextError::TooManyTokens {
                id: entry.id,
                max: MAX_TOKENS,
            });
        }
        self.ends.resize(id, self.bytes.len());
        self.kinds.resize(id, TokenKind::Absent);
        let start = self.bytes.len();
        match entry.kind {
            TokenKind::Absent => {}
            TokenKind::Text => self.bytes.extend(spelling.bytes_of(&entry.spelling)),
            TokenKind::Special => self.bytes.extend(entry.spelling.bytes()),
        }
        self.max_token_bytes = self.max_token_bytes.max(self.bytes.len() - start);
        self.ends.push(self.bytes.len());
        self.kinds.push(entry.kind);
        Ok(())
    }

    /// The highest id and one.
    pub fn num_tokens(&self) -> usize {
        self.kinds.len()
    }

    /// Bytes of the longest token.
    pub fn max_token_bytes(&self) -> usize {
        self.max_token_bytes
    }

    pub fn kind(&self, token: TokenId) -> TokenKind {
        let kind = self.kinds.get(token.0 as usize);
        kind.copied().unwrap_or_default()
    }

    /// The bytes of a token; `None` for an id without one.
    pub fn bytes(&self, token: TokenId) -> Option<&[u8]> {
        if self.kind(token) == TokenKind::Absent {
            return None;
        }
        let index = token.0 as usize;
        let start = match index {
            0 => 0,
            _ => *self.ends.get(index - 1)?,
        };
        self.bytes.get(start..*self.ends.get(index)?)
    }

    /// Ids of all special tokens, ascending.
    pub fn special_tokens(&self) -> impl Iterator<Item = TokenId> {
        (0..)
            .zip(&self.kinds)
            .filter(|&(_, &kind)| kind == TokenKind::Special)
            .map(|(id, _)| TokenId(id))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(id: u32, spelling: &str, kind: TokenKind) -> TokenEntry {
        TokenEntry {
            id,
            spelling: spelling.to_owned(),
            kind,
        }
    }

    #[test]
    fn knows_the_bytes_of_every_token() {
        let entries = vec![
            entry(4, "▁a", TokenKind::Text),
            entry(1, "<0x0A>", TokenKind::Text),
            entry(0, "old", TokenKind::Text),
            entry(0, "<s▁>", TokenKind::Special),
            entry(2, "<0x+A>", TokenKind::Text),
        ];
        let table = Vocabulary::new(entries, &Spelling::sentencepiece()).expect("valid ids");
        let bytes = |id| table.bytes(TokenId(id));
        assert_eq!(bytes(0), Some("<s▁>".as_bytes()));
        assert_eq!(bytes(1), Some(b"\n".as_slice()));
        assert_eq!(bytes(2), Some(b"<0x+A>".as_slice()));
        assert_eq!((bytes(3), bytes(5), bytes(u32::MAX)), (None, None, None));
        assert_eq!(bytes(4), Some(b" a".as_slice()));
        assert_eq!((table.num_tokens(), table.max_token_bytes()), (5, 6));
        assert_eq!(table.special_tokens().collect::<Vec<_>>(), [TokenId(0)]);
    }

    #[test]
    fn refuses_an_absurd_id() {
        let entries = vec![entry(u32::MAX, "x", TokenKind::Text)];
        let result = Vocabulary::new(entries, &Spelling::ByteLevel);
        assert!(matches!(result, Err(TextError::TooManyTokens { .. })));
    }
}
