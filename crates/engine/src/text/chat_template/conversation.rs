//! A chat request as the variables that templates expect, with the keys that transformers gives them.
//!
//! Every string of the request is broken here, so that no template can pass a special token on from content.

use std::time::SystemTime;

use minijinja::Value;
use serde_json::{Map, Value as Json};

use super::super::TextError;
use super::super::pattern_set::PatternSet;
use super::calendar;
use super::marks::break_specials;
use crate::llm::{ChatMessage, ChatRequest, ToolCall};

/// Deeper values could exhaust the stack; JSON parsers stop at 128.
const MAX_DEPTH: usize = 128;

/// Names that the renderer gives meaning to, here or in transformers.
const RESERVED: &[&str] = &[
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "bos_token",
    "eos_token",
    "chat_template",
    "tokenize",
    "raise_exception",
    "strftime_now",
    "namespace",
    "range",
    "dict",
];

/// All that a template can see.
pub(crate) struct Variables<'a> {
    pub request: &'a ChatRequest,
    pub bos: Option<&'a str>,
    pub eos: Option<&'a str>,
    pub specials: &'a PatternSet,
    /// Goes into special tokens that the request spells out.
    pub breaker: char,
    /// Goes, with a space, after a final message that is to be continued.
    pub end: char,
    pub now: SystemTime,
}

impl Variables<'_> {
    /// The template's context.
    pub fn to_value(&self) -> Result<Value, TextError> {
        let request = self.request;
        let mut variables = vec![
            ("messages", self.messages()?),
            ("tools", self.list_or_none(&request.tools)?),
            ("documents", self.list_or_none(&request.documents)?),
            ("add_generation_prompt", Value::from(self.opens_answer()?)),
            ("strftime_now", self.strftime_now()),
        ];
        variables.extend(self.bos.map(|bos| ("bos_token", Value::from(bos))));
        variables.extend(self.eos.map(|eos| ("eos_token", Value::from(eos))));
        for (name, value) in &request.template_kwargs {
            if RESERVED.contains(&name.as_str()) {
                return Err(TextError::ReservedVariable { name: name.clone() });
            }
            variables.push((name.as_str(), self.value(value, MAX_DEPTH)?));
        }
        Ok(Value::from_pairs(variables))
    }

    fn opens_answer(&self) -> Result<bool, TextError> {
        match (
            self.request.add_generation_prompt,
            self.request.continue_final_message,
        ) {
            (Some(true), true) => Err(TextError::CannotContinue(
                "a new message is to be opened as well (add_generation_prompt)",
            )),
            (None, continues) => Ok(!continues),
            (Some(opens), _) => Ok(opens),
        }
    }

    fn messages(&self) -> Result<Value, TextError> {
        let mut messages = self.request.messages.iter();
        let last = match self.request.continue_final_message {
            true => messages.next_back(),
            false => None,
        };
        let mut values = messages
            .map(|message| self.message(message, self.optional(&message.content)))
            .collect::<Result<Vec<Value>, TextError>>()?;
        if let Some(message) = last {
            values.push(self.continued_message(message)?);
        } else if self.request.continue_final_message {
            return Err(TextError::CannotContinue("there is none"));
        }
        Ok(Value::from(values))
    }

    fn continued_message(&self, message: &ChatMessage) -> Result<Value, TextError> {
        let content = message
            .content
            .as_deref()
            .ok_or(TextError::CannotContinue("it has no content"))?;
        let content = format!("{}{} ", self.text(content), self.end);
        self.message(message, Some(Value::from(content)))
    }

    /// Keys without a value are absent, as templates ask whether they are defined.
    fn message(&self, message: &ChatMessage, content: Option<Value>) -> Result<Value, TextError> {
        let mut fields = vec![("role", Value::from(message.role.as_str()))];
        let mut add = |name, value: Option<Value>| fields.extend(value.map(|value| (name, value)));
        add("content", content);
        add(
            "reasoning_content",
            self.optional(&message.reasoning_content),
        );
        add("name", self.optional(&message.name));
        add("tool_call_id", self.optional(&message.tool_call_id));
        if !message.tool_calls.is_empty() {
            let calls = message.tool_calls.iter().map(|call| self.tool_call(call));
            let calls = calls.collect::<Result<Vec<Value>, TextError>>()?;
            add("tool_calls", Some(Value::from(calls)));
        }
        Ok(Value::from_pairs(fields))
    }

    fn tool_call(&self, call: &ToolCall) -> Result<Value, TextError> {
        let function = [
            ("name", Value::from(self.text(&call.name))),
            ("arguments", self.value(&call.arguments, MAX_DEPTH)?),
        ];
        Ok(Value::from_pairs([
            ("id", Value::from(self.text(&call.id))),
            ("type", Value::from("function")),
            ("function", Value::from_pairs(function)),
        ]))
    }

    fn list_or_none(&self, values: &[Json]) -> Result<Value, TextError> {
        if values.is_empty() {
            return Ok(Value::from(()));
        }
        let values = values.iter().map(|value| self.value(value, MAX_DEPTH));
        Ok(Value::from(
            values.collect::<Result<Vec<Value>, TextError>>()?,
        ))
    }

    fn value(&self, json: &Json, depth_left: usize) -> Result<Value, TextError> {
        let depth_left = depth_left
            .checked_sub(1)
            .ok_or(TextError::TemplateLimit { limit: "nesting" })?;
        match json {
            Json::Null => Ok(Value::from(())),
            Json::Bool(flag) => Ok(Value::from(*flag)),
            Json::Number(number) => Ok(number_value(number)),
            Json::String(text) => Ok(Value::from(self.text(text))),
            Json::Array(values) => {
                let values = values.iter().map(|value| self.value(value, depth_left));
                Ok(Value::from(
                    values.collect::<Result<Vec<Value>, TextError>>()?,
                ))
            }
            Json::Object(fields) => self.object(fields, depth_left),
        }
    }

    fn object(&self, fields: &Map<String, Json>, depth_left: usize) -> Result<Value, TextError> {
        let fields = fields
            .iter()
            .map(|(name, value)| Ok((self.text(name), self.value(value, depth_left)?)));
        let fields = fields.collect::<Result<Vec<(String, Value)>, TextError>>()?;
        Ok(Value::from_pairs(fields))
    }

    fn optional(&self, text: &Option<String>) -> Option<Value> {
        text.as_deref().map(|text| Value::from(self.text(text)))
    }

    fn text(&self, text: &str) -> String {
        break_specials(text, self.specials, self.breaker)
    }

    /// Python's `datetime.now().strftime`, at the time of the request, in UTC.
    fn strftime_now(&self) -> Value {
        let now = self.now;
        Value::from_function(move |format: &str| calendar::strftime(now, format))
    }
}

fn number_value(number: &serde_json::Number) -> Value {
    if let Some(number) = number.as_i64() {
        Value::from(number)
    } else if let Some(number) = number.as_u64() {
        Value::from(number)
    } else {
        Value::from(number.as_f64().unwrap_or(f64::NAN))
    }
}
