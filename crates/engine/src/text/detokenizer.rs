//! Tokens to text one token at a time; a character split across tokens is held back.
//!
//! It strips nothing: the text continues a prompt, so a leading space is part of it.

use millpond_scheduler::TokenId;

use super::tokenizer::Tokenizer;

/// The text of one choice, growing by a token at a time.
///
/// All text given out, taken together, is what `String::from_utf8_lossy` makes of all tokens' bytes.
#[derive(Clone, Debug)]
pub struct Detokenizer {
    tokenizer: Tokenizer,
    skip_special: bool,
    /// The beginning of a character whose end has not come yet: at most three bytes.
    incomplete: Vec<u8>,
}

impl Detokenizer {
    /// `skip_special` leaves special tokens out of the text.
    pub fn new(tokenizer: Tokenizer, skip_special: bool) -> Self {
        Detokenizer {
            tokenizer,
            skip_special,
            incomplete: Vec::new(),
        }
    }

    /// Appends the characters that `token` completes. Ids without a token add nothing.
    pub fn push(&mut self, token: TokenId, out: &mut String) {
        if self.skip_special && self.tokenizer.is_special(token) {
            return;
        }
        let Some(bytes) = self.tokenizer.token_bytes(token) else {
            return;
        };
        self.incomplete.extend_from_slice(bytes);
        let num_done = append_complete(&self.incomplete, out);
        self.incomplete.drain(..num_done);
    }

    /// Appends a replacement character if the output ended inside a character.
    pub fn finish(&mut self, out: &mut String) {
        out.push_str(&String::from_utf8_lossy(&self.incomplete));
        self.incomplete.clear();
    }
}

/// Appends characters, and U+FFFD for what can no longer become one; returns how many bytes that used up.
fn append_complete(bytes: &[u8], out: &mut String) -> usize {
    let mut rest = bytes;
    loop {
        let error = match str::from_utf8(rest) {
            Ok(text) => {
                out.push_str(text);
                return bytes.len();
            }
            Err(error) => error,
        };
        let (valid, invalid) = rest.split_at(error.valid_up_to());
        out.push_str(str::from_utf8(valid).unwrap_or_default());
        let Some(num_invalid) = error.error_len() else {
            return bytes.len() - invalid.len();
        };
        out.push(char::REPLACEMENT_CHARACTER);
        rest = &invalid[num_invalid..];
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Text after each token of the byte tokenizer, then the end.
    fn steps(tokens: impl IntoIterator<Item = u32>, skip_special: bool) -> Vec<String> {
        let mut detokenizer = Detokenizer::new(Tokenizer::bytes(), skip_special);
        let mut steps: Vec<String> = tokens
            .into_iter()
            .map(|token| {
                let mut step = String::new();
                detokenizer.push(TokenId(token), &mut step);
                step
            })
            .collect();
        let mut last = String::new();
        detokenizer.finish(&mut last);
        steps.push(last);
        steps
    }

    #[test]
    fn holds_back_incomplete_characters() {
        let euro = [0xE2, 0x82, 0xAC];
        let end = Tokenizer::bytes().eos().expect("bytes have an end").0;
        let cases: &[(&[u32], bool, &[&str])] = &[
            (&[b'a'.into(), b'b'.into()], true, &["a", "b", ""]),
            (&euro, true, &["", "", "€", ""]),
            (&[0xE2, 0x82, b'x'.into()], true, &["", "", "\u{FFFD}x", ""]),
            (&[0xE2, 0x82], true, &["", "", "\u{FFFD}"]),
            (&[0xFF, 0xE2], true, &["\u{FFFD}", "", "\u{FFFD}"]),
            (&[0xE2, 0x82, end, 0xAC], true, &["", "", "", "€", ""]),
            (&[end], false, &["<|end|>", ""]),
            (&[70_000], false, &["", ""]),
        ];
        for &(tokens, skip_special, expected) in cases {
            assert_eq!(
                steps(tokens.iter().copied(), skip_special),
                expected,
                "{tokens:?}"
            );
        }
    }

    /// Mostly pieces of real characters, sometimes noise.
    fn bytes() -> impl Strategy<Value = Vec<u8>> {
        let noisy = prop::collection::vec(any::<u8>(), 0..6);
        let text = "\\PC{0,6}".prop_map(String::into_bytes);
        let cut = ("\\PC{1,4}", any::<prop::sample::Index>()).prop_map(|(text, cut)| {
            let mut bytes = text.into_bytes();
            bytes.truncate(cut.index(bytes.len()));
            bytes
        });
        prop::collection::vec(prop_oneof![noisy, text, cut], 0..6).prop_map(|parts| parts.concat())
    }

    proptest! {
        #[test]
        fn pieces_join_to_the_lossy_whole(bytes in bytes()) {
            let joined = steps(bytes.iter().map(|&byte| byte.into()), true).concat();
            prop_assert_eq!(joined, String::from_utf8_lossy(&bytes));
        }
    }
}
