//! Ends: clients that go away, aborts, signals.

use std::io::{Read, Write};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::server::{Server, chat_body, merge, read_answer};

/// Room for answers that take seconds, and for clients of this test that fall behind meanwhile.
const LONG: &[&str] = &[
    "--max-context",
    "1000000",
    "--kv-tokens",
    "1100000",
    "--max-stream-buffer-bytes",
    "1000000000",
];

fn long(fields: Value) -> Value {
    merge(
        chat_body(json!({"max_tokens": 900_000, "ignore_eos": true})),
        fields,
    )
}

fn flags(more: &[&'static str]) -> Vec<&'static str> {
    LONG.iter().chain(more).copied().collect()
}

/// Starts a request and returns once the engine runs all of its choices.
async fn start(server: &Server, body: Value) -> tokio::task::JoinHandle<Option<String>> {
    let request = server
        .client()
        .post(server.url("/v1/chat/completions"))
        .json(&body);
    let num_choices = body["n"].as_f64().unwrap_or(1.0);
    let running = tokio::spawn(async move { request.send().await.ok()?.text().await.ok() });
    server
        .metric_becomes("vllm:num_requests_running", num_choices)
        .await;
    running
}

fn last_error(text: &str) -> Value {
    let event = text
        .trim_end()
        .rsplit("\n\n")
        .next()
        .and_then(|event| event.strip_prefix("data: "));
    serde_json::from_str::<Value>(event.expect("an event")).expect("JSON")["error"].clone()
}

#[tokio::test]
async fn a_client_that_goes_away_stops_its_request() {
    let server = Server::start(LONG);
    for stream in [true, false] {
        let running = start(&server, long(json!({"stream": stream, "n": 2}))).await;
        running.abort();
        server
            .metric_becomes("vllm:num_requests_running", 0.0)
            .await;
        server
            .metric_becomes("vllm:num_requests_waiting", 0.0)
            .await;
    }
    server.metric_becomes("vllm:kv_cache_usage_perc", 0.0).await;
    let text = server.get("/metrics").await.text;
    assert!(
        text.contains("finished_reason=\"abort\"")
            && !text.contains("finished_reason=\"abort\"} 0")
    );
}

#[tokio::test]
async fn a_client_that_closes_its_socket_stops_its_request() {
    let server = Server::start(LONG);
    let body = long(json!({"stream": true})).to_string();
    let mut stream = server.connect();
    write!(
        stream,
        "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
    .expect("the server listens");
    let mut byte = [0];
    stream.read_exact(&mut byte).expect("an answer");
    drop(stream);
    server
        .metric_becomes("vllm:num_requests_running", 0.0)
        .await;
}

#[tokio::test]
async fn a_request_can_be_aborted_by_either_name() {
    let server = Server::start(LONG);
    let streamed = server
        .client()
        .post(server.url("/v1/chat/completions"))
        .header("x-request-id", "mine-1");
    let request = streamed.json(&long(json!({"stream": true})));
    let running =
        tokio::spawn(async move { request.send().await.expect("an answer").text().await });
    server
        .metric_becomes("vllm:num_requests_running", 1.0)
        .await;
    let aborted = server.post("/v1/requests/mine-1/abort", json!({})).await;
    assert_eq!(
        (aborted.status, &aborted.json()["phase"]),
        (200, &json!("generating")),
        "{}",
        aborted.text
    );
    let text = running.await.expect("no panic").expect("a whole body");
    assert_eq!(last_error(&text)["code"], "request_aborted");
    server
        .metric_becomes("vllm:num_requests_running", 0.0)
        .await;
    let again = server.post("/v1/requests/mine-1/abort", json!({})).await;
    assert_eq!((again.status, again.code().as_str()), (404, "not_found"));

    let whole = server
        .client()
        .post(server.url("/v1/chat/completions"))
        .header("x-request-id", "mine-2");
    let request = whole.json(&long(json!({})));
    let running = tokio::spawn(read_answer(request));
    server
        .metric_becomes("vllm:num_requests_running", 1.0)
        .await;
    server.post("/v1/requests/mine-2/abort", json!({})).await;
    let answer = running.await.expect("no panic");
    assert_eq!(
        (answer.status, answer.code().as_str()),
        (409, "request_aborted")
    );
}

#[tokio::test]
async fn sigterm_lets_requests_finish_and_refuses_new_ones() {
    let mut server = Server::start(&flags(&["--drain-timeout", "60"]));
    let body = long(json!({"stream": true, "max_tokens": 30_000}));
    let running = start(&server, body).await;
    server.signal("TERM");
    let end = Instant::now() + Duration::from_secs(10);
    while server.get("/ready").await.status == 200 {
        assert!(Instant::now() < end, "not ready any more");
    }
    let refused = server.chat(json!({})).await;
    assert_eq!(
        (refused.status, refused.code().as_str()),
        (503, "server_shutdown")
    );
    assert_eq!(
        (refused.header("connection"), refused.header("retry-after")),
        ("close", "1")
    );
    assert_eq!(server.get("/live").await.status, 200);
    let text = running.await.expect("no panic").expect("a whole body");
    assert!(
        text.ends_with("data: [DONE]\n\n"),
        "the stream came to its own end"
    );
    assert_eq!(server.ended().await.code(), Some(0));
}

#[tokio::test]
async fn the_drain_timeout_ends_requests_with_an_error() {
    let mut server = Server::start(&flags(&["--drain-timeout", "0.3"]));
    let streamed = start(&server, long(json!({"stream": true}))).await;
    let whole = server
        .client()
        .post(server.url("/v1/chat/completions"))
        .json(&long(json!({})));
    let whole = tokio::spawn(read_answer(whole));
    server
        .metric_becomes("vllm:num_requests_running", 2.0)
        .await;
    let started = Instant::now();
    server.signal("INT");
    let text = streamed.await.expect("no panic").expect("a whole body");
    assert_eq!(last_error(&text)["code"], "server_shutdown");
    let whole = whole.await.expect("no panic");
    assert_eq!(
        (whole.status, whole.code().as_str()),
        (503, "server_shutdown")
    );
    assert_eq!(server.ended().await.code(), Some(0));
    assert!(started.elapsed() >= Duration::from_millis(300));
}

#[tokio::test]
async fn a_second_signal_ends_at_once() {
    let mut server = Server::start(&flags(&["--drain-timeout", "600"]));
    let _running = start(&server, long(json!({"stream": true}))).await;
    server.signal("TERM");
    while server.get("/ready").await.status == 200 {}
    server.signal("TERM");
    assert_eq!(server.ended().await.code(), Some(130));
}

#[tokio::test]
async fn an_idle_server_ends_at_once_with_open_connections() {
    let mut server = Server::start(&[]);
    assert_eq!(server.get("/version").await.status, 200);
    let started = Instant::now();
    server.signal("TERM");
    assert_eq!(server.ended().await.code(), Some(0));
    assert!(
        started.elapsed() < Duration::from_secs(2),
        "{:?}",
        started.elapsed()
    );
}

#[tokio::test]
async fn a_full_queue_is_our_limit_and_passes() {
    let server = Server::start(&flags(&["--max-sequences", "1", "--max-waiting", "1"]));
    let first = start(&server, long(json!({"stream": true}))).await;
    let request = server
        .client()
        .post(server.url("/v1/chat/completions"))
        .json(&long(json!({"stream": true})));
    let second = tokio::spawn(async move { request.send().await });
    server
        .metric_becomes("vllm:num_requests_waiting", 1.0)
        .await;
    let refused = server.chat(json!({})).await;
    assert_eq!(
        (refused.status, refused.code().as_str()),
        (503, "server_overloaded"),
        "{}",
        refused.text
    );
    assert_eq!(refused.header("retry-after"), "1");
    first.abort();
    second.abort();
    server
        .metric_becomes("vllm:num_requests_running", 0.0)
        .await;
    assert_eq!(server.chat(json!({})).await.status, 200);
}

#[tokio::test]
async fn time_limits_end_requests() {
    let server = Server::start(&flags(&[
        "--max-sequences",
        "1",
        "--queue-timeout",
        "0.3",
        "--total-timeout",
        "3",
    ]));
    let first = start(&server, long(json!({"stream": true}))).await;
    let queued = server.chat(json!({"stream": true})).await;
    assert_eq!(
        (queued.status, queued.code().as_str()),
        (503, "queue_timeout"),
        "{}",
        queued.text
    );
    first.abort();
    server
        .metric_becomes("vllm:num_requests_running", 0.0)
        .await;
    let timed = server
        .post("/v1/chat/completions", long(json!({"timeout": 0.3})))
        .await;
    assert_eq!(
        (timed.status, timed.code().as_str()),
        (504, "timeout"),
        "{}",
        timed.text
    );
}
