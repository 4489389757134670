//! The small paths: models, health, version, errors for everything else, names of requests.

use async_openai::types::models::ListModelResponse;
use serde_json::json;

use crate::server::{Server, read_answer};

#[tokio::test]
async fn models_are_listed_and_retrieved() {
    let server = Server::start(&["--served-model-name", "org/my-model"]);
    let list = server.get("/v1/models").await;
    let decoded: ListModelResponse = serde_json::from_str(&list.text).expect("decodes");
    assert_eq!(decoded.data[0].id, "org/my-model");
    assert!(
        list.json()["data"][0]["max_model_len"]
            .as_u64()
            .expect("a length")
            > 0
    );
    for name in ["org/my-model", "default", "mock"] {
        let model = server.get(&format!("/v1/models/{name}")).await;
        assert_eq!(
            (model.status, &model.json()["id"]),
            (200, &json!("org/my-model")),
            "{name}"
        );
        assert_eq!(server.chat(json!({"model": name})).await.status, 200);
    }
    for answer in [
        server.get("/v1/models/other").await,
        server.chat(json!({"model": "other"})).await,
    ] {
        assert_eq!(
            (answer.status, answer.code().as_str()),
            (404, "model_not_found")
        );
        assert_eq!(answer.param().as_deref(), Some("model"));
    }
}

#[tokio::test]
async fn what_is_not_there_is_told_in_the_same_form() {
    let server = Server::start(&[]);
    for path in [
        "/nothing",
        "/v1",
        "/v1/chat",
        "/admin",
        "//v1/models",
        "/v1/../admin",
    ] {
        let answer = server.get(path).await;
        assert_eq!(
            (answer.status, answer.code().as_str()),
            (404, "not_found"),
            "{path}"
        );
    }
    for (method, path) in [
        ("GET", "/v1/chat/completions"),
        ("DELETE", "/v1/models"),
        ("POST", "/health"),
    ] {
        let method = method.parse().expect("a method");
        let answer = read_answer(server.client().request(method, server.url(path))).await;
        assert_eq!(
            (answer.status, answer.code().as_str()),
            (405, "method_not_allowed"),
            "{path}"
        );
        assert!(!answer.header("allow").is_empty(), "{path}");
    }
}

#[tokio::test]
async fn probes_are_answered() {
    let server = Server::start(&[]);
    for path in ["/health", "/ready", "/live"] {
        let answer = server.get(path).await;
        assert_eq!(
            (answer.status, &answer.json()["status"]),
            (200, &json!("ok")),
            "{path}"
        );
    }
    assert_eq!(
        server.get("/version").await.json(),
        json!({"version": env!("CARGO_PKG_VERSION")})
    );
    let head = read_answer(server.client().head(server.url("/"))).await;
    assert_eq!((head.status, head.text.as_str()), (200, ""));
}

#[tokio::test]
async fn a_request_keeps_its_name() {
    let server = Server::start(&[]);
    for (given, is_kept) in [
        ("my-request.1_A", true),
        ("a b", false),
        (&"x".repeat(200), false),
    ] {
        let request = server
            .client()
            .get(server.url("/version"))
            .header("x-request-id", given);
        let answer = read_answer(request).await;
        let returned = answer.header("x-request-id");
        assert_eq!(returned == given, is_kept, "{given}: {returned}");
        assert!(!returned.is_empty());
    }
}

/// A-T20: what clients send is escaped in logs, and what they say is not logged at all.
#[tokio::test]
async fn logs_hold_no_content_and_no_control_characters() {
    let server = Server::start(&[]);
    let canary = "canary-5f1e";
    let name = "model\u{1b}[31m\u{202e}\r\nforged: line";
    server
        .chat(json!({"messages": [{"role": "user", "content": canary}]}))
        .await;
    server
        .chat(json!({"model": name, "messages": [{"role": "user", "content": canary}]}))
        .await;
    server
        .chat(json!({"user": canary, "\u{1b}[2J": canary}))
        .await;
    let log = server.log();
    assert!(
        log.contains("/v1/chat/completions") && !log.contains(canary),
        "{log}"
    );
    assert!(
        !log.contains("\u{1b}[31m") && !log.contains('\u{202e}') && !log.contains("\nforged"),
        "{log}"
    );
}
