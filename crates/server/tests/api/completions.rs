//! `/v1/completions`: prompts in all forms, echo, legacy log-probabilities.

use async_openai::types::completions::CreateCompletionResponse;
use serde_json::{Value, json};

use crate::server::Server;
use crate::stream::events;

fn texts(json: &Value) -> Vec<&str> {
    let choices = json["choices"].as_array().expect("choices");
    let indices: Vec<_> = choices
        .iter()
        .map(|choice| choice["index"].as_u64())
        .collect();
    let expected: Vec<_> = (0..choices.len() as u64).map(Some).collect();
    assert_eq!(indices, expected, "choices are numbered");
    choices
        .iter()
        .map(|choice| choice["text"].as_str().expect("text"))
        .collect()
}

#[tokio::test]
async fn every_form_of_prompt_is_the_same_prompt() {
    let server = Server::start(&[]);
    let tokens = server
        .post("/tokenize", json!({"prompt": "abc"}))
        .await
        .json()["tokens"]
        .clone();
    let expected = server.complete(json!({"prompt": "abc"})).await.json()["choices"].clone();
    for prompt in [json!(["abc"]), tokens.clone(), json!([tokens])] {
        let answer = server.complete(json!({"prompt": prompt})).await.json();
        assert_eq!(answer["choices"], expected);
    }
}

#[tokio::test]
async fn a_list_of_prompts_with_several_choices_each() {
    let server = Server::start(&[]);
    let alone: Vec<Value> = {
        let mut answers = Vec::new();
        for prompt in ["abc", "xyz"] {
            let fields = json!({"prompt": prompt, "n": 2, "seed": 3, "temperature": 1.0});
            answers.push(server.complete(fields).await.json());
        }
        answers
    };
    let fields = json!({"prompt": ["abc", "xyz"], "n": 2, "seed": 3, "temperature": 1.0});
    let together = server.complete(fields).await.json();
    let expected: Vec<&str> = alone.iter().flat_map(texts).collect();
    assert_eq!(texts(&together), expected);
    let sum = |name: &str| {
        alone
            .iter()
            .filter_map(|json| json["usage"][name].as_u64())
            .sum::<u64>()
    };
    assert_eq!(together["usage"]["prompt_tokens"], sum("prompt_tokens"));
    assert_eq!(
        together["usage"]["completion_tokens"],
        sum("completion_tokens")
    );
}

#[tokio::test]
async fn sixteen_tokens_unless_told_otherwise() {
    let server = Server::start(&[]);
    let answer = server
        .post("/v1/completions", json!({"prompt": "abc"}))
        .await
        .json();
    assert_eq!(answer["usage"]["completion_tokens"], 16);
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
}

#[tokio::test]
async fn echo_repeats_the_prompt_before_every_choice() {
    let server = Server::start(&[]);
    let plain = server.complete(json!({"n": 2, "seed": 1})).await.json();
    let echoed = server
        .complete(json!({"n": 2, "seed": 1, "echo": true}))
        .await
        .json();
    let expected: Vec<String> = texts(&plain)
        .iter()
        .map(|text| format!("abc{text}"))
        .collect();
    assert_eq!(texts(&echoed), expected);
    let only = server
        .complete(json!({"echo": true, "max_tokens": 0}))
        .await
        .json();
    assert_eq!(texts(&only), ["abc"]);
    assert_eq!(only["usage"]["completion_tokens"], 0);
    assert_eq!(only["choices"][0]["finish_reason"], "length");
}

#[tokio::test]
async fn legacy_logprobs_have_their_shape() {
    let server = Server::start(&[]);
    let answer = server.complete(json!({"logprobs": 2, "echo": true})).await;
    let decoded: CreateCompletionResponse = serde_json::from_str(&answer.text).expect("decodes");
    let choice = &decoded.choices[0];
    let logprobs = choice.logprobs.as_ref().expect("log-probabilities");
    let num_tokens = 3 + 8;
    assert_eq!(logprobs.tokens.len(), num_tokens);
    assert_eq!(logprobs.token_logprobs.len(), num_tokens);
    assert_eq!(logprobs.top_logprobs.len(), num_tokens);
    assert_eq!(logprobs.text_offset.len(), num_tokens);
    assert_eq!(logprobs.token_logprobs[0], None);
    assert!(logprobs.token_logprobs[1..].iter().all(Option::is_some));
    assert!(logprobs.top_logprobs[0].is_null());
    for (top, token) in logprobs.top_logprobs.iter().zip(&logprobs.tokens).skip(1) {
        let top = top.as_object().expect("alternatives");
        assert!((2..=3).contains(&top.len()) && top.contains_key(token));
    }
    let chars: Vec<char> = choice.text.chars().collect();
    for (offset, token) in logprobs.text_offset.iter().zip(&logprobs.tokens) {
        let at_offset: String = chars[*offset as usize..]
            .iter()
            .take(token.chars().count())
            .collect();
        assert_eq!(at_offset, *token);
    }
    let none = server.complete(json!({})).await.json();
    assert_eq!(none["choices"][0]["logprobs"], Value::Null);
}

#[tokio::test]
async fn chunks_decode_and_carry_the_same_logprobs() {
    let server = Server::start(&[]);
    let fields = json!({"logprobs": 1, "echo": true, "seed": 1});
    let whole = server.complete(fields.clone()).await.json();
    let mut streamed = fields;
    streamed["stream"] = json!(true);
    let mut events = events(&server.complete(streamed).await);
    events.pop();
    let mut offsets = Vec::new();
    let mut tokens = Vec::new();
    for event in events {
        let chunk: CreateCompletionResponse = serde_json::from_str(&event).expect("decodes");
        if let Some(logprobs) = &chunk.choices[0].logprobs {
            offsets.extend(logprobs.text_offset.clone());
            tokens.extend(logprobs.tokens.clone());
        }
    }
    assert_eq!(
        whole["choices"][0]["logprobs"]["text_offset"],
        json!(offsets)
    );
    assert_eq!(whole["choices"][0]["logprobs"]["tokens"], json!(tokens));
}

#[tokio::test]
async fn token_ids_and_prompt_logprobs_lie_in_the_choice() {
    let server = Server::start(&[]);
    let json = server
        .complete(json!({"return_token_ids": true, "prompt_logprobs": 1}))
        .await
        .json();
    let choice = &json["choices"][0];
    assert_eq!(choice["prompt_token_ids"].as_array().map(Vec::len), Some(3));
    assert_eq!(choice["token_ids"].as_array().map(Vec::len), Some(8));
    assert_eq!(choice["prompt_logprobs"].as_array().map(Vec::len), Some(3));
    let refused = server
        .complete(json!({"prompt_logprobs": 1, "stream": true}))
        .await;
    assert_eq!(
        (refused.status, refused.param().as_deref()),
        (400, Some("prompt_logprobs"))
    );
}
