//! A streaming client of the OpenAI completions API that measures time and nothing else.
//!
//! Arrival times are taken per piece of the body and all JSON is parsed after the last stream has ended, so that the
//! client costs the measured server little on a machine that both share. Nothing here knows which server it talks to.

use std::time::{Duration, Instant};

use axum::body::Bytes;
use axum::http::{HeaderValue, Method, Request, Uri, header};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use serde_json::json;
use tokio::net::TcpStream;
use tokio::task::JoinSet;

/// Bytes of a strange answer that an error shows.
const MAX_SHOWN_BYTES: usize = 300;

/// Why a server could not be measured.
#[derive(Debug, thiserror::Error)]
pub enum StreamError {
    /// The address is not one.
    #[error("--base-url {url}: {problem}")]
    BadUrl {
        /// As given.
        url: String,
        /// What is wrong.
        problem: &'static str,
    },
    /// The key cannot be sent.
    #[error("--api-key: holds characters that no header may have")]
    BadKey,
    /// Nobody listens there.
    #[error("no server at {address}: {problem}")]
    Unreachable {
        /// Host and port.
        address: String,
        /// What the system said.
        problem: std::io::Error,
    },
    /// The connection broke.
    #[error("the connection broke")]
    Broken(#[from] hyper::Error),
    /// It took too long.
    #[error("no complete answer within {0} s (--timeout)")]
    TimedOut(f64),
    /// An HTTP error.
    #[error("{path} answered {status}: {body}")]
    Status {
        /// What was asked for.
        path: String,
        /// HTTP status.
        status: u16,
        /// The beginning of the body.
        body: String,
    },
    /// Not the JSON that was expected, or an error inside a stream.
    #[error("{path} answered something else: {body}")]
    Unexpected {
        /// What was asked for.
        path: String,
        /// The beginning of it.
        body: String,
    },
    /// The server generated another number of tokens: the speed of wrong answers is not measured.
    #[error("asked for {asked} tokens, got {got} (by usage) in {num_chunks} chunks with text")]
    WrongLength {
        /// Tokens asked for.
        asked: usize,
        /// Tokens by `usage`.
        got: u64,
        /// Chunks with text.
        num_chunks: usize,
    },
}

/// An OpenAI-compatible server.
pub struct Endpoint {
    /// Host and port, to connect to.
    address: String,
    /// The `Host` header.
    authority: String,
    /// Up to and including `/v1`.
    path: String,
    authorization: Option<HeaderValue>,
    timeout: Duration,
}

/// One request: a prompt and the exact number of tokens to generate.
#[derive(Clone, Debug)]
pub struct Ask {
    pub model: String,
    pub prompt: String,
    pub num_output: usize,
}

/// A stream as it came: when it was sent, and the pieces of the answer with the time of each.
pub struct RawStream {
    sent: Instant,
    pieces: Vec<(Instant, Bytes)>,
    asked: usize,
}

/// What one stream did.
#[derive(Clone, Debug)]
pub struct Timing {
    /// When the first byte was sent, the connection being open.
    pub sent: Instant,
    /// Of chunks with text; at least one.
    pub arrivals: Vec<Instant>,
    /// Tokens of the prompt, by `usage`.
    pub num_prompt: u64,
    /// Those that came from a cache.
    pub num_cached: u64,
    /// Tokens of the answer, as many as asked for.
    pub num_output: u64,
}

impl Timing {
    /// Seconds to the first token.
    pub fn ttft(&self) -> f64 {
        (self.arrivals[0] - self.sent).as_secs_f64()
    }

    /// Inter-token latencies in seconds.
    pub fn gaps(&self) -> impl Iterator<Item = f64> {
        let pairs = self.arrivals.windows(2);
        pairs.map(|pair| (pair[1] - pair[0]).as_secs_f64())
    }

