//! The `prompt` of a completion in its four forms: a text, texts, token ids, lists of token ids.

use std::fmt;

use millpond_engine::llm::Prompt;
use millpond_scheduler::TokenId;
use serde::de::{self, DeserializeSeed, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

use super::errors::{ApiError, ApiResult};
use super::fields::without_position;
use crate::http::limits::MAX_PROMPT_TOKENS;

/// Reads one or several prompts, at most `max_prompts`.
pub fn parse_prompts(value: &RawValue, max_prompts: usize) -> ApiResult<Vec<Prompt>> {
    let prompts = PromptsSeed { max_prompts }
        .deserialize(&mut serde_json::Deserializer::from_str(value.get()))
        .map_err(|error| ApiError::invalid("prompt", without_position(&error)))?;
    if prompts.is_empty() {
        return Err(ApiError::invalid("prompt", "must not be empty"));
    }
    Ok(prompts)
}

struct PromptsSeed {
    max_prompts: usize,
}

impl<'de> DeserializeSeed<'de> for PromptsSeed {
    type Value = Vec<Prompt>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for PromptsSeed {
    type Value = Vec<Prompt>;

    fn expecting(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        formatter.write_str("a text, token ids, or a list of these")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Self::Value, E> {
        Ok(vec![Prompt::Text(text.to_owned())])
    }

    /// The first element tells which form the list has.
    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        match seq.next_element()? {
            None => Ok(Vec::new()),
            Some(Element::Token(first)) => {
                let mut tokens = vec![first];
                extend_tokens(&mut tokens, &mut seq)?;
                Ok(vec![Prompt::Tokens(tokens)])
            }
            Some(Element::Prompt(first)) => self.visit_prompts(first, seq),
        }
    }
}

impl PromptsSeed {
    fn visit_prompts<'de, A: SeqAccess<'de>>(
        self,
        first: Prompt,
        mut seq: A,
    ) -> Result<Vec<Prompt>, A::Error> {
        let mut prompts = vec![first];
        while let Some(element) = seq.next_element()? {
            let Element::Prompt(prompt) = element else {
                return Err(de::Error::custom(
                    "token ids and prompts cannot share a list",
                ));
            };
            if prompts.len() == self.max_prompts {
                let message = format!("at most {} prompts allowed (max_prompts)", self.max_prompts);
                return Err(de::Error::custom(message));
            }
            prompts.push(prompt);
        }
        Ok(prompts)
    }
}

/// One element of a list: a token of the only prompt, or a whole prompt.
enum Element {
    Token(TokenId),
    Prompt(Prompt),
}

impl<'de> Deserialize<'de> for Element {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ElementVisitor)
    }
}

struct ElementVisitor;

impl<'de> Visitor<'de> for ElementVisitor {
    type Value = Element;

    fn expecting(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        formatter.write_str("a text, a token id or a list of token ids")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Element, E> {
        Ok(Element::Prompt(Prompt::Text(text.to_owned())))
    }

    fn visit_u64<E: de::Error>(self, id: u64) -> Result<Element, E> {
        let id =
            u32::try_from(id).map_err(|_| de::Error::custom(format!("no token has id {id}")))?;
        Ok(Element::Token(TokenId(id)))
    }

    fn visit_i64<E: de::Error>(self, id: i64) -> Result<Element, E> {
        Err(de::Error::custom(format!("no token has id {id}")))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Element, A::Error> {
        let mut tokens = Vec::new();
        extend_tokens(&mut tokens, &mut seq)?;
        Ok(Element::Prompt(Prompt::Tokens(tokens)))
    }
}

fn extend_tokens<'de, A: SeqAccess<'de>>(
    tokens: &mut Vec<TokenId>,
    seq: &mut A,
) -> Result<(), A::Error> {
    while let Some(id) = seq.next_element()? {
        if tokens.len() == MAX_PROMPT_TOKENS {
            let message = format!("at most {MAX_PROMPT_TOKENS} token ids allowed");
            return Err(de::Error::custom(message));
        }
        tokens.push(TokenId(id));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Prompts in a short notation: `t:text`, `i:id,id`.
    fn check(json: &str, expected: Result<&[&str], ()>) {
        let value = RawValue::from_string(json.to_owned()).expect("valid JSON");
        let parsed = parse_prompts(&value, 3).map_err(drop).map(|prompts| {
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
    fn a_list_of_ids_is_bounded() {
        let ids = vec!["1"; MAX_PROMPT_TOKENS + 1].join(",");
        check(&format!("[{ids}]"), Err(()));
    }
}
