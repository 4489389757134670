//! Traces of requests in three formats, read into the scheduler's workloads. Nothing is simulated here.
//!
//! Mooncake: JSON lines with `timestamp` (ms), `input_length`, `output_length`, `hash_ids` of 512-token
//! blocks. Azure: CSV with `TIMESTAMP`, `ContextTokens`, `GeneratedTokens`. OpenAI: JSON lines with a
//! `request` body (or the body itself), and optionally `timestamp` (seconds) and `usage`.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context;
use clap::ValueEnum;
use millpond_scheduler::sim::workload::{Prompt, Session, Turn, VOCABULARY, Workload};
use millpond_scheduler::{Span, Timestamp, TokenId};
use serde::Deserialize;

/// Tokens that a hash of the Mooncake traces stands for.
pub const MOONCAKE_BLOCK: u32 = 512;

/// Bytes of one line, at most.
const MAX_LINE: u64 = 64 << 20;

/// Output tokens of a logged request that says neither how many it got nor how many it wanted.
const DEFAULT_OUTPUT: u32 = 128;

/// How a trace is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TraceFormat {
    /// JSON lines with `timestamp`, `input_length`, `output_length`, `hash_ids`
    Mooncake,
    /// CSV with `TIMESTAMP`, `ContextTokens`, `GeneratedTokens`
    Azure,
    /// JSON lines with OpenAI request bodies
    Openai,
}

/// One request of a trace.
#[derive(Clone, Debug, PartialEq)]
pub struct TraceRow {
    /// Nanoseconds since the first request, or since any origin while reading.
    pub at: i128,
    /// What is asked.
    pub prompt: Prompt,
    /// Tokens generated.
    pub num_output: u32,
    /// Names of prefix blocks, where the trace has them.
    pub hashes: Vec<u64>,
    /// Who asks, where the trace says.
    pub tenant: Option<String>,
}

/// A trace in order of time, beginning at 0.
#[derive(Clone, Debug, PartialEq)]
pub struct Trace {
    /// Its requests.
    pub rows: Vec<TraceRow>,
    /// How it was written.
    pub format: TraceFormat,
}

impl Trace {
    /// Reads at most `limit` requests of a file.
    pub fn read(
        path: &Path,
        format: Option<TraceFormat>,
        limit: Option<usize>,
    ) -> anyhow::Result<Trace> {
        let name = path.display().to_string();
        let mut file = File::open(path).with_context(|| format!("cannot open {name}"))?;
        let format = match format {
            Some(format) => format,
            None => detect(&mut file).with_context(|| name.clone())?,
        };
        let limit = limit.unwrap_or(usize::MAX);
        let mut rows = match format {
            TraceFormat::Azure => azure(file, limit),
            TraceFormat::Mooncake => json_lines(file, limit, MooncakeRow::convert),
            TraceFormat::Openai => json_lines(file, limit, OpenaiRow::convert),
        }
        .with_context(|| name.clone())?;
        anyhow::ensure!(!rows.is_empty(), "{name}: no request in it");
        rows.sort_by_key(|row| row.at);
        let origin = rows[0].at;
        for row in &mut rows {
            row.at -= origin;
        }
        Ok(Trace { rows, format })
    }

    /// One session per request.
    pub fn workload(&self) -> Workload {
        let mut tenants = BTreeMap::new();
        let session = |row: &TraceRow| {
            let next = tenants.len() as u32;
            let tenant = match &row.tenant {
                Some(name) => *tenants.entry(name.clone()).or_insert(next + 1),
                None => 0,
            };
            Session {
                start: Timestamp(u64::try_from(row.at).unwrap_or(u64::MAX)),
                tenant,
                priority: 0,
                turns: vec![Turn {
                    pause: Span(0),
                    prompt: row.prompt.clone(),
                    num_output: row.num_output,
                    num_choices: 1,
                }],
            }
        };
        Workload {
            sessions: self.rows.iter().map(session).collect(),
        }
    }

    /// Prompt and output tokens of each request.
    pub fn lengths(&self) -> Vec<(u32, u32)> {
        let lengths = |row: &TraceRow| (row.prompt.num_tokens(), row.num_output);
        self.rows.iter().map(lengths).collect()
    }
}

