//! The grammar of OpenAI's streams (A-P1): an automaton that every stream of these tests must pass.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::server::{Answer, Server, chat_body, merge};

/// What a stream said, choice by choice.
#[derive(Debug, Default)]
pub struct Told {
    pub texts: BTreeMap<u64, String>,
    pub finish_reasons: BTreeMap<u64, String>,
    pub chunks: Vec<Value>,
    pub usage: Option<Value>,
}

/// Which endpoint a stream comes from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    Chat,
    Completion,
}

/// How usage was asked for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum UsageAsked {
    Never,
    AtEnd,
    Continuous,
}

/// The data of the events of a stream, in order.
pub fn events(answer: &Answer) -> Vec<String> {
    assert_eq!(answer.status, 200, "{}", answer.text);
    assert!(
        answer
            .header("content-type")
            .starts_with("text/event-stream")
    );
    assert!(answer.text.ends_with("\n\n"), "the last event is whole");
    let event = |event: &str| {
        event
            .strip_prefix("data: ")
            .expect("an event of data")
            .to_owned()
    };
    answer
        .text
        .trim_end_matches("\n\n")
        .split("\n\n")
        .map(event)
        .collect()
}

/// Runs the automaton over a stream of `num_choices` that came to its own end.
pub fn check(answer: &Answer, kind: Kind, num_choices: u64, usage: UsageAsked) -> Told {
    let mut events = events(answer);
    assert_eq!(events.pop().as_deref(), Some("[DONE]"));
    let mut told = Told::default();
    let last = events.len().saturating_sub(1);
    for (index, event) in events.iter().enumerate() {
        let chunk: Value = serde_json::from_str(event).expect("JSON");
        assert_eq!(stamp(&chunk), stamp(told.chunks.first().unwrap_or(&chunk)));
        let choices = chunk["choices"].as_array().expect("choices").clone();
        match choices.as_slice() {
            [] => {
                assert_eq!(index, last, "only the last chunk has no choice");
                assert_ne!(usage, UsageAsked::Never);
                told.usage = Some(chunk["usage"].clone());
            }
            [choice] => {
                check_usage(&chunk, usage);
                told.step(choice, kind);
            }
            more => panic!("{} choices in a chunk", more.len()),
        }
        told.chunks.push(chunk);
    }
    assert_eq!(told.usage.is_some(), usage != UsageAsked::Never);
    assert_eq!(
        told.finish_reasons.len() as u64,
        num_choices,
        "every choice ends"
    );
    told
}

/// What must be the same in every chunk.
fn stamp(chunk: &Value) -> [&Value; 5] {
    ["id", "object", "created", "model", "system_fingerprint"].map(|name| {
        assert!(!chunk[name].is_null(), "{name} in {chunk}");
        &chunk[name]
    })
}

fn check_usage(chunk: &Value, usage: UsageAsked) {
    match usage {
        UsageAsked::Never => assert_eq!(chunk.get("usage"), None),
        UsageAsked::AtEnd => assert_eq!(chunk.get("usage"), Some(&Value::Null)),
        UsageAsked::Continuous => assert!(chunk["usage"]["prompt_tokens"].is_u64()),
    }
}

impl Told {
    fn step(&mut self, choice: &Value, kind: Kind) {
        let index = choice["index"].as_u64().expect("an index");
        assert!(
            !self.finish_reasons.contains_key(&index),
            "nothing follows a finish: {choice}"
        );
        if kind == Kind::Chat {
            let is_first = !self.texts.contains_key(&index);
            let role = choice["delta"].get("role");
            assert_eq!(
                role,
                is_first.then_some(&json!("assistant")),
                "the role comes first, once"
            );
        }
        let text = match kind {
            Kind::Chat => &choice["delta"]["content"],
            Kind::Completion => &choice["text"],
        };
        self.texts
            .entry(index)
            .or_default()
            .push_str(text.as_str().unwrap_or_default());
        match &choice["finish_reason"] {
            Value::Null => {}
            Value::String(reason) => {
                self.finish_reasons.insert(index, reason.clone());
            }
            other => panic!("finish_reason {other}"),
        }
    }
}

const AT_END: &str = r#"{"include_usage":true}"#;
const CONTINUOUS: &str = r#"{"include_usage":true,"continuous_usage_stats":true}"#;

fn options(usage: UsageAsked) -> Value {
    match usage {
        UsageAsked::Never => json!({"stream": true}),
        UsageAsked::AtEnd => json!({"stream": true, "stream_options": parse(AT_END)}),
        UsageAsked::Continuous => json!({"stream": true, "stream_options": parse(CONTINUOUS)}),
    }
}

fn parse(text: &str) -> Value {
    serde_json::from_str(text).expect("JSON")
}

/// Asks twice, whole and streamed, and compares.
async fn compare(server: &Server, kind: Kind, fields: Value, usage: UsageAsked) {
    let (path, body) = match kind {
        Kind::Chat => ("/v1/chat/completions", chat_body(fields)),
        Kind::Completion => ("/v1/completions", merge(json!({"prompt": "abc"}), fields)),
    };
    let whole = server.post(path, body.clone()).await;
    assert_eq!(whole.status, 200, "{}", whole.text);
    let whole = whole.json();
    let choices = whole["choices"].as_array().expect("choices");
    let streamed = server.post(path, merge(body, options(usage))).await;
    let told = check(&streamed, kind, choices.len() as u64, usage);
    for choice in choices {
        let index = choice["index"].as_u64().expect("an index");
        let text = match kind {
            Kind::Chat => &choice["message"]["content"],
            Kind::Completion => &choice["text"],
        };
        assert_eq!(
            Some(text.as_str().expect("text")),
            told.texts.get(&index).map(String::as_str)
        );
        assert_eq!(choice["finish_reason"], told.finish_reasons[&index]);
    }
    if let Some(usage) = told.usage {
        for name in ["prompt_tokens", "completion_tokens", "total_tokens"] {
            assert_eq!(usage[name], whole["usage"][name], "{name}");
        }
    }
}

#[tokio::test]
async fn streams_say_what_whole_answers_say() {
    let server = Server::start(&[]);
    for kind in [Kind::Chat, Kind::Completion] {
        for usage in [UsageAsked::Never, UsageAsked::AtEnd, UsageAsked::Continuous] {
            for fields in [
                json!({}),
                json!({"max_tokens": 1}),
                json!({"n": 3, "temperature": 1.0, "seed": 5}),
                json!({"max_tokens": 40, "stop": ["h", "zz"]}),
                json!({"max_tokens": 40, "stop": "gh", "include_stop_str_in_output": true}),
                json!({"return_token_ids": true}),
                json!({"max_tokens": 300}),
            ] {
                compare(&server, kind, fields, usage).await;
            }
        }
    }
    for fields in [
        json!({"prompt": ["a", "b", "c"], "n": 2, "echo": true}),
        json!({"prompt": [[97, 98], [120]], "logprobs": 2, "echo": true}),
        json!({"echo": true, "max_tokens": 0}),
    ] {
        compare(&server, Kind::Completion, fields, UsageAsked::AtEnd).await;
    }
    compare(
        &server,
        Kind::Chat,
        json!({"logprobs": true, "top_logprobs": 2}),
        UsageAsked::AtEnd,
    )
    .await;
}
