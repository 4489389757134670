//! The `prompt` of a completion in its four forms: a text, texts, token ids, lists of token ids.

use std::cell::Cell;
use std::fmt;

use millpond_engine::llm::Prompt;
use millpond_scheduler::TokenId;
use serde::Deserializer;
use serde::de::{self, DeserializeSeed, SeqAccess, Visitor};
use serde_json::value::RawValue;

use super::errors::{ApiError, ApiResult, ErrorKind};
use super::fields::without_position;

/// Bounds of a request's prompts.
#[derive(Clone, Copy, Debug)]
pub struct PromptBounds {
    /// Prompts of one request.
    pub max_prompts: usize,
    /// The model's context; more token ids can never fit.
    pub max_context: usize,
}

/// Reads one or several prompts.
pub fn parse_prompts(value: &RawValue, bounds: PromptBounds) -> ApiResult<Vec<Prompt>> {
    let too_long = Cell::new(false);
    let parser = PromptsParser {
        bounds,
        too_long: &too_long,
    };
    let mut deserializer = serde_json::Deserializer::from_str(value.get());
    match parser.deserialize(&mut deserializer) {
        Ok(prompts) if prompts.is_empty() => Err(ApiError::invalid("prompt", "must not be empty")),
        Ok(prompts) => Ok(prompts),
        Err(error) => {
            let kind = match too_long.get() {
                true => ErrorKind::ContextLength,
                false => ErrorKind::Invalid,
            };
            Err(ApiError::of_field(kind, "prompt", without_position(&error)))
        }
    }
}

/// Reads the whole field.
#[derive(Clone, Copy)]
struct PromptsParser<'c> {
    bounds: PromptBounds,
    /// Set when an error is one of length: JSON errors are texts.
    too_long: &'c Cell<bool>,
}

impl<'de> DeserializeSeed<'de> for PromptsParser<'_> {
    type Value = Vec<Prompt>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for PromptsParser<'_> {
    type Value = Vec<Prompt>;

    fn expecting(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        formatter.write_str("a text, token ids, or a list of these")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Self::Value, E> {
        Ok(vec![Prompt::Text(text.to_owned())])
    }

    /// The first element tells which form the list has.
    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        match seq.next_element_seed(ElementParser(self))? {
            None => Ok(Vec::new()),
            Some(Element::Token(first)) => {
                let tokens = self.read_tokens(vec![first], &mut seq)?;
                Ok(vec![Prompt::Tokens(tokens)])
            }
            Some(Element::Prompt(first)) => self.read_prompts(first, seq),
        }
    }
}

impl PromptsParser<'_> {
    fn read_prompts<'de, A: SeqAccess<'de>>(
        self,
        first: Prompt,
        mut seq: A,
    ) -> Result<Vec<Prompt>, A::Error> {
        let mut prompts = vec![first];
        while let Some(element) = seq.next_element_seed(ElementParser(self))? {
            let Element::Prompt(prompt) = element else {
                let message = "token ids and prompts cannot share a list";
                return Err(de::Error::custom(message));
            };
            if prompts.len() == self.bounds.max_prompts {
                let max = self.bounds.max_prompts;
                let message = format!("at most {max} prompts allowed (max_prompts)");
                return Err(de::Error::custom(message));
            }
            prompts.push(prompt);
        }
        Ok(prompts)
    }

    fn read_tokens<'de, A: SeqAccess<'de>>(
        self,
        mut tokens: Vec<TokenId>,
        seq: &mut A,
    ) -> Result<Vec<TokenId>, A::Error> {
        while let Some(id) = seq.next_element()? {
            if tokens.len() == self.bounds.max_context {
                self.too_long.set(true);
                let max = self.bounds.max_context;
                let message = format!(
                    "the prompt has more than {max} tokens, which is this model's maximum context length"
                );
                return Err(de::Error::custom(message));
            }
            tokens.push(TokenId(id));
        }
        Ok(tokens)
    }
}

/// One element of a list: a token of the only prompt, or a whole prompt.
enum Element {
    Token(TokenId),
    Prompt(Prompt),
}

/// Reads one element.
struct ElementParser<'c>(PromptsParser<'c>);

impl<'de> DeserializeSeed<'de> for ElementParser<'_> {
    type Value = Element;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Element, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for ElementParser<'_> {
    type Value = Element;

    fn expecting(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        formatter.write_str("a text, a token id or a list of token ids")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Element, E> {
        Ok(Element::Prompt(Prompt::Text(text.to_owned())))
    }

    fn visit_u64<E: de::Error>(self, id: u64) -> Result<Element, E> {
        let unknown = |_| de::Error::custom(format!("no token has id {id}"));
        let id = u32::try_from(id).map_err(unknown)?;
        Ok(Element::Token(TokenId(id)))
    }

    fn visit_i64<E: de::Error>(self, id: i64) -> Result<Element, E> {
        Err(de::Error::custom(format!("no token has id {id}")))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Element, A::Error> {
        let tokens = self.0.read_tokens(Vec::new(), &mut seq)?;
        Ok(Element::Prompt(Prompt::Tokens(tokens)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUNDS: PromptBounds = PromptBounds {
        max_prompts: 3,
        max_context: 5,
    };

    /// Prompts in a short notation: `t:text`, `i:id,id`.
    fn check(json: &str, expected: Result<&[&str], ()>) {
        let value = RawValue::from_string(json.to_owned()).expect("valid JSON");
        let parsed = parse_prompts(&value, BOUNDS).map_err(drop).map(|prompts| {
            let short = |prompt: &Prompt| match prompt {
                Prompt::Text(text) => format!("t:{text}"),
                Prompt::Tokens(tokens) => {
                    let ids: Vec<_> = tokens.iter().map(|token| token.0.to_string()).collect();
                    format!("i:{}", ids.join(","))
                }
            };
            prompts.iter().map(short).collect::<Vec<_>>()
        });
        assert_eq!(
            parsed,
            expected.map(|prompts| prompts.iter().map(|&p| p.to_owned()).collect()),
            "{json}"
        );
    }

    #[test]
    fn the_four_forms() {
        check(r#""a""#, Ok(&["t:a"]));
        check(r#"["a","b"]"#, Ok(&["t:a", "t:b"]));
        check("[1,2]", Ok(&["i:1,2"]));
        check("[[1,2],[3]]", Ok(&["i:1,2", "i:3"]));
        check(r#"["a",[3]]"#, Ok(&["t:a", "i:3"]));
    }

    #[test]
    fn everything_else_is_refused() {
        for json in [
            "[]",
            "1",
            "null",
            "{}",
            "true",
            "[-1]",
            "[1.5]",
            "[4294967296]",
            "[1,\"a\"]",
            "[\"a\",1]",
            "[[1],2]",
            "[[\"a\"]]",
            "[[[1]]]",
            "[1,-1]",
            "[\"a\",\"b\",\"c\",\"d\"]",
            "[9223372036854775808]",
        ] {
            check(json, Err(()));
        }
    }

    #[test]
    fn a_list_of_ids_is_bounded_by_the_context() {
        check("[1,2,3,4,5]", Ok(&["i:1,2,3,4,5"]));
        for json in ["[1,2,3,4,5,6]", "[[1,2,3,4,5,6]]"] {
            let value = RawValue::from_string(json.to_owned()).expect("valid JSON");
            let error = parse_prompts(&value, BOUNDS).expect_err("too long");
            assert_eq!(error.kind, ErrorKind::ContextLength);
        }
    }
}
