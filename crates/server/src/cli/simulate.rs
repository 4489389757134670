//! The command line of `millpond simulate`.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::builder::RangedI64ValueParser;
use clap::{Args, ValueEnum};

use crate::commands::simulate::sweep::Sweep;
use crate::commands::simulate::traces::TraceFormat;
use crate::http::limits::seconds;

/// `millpond simulate`
#[derive(Debug, Args)]
#[command(args_override_self = true)]
pub struct SimulateArgs {
    /// What arrives.
    #[command(flatten)]
    pub arrivals: ArrivalArgs,

    /// What serves it.
    #[command(flatten)]
    pub workers: WorkerArgs,

    /// What goes wrong.
    #[command(flatten)]
    pub faults: FaultArgs,

    /// Run once for each of these values of a flag, and for each combination when given several times; for example
    /// `--sweep block-size=16,32`
    #[arg(long, value_name = "FLAG=VALUES")]
    pub sweep: Vec<Sweep>,

    /// What to print.
    #[command(flatten)]
    pub output: SimulateOutputArgs,

    /// Only count prefix-cache hits, one request after another, for each of `--capacities`
    #[arg(long, requires = "trace", conflicts_with = "sweep")]
    pub hit_rate: bool,

    /// Blocks of the pool, for `--hit-rate`; `unlimited` never evicts
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "unlimited",
        requires = "hit_rate"
    )]
    pub capacities: Vec<Capacity>,
}

/// What arrives.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Arrivals")]
pub struct ArrivalArgs {
    /// A trace: Mooncake JSON lines, Azure CSV, or JSON lines of OpenAI requests
    pub trace: Option<PathBuf>,

    /// How the trace is written [default: seen from its first line]
    #[arg(long, value_enum)]
    pub trace_format: Option<TraceFormat>,

    /// Take only so many requests of the trace
    #[arg(long)]
    pub limit: Option<usize>,

    /// Let the trace arrive so many times as fast
    #[arg(long, default_value_t = 1.0, value_parser = above_zero)]
    pub speed: f64,

    /// Make requests instead of reading them; with a trace, only their lengths are taken from it
    #[arg(long, value_enum)]
    pub generate: Option<GeneratorKind>,

    /// Requests, conversations or bursts per second
    #[arg(long, default_value_t = 1.0, value_parser = above_zero)]
    pub rate: f64,

    /// Requests, conversations or bursts in all
    #[arg(long, value_parser = count(), default_value_t = 256)]
    pub requests: u32,

    /// Requests of a burst
    #[arg(long, value_parser = count(), default_value_t = 16)]
    pub burst: u32,

    /// Prompt tokens; of a conversation, those that each turn adds
    #[arg(long, value_name = "N or A-B", default_value = "64-256")]
    pub prompt_tokens: Range,

    /// Output tokens
    #[arg(long, value_name = "N or A-B", default_value = "64")]
    pub output_tokens: Range,

    /// Turns of a conversation
    #[arg(long, value_name = "N or A-B", default_value = "3-6")]
    pub turns: Range,

    /// Tokens of a system prompt
    #[arg(long, default_value_t = 1_000)]
    pub system_tokens: u32,

    /// Different system prompts of chats
    #[arg(long, value_parser = count(), default_value_t = 4)]
    pub systems: u32,

    /// Seconds from an answer to the next question or tool result, on average
    #[arg(long, default_value = "5", value_parser = seconds)]
    pub pause: Duration,

    /// Determines everything that is drawn by chance
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
}

/// Ways to make requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum GeneratorKind {
    /// Independent requests at random times
    Poisson,
    /// Many at once, again and again
    Bursts,
    /// Conversations that share system prompts and grow turn by turn
    Chats,
    /// Conversations at tool speed, all with one system prompt
    Agents,
}

/// What serves it.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Workers")]
pub struct WorkerArgs {
    /// How long steps take: a preset, or a JSON file with a model [presets: distserve-13b,
    /// vllm-13b, distserve-66b, vllm-66b, burst, unit]
    #[arg(long, default_value = "distserve-13b")]
    pub cost: String,

    /// The cost model of decode workers, if it is another
    #[arg(long)]
    pub decode_cost: Option<String>,

    /// Workers that do everything
    #[arg(long, value_parser = count(), conflicts_with_all = ["prefill_workers", "decode_workers"], default_value_t = 1)]
    pub workers: u32,

    /// Workers that compute prompts and hand over
    #[arg(long, value_parser = count(), requires = "decode_workers")]
    pub prefill_workers: Option<u32>,

    /// Workers that go on from there
    #[arg(long, value_parser = count(), requires = "prefill_workers")]
    pub decode_workers: Option<u32>,