/// Tells the format from the first line.
fn detect(file: &mut File) -> anyhow::Result<TraceFormat> {
    let mut line = String::new();
    BufReader::new(&mut *file)
        .take(MAX_LINE)
        .read_line(&mut line)
        .context("cannot read the first line")?;
    file.rewind().context("cannot read it twice")?;
    if line.starts_with("TIMESTAMP,") {
        return Ok(TraceFormat::Azure);
    }
    let fields: BTreeMap<String, serde::de::IgnoredAny> = serde_json::from_str(&line).context(
        "neither CSV with a TIMESTAMP column nor JSON lines: say what it is with --trace-format",
    )?;
    Ok(match fields.contains_key("hash_ids") {
        true => TraceFormat::Mooncake,
        false => TraceFormat::Openai,
    })
}

fn json_lines<T: for<'a> Deserialize<'a>>(
    file: File,
    limit: usize,
    convert: impl Fn(T) -> anyhow::Result<TraceRow>,
) -> anyhow::Result<Vec<TraceRow>> {
    let mut reader = BufReader::new(file);
    let (mut rows, mut line, mut number) = (Vec::new(), String::new(), 0);
    while rows.len() < limit {
        line.clear();
        number += 1;
        let num_bytes = (&mut reader)
            .take(MAX_LINE)
            .read_line(&mut line)
            .with_context(|| format!("line {number}"))?;
        if num_bytes == 0 {
            break;
        }
        anyhow::ensure!(
            (num_bytes as u64) < MAX_LINE,
            "line {number} is longer than {MAX_LINE} bytes"
        );
        if line.trim().is_empty() {
            continue;
        }
        let row = serde_json::from_str(&line).map_err(anyhow::Error::from);
        let row = row.and_then(&convert);
        rows.push(row.with_context(|| format!("line {number}"))?);
    }
    Ok(rows)
}

/// A line of the Mooncake traces (FAST'25 release).
#[derive(Deserialize)]
struct MooncakeRow {
    /// Milliseconds.
    timestamp: f64,
    input_length: u32,
    output_length: u32,
    hash_ids: Vec<u64>,
}

impl MooncakeRow {
    fn convert(self) -> anyhow::Result<TraceRow> {
        let num_blocks = self.input_length.div_ceil(MOONCAKE_BLOCK);
        anyhow::ensure!(
            self.input_length > 0 && self.hash_ids.len() == num_blocks as usize,
            "input_length {} and {} hash_ids do not fit blocks of {MOONCAKE_BLOCK} tokens",
            self.input_length,
            self.hash_ids.len()
        );
        Ok(TraceRow {
            at: nanos(self.timestamp * 1e6)?,
            prompt: Prompt::blocks(&self.hash_ids, MOONCAKE_BLOCK, self.input_length),
            num_output: self.output_length.max(1),
            hashes: self.hash_ids,
            tenant: None,
        })
    }
}

fn nanos(value: f64) -> anyhow::Result<i128> {
    anyhow::ensure!(
        value.is_finite() && value.abs() < 1e19,
        "timestamp out of range"
    );
    Ok(value as i128)
}

/// A line of Azure's LLM inference traces.
#[derive(Deserialize)]
struct AzureRow {
    #[serde(rename = "TIMESTAMP")]
    timestamp: String,
    #[serde(rename = "ContextTokens")]
    context_tokens: u32,
    #[serde(rename = "GeneratedTokens")]
    generated_tokens: u32,
}

fn azure(file: File, limit: usize) -> anyhow::Result<Vec<TraceRow>> {
    let mut reader = csv::Reader::from_reader(file);
    let mut rows = Vec::new();
    for (index, row) in reader.deserialize::<AzureRow>().take(limit).enumerate() {
        let row = row.map_err(anyhow::Error::from);
        let row = row.and_then(|row| row.convert(index as u64));
        // The first line is the header.
        rows.push(row.with_context(|| format!("line {}", index + 2))?);
    }
    Ok(rows)
}

