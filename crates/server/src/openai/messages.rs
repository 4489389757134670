//! Messages of a conversation: from the wire to the engine's `ChatMessage`.
//!
//! Content may be a text or text parts, which are joined by newlines as vLLM and llama.cpp do. Parts that are
//! no text are refused, never dropped.

use millpond_engine::llm::{ChatMessage, Role, ToolCall};
use serde_json::Value;
use serde_json::value::RawValue;

use super::border::Notes;
use super::errors::{ApiError, ApiResult, ErrorKind};
use super::fields::{Fields, parse_list, printable, without_position};
use crate::http::limits::{MAX_CONTENT_PARTS, MAX_FREE_JSON_BYTES, MAX_TOOL_CALLS};

/// Fields of a message that have no bearing on the answer.
const ACCEPTED: &[&str] = &["refusal", "annotations", "audio", "id", "status"];

/// Takes the field `messages`.
pub fn take_messages(
    fields: &mut Fields,
    max_messages: usize,
    notes: &mut Notes,
) -> ApiResult<Vec<ChatMessage>> {
    let values = fields
        .take_list::<&RawValue>("messages", max_messages)?
        .ok_or_else(|| ApiError::invalid("messages", "is required"))?;
    if values.is_empty() {
        return Err(ApiError::invalid("messages", "must not be empty"));
    }
    let message = |(index, value)| parse_message(value, &format!("messages[{index}]"), notes);
    values.into_iter().enumerate().map(message).collect()
}

fn parse_message(value: &RawValue, path: &str, notes: &mut Notes) -> ApiResult<ChatMessage> {
    let mut fields = Fields::of_value(value, path)?;
    let role = take_role(&mut fields)?;
    let message = ChatMessage {
        role,
        content: take_content(&mut fields, notes)?,
        reasoning_content: take_reasoning(&mut fields)?,
        name: fields.take("name")?,
        tool_calls: take_tool_calls(&mut fields, notes)?,
        tool_call_id: fields.take("tool_call_id")?,
    };
    if message.content.is_none() && (role != Role::Assistant || message.tool_calls.is_empty()) {
        return Err(ApiError::invalid(fields.name_of("content"), "is required"));
    }
    for name in ACCEPTED {
        fields.take_raw(name);
    }
    notes.finish(fields)?;
    Ok(message)
}

fn take_role(fields: &mut Fields) -> ApiResult<Role> {
    let role: String = fields.require("role")?;
    match role.as_str() {
        "system" => Ok(Role::System),
        "developer" => Ok(Role::Developer),
        "user" => Ok(Role::User),
        "assistant" => Ok(Role::Assistant),
        "tool" => Ok(Role::Tool),
        other => Err(ApiError::invalid(
            fields.name_of("role"),
            format!(
                "must be system, developer, user, assistant or tool, got \"{}\"",
                printable(other)
            ),
        )),
    }
}

/// Two names for the same thing are in use.
fn take_reasoning(fields: &mut Fields) -> ApiResult<Option<String>> {
    let reasoning = fields.take("reasoning")?;
    Ok(fields.take("reasoning_content")?.or(reasoning))
}

fn take_content(fields: &mut Fields, notes: &mut Notes) -> ApiResult<Option<String>> {
    let path = fields.name_of("content");
    let Some(value) = fields.take_raw("content") else {
        return Ok(None);
    };
    if value.get().starts_with('"') {
        let text = serde_json::from_str(value.get());
        return text
            .map(Some)
            .map_err(|error| ApiError::invalid(path, without_position(&error)));
    }
    let parts: Vec<&RawValue> = parse_list(value, &path, MAX_CONTENT_PARTS)?;
    let part = |(index, part)| parse_part(part, &format!("{path}[{index}]"), notes);
    let texts: Vec<String> = parts
        .into_iter()
        .enumerate()
        .map(part)
        .collect::<ApiResult<_>>()?;
    Ok(Some(texts.join("\n")))
}

fn parse_part(value: &RawValue, path: &str, notes: &mut Notes) -> ApiResult<String> {
    let mut fields = Fields::of_value(value, path)?;
    let kind: String = fields.require("type")?;
    let text = match kind.as_str() {
        "text" | "input_text" | "output_text" => fields.require("text")?,
        "refusal" => fields.require("refusal")?,
        other => {
            return Err(ApiError::of_field(
                ErrorKind::Unsupported,
                fields.name_of("type"),
                format!(
                    "content of type \"{}\" is not supported; this model reads text",
                    printable(other)
                ),
            ));
        }
    };
    notes.finish(fields)?;
    Ok(text)
}

