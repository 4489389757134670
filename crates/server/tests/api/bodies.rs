//! Hostile and unusual bodies: each is refused in the API's own form, or accepted and commented upon.

use serde_json::{Value, json};

use crate::server::{Server, chat_body, merge, read_answer};

async fn refused(
    server: &Server,
    path: &str,
    body: impl Into<reqwest::Body>,
    status: u16,
    param: Option<&str>,
) {
    let answer = server.post_text(path, body).await;
    assert_eq!(answer.status, status, "{:.300}", answer.text);
    let error = &answer.json()["error"];
    assert_eq!(error["param"].as_str(), param, "{error}");
    for name in ["message", "type", "code"] {
        assert!(error[name].is_string(), "{name} in {error}");
    }
    assert!(answer.text.len() < 1000, "errors are short");
}

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

#[tokio::test]
async fn bodies_that_are_no_json_object() {
    let server = Server::start(&[]);
    for body in [
        "",
        "x",
        "[]",
        "7",
        "null",
        "{",
        "{\"messages\"",
        "\"x\"",
        "{}}",
    ] {
        for path in [CHAT, COMPLETIONS, "/tokenize", "/detokenize"] {
            let answer = server.post_text(path, body).await;
            assert_eq!(answer.status, 400, "{path} {body}");
        }
    }
    refused(
        &server,
        CHAT,
        b"{\"messages\":\"\xff\xfe\"}".to_vec(),
        400,
        None,
    )
    .await;
    refused(
        &server,
        CHAT,
        "{\"messages\":\"\\ud800\"}",
        400,
        Some("messages"),
    )
    .await;
}

#[tokio::test]
async fn nesting_is_bounded() {
    let server = Server::start(&[]);
    for depth in [65, 1_000, 100_000] {
        let deep = format!("{}{}", "[".repeat(depth), "]".repeat(depth));
        refused(&server, CHAT, format!("{{\"messages\":{deep}}}"), 400, None).await;
        refused(&server, CHAT, "[".repeat(depth), 400, None).await;
        refused(&server, CHAT, "{\"a\":".repeat(depth), 400, None).await;
    }
}

#[tokio::test]
async fn lists_are_bounded() {
    let server = Server::start(&[]);
    let list = |count: usize, element: &str| format!("[{}]", vec![element; count].join(","));
    let message = "{\"role\":\"user\",\"content\":\"a\"}";
    refused(
        &server,
        CHAT,
        format!("{{\"messages\":{}}}", list(100_000, message)),
        400,
        Some("messages"),
    )
    .await;
    let stop = format!("{{\"prompt\":\"a\",\"stop\":{}}}", list(100_000, "\"x\""));
    refused(&server, COMPLETIONS, stop, 400, Some("stop")).await;
    refused(
        &server,
        COMPLETIONS,
        format!("{{\"prompt\":{}}}", list(10_000, "\"a\"")),
        400,
        Some("prompt"),
    )
    .await;
    refused(
        &server,
        COMPLETIONS,
        format!("{{\"prompt\":{}}}", list(33, "\"a\"")),
        400,
        Some("prompt"),
    )
    .await;
    refused(
        &server,
        COMPLETIONS,
        format!("{{\"prompt\":{}}}", list(2_000_000, "1")),
        400,
        Some("prompt"),
    )
    .await;
    let ids: Vec<String> = (0..300_000).map(|id| format!("\"{id}\":1")).collect();
    let bias = format!("{{\"prompt\":\"a\",\"logit_bias\":{{{}}}}}", ids.join(","));
    refused(&server, COMPLETIONS, bias, 400, Some("logit_bias")).await;
    let salt = json!({"prompt": "a", "cache_salt": "s".repeat(129)}).to_string();
    refused(&server, COMPLETIONS, salt, 400, Some("cache_salt")).await;
    let stop = json!({"prompt": "a", "stop": "s".repeat(257)}).to_string();
    refused(&server, COMPLETIONS, stop, 400, Some("stop")).await;
    let empty = json!({"prompt": "a", "stop": [""]}).to_string();
    refused(&server, COMPLETIONS, empty, 400, Some("stop")).await;
}