impl AzureRow {
    fn convert(self, index: u64) -> anyhow::Result<TraceRow> {
        let time: jiff::civil::DateTime = self
            .timestamp
            .parse()
            .with_context(|| format!("TIMESTAMP {:?}", self.timestamp))?;
        let since_epoch = time.duration_since(jiff::civil::DateTime::ZERO);
        Ok(TraceRow {
            at: since_epoch.as_nanos(),
            prompt: Prompt::distinct(index, self.context_tokens.max(1)),
            num_output: self.generated_tokens.max(1),
            hashes: Vec::new(),
            tenant: None,
        })
    }
}

/// A line of a log of OpenAI requests.
#[derive(Deserialize)]
struct OpenaiRow {
    /// Seconds.
    #[serde(default, alias = "created", alias = "created_at")]
    timestamp: f64,
    request: Option<OpenaiBody>,
    /// The line is the body itself.
    #[serde(flatten)]
    body: OpenaiBody,
    usage: Option<OpenaiUsage>,
    response: Option<OpenaiResponse>,
}

/// What counts of a request body, for chat and completions alike.
#[derive(Default, Deserialize)]
struct OpenaiBody {
    messages: Option<Vec<OpenaiMessage>>,
    prompt: Option<OpenaiPrompt>,
    max_tokens: Option<u32>,
    max_completion_tokens: Option<u32>,
    user: Option<String>,
}

#[derive(Deserialize)]
struct OpenaiMessage {
    role: String,
    /// Text, or parts with text.
    content: Option<serde_json::Value>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OpenaiPrompt {
    Text(String),
    Tokens(Vec<u32>),
}

#[derive(Clone, Copy, Deserialize)]
struct OpenaiUsage {
    completion_tokens: u32,
}

#[derive(Deserialize)]
struct OpenaiResponse {
    usage: Option<OpenaiUsage>,
}

impl OpenaiRow {
    fn convert(self) -> anyhow::Result<TraceRow> {
        let body = self.request.unwrap_or(self.body);
        let usage = self.usage.or(self.response.and_then(|r| r.usage));
        let wanted = body.max_completion_tokens.or(body.max_tokens);
        let num_output = usage.map(|u| u.completion_tokens).or(wanted);
        let tokens = match (&body.messages, &body.prompt) {
            (Some(messages), None) => message_tokens(messages),
            (None, Some(OpenaiPrompt::Text(text))) => text_tokens(text),
            (None, Some(OpenaiPrompt::Tokens(ids))) => {
                ids.iter().map(|id| TokenId(id % VOCABULARY)).collect()
            }
            (Some(_), Some(_)) => anyhow::bail!("both messages and prompt"),
            (None, None) => anyhow::bail!("neither messages nor prompt"),
        };
        anyhow::ensure!(!tokens.is_empty(), "the prompt is empty");
        Ok(TraceRow {
            at: nanos(self.timestamp * 1e9)?,
            prompt: Prompt::Tokens(Arc::from(tokens)),
            num_output: num_output.unwrap_or(DEFAULT_OUTPUT).max(1),
            hashes: Vec::new(),
            tenant: body.user,
        })
    }
}

fn message_tokens(messages: &[OpenaiMessage]) -> Vec<TokenId> {
    let mut text = String::new();
    for message in messages {
        text.push_str(&message.role);
        text.push('\n');
        match &message.content {
            Some(serde_json::Value::String(content)) => text.push_str(content),
            Some(other) => text.push_str(&other.to_string()),
            None => {}
        }
        text.push('\n');
    }
    text_tokens(&text)
}

/// Stands for a tokenizer that is not here: one token per four bytes, each named by a hash of them, so that
/// equal prefixes stay equal.
fn text_tokens(text: &str) -> Vec<TokenId> {
    let token = |bytes: &[u8]| {
        let mut word = [0; 4];
        word[..bytes.len()].copy_from_slice(bytes);
        TokenId((u32::from_le_bytes(word).wrapping_mul(0x9e37_79b1) >> 2) % VOCABULARY)
    };
    text.as_bytes().chunks(4).map(token).collect()
}

/// The file of a trace, and what of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceSource {
    /// Where it is.
    pub path: PathBuf,
    /// How it is written, if given.
    pub format: Option<TraceFormat>,
    /// Requests at most.
    pub limit: Option<usize>,
}

