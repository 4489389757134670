//! `/v1/chat/completions`: what answers hold, and that the official types decode them.

use async_openai::types::chat::{CreateChatCompletionResponse, CreateChatCompletionStreamResponse};
use serde_json::{Value, json};

use crate::server::{Server, chat_body};
use crate::stream::{Kind, UsageAsked, check, events};

#[tokio::test]
async fn an_answer_holds_what_clients_read() {
    let server = Server::start(&[]);
    let answer = server.chat(json!({"seed": 7})).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    let json = answer.json();
    assert_eq!(json["object"], "chat.completion");
    assert!(json["id"].as_str().expect("an id").starts_with("chatcmpl-"));
    assert_eq!(json["model"], "mock");
    assert_eq!(json["seed"], 7);
    assert_eq!(json["choices"][0]["message"]["role"], "assistant");
    assert_eq!(json["choices"][0]["finish_reason"], "length");
    assert_eq!(json["usage"]["completion_tokens"], 8);
    assert!(json["usage"]["prompt_tokens_details"]["cached_tokens"].is_u64());
    for name in ["queue_ms", "prefill_ms", "decode_ms", "total_ms"] {
        assert!(json["timings"][name].as_f64().expect("a time") >= 0.0);
    }
    assert!(json.get("warnings").is_none());
}

#[tokio::test]
async fn the_official_types_decode_answers_and_chunks() {
    let server = Server::start(&[]);
    let fields = json!({"logprobs": true, "top_logprobs": 2, "n": 2, "return_token_ids": true, "unknown": 1});
    let answer = server.chat(fields.clone()).await;
    let decoded: CreateChatCompletionResponse =
        serde_json::from_str(&answer.text).expect("decodes");
    assert_eq!(decoded.choices.len(), 2);
    let logprobs = decoded.choices[0]
        .logprobs
        .as_ref()
        .and_then(|logprobs| logprobs.content.as_ref());
    assert_eq!(logprobs.map(Vec::len), Some(8));
    let mut body = chat_body(fields);
    body["stream"] = json!(true);
    let streamed = server.post("/v1/chat/completions", body).await;
    let mut chunks = events(&streamed);
    assert_eq!(chunks.pop().as_deref(), Some("[DONE]"));
    for chunk in chunks {
        serde_json::from_str::<CreateChatCompletionStreamResponse>(&chunk).expect("decodes");
    }
}

#[tokio::test]
async fn a_seed_that_was_minted_gives_the_same_answer_again() {
    let server = Server::start(&[]);
    let sampled = json!({"temperature": 1.5, "max_tokens": 32});
    let first = server.chat(sampled.clone()).await.json();
    let mut again = sampled;
    again["seed"] = first["seed"].clone();
    assert!(first["seed"].is_i64());
    let second = server.chat(again).await.json();
    assert_eq!(first["choices"], second["choices"]);
    assert_eq!(first["seed"], second["seed"]);
}

#[tokio::test]
async fn logprobs_have_a_position_per_token() {
    let server = Server::start(&[]);
    let json = server
        .chat(json!({"logprobs": true, "top_logprobs": 3}))
        .await
        .json();
    let content = json["choices"][0]["logprobs"]["content"]
        .as_array()
        .expect("positions")
        .clone();
    assert_eq!(content.len(), 8);
    for position in &content {
        assert!(position["logprob"].as_f64().expect("a number") <= 0.0);
        assert_eq!(position["top_logprobs"].as_array().map(Vec::len), Some(3));
        assert!(position["bytes"].is_array() && position["token"].is_string());
    }
    let without = server.chat(json!({"logprobs": true})).await.json();
    assert_eq!(
        without["choices"][0]["logprobs"]["content"][0]["top_logprobs"],
        json!([])
    );
    let none = server.chat(json!({})).await.json();
    assert_eq!(none["choices"][0]["logprobs"], Value::Null);
}

#[tokio::test]
async fn a_stop_string_is_reported_and_left_out() {
    let server = Server::start(&[]);
    let plain = server.chat(json!({"max_tokens": 20})).await.json();
    let text = plain["choices"][0]["message"]["content"]
        .as_str()
        .expect("text")
        .to_owned();
    let stop: String = text.chars().skip(4).take(2).collect();
    let stopped = server
        .chat(json!({"max_tokens": 20, "stop": stop}))
        .await
        .json();
    let choice = &stopped["choices"][0];
    let expected: String = text.chars().take(4).collect();
    assert_eq!(choice["message"]["content"], expected);
    assert_eq!(
        (&choice["finish_reason"], &choice["stop_reason"]),
        (&json!("stop"), &json!(stop))
    );
}

#[tokio::test]
async fn tokens_and_prompt_logprobs_when_asked_for() {
    let server = Server::start(&[]);
    let json = server
        .chat(json!({"return_token_ids": true, "prompt_logprobs": 1}))
        .await
        .json();
    let prompt = json["prompt_token_ids"].as_array().expect("tokens").len();
    assert_eq!(json["usage"]["prompt_tokens"], prompt);
    assert_eq!(
        json["choices"][0]["token_ids"].as_array().map(Vec::len),
        Some(8)
    );
    let positions = json["prompt_logprobs"].as_array().expect("positions");
    assert_eq!(positions.len(), prompt);
    assert_eq!(positions[0], Value::Null);
    let entry = positions[1]
        .as_object()
        .and_then(|entries| entries.values().next())
        .expect("an entry");
    assert!(
        entry["rank"].is_u64()
            && entry["logprob"].is_number()
            && entry["decoded_token"].is_string()
    );
}

#[tokio::test]
async fn both_names_of_the_token_limit_are_known() {
    let server = Server::start(&[]);
    let json = server
        .chat(json!({"max_tokens": 20, "max_completion_tokens": 3}))
        .await
        .json();
    assert_eq!(json["usage"]["completion_tokens"], 3);
    let refused = server
        .chat(json!({"max_completion_tokens": 1_000_000}))
        .await;
    assert_eq!(
        (refused.status, refused.param().as_deref()),
        (400, Some("max_completion_tokens"))
    );
    assert_eq!(refused.code(), "context_length_exceeded");
}

#[tokio::test]
async fn repeated_prompts_are_reported_as_cached() {
    let server = Server::start(&[]);
    let long = "word ".repeat(60);
    let fields = json!({"messages": [{"role": "user", "content": long}]});
    let cold = server.chat(fields.clone()).await.json();
    let warm = server.chat(fields).await.json();
    let cached = |json: &Value| json["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
    assert_eq!(cached(&cold), Some(0));
    assert!(cached(&warm).expect("a count") > 200);
    assert_eq!(cold["choices"], warm["choices"]);
}

#[tokio::test]
async fn concurrent_streams_say_what_single_ones_say() {
    let server = Server::start(&[]);
    let body = |index: usize| {
        chat_body(json!({
            "messages": [{"role": "user", "content": format!("chat {index}")}],
            "stream": true, "temperature": 1.0, "seed": index, "max_tokens": 50,
        }))
    };
    let mut alone = Vec::new();
    for index in 0..16 {
        let answer = server.post("/v1/chat/completions", body(index)).await;
        alone.push(check(&answer, Kind::Chat, 1, UsageAsked::Never).texts);
    }
    let answers = (0..16).map(|index| server.post("/v1/chat/completions", body(index)));
    let together = futures_util::future::join_all(answers).await;
    for (alone, answer) in alone.iter().zip(&together) {
        assert_eq!(
            *alone,
            check(answer, Kind::Chat, 1, UsageAsked::Never).texts
        );
    }
}