    /// When the last token arrived.
    pub fn end(&self) -> Instant {
        self.arrivals[self.arrivals.len() - 1]
    }
}

impl Endpoint {
    /// Reads an address; connects to nothing yet.
    pub fn new(url: &str, api_key: Option<&str>, timeout: Duration) -> Result<Self, StreamError> {
        let bad = |problem| StreamError::BadUrl {
            url: url.to_owned(),
            problem,
        };
        let uri: Uri = url.parse().map_err(|_| bad("is not a URL"))?;
        match uri.scheme_str() {
            Some("http") => {}
            Some("https") => return Err(bad("TLS is not spoken here, use http://")),
            Some(_) | None => return Err(bad("must begin with http://")),
        }
        let authority = uri.authority().ok_or_else(|| bad("names no host"))?;
        if uri.query().is_some() {
            return Err(bad("must have no query"));
        }
        let path = uri.path().trim_end_matches('/');
        Ok(Endpoint {
            address: format!("{}:{}", authority.host(), uri.port_u16().unwrap_or(80)),
            authority: authority.to_string(),
            path: match path.ends_with("/v1") {
                true => path.to_owned(),
                false => format!("{path}/v1"),
            },
            authorization: api_key.map(bearer).transpose()?,
            timeout,
        })
    }

    /// The first model that the server lists.
    pub async fn first_model(&self) -> Result<String, StreamError> {
        let request = self.request(Method::GET, "/models", Bytes::new());
        let mut raw = Vec::new();
        self.exchange(request, &mut raw).await?;
        let body: Vec<u8> = raw.iter().flat_map(|(_, bytes)| bytes.to_vec()).collect();
        let list: Option<ModelList> = serde_json::from_slice(&body).ok();
        let first = list.and_then(|list| list.data.into_iter().next());
        first
            .map(|model| model.id)
            .ok_or_else(|| StreamError::Unexpected {
                path: format!("{}/models", self.path),
                body: beginning(&body),
            })
    }

    /// Sends one request and reads its whole answer.
    pub async fn stream(&self, ask: &Ask) -> Result<RawStream, StreamError> {
        // Greedy and without end of sequence, so that every server does equal work.
        let body = json!({
            "model": ask.model,
            "prompt": ask.prompt,
            "max_tokens": ask.num_output,
            "temperature": 0,
            "ignore_eos": true,
            "stream": true,
            "stream_options": {"include_usage": true},
        });
        let request = self.request(Method::POST, "/completions", body.to_string().into());
        let mut pieces = Vec::new();
        let sent = self.exchange(request, &mut pieces).await?;
        Ok(RawStream {
            sent,
            pieces,
            asked: ask.num_output,
        })
    }

    /// What a stream did; the work that is left for when nothing is measured.
    pub fn timing(&self, raw: &RawStream) -> Result<Timing, StreamError> {
        let mut arrivals = Vec::new();
        let mut usage = Usage::default();
        for (when, payload) in events(&raw.pieces) {
            let chunk = serde_json::from_slice::<Chunk>(&payload).ok();
            let Some(chunk) = chunk.filter(|chunk| chunk.error.is_none()) else {
                return Err(StreamError::Unexpected {
                    path: format!("{}/completions", self.path),
                    body: beginning(&payload),
                });
            };
            usage = chunk.usage.unwrap_or(usage);
            if chunk.choices.iter().any(Choice::has_text) {
                arrivals.push(when);
            }
        }
        if usage.completion_tokens != raw.asked as u64 || arrivals.is_empty() {
            return Err(StreamError::WrongLength {
                asked: raw.asked,
                got: usage.completion_tokens,
                num_chunks: arrivals.len(),
            });
        }
        Ok(Timing {
            sent: raw.sent,
            arrivals,
            num_prompt: usage.prompt_tokens,
            num_cached: usage
                .prompt_tokens_details
                .unwrap_or_default()
                .cached_tokens
                .unwrap_or(0),
            num_output: usage.completion_tokens,
        })
    }

    fn request(&self, method: Method, path: &str, body: Bytes) -> Request<Full<Bytes>> {
        let mut request = Request::new(Full::new(body));
        *request.method_mut() = method;
        let path = format!("{}{path}", self.path);
        *request.uri_mut() = path
            .parse()
            .expect("a path that was parsed, and a constant");
        let headers = request.headers_mut();
        let host = HeaderValue::from_str(&self.authority).expect("an authority that was parsed");
        headers.insert(header::HOST, host);
        let json = HeaderValue::from_static("application/json");
        headers.insert(header::CONTENT_TYPE, json);
        if let Some(authorization) = &self.authorization {
            headers.insert(header::AUTHORIZATION, authorization.clone());
        }
        request
    }

