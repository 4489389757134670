//! Tokenizing, detokenizing and rendering.

use serde_json::json;

use crate::server::Server;

#[tokio::test]
async fn tokenize_and_detokenize_are_inverse() {
    let server = Server::start(&[]);
    let text = "héllo\u{1F600}";
    let encoded = server
        .post(
            "/tokenize",
            json!({"prompt": text, "return_token_strs": true}),
        )
        .await
        .json();
    let tokens = encoded["tokens"].as_array().expect("tokens");
    assert_eq!(encoded["count"], tokens.len());
    assert_eq!(
        encoded["token_strs"].as_array().map(Vec::len),
        Some(tokens.len())
    );
    assert!(encoded["max_model_len"].as_u64().expect("a length") > 0);
    let decoded = server
        .post("/detokenize", json!({"tokens": tokens}))
        .await
        .json();
    assert_eq!(decoded["prompt"], text);
}

#[tokio::test]
async fn a_conversation_is_tokenized_as_it_is_rendered() {
    let server = Server::start(&[]);
    let chat = json!({"messages": [{"role": "user", "content": "hi"}]});
    let encoded = server.post("/tokenize", chat.clone()).await.json();
    let rendered = server
        .post("/v1/chat/completions/render", chat)
        .await
        .json();
    assert_eq!(encoded["tokens"], rendered["token_ids"]);
    assert!(rendered["prompt"].as_str().expect("text").contains("hi"));
    assert!(
        rendered["request_id"]
            .as_str()
            .expect("an id")
            .starts_with("chatcmpl-")
    );
    assert_eq!(rendered["model"], "mock");
}

#[tokio::test]
async fn prompts_are_rendered_as_a_list() {
    let server = Server::start(&[]);
    let body = json!({"prompt": ["abc", "de"], "max_tokens": 5, "temperature": 0.5});
    let rendered = server.post("/v1/completions/render", body).await.json();
    let list = rendered.as_array().expect("a list");
    assert_eq!(list.len(), 2);
    assert_eq!(list[0]["token_ids"].as_array().map(Vec::len), Some(3));
    assert_eq!(list[1]["prompt"], "de");
    assert_eq!(list[0]["sampling_params"]["max_tokens"], 5);
    assert_eq!(list[0]["sampling_params"]["temperature"], 0.5);
}

#[tokio::test]
async fn ids_that_no_token_has_are_refused() {
    let server = Server::start(&[]);
    for id in [
        "-1",
        "4294967296",
        "9223372036854775808",
        "100000",
        "1.5",
        "\"1\"",
        "NaN",
    ] {
        for (path, body, param) in [
            ("/detokenize", format!("{{\"tokens\":[{id}]}}"), "tokens"),
            (
                "/v1/completions",
                format!("{{\"prompt\":[1,{id}]}}"),
                "prompt",
            ),
            (
                "/v1/completions",
                format!("{{\"prompt\":[[{id}]]}}"),
                "prompt",
            ),
            (
                "/v1/completions",
                format!("{{\"prompt\":\"a\",\"stop_token_ids\":[{id}]}}"),
                "stop_token_ids",
            ),
            (
                "/v1/completions",
                format!("{{\"prompt\":\"a\",\"allowed_token_ids\":[{id}]}}"),
                "allowed_token_ids",
            ),
        ] {
            let answer = server.post_text(path, body.clone()).await;
            assert_eq!(
                (answer.status, answer.param().as_deref()),
                (400, Some(param)),
                "{body}: {}",
                answer.text
            );
        }
    }
}
