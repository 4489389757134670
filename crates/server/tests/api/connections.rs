//! Connections that stand still, are too many, or read too slowly.

use std::io::{Read, Write};
use std::time::{Duration, Instant};

use serde_json::json;

use crate::server::{PATIENCE, Server, chat_body, read_to_close};

/// Sends what a slow or broken client would, and tells what came back and when the server closed.
async fn close_after(server: &Server, bytes: &'static [u8]) -> (String, Duration) {
    let mut stream = server.connect();
    tokio::task::spawn_blocking(move || {
        let started = Instant::now();
        stream.write_all(bytes).expect("the server listens");
        (read_to_close(&mut stream), started.elapsed())
    })
    .await
    .expect("no panic")
}

#[tokio::test]
async fn heads_that_do_not_arrive_end_the_connection() {
    let server = Server::start(&["--header-timeout", "0.3", "--keep-alive", "20"]);
    for bytes in [&b""[..], b"GET", b"GET / HTTP/1.1\r\nHost: x\r\n"] {
        let (text, elapsed) = close_after(&server, bytes).await;
        assert_eq!(text, "");
        assert!(
            elapsed >= Duration::from_millis(250) && elapsed < PATIENCE,
            "{elapsed:?}"
        );
    }
}

#[tokio::test]
async fn idle_connections_may_stay_longer_than_heads_may_take() {
    let server = Server::start(&["--header-timeout", "0.3", "--keep-alive", "1.5"]);
    let (text, elapsed) = close_after(&server, b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n").await;
    assert!(text.starts_with("HTTP/1.1 200"), "{text}");
    assert!(
        elapsed >= Duration::from_millis(1_400) && elapsed < PATIENCE,
        "{elapsed:?}"
    );
}

#[tokio::test]
async fn a_second_head_has_its_own_time() {
    let server = Server::start(&["--header-timeout", "0.3", "--keep-alive", "20"]);
    let mut stream = server.connect();
    let text = tokio::task::spawn_blocking(move || {
        stream
            .write_all(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
            .expect("the server listens");
        std::thread::sleep(Duration::from_millis(600));
        stream
            .write_all(b"GET /version HT")
            .expect("the server listens still");
        read_to_close(&mut stream)
    });
    let text = text.await.expect("no panic");
    assert_eq!(text.matches("HTTP/1.1 200").count(), 1, "{text}");
}

#[tokio::test]
async fn bodies_that_stand_still_are_given_up() {
    let server = Server::start(&["--body-timeout", "0.3"]);
    let head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{";
    let (text, elapsed) = close_after(&server, head).await;
    assert!(
        text.starts_with("HTTP/1.1 408") && text.contains("body_timeout"),
        "{text}"
    );
    assert!(elapsed < PATIENCE);
}

#[tokio::test]
async fn broken_http_is_refused() {
    let server = Server::start(&[]);
    for bytes in [
        &b"\x00\x01\x02\r\n\r\n"[..],
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Type: application/json\r\n\r\nFFFFFFFFFFFFFFFFFF\r\n",
    ] {
        let (text, _) = close_after(&server, bytes).await;
        assert!(text.starts_with("HTTP/1.1 4") || text.is_empty(), "{text}");
    }
    let mut headers = b"GET / HTTP/1.1\r\n".to_vec();
    for index in 0..5_000 {
        headers.extend(format!("x-{index}: y\r\n").into_bytes());
    }
    headers.extend(b"\r\n");
    let mut stream = server.connect();
    let answer = tokio::task::spawn_blocking(move || {
        // The server may close before it has read everything.
        let _ = stream.write_all(&headers);
        read_to_close(&mut stream)
    });
    let text = answer.await.expect("no panic");
    assert!(
        text.starts_with("HTTP/1.1 431") || text.is_empty(),
        "{text}"
    );
    assert_eq!(server.get("/version").await.status, 200);
}

#[tokio::test]
async fn connections_are_counted_and_given_back() {
    for (flags, status) in [
        (["--max-connections-per-address", "3"], "HTTP/1.1 429"),
        (["--max-connections", "3"], "HTTP/1.1 503"),
    ] {
        let server = Server::start(&flags);
        let mut held: Vec<_> = (0..3).map(|_| server.connect()).collect();
        for stream in &mut held {
            stream
                .write_all(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
                .expect("the server listens");
            let mut byte = [0];
            stream.read_exact(&mut byte).expect("an answer");
        }
        let mut refused = server.connect();
        let mut text = vec![0; status.len()];
        refused.read_exact(&mut text).expect("a refusal");
        assert_eq!(String::from_utf8_lossy(&text), status);
        drop((held, refused));
        let end = Instant::now() + PATIENCE;
        loop {
            let mut stream = server.connect();
            stream
                .write_all(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
                .expect("the server listens");
            let mut text = vec![0; status.len()];
            if stream.read_exact(&mut text).is_ok() && text.starts_with(b"HTTP/1.1 200") {
                break;
            }
            assert!(Instant::now() < end, "places are not given back");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

/// L10: a process without free files waits, and serves again once there are some.
#[tokio::test]
async fn running_out_of_files_is_survived() {
    let server = Server::start_with_files(48, &[]);
    let held: Vec<_> = (0..60).map(|_| server.connect()).collect();
    let end = Instant::now() + PATIENCE;
    while !server.log().contains("cannot accept connections") {
        assert!(Instant::now() < end, "{}", server.log());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    drop(held);
    assert_eq!(server.chat(json!({})).await.status, 200);
    let num_complaints = server.log().matches("cannot accept connections").count();
    assert!(
        num_complaints < 50,
        "{num_complaints} complaints: the loop spins"
    );
}

/// Room for a stream that fills every buffer between the server and a reader that does not read.
const LONG: &[&str] = &["--max-context", "1000000", "--kv-tokens", "1100000"];

const MAX_TOKENS: u32 = 900_000;

/// Starts a stream and reads nothing of it, until the server gives it up; then tells what had been sent.
async fn neglect(flags: &[&str]) -> (Server, String) {
    let flags: Vec<&str> = LONG.iter().chain(flags).copied().collect();
    let server = Server::start(&flags);
    let body = chat_body(json!({"stream": true, "max_tokens": MAX_TOKENS, "ignore_eos": true}))
        .to_string();
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    let mut stream = server.connect();
    stream
        .write_all((head + &body).as_bytes())
        .expect("the server listens");
    while server.metric("vllm:generation_tokens_total").await == 0.0 {}
    server
        .metric_becomes("vllm:num_requests_running", 0.0)
        .await;
    let generated = server.metric("vllm:generation_tokens_total").await;
    assert!(
        generated < f64::from(MAX_TOKENS),
        "{generated} tokens were generated for nobody"
    );
    let text = tokio::task::spawn_blocking(move || read_to_close(&mut stream)).await;
    (server, text.expect("no panic"))
}

#[tokio::test]
async fn a_reader_that_falls_too_far_behind_is_aborted() {
    let (server, text) = neglect(&[]).await;
    assert!(text.starts_with("HTTP/1.1 200") && !text.contains("[DONE]"));
    assert!(server.log().contains("max_stream_buffer_bytes"));
    assert_eq!(server.chat(json!({})).await.status, 200);
}

#[tokio::test]
async fn a_reader_that_accepts_nothing_is_cut_off_in_time() {
    let (server, text) = neglect(&[
        "--slow-reader-timeout",
        "0.5",
        "--max-stream-buffer-bytes",
        "1000000000",
    ])
    .await;
    assert!(text.starts_with("HTTP/1.1 200") && !text.contains("[DONE]"));
    assert!(server.log().contains("the reader is gone"));
}