    /// Sends a request over a connection of its own; gives back when, and the pieces of the body.
    async fn exchange(
        &self,
        request: Request<Full<Bytes>>,
        pieces: &mut Vec<(Instant, Bytes)>,
    ) -> Result<Instant, StreamError> {
        let path = request.uri().path().to_owned();
        let whole = async {
            // Ends the connection when this is over, however that comes about.
            let mut connections = JoinSet::new();
            let mut sender = self.connect(&mut connections).await?;
            let sent = Instant::now();
            let response = sender.send_request(request).await?;
            let status = response.status();
            read_pieces(response.into_body(), pieces).await?;
            if !status.is_success() {
                let body: Vec<u8> = pieces
                    .iter()
                    .flat_map(|(_, bytes)| bytes.to_vec())
                    .collect();
                return Err(StreamError::Status {
                    path,
                    status: status.as_u16(),
                    body: beginning(&body),
                });
            }
            Ok(sent)
        };
        match tokio::time::timeout(self.timeout, whole).await {
            Ok(result) => result,
            Err(_) => Err(StreamError::TimedOut(self.timeout.as_secs_f64())),
        }
    }

    async fn connect(
        &self,
        connections: &mut JoinSet<()>,
    ) -> Result<SendRequest<Full<Bytes>>, StreamError> {
        let unreachable = |problem| StreamError::Unreachable {
            address: self.address.clone(),
            problem,
        };
        let stream = TcpStream::connect(&self.address)
            .await
            .map_err(unreachable)?;
        stream.set_nodelay(true).map_err(unreachable)?;
        let (sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        connections.spawn(async {
            // What goes wrong on the connection is told to the request on it.
            let _ = connection.await;
        });
        Ok(sender)
    }
}

fn bearer(key: &str) -> Result<HeaderValue, StreamError> {
    let mut value =
        HeaderValue::from_str(&format!("Bearer {key}")).map_err(|_| StreamError::BadKey)?;
    value.set_sensitive(true);
    Ok(value)
}

async fn read_pieces(
    mut body: Incoming,
    pieces: &mut Vec<(Instant, Bytes)>,
) -> Result<(), StreamError> {
    while let Some(frame) = body.frame().await {
        // Trailers carry nothing for us.
        if let Ok(data) = frame?.into_data() {
            pieces.push((Instant::now(), data));
        }
    }
    Ok(())
}

/// The server-sent events, each with the time at which its last byte arrived; an event is one line.
fn events(pieces: &[(Instant, Bytes)]) -> Vec<(Instant, Vec<u8>)> {
    let mut events = Vec::new();
    let mut rest = Vec::new();
    for (when, bytes) in pieces {
        let mut lines = bytes.split(|byte| *byte == b'\n').peekable();
        while let Some(line) = lines.next() {
            rest.extend_from_slice(line);
            if lines.peek().is_none() {
                break;
            }
            let line = std::mem::take(&mut rest);
            let payload = line.strip_prefix(b"data:").map(<[u8]>::trim_ascii);
            if let Some(payload) = payload.filter(|payload| *payload != b"[DONE]") {
                events.push((*when, payload.to_vec()));
            }
        }
    }
    events
}

/// As much of a strange answer as an error shows.
fn beginning(bytes: &[u8]) -> String {
    let shown = &bytes[..bytes.len().min(MAX_SHOWN_BYTES)];
    String::from_utf8_lossy(shown).into_owned()
}

#[derive(Deserialize)]
struct ModelList {
    data: Vec<ModelEntry>,
}

#[derive(Deserialize)]
struct ModelEntry {
    id: String,
}

#[derive(Deserialize)]
struct Chunk {
    #[serde(default)]
    choices: Vec<Choice>,
    #[serde(default)]
    usage: Option<Usage>,
    #[serde(default)]
    error: Option<serde_json::Value>,
}

#[derive(Deserialize)]
struct Choice {
    #[serde(default)]
    text: Option<String>,
}

impl Choice {
    fn has_text(&self) -> bool {
        self.text.as_ref().is_some_and(|text| !text.is_empty())
    }
}

#[derive(Default, Deserialize)]
struct Usage {
    #[serde(default)]
    prompt_tokens: u64,
    #[serde(default)]
    completion_tokens: u64,
    #[serde(default)]
    prompt_tokens_details: Option<PromptDetails>,
}

#[derive(Default, Deserialize)]
struct PromptDetails {
    #[serde(default)]
    cached_tokens: Option<u64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn endpoint(url: &str) -> Result<Endpoint, StreamError> {
        Endpoint::new(url, None, Duration::from_secs(1))
    }

