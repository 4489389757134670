//! Characters that occur nowhere in a request, to mark places in its text with.
//!
//! Unicode sets U+FDD0 to U+FDEF aside for such use inside a program; text has no business containing them.

use serde_json::Value;

use super::super::pattern_set::PatternSet;
use crate::llm::{ChatMessage, ChatRequest};

const FIRST: u32 = 0xFDD0;
const NUM_CHARACTERS: u32 = 32;

/// Which of them are taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Marks {
    /// Bit i stands for U+FDD0 + i.
    taken: u32,
}

impl Marks {
    /// Takes those that occur in `text`.
    pub fn note(&mut self, text: &str) {
        for character in text.chars() {
            let offset = u32::from(character).wrapping_sub(FIRST);
            if offset < NUM_CHARACTERS {
                self.taken |= 1 << offset;
            }
        }
    }

    /// Takes those that occur in any string of `request`.
    pub fn note_request(&mut self, request: &ChatRequest) {
        for message in &request.messages {
            self.note_message(message);
        }
        for value in request.tools.iter().chain(&request.documents) {
            self.note_value(value);
        }
        for (name, value) in &request.template_kwargs {
            self.note(name);
            self.note_value(value);
        }
    }

    /// Takes one that is free.
    pub fn pick(&mut self) -> Option<char> {
        let offset = self.taken.trailing_ones();
        let bit = 1u32.checked_shl(offset)?;
        self.taken |= bit;
        char::from_u32(FIRST + offset)
    }

    fn note_message(&mut self, message: &ChatMessage) {
        let texts = [
            &message.content,
            &message.reasoning_content,
            &message.name,
            &message.tool_call_id,
        ];
        for text in texts.into_iter().flatten() {
            self.note(text);
        }
        for call in &message.tool_calls {
            self.note(&call.id);
            self.note(&call.name);
            self.note_value(&call.arguments);
        }
    }

    fn note_value(&mut self, value: &Value) {
        match value {
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
            Value::String(text) => self.note(text),
            Value::Array(values) => values.iter().for_each(|value| self.note_value(value)),
            Value::Object(fields) => {
                for (name, value) in fields {
                    self.note(name);
                    self.note_value(value);
                }
            }
        }
    }
}

/// `text` with `breaker` after the first character of every special token that it spells or that its end may begin; so
/// the template cannot complete one either.
pub(crate) fn break_specials(text: &str, specials: &PatternSet, breaker: char) -> String {
    let mut broken = String::with_capacity(text.len());
    for (index, character) in text.char_indices() {
        broken.push(character);
        if specials.may_begin(&text[index..]) {
            broken.push(breaker);
        }
    }
    broken
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn picks_what_is_free() {
        let mut marks = Marks::default();
        marks.note("a\u{FDD0}b\u{FDD2}\u{FDEF}\u{FDF0}");
        assert_eq!(marks.pick(), Some('\u{FDD1}'));
        assert_eq!(marks.pick(), Some('\u{FDD3}'));
        let rest = std::iter::from_fn(|| marks.pick());
        assert_eq!(rest.last(), Some('\u{FDEE}'));
    }

    #[test]
    fn breaks_whole_and_begun_specials() {
        let specials = PatternSet::new(["<s>", "<|end|>"]);
        let cases = [
            ("a <s> b", "a <·s> b"),
            ("<<s>", "<<·s>"),
            ("<s", "<·s"),
            ("x <", "x <·"),
            ("<sx <|ende", "<sx <|ende"),
            ("<s><|end|>", "<·s><·|end|>"),
        ];
        for (text, expected) in cases {
            assert_eq!(break_specials(text, &specials, '·'), expected, "{text:?}");
        }
    }
}
