//! Templates against what transformers makes of them.

use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use serde_json::Value as Json;

use super::*;
use crate::llm::{ChatMessage, Role, ToolCall};

/// 2025-01-15T12:34:56, when the fixtures' clock stood still.
const FROZEN: Duration = Duration::from_secs(1_736_944_496);

fn read_lines(path: &Path) -> Vec<Json> {
    let text = std::fs::read_to_string(path).expect("the fixture exists");
    let lines = text.lines();
    lines
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect()
}

fn text(value: &Json) -> Option<String> {
    value.as_str().map(str::to_owned)
}

fn role(name: &str) -> Role {
    let roles = [
        Role::System,
        Role::Developer,
        Role::User,
        Role::Assistant,
        Role::Tool,
    ];
    let role = roles.into_iter().find(|role| role.as_str() == name);
    role.expect("a known role")
}

fn message(value: &Json) -> ChatMessage {
    let calls = value["tool_calls"].as_array().into_iter().flatten();
    ChatMessage {
        content: text(&value["content"]),
        reasoning_content: text(&value["reasoning_content"]),
        name: text(&value["name"]),
        tool_calls: calls
            .map(|call| ToolCall {
                id: text(&call["id"]).expect("an id"),
                name: text(&call["function"]["name"]).expect("a name"),
                arguments: call["function"]["arguments"].clone(),
            })
            .collect(),
        tool_call_id: text(&value["tool_call_id"]),
        ..ChatMessage::text(role(value["role"].as_str().expect("a role")), "")
    }
}

fn request(case: &Json) -> ChatRequest {
    let list = |name: &str| case[name].as_array().cloned().unwrap_or_default();
    ChatRequest {
        messages: list("messages").iter().map(message).collect(),
        tools: list("tools"),
        template_kwargs: case["kwargs"].as_object().cloned().unwrap_or_default(),
        add_generation_prompt: case["add_generation_prompt"].as_bool(),
        continue_final_message: case["continue_final_message"].as_bool().unwrap_or(false),
        ..ChatRequest::default()
    }
}

/// How a case came out: nothing if as expected.
fn difference(template: &ChatTemplate, case: &Json) -> Option<String> {
    let rendered = template.render_at(&request(case), UNIX_EPOCH + FROZEN);
    let expected = &case["rendered"];
    match (rendered, expected.as_str(), case["error"]["type"].as_str()) {
        (Ok(rendered), Some(expected), _) => {
            let rendered = rendered.text();
            (rendered != expected).then(|| format!("{rendered:?}\n  not {expected:?}"))
        }
        (Err(error), Some(_), _) => Some(format!("{error}")),
        (Err(TextError::TemplateRefused(message)), None, Some("TemplateError")) => {
            let expected = &case["error"]["message"];
            (message != *expected).then(|| format!("{message:?}\n  not {expected}"))
        }
        (other, None, Some("TemplateError")) => {
            Some(format!("{other:?} where the template refuses"))
        }
        // Python's strictness about types: rendering is as good as an error.
        (_, None, _) => None,
    }
}

fn check_file(path: &Path) -> Vec<String> {
    let lines = read_lines(path);
    let ends = SpelledEnds {
        bos: text(&lines[0]["bos_token"]),
        eos: text(&lines[0]["eos_token"]),
    };
    let source = lines[0]["template"].as_str().expect("a template");
    let template = ChatTemplate::compile(source, ends, Tokenizer::bytes()).expect("it compiles");
    let has_parts = |message: &Json| message["content"].is_array();
    let cases = lines[1..].iter().filter(|case| {
        // Our messages hold text; the server joins parts.
        let messages = case["messages"].as_array().expect("messages");
        !messages.iter().any(has_parts)
    });
    cases
        .filter_map(|case| {
            let difference = difference(&template, case)?;
            Some(format!("{}: {difference}", case["conv"]))
        })
        .collect()
}

#[test]
#[ignore = "reads third-party templates from the folder that MILLPOND_ORACLES names"]
fn third_party_templates_render_as_in_transformers() {
    let folder = std::env::var_os("MILLPOND_ORACLES").expect("MILLPOND_ORACLES is set");
    let folder = PathBuf::from(folder).join("chat_templates");
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder)
        .expect("the folder exists")
        .map(|entry| entry.expect("an entry").path())
        .collect();
    files.sort();
    let mut num_different = 0;
    for file in files {
        for difference in check_file(&file) {
            num_different += 1;
            println!("{}\n  {difference}", file.display());
        }
    }
    assert_eq!(num_different, 0);
}