    /// An answer whose pieces arrive a second apart.
    fn raw(pieces: &[&str], asked: usize) -> RawStream {
        let sent = Instant::now();
        let arrival = |second| sent + Duration::from_secs(second);
        RawStream {
            sent,
            pieces: (1..)
                .zip(pieces)
                .map(|(second, piece)| (arrival(second), piece.to_string().into()))
                .collect(),
            asked,
        }
    }

    #[test]
    fn addresses_with_and_without_v1() {
        for (url, address, path) in [
            ("http://127.0.0.1:8000", "127.0.0.1:8000", "/v1"),
            ("http://127.0.0.1:8000/", "127.0.0.1:8000", "/v1"),
            ("http://127.0.0.1:8000/v1/", "127.0.0.1:8000", "/v1"),
            ("http://example.org", "example.org:80", "/v1"),
            ("http://[::1]:9/api/v1", "[::1]:9", "/api/v1"),
        ] {
            let endpoint = endpoint(url).expect(url);
            assert_eq!(
                (endpoint.address.as_str(), endpoint.path.as_str()),
                (address, path)
            );
        }
    }

    #[test]
    fn what_is_no_address_is_named() {
        for url in [
            "",
            "127.0.0.1:8000",
            "https://x",
            "ftp://x",
            "http://",
            "http://x/?a",
            "no url",
        ] {
            let error = endpoint(url).err().expect(url).to_string();
            assert!(error.starts_with("--base-url"), "{error}");
        }
    }

    #[test]
    fn a_stream_is_timed_by_its_chunks_with_text() {
        let raw = raw(
            &[
                "data: {\"choices\":[{\"text\":\"\"}]}\n\n",
                "data: {\"choices\":[{\"text\":\"a\"}]}\n\ndata: {\"choices\":[{\"te",
                "xt\":\"b\"}]}\r\n\r\n: a comment\n",
                "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":3,\
                 \"prompt_tokens_details\":{\"cached_tokens\":4}}}\n\ndata: [DONE]\n\n",
            ],
            3,
        );
        let timing = endpoint("http://x")
            .and_then(|endpoint| endpoint.timing(&raw))
            .expect("three tokens");
        assert_eq!(
            (timing.num_prompt, timing.num_cached, timing.num_output),
            (7, 4, 3)
        );
        assert_eq!(timing.ttft(), 2.0);
        assert_eq!(timing.gaps().collect::<Vec<_>>(), [1.0]);
    }

    #[test]
    fn wrong_answers_are_refused() {
        let check = |pieces: &[&str], expected: &str| {
            let timing = endpoint("http://x").and_then(|endpoint| endpoint.timing(&raw(pieces, 3)));
            let error = timing.expect_err("refused").to_string();
            assert!(error.contains(expected), "{error}");
        };
        let text = "data: {\"choices\":[{\"text\":\"a\"}]}\n";
        let usage = |num: u32| {
            format!("data: {{\"choices\":[],\"usage\":{{\"completion_tokens\":{num}}}}}\n")
        };
        check(&[text], "asked for 3 tokens, got 0 (by usage) in 1 chunks");
        check(&[text, &usage(2)], "got 2");
        check(&[&usage(3)], "in 0 chunks");
        check(
            &[text, "data: {\"error\":{\"message\":\"no\"}}\n"],
            "\"no\"",
        );
        check(&["data: nonsense\n"], "nonsense");
    }
}