/// A-T02: what a hostile body costs in memory is at most twice the limit on bodies, whatever it spells.
#[tokio::test]
async fn hostile_bodies_cost_little_memory() {
    let fill = |open: &str, element: &str, close: &str| {
        let room = (8 << 20) - open.len() - close.len() - 64;
        format!("{open}{}{close}", element.repeat(room / element.len()))
    };
    for (path, body) in [
        (CHAT, fill("{\"messages\":[", "0,", "0]}")),
        (
            CHAT,
            fill(
                "{\"messages\":[{\"role\":\"user\",\"content\":[",
                "{},",
                "{}]}]}",
            ),
        ),
        (
            CHAT,
            fill("{\"chat_template_kwargs\":{\"a\":[", "0,", "0]}}"),
        ),
        (CHAT, fill("{\"tools\":[", "0,", "0]}")),
        (CHAT, fill("{\"zeta\":[", "0,", "0]}")),
        (COMPLETIONS, fill("{\"prompt\":[", "0,", "0]}")),
        (COMPLETIONS, fill("{\"prompt\":[[", "0,", "0]]}")),
        (
            COMPLETIONS,
            fill("{\"prompt\":\"a\",\"stop\":[", "\"\",", "\"\"]}"),
        ),
        (
            COMPLETIONS,
            fill("{\"prompt\":\"a\",\"stop_token_ids\":[", "0,", "0]}"),
        ),
        (
            COMPLETIONS,
            fill(
                "{\"prompt\":\"a\",\"logit_bias\":{",
                "\"1\":0,",
                "\"1\":0}}",
            ),
        ),
        (
            COMPLETIONS,
            fill("{\"prompt\":\"a\",\"cache_salt\":\"", "a", "\"}"),
        ),
        (
            COMPLETIONS,
            fill("{\"prompt\":\"a\",\"user\":\"", "a", "\"}"),
        ),
        ("/detokenize", fill("{\"tokens\":[", "0,", "0]}")),
    ] {
        // Each has a server of its own: what an allocator keeps from one body is not the next one's cost.
        let server = Server::start(&[]);
        server.complete(json!({})).await;
        let before = server.peak_memory();
        let is_harmless = body.contains("\"user\":\"");
        let name = format!("{path} {body:.60}");
        let answer = server.post_text(path, body).await;
        assert_eq!(
            answer.status,
            if is_harmless { 200 } else { 400 },
            "{name}: {:.300}",
            answer.text
        );
        let grown = server.peak_memory() - before;
        assert!(
            grown < 2 * 8 * 1024 + 1024,
            "{name}: {grown} KiB more than before"
        );
    }
}

#[tokio::test]
async fn a_body_over_the_limit_is_told_so() {
    let server = Server::start(&[]);
    let stops = vec!["\"stop\""; 10 << 20 >> 3].join(",");
    let body = format!("{{\"prompt\":\"a\",\"stop\":[{stops}]}}");
    assert!(body.len() > 8 << 20);
    refused(&server, COMPLETIONS, body.clone(), 413, None).await;
    // Without a length.
    let pieces: Vec<Result<Vec<u8>, std::io::Error>> = body
        .into_bytes()
        .chunks(100_000)
        .map(|piece| Ok(piece.to_vec()))
        .collect();
    let stream = reqwest::Body::wrap_stream(futures_util::stream::iter(pieces));
    refused(&server, COMPLETIONS, stream, 413, None).await;
    assert_eq!(server.complete(json!({})).await.status, 200);
}

#[tokio::test]
async fn prompts_that_can_never_fit() {
    let server = Server::start(&["--max-context", "64"]);
    let long = "a".repeat(100);
    for (path, fields, param) in [
        (
            COMPLETIONS,
            json!({"prompt": long, "max_tokens": 1}),
            "prompt",
        ),
        (
            COMPLETIONS,
            json!({"prompt": "a", "max_tokens": 64}),
            "max_tokens",
        ),
        (
            CHAT,
            json!({"messages": [{"role": "user", "content": long}]}),
            "messages",
        ),
        (
            COMPLETIONS,
            json!({"prompt": "a".repeat(7 << 20)}),
            "prompt",
        ),
    ] {
        let answer = server.post(path, fields).await;
        assert_eq!(
            (answer.status, answer.code().as_str()),
            (400, "context_length_exceeded"),
            "{}",
            answer.text
        );
        assert_eq!(answer.param().as_deref(), Some(param));
    }
}

#[tokio::test]
async fn only_plain_json_is_taken() {
    let server = Server::start(&[]);
    let body = chat_body(json!({})).to_string();
    for headers in [
        vec![("content-type", "text/plain")],
        vec![("content-type", "application/x-www-form-urlencoded")],
        vec![],
        vec![
            ("content-type", "application/json"),
            ("content-encoding", "gzip"),
        ],
    ] {
        let mut request = server.client().post(server.url(CHAT)).body(body.clone());
        for (name, value) in &headers {
            request = request.header(*name, *value);
        }
        assert_eq!(read_answer(request).await.status, 415, "{headers:?}");
    }
}

#[tokio::test]
async fn unknown_fields_are_listed_everywhere() {
    let server = Server::start(&[]);
    let fields = json!({
        "zeta": 1,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}], "mood": "good"}],
    });
    let answer = server.chat(fields.clone()).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    let expected = [
        "unknown field messages[0].content[0].cache_control was ignored",
        "unknown field messages[0].mood was ignored",
        "unknown field zeta was ignored",
    ];
    assert_eq!(answer.json()["warnings"], json!(expected));
    assert_eq!(answer.header("x-millpond-warnings"), expected.join("; "));
    assert!(server.log().contains("unknown field zeta was ignored"));
    let streamed = server.chat(merge(fields, json!({"stream": true}))).await;
    assert_eq!(streamed.header("x-millpond-warnings"), expected.join("; "));
    let first = streamed
        .text
        .lines()
        .next()
        .and_then(|line| line.strip_prefix("data: "))
        .expect("an event");
    let first: Value = serde_json::from_str(first).expect("JSON");
    assert_eq!(first["warnings"], json!(expected));
}

