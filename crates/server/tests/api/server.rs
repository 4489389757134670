//! A server of the mock model in a process of its own, on a free port, gone with its owner.

use std::io::{BufRead, BufReader, Read};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;

/// Longest time that anything in these tests may take.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// A running server.
pub struct Server {
    process: Child,
    address: SocketAddr,
    folder: TempDir,
    client: reqwest::Client,
}

/// An answer, read to its end.
pub struct Answer {
    pub status: u16,
    pub headers: reqwest::header::HeaderMap,
    pub text: String,
}

impl Answer {
    /// The body as JSON.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error}: {}", self.text))
    }

    /// A header as text; empty when absent.
    pub fn header(&self, name: &str) -> &str {
        let value = self.headers.get(name);
        value.map_or("", |value| value.to_str().expect("ASCII"))
    }

    /// The field that an error names.
    pub fn param(&self) -> Option<String> {
        self.json()["error"]["param"].as_str().map(str::to_owned)
    }

    /// The code of an error.
    pub fn code(&self) -> String {
        self.json()["error"]["code"]
            .as_str()
            .unwrap_or_default()
            .to_owned()
    }
}

impl Server {
    /// Starts a server with these flags besides.
    pub fn start(flags: &[&str]) -> Self {
        Server::run(Command::new(env!("CARGO_BIN_EXE_millpond")), flags)
    }

    /// Starts a server that may have so many files open.
    pub fn start_with_files(num_files: usize, flags: &[&str]) -> Self {
        let mut shell = Command::new("sh");
        let script = format!("ulimit -n {num_files}; exec \"$0\" \"$@\"");
        shell.args(["-c", &script, env!("CARGO_BIN_EXE_millpond")]);
        Server::run(shell, flags)
    }

    fn run(mut command: Command, flags: &[&str]) -> Self {
        let folder = TempDir::new().expect("a scratch folder");
        let log = std::fs::File::create(folder.path().join("log")).expect("a log file");
        let mut process = command
            .args(["serve", "--model", "mock", "--port", "0"])
            .args(flags)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .expect("the binary starts");
        let mut line = String::new();
        let stdout = process.stdout.take().expect("stdout is a pipe");
        BufReader::new(stdout)
            .read_line(&mut line)
            .expect("a first line");
        let address = line
            .trim()
            .rsplit("http://")
            .next()
            .and_then(|text| text.parse().ok());
        let Some(address) = address else {
            let _ = process.kill();
            panic!(
                "no address in {line:?}; {}",
                read(folder.path().join("log"))
            );
        };
        // A connection that is kept may be closed by the server just when it is used again.
        let client = reqwest::Client::builder().pool_max_idle_per_host(0);
        let client = client.build().expect("a client");
        Server {
            process,
            address,
            folder,
            client,
        }
    }

    /// `http://…` with this path.
    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// What the server logged so far.
    pub fn log(&self) -> String {
        read(self.folder.path().join("log"))
    }

    /// A client that makes a connection per request.
    pub fn client(&self) -> &reqwest::Client {
        &self.client
    }

    /// A bare connection.
    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).expect("the server accepts");
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        stream
    }

    /// Sends text as it is.
    pub async fn post_text(&self, path: &str, body: impl Into<reqwest::Body>) -> Answer {
        let request = self
            .client
            .post(self.url(path))
            .header("content-type", "application/json");
        read_answer(request.body(body)).await
    }

    /// Sends JSON.
    pub async fn post(&self, path: &str, body: Value) -> Answer {
        self.post_text(path, body.to_string()).await
    }

    /// Asks for a path.
    pub async fn get(&self, path: &str) -> Answer {
        read_answer(self.client.get(self.url(path))).await
    }

    /// A short chat with these fields besides.
    pub async fn chat(&self, fields: Value) -> Answer {
        self.post("/v1/chat/completions", chat_body(fields)).await
    }

    /// A short completion with these fields besides.
    pub async fn complete(&self, fields: Value) -> Answer {
        self.post(
            "/v1/completions",
            merge(json!({"prompt": "abc", "max_tokens": 8}), fields),
        )
        .await
    }

    /// The value of a metric's only series.
    pub async fn metric(&self, name: &str) -> f64 {
        let text = self.get("/metrics").await.text;
        let series = text.lines().find(|line| {
            line.strip_prefix(name)
                .is_some_and(|rest| rest.starts_with(['{', ' ']))
        });
        let value = series.and_then(|line| line.rsplit(' ').next()?.parse().ok());
        value.unwrap_or_else(|| panic!("no {name} in {text}"))
    }

    /// Waits until a metric has a value.
    pub async fn metric_becomes(&self, name: &str, expected: f64) {
        let end = Instant::now() + PATIENCE;
        loop {
            let value = self.metric(name).await;
            if value == expected {
                return;
            }
            assert!(Instant::now() < end, "{name} is {value}, not {expected}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// The most memory that the process had so far, in KiB.
    pub fn peak_memory(&self) -> u64 {
        let status = read(format!("/proc/{}/status", self.process.id()).into());
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let number = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
        number.expect("Linux tells")
    }

    /// Sends a signal, by the name that `kill` knows.
    pub fn signal(&self, name: &str) {
        let pid = self.process.id().to_string();
        let status = Command::new("kill")
            .args([&format!("-{name}"), &pid])
            .status();
        assert!(status.expect("kill runs").success());
    }

    /// Waits for the end of the process.
    pub async fn ended(&mut self) -> ExitStatus {
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.process.try_wait().expect("our own process") {
                return status;
            }
            assert!(
                Instant::now() < end,
                "the server does not end; {}",
                self.log()
            );
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Sends a request and reads its answer.
pub async fn read_answer(request: reqwest::RequestBuilder) -> Answer {
    let response = request.timeout(PATIENCE).send().await.expect("an answer");
    Answer {
        status: response.status().as_u16(),
        headers: response.headers().clone(),
        text: response.text().await.expect("a whole body"),
    }
}

/// A short chat with these fields besides.
pub fn chat_body(fields: Value) -> Value {
    merge(
        json!({"messages": [{"role": "user", "content": "abc"}], "max_tokens": 8}),
        fields,
    )
}

/// Fields of `right` over those of `left`.
pub fn merge(mut left: Value, right: Value) -> Value {
    let fields = left.as_object_mut().expect("an object");
    fields.extend(right.as_object().expect("an object").clone());
    left
}

/// Reads from a bare connection until it closes; an error counts as the end.
pub fn read_to_close(stream: &mut TcpStream) -> String {
    let mut bytes = Vec::new();
    let _ = stream.read_to_end(&mut bytes);
    String::from_utf8_lossy(&bytes).into_owned()
}

fn read(path: PathBuf) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}