impl TraceSource {
    /// Reads it.
    pub fn read(&self) -> anyhow::Result<Trace> {
        Trace::read(&self.path, self.format, self.limit)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn read(content: &str) -> anyhow::Result<Trace> {
        let mut file = tempfile::NamedTempFile::new().expect("a scratch file");
        file.write_all(content.as_bytes()).expect("it is writable");
        Trace::read(file.path(), None, None)
    }

    fn error(content: &str) -> String {
        format!("{:#}", read(content).expect_err("it is wrong"))
    }

    #[test]
    fn mooncake_rows_become_blocks_in_order_of_time() {
        let trace = read(
            "{\"timestamp\": 3000, \"input_length\": 600, \"output_length\": 5, \"hash_ids\": [1, 2]}\n\n\
             {\"timestamp\": 1000, \"input_length\": 512, \"output_length\": 7, \"hash_ids\": [1]}\n",
        )
        .expect("it is right");
        assert_eq!(trace.format, TraceFormat::Mooncake);
        assert_eq!(trace.lengths(), [(512, 7), (600, 5)]);
        let workload = trace.workload();
        assert_eq!(workload.sessions[1].start, Timestamp(2_000_000_000));
    }

    #[test]
    fn azure_rows_have_times_to_the_tenth_of_a_microsecond() {
        let trace = read(
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n",
        )
        .expect("it is right");
        assert_eq!(trace.format, TraceFormat::Azure);
        assert_eq!(trace.rows[1].at, 4_314_579_000);
        assert_eq!(trace.lengths(), [(374, 44), (396, 109)]);
    }

    #[test]
    fn openai_logs_share_prefixes_where_their_texts_do() {
        let trace = read(
            r#"{"timestamp": 5, "messages": [{"role": "system", "content": "You help with everything."}, {"role": "user", "content": "one"}], "max_tokens": 9}
{"timestamp": 6.5, "request": {"messages": [{"role": "system", "content": "You help with everything."}, {"role": "user", "content": "two"}], "user": "ann"}, "usage": {"prompt_tokens": 9, "completion_tokens": 4}}
{"timestamp": 7, "prompt": [1, 2, 3]}"#,
        )
        .expect("it is right");
        let tokens = |row: usize| match &trace.rows[row].prompt {
            Prompt::Tokens(tokens) => tokens.clone(),
            Prompt::Parts(_) => panic!("a log has tokens"),
        };
        let (one, two) = (tokens(0), tokens(1));
        let num_common = one
            .iter()
            .zip(two.iter())
            .take_while(|(a, b)| a == b)
            .count();
        assert!(num_common >= 8 && num_common < one.len());
        assert_eq!(*tokens(2), [1, 2, 3].map(TokenId));
        let outputs: Vec<u32> = trace.rows.iter().map(|row| row.num_output).collect();
        assert_eq!(outputs, [9, 4, DEFAULT_OUTPUT]);
        let workload = trace.workload();
        let tenants: Vec<u32> = workload.sessions.iter().map(|s| s.tenant).collect();
        assert_eq!(tenants, [0, 1, 0]);
    }

    #[test]
    fn what_is_wrong_is_named_with_its_line() {
        let rows =
            "{\"timestamp\": 0, \"input_length\": 600, \"output_length\": 5, \"hash_ids\": [1]}\n";
        assert!(error(rows).contains("line 1: input_length 600 and 1 hash_ids"));
        assert!(error("hello\n").contains("--trace-format"));
        let csv = "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n";
        assert!(error(csv).contains("line 2: TIMESTAMP \"yesterday\""));
        assert!(
            error("{\"timestamp\": 1, \"max_tokens\": 4}\n")
                .contains("neither messages nor prompt")
        );
        assert!(error("TIMESTAMP,ContextTokens,GeneratedTokens\n").contains("no request in it"));
        let missing = Trace::read(Path::new("/nowhere/at/all"), None, None);
        assert!(format!("{:#}", missing.expect_err("it is not there")).contains("cannot open"));
    }
}