#[tokio::test]
async fn unknown_fields_are_refused_when_strict() {
    let server = Server::start(&["--strict"]);
    for (path, body, param) in [
        (CHAT, chat_body(json!({"zeta": 1})), "zeta"),
        (
            CHAT,
            chat_body(json!({"messages": [{"role": "user", "content": "a", "mood": 1}]})),
            "messages[0].mood",
        ),
        (COMPLETIONS, json!({"prompt": "a", "zeta": 1}), "zeta"),
        ("/tokenize", json!({"prompt": "a", "zeta": 1}), "zeta"),
        ("/detokenize", json!({"tokens": [], "zeta": 1}), "zeta"),
        (
            "/v1/completions/render",
            json!({"prompt": "a", "zeta": 1}),
            "zeta",
        ),
    ] {
        let answer = server.post(path, body).await;
        assert_eq!(
            (answer.status, answer.code().as_str()),
            (400, "unknown_parameter"),
            "{path}"
        );
        assert_eq!(answer.param().as_deref(), Some(param));
    }
    let accepted =
        json!({"user": "me", "metadata": {"a": "b"}, "service_tier": "auto", "store": false});
    assert_eq!(server.chat(accepted).await.status, 200);
}

#[tokio::test]
async fn known_fields_that_cannot_be_honoured_are_refused_by_name() {
    let server = Server::start(&[]);
    let tool = json!([{"type": "function", "function": {"name": "f"}}]);
    for (fields, param) in [
        (json!({"tools": tool}), "tools"),
        (json!({"tool_choice": "required"}), "tool_choice"),
        (
            json!({"response_format": {"type": "json_object"}}),
            "response_format",
        ),
        (json!({"regex": "a+"}), "regex"),
        (json!({"guided_json": {}}), "guided_json"),
        (json!({"typical_p": 0.5}), "typical_p"),
        (json!({"dry_multiplier": 1}), "dry_multiplier"),
        (json!({"xtc_probability": 0.5}), "xtc_probability"),
        (json!({"bad_words": ["x"]}), "bad_words"),
        (json!({"best_of": 2}), "best_of"),
        (json!({"suffix": "x"}), "suffix"),
        (json!({"logits_processors": ["x"]}), "logits_processors"),
        (json!({"chat_template": "x"}), "chat_template"),
        (
            json!({"chat_template_kwargs": {"tokenize": true}}),
            "chat_template_kwargs.tokenize",
        ),
        (json!({"audio": {"voice": "x"}}), "audio"),
        (json!({"reasoning_effort": "high"}), "reasoning_effort"),
        (json!({"echo": true}), "echo"),
        (json!({"top_logprobs": 1}), "top_logprobs"),
        (
            json!({"stream_options": {"include_usage": true}}),
            "stream_options",
        ),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}),
            "messages[0].content[0].type",
        ),
    ] {
        let answer = server.chat(fields).await;
        assert_eq!(
            (answer.status, answer.param().as_deref()),
            (400, Some(param)),
            "{}",
            answer.text
        );
    }
}

/// A-T15 in small: what one hostile body after the other does to streams under way.
#[tokio::test]
async fn hostile_bodies_do_not_touch_innocent_streams() {
    let server = Server::start(&[]);
    let innocent = |index: usize| {
        chat_body(json!({
            "messages": [{"role": "user", "content": format!("innocent {index}")}],
            "temperature": 1.0, "seed": index, "max_tokens": 2000, "stream": true,
        }))
    };
    let texts = |answers: Vec<crate::server::Answer>| -> Vec<_> {
        let told = |answer| {
            crate::stream::check(
                answer,
                crate::stream::Kind::Chat,
                1,
                crate::stream::UsageAsked::Never,
            )
        };
        answers.iter().map(|answer| told(answer).texts).collect()
    };
    let run =
        || futures_util::future::join_all((0..8).map(|index| server.post(CHAT, innocent(index))));
    let control = texts(run().await);
    let hostile = async {
        for body in [
            "[".repeat(100_000),
            chat_body(json!({"temperature": 9})).to_string(),
            json!({"prompt": "a".repeat(1 << 20)}).to_string(),
            json!({"messages": vec![0; 100_000]}).to_string(),
            chat_body(json!({"max_tokens": 1_000_000})).to_string(),
        ] {
            assert_eq!(server.post_text(CHAT, body).await.status, 400);
        }
    };
    let (answers, ()) = tokio::join!(run(), hostile);
    assert_eq!(texts(answers), control);
}