fn take_tool_calls(fields: &mut Fields, notes: &mut Notes) -> ApiResult<Vec<ToolCall>> {
    let path = fields.name_of("tool_calls");
    let calls = fields.take_list::<&RawValue>("tool_calls", MAX_TOOL_CALLS)?;
    let call = |(index, call)| parse_tool_call(call, &format!("{path}[{index}]"), notes);
    calls
        .unwrap_or_default()
        .into_iter()
        .enumerate()
        .map(call)
        .collect()
}

fn parse_tool_call(value: &RawValue, path: &str, notes: &mut Notes) -> ApiResult<ToolCall> {
    let mut fields = Fields::of_value(value, path)?;
    let kind: Option<String> = fields.take("type")?;
    if kind.is_some_and(|kind| kind != "function") {
        return Err(ApiError::invalid(
            fields.name_of("type"),
            "must be \"function\"",
        ));
    }
    let id = fields.take("id")?.unwrap_or_default();
    fields.take_raw("index");
    let Some(mut function) = fields.take_object("function")? else {
        return Err(ApiError::invalid(fields.name_of("function"), "is required"));
    };
    let call = ToolCall {
        id,
        name: function.require("name")?,
        arguments: take_arguments(&mut function)?,
    };
    notes.finish(function)?;
    notes.finish(fields)?;
    Ok(call)
}

/// Arguments are JSON inside a text; some clients send the JSON itself.
fn take_arguments(function: &mut Fields) -> ApiResult<Value> {
    let name = function.name_of("arguments");
    let arguments: Value = function
        .take_free("arguments", MAX_FREE_JSON_BYTES)?
        .unwrap_or_default();
    match arguments {
        Value::String(text) if text.trim().is_empty() => Ok(Value::Object(Default::default())),
        Value::String(text) => serde_json::from_str(&text)
            .map_err(|error| ApiError::invalid(name, without_position(&error))),
        Value::Null => Ok(Value::Object(Default::default())),
        Value::Object(_) => Ok(arguments),
        Value::Bool(_) | Value::Number(_) | Value::Array(_) => {
            Err(ApiError::invalid(name, "must be a text that holds JSON"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::openai::border::UnknownFields;

    fn parse(messages: &str) -> ApiResult<Vec<ChatMessage>> {
        let body = format!("{{\"messages\":{messages}}}");
        let mut fields = Fields::of_body(body.as_bytes(), 64)?;
        take_messages(&mut fields, 4, &mut Notes::new(UnknownFields::Warn))
    }

    fn param(messages: &str) -> String {
        parse(messages)
            .expect_err("refused")
            .param
            .expect("names a field")
    }

    #[test]
    fn parts_are_joined_by_newlines() {
        let messages = parse(
            r#"[{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}]"#,
        );
        assert_eq!(messages.expect("valid")[0].content.as_deref(), Some("a\nb"));
    }

    #[test]
    fn a_tool_call_round_trip() {
        let messages = parse(
            r#"[{"role":"assistant","content":null,"tool_calls":[{"id":"c1","type":"function",
                "function":{"name":"f","arguments":"{\"x\":1}"}}]},{"role":"tool","tool_call_id":"c1","content":"2"}]"#,
        )
        .expect("valid");
        assert_eq!(
            messages[0].tool_calls[0].arguments,
            serde_json::json!({"x": 1})
        );
        assert_eq!(messages[1].tool_call_id.as_deref(), Some("c1"));
    }

    #[test]
    fn refusals_name_the_place() {
        for (messages, expected) in [
            ("[]", "messages"),
            ("7", "messages"),
            ("[7]", "messages[0]"),
            (r#"[{"role":"user"}]"#, "messages[0].content"),
            (r#"[{"content":"x"}]"#, "messages[0].role"),
            (r#"[{"role":"zzz","content":"x"}]"#, "messages[0].role"),
            (r#"[{"role":"user","content":7}]"#, "messages[0].content"),
            (
                r#"[{"role":"user","content":[{"type":"image_url","image_url":{}}]}]"#,
                "messages[0].content[0].type",
            ),
            (
                r#"[{"role":"user","content":"x"},{"role":"assistant"}]"#,
                "messages[1].content",
            ),
            (
                r#"[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"{"}}]}]"#,
                "messages[0].tool_calls[0].function.arguments",
            ),
            (r#"[0,0,0,0,0]"#, "messages"),
        ] {
            assert_eq!(param(messages), expected, "{messages}");
        }
    }
}