    /// Tokens whose keys and values a worker keeps [default: what the preset's machine had room for, else 65,536]
    #[arg(long)]
    pub kv_tokens: Option<u64>,

    /// Tokens per KV block
    #[arg(long, value_parser = count(), default_value_t = 16)]
    pub block_size: u32,

    /// Tokens computed in one step; a large number computes every prompt whole
    #[arg(long, value_parser = count(), default_value_t = 512)]
    pub max_batch_tokens: u32,

    /// Sequences running at once
    #[arg(long, value_parser = count(), default_value_t = 256)]
    pub max_sequences: u32,

    /// Longest prompt and output together, in tokens [default: what the pool holds]
    #[arg(long, value_parser = count())]
    pub max_context: Option<u32>,

    /// What leaves the prefix cache first
    #[arg(long, value_enum, default_value_t = Eviction::Lru)]
    pub eviction: Eviction,

    /// Compute every prompt from its beginning
    #[arg(long)]
    pub no_prefix_cache: bool,

    /// GB per second that a worker can send to others
    #[arg(long, default_value_t = 25.0, value_parser = above_zero)]
    pub link_gb_per_s: f64,

    /// Microseconds that a transfer takes besides
    #[arg(long, default_value_t = 10.0, value_parser = zero_or_more)]
    pub link_latency_us: f64,

    /// Bytes of keys and values per token [default: those of OPT-13B in half precision]
    #[arg(long, default_value_t = 819_200.0, value_parser = zero_or_more)]
    pub kv_bytes_per_token: f64,
}

/// What leaves the prefix cache first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Eviction {
    /// The leaf used longest ago
    Lru,
}

/// What goes wrong.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Faults")]
pub struct FaultArgs {
    /// How often, as a multiple of the usual mix of faults
    #[arg(long, default_value_t = 0.0, value_parser = zero_or_more)]
    pub faults: f64,

    /// Run one of the fault-hunting scenarios of the tests and print its event log
    #[arg(long, value_name = "SEED", conflicts_with_all = ["trace", "generate", "sweep"])]
    pub scenario: Option<u64>,
}

/// What to print.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Output")]
pub struct SimulateOutputArgs {
    /// Text, JSON or a page with plots
    #[arg(long, value_enum, default_value_t = Format::Text)]
    pub format: Format,

    /// Write there instead of to standard output
    #[arg(long, short)]
    pub output: Option<PathBuf>,

    /// Write every event, a line each
    #[arg(long, value_name = "FILE")]
    pub event_log: Option<PathBuf>,

    /// Seconds to the first token that count as kept, for goodput
    #[arg(long, value_parser = seconds, requires = "slo_tpot")]
    pub slo_ttft: Option<Duration>,

    /// Mean seconds per later token that count as kept
    #[arg(long, value_parser = seconds, requires = "slo_ttft")]
    pub slo_tpot: Option<Duration>,
}

/// How results look.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// For people
    Text,
    /// For programs
    Json,
    /// For people, with plots; a single file
    Html,
}

/// A number, or a range with both ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range(pub u32, pub u32);

impl FromStr for Range {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (low, high) = text.split_once('-').unwrap_or((text, text));
        let number = |part: &str| {
            let parsed = part.trim().parse::<u32>();
            parsed.map_err(|_| format!("{text:?} is neither a number nor a range such as 64-256"))
        };
        let range = Range(number(low)?, number(high)?);
        match 1 <= range.0 && range.0 <= range.1 {
            true => Ok(range),
            false => Err(format!(
                "{text:?} must begin at 1 or more and not end below its start"
            )),
        }
    }
}

/// Blocks of a pool; `None` is unlimited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacity(pub Option<u32>);

impl FromStr for Capacity {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match (text, text.parse::<u32>()) {
            ("unlimited" | "inf", _) => Ok(Capacity(None)),
            (_, Ok(blocks)) if blocks > 0 => Ok(Capacity(Some(blocks))),
            (_, _) => Err(format!(
                "{text:?} is neither a number of blocks nor `unlimited`"
            )),
        }
    }
}

/// A number of things, at least one.
fn count() -> RangedI64ValueParser<u32> {
    RangedI64ValueParser::new().range(1..)
}

fn zero_or_more(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number.is_finite() && number >= 0.0 => Ok(number),
        Ok(_) | Err(_) => Err(format!("{text:?} is not a number of zero or more")),
    }
}

fn above_zero(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number.is_finite() && number > 0.0 => Ok(number),
        Ok(_) | Err(_) => Err(format!("{text:?} is not a number above zero")),
    }
}
