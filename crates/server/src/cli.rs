//! The command line as given: commands, flags and the environment variables behind them.
//!
//! Nothing here is resolved or checked beyond its type; `config` does that.

mod bench;
mod simulate;

use std::path::PathBuf;
use std::time::Duration;

use clap::builder::FalseyValueParser;
use clap::{Args, Parser, Subcommand};
use millpond_engine::kernels::cpu::Isa;
use millpond_engine::llm::{EngineOptions, Limits};

use crate::config::parse_isa;
use crate::http::limits::{HttpLimits, seconds};
use crate::telemetry::logs::LogFormat;

pub use bench::{BenchArgs, BenchCommand, KernelArgs, OfflineArgs, ServerLoadArgs, Shape};
pub use simulate::{
    ArrivalArgs, Capacity, Format, GeneratorKind, SimulateArgs, SimulateOutputArgs, WorkerArgs,
};

/// Serves large language models; the same request with the same seed gives the same bytes.
#[derive(Debug, Parser)]
#[command(name = "millpond", version, propagate_version = true)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,

    /// How to log.
    #[command(flatten)]
    pub log: LogArgs,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve a model over the OpenAI API
    Serve(Box<ServeArgs>),
    /// Talk to a model; with a prompt, answer it and end
    Chat(ChatArgs),
    /// Continue a text
    Complete(CompleteArgs),
    /// Fetch a model and print where it is
    Pull(PullArgs),
    /// Show what a model file or folder holds
    Inspect(InspectArgs),
    /// Measure kernels, a model or a server, beside the ceilings of this machine
    Bench(BenchArgs),
    /// Run the scheduler on a trace under simulated time and report
    Simulate(Box<SimulateArgs>),
    /// Say whether this machine can serve, and with what
    Doctor(DoctorArgs),
}

/// How to log.
#[derive(Debug, Args)]
#[command(next_help_heading = "Logging")]
pub struct LogArgs {
    /// How log lines on standard error look
    #[arg(long, global = true, env = "MILLPOND_LOG_FORMAT", value_enum, default_value_t = LogFormat::Text)]
    pub log_format: LogFormat,

    /// error, warn, info, debug, trace, or a filter of the `tracing` crate [default: info when serving, else warn]
    #[arg(long, global = true, env = "MILLPOND_LOG")]
    pub log_level: Option<String>,
}

/// Which model, and how its engine runs.
#[derive(Debug, Args)]
#[command(next_help_heading = "Model and engine")]
pub struct EngineArgs {
    /// `default`, `mock`, a model card, a GGUF file, a folder with config.json, or a Hugging Face Hub id
    #[arg(long, short, env = "MILLPOND_MODEL", default_value = "default")]
    pub model: String,

    /// Worker threads [default: one per processor]
    #[arg(long, env = "MILLPOND_THREADS")]
    pub threads: Option<usize>,

    /// Instruction set of the kernels: portable, neon, neon-dot, avx2, avx2-vnni or avx512 [default: the best one here; all give the same bytes]
    #[arg(long, env = "MILLPOND_ISA", value_parser = parse_isa)]
    pub isa: Option<Isa>,

    /// Tokens whose keys and values are kept [default: four full contexts, as memory allows]
    #[arg(long, env = "MILLPOND_KV_TOKENS")]
    pub kv_tokens: Option<u64>,

    /// Longest prompt and output together, in tokens [default: the model's own]
    #[arg(long, env = "MILLPOND_MAX_CONTEXT")]
    pub max_context: Option<u32>,

    /// Tokens computed in one step
    #[arg(long, env = "MILLPOND_MAX_BATCH_TOKENS", default_value_t = EngineOptions::default().max_batch_tokens)]
    pub max_batch_tokens: u32,

    /// Sequences running at once
    #[arg(long, env = "MILLPOND_MAX_SEQUENCES", default_value_t = EngineOptions::default().max_sequences)]
    pub max_sequences: u32,

    /// Sequences waiting at once
    #[arg(long, env = "MILLPOND_MAX_WAITING", default_value_t = EngineOptions::default().max_waiting)]
    pub max_waiting: u32,

    /// Compute every prompt from its beginning
    #[arg(long, env = "MILLPOND_NO_PREFIX_CACHE", value_parser = FalseyValueParser::new())]
    pub no_prefix_cache: bool,
}

/// `millpond serve`
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// Which model, and how its engine runs.
    #[command(flatten)]
    pub engine: EngineArgs,

    /// Address to listen on
    #[arg(long, env = "MILLPOND_HOST", default_value = "127.0.0.1")]
    pub host: String,

    /// Port to listen on; 0 takes a free one
    #[arg(long, env = "MILLPOND_PORT", default_value_t = 8000)]
    pub port: u16,

    /// The model's name in the API [default: the file's]
    #[arg(long, env = "MILLPOND_SERVED_MODEL_NAME")]
    pub served_model_name: Option<String>,

    /// Refuse requests with unknown fields instead of listing them in `warnings`
    #[arg(long, env = "MILLPOND_STRICT", value_parser = FalseyValueParser::new())]
    pub strict: bool,

    /// Seconds that running requests may take to finish after SIGTERM or SIGINT
    #[arg(long, env = "MILLPOND_DRAIN_TIMEOUT", default_value = "30", value_parser = seconds)]
    pub drain_timeout: Duration,

    /// Limits of one request.
    #[command(flatten)]
    pub request_limits: RequestLimitArgs,

    /// Limits of the HTTP door.
    #[command(flatten)]
    pub http_limits: HttpLimits,
}

/// Limits of one request.
#[derive(Debug, Args)]
#[command(next_help_heading = "Request limits")]
pub struct RequestLimitArgs {
    /// Messages of a conversation
    #[arg(long, env = "MILLPOND_MAX_MESSAGES", default_value_t = Limits::default().max_messages)]
    pub max_messages: usize,

    /// Choices
    #[arg(long, env = "MILLPOND_MAX_N", default_value_t = Limits::default().max_n)]
    pub max_n: u64,

    /// Stop strings
    #[arg(long, env = "MILLPOND_MAX_STOP", default_value_t = Limits::default().max_stop)]
    pub max_stop: usize,

    /// Bytes of a stop string
    #[arg(long, env = "MILLPOND_MAX_STOP_BYTES", default_value_t = Limits::default().max_stop_bytes)]
    pub max_stop_bytes: usize,

    /// Alternatives per position
    #[arg(long, env = "MILLPOND_MAX_TOP_LOGPROBS", default_value_t = Limits::default().max_top_logprobs)]
    pub max_top_logprobs: u64,

    /// Entries of logit_bias
    #[arg(long, env = "MILLPOND_MAX_LOGIT_BIAS", default_value_t = Limits::default().max_logit_bias)]
    pub max_logit_bias: usize,

    /// Stop tokens, and allowed tokens
    #[arg(long, env = "MILLPOND_MAX_TOKEN_IDS", default_value_t = Limits::default().max_token_ids)]
    pub max_token_ids: usize,

    /// Bytes of cache_salt
    #[arg(long, env = "MILLPOND_MAX_CACHE_SALT_BYTES", default_value_t = Limits::default().max_cache_salt_bytes)]
    pub max_cache_salt_bytes: usize,

    /// Seconds a request may wait to be scheduled
    #[arg(long, env = "MILLPOND_QUEUE_TIMEOUT", default_value = "30", value_parser = seconds)]
    pub queue_timeout: Duration,

    /// Seconds until a request's first token
    #[arg(long, env = "MILLPOND_FIRST_TOKEN_TIMEOUT", default_value = "120", value_parser = seconds)]
    pub first_token_timeout: Duration,

    /// Seconds until a request's end
    #[arg(long, env = "MILLPOND_TOTAL_TIMEOUT", default_value = "900", value_parser = seconds)]
    pub total_timeout: Duration,
}

/// How to generate, for the commands that people type.
#[derive(Debug, Args)]
#[command(next_help_heading = "Generation")]
pub struct SamplingArgs {
    /// Tokens of output at most [default: what the context leaves]
    #[arg(long)]
    pub max_tokens: Option<u64>,

    /// 0 always takes the most likely token
    #[arg(long, default_value_t = 0.2)]
    pub temperature: f64,

    /// Keep the most likely tokens that have this probability together
    #[arg(long, default_value_t = 0.9)]
    pub top_p: f64,

    /// Keep this many of the most likely tokens; 0 keeps all
    #[arg(long, default_value_t = 0)]
    pub top_k: i64,

    /// Above 1: tokens that occurred become less likely
    #[arg(long, default_value_t = 1.0)]
    pub repetition_penalty: f64,

    /// The same seed gives the same answer [default: a new one each time]
    #[arg(long)]
    pub seed: Option<u64>,

    /// Ends the output; may be given several times
    #[arg(long)]
    pub stop: Vec<String>,
}

/// `millpond chat`
#[derive(Debug, Args)]
pub struct ChatArgs {
    /// What to ask; without it a conversation begins, or standard input is the prompt when it is no terminal
    pub prompt: Option<String>,

    /// Instructions before the conversation
    #[arg(long)]
    pub system: Option<String>,

    /// How to generate.
    #[command(flatten)]
    pub sampling: SamplingArgs,

    /// Which model, and how its engine runs.
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// `millpond complete`
#[derive(Debug, Args)]
pub struct CompleteArgs {
    /// The text to continue [default: standard input]
    pub prompt: Option<String>,

    /// How to generate.
    #[command(flatten)]
    pub sampling: SamplingArgs,

    /// Which model, and how its engine runs.
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// `millpond pull`
#[derive(Debug, Args)]
pub struct PullArgs {
    /// `default`, a model card, or a Hugging Face Hub id
    #[arg(default_value = "default")]
    pub model: String,
}

/// `millpond inspect`
#[derive(Debug, Args)]
pub struct InspectArgs {
    /// A GGUF or safetensors file, or a folder with a model
    pub path: PathBuf,

    /// Print JSON
    #[arg(long)]
    pub json: bool,

    /// List every tensor
    #[arg(long)]
    pub tensors: bool,
}

/// `millpond doctor`
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// The model that is to be served
    #[arg(long, short, env = "MILLPOND_MODEL", default_value = "default")]
    pub model: String,

    /// Worker threads [default: one per processor]
    #[arg(long, env = "MILLPOND_THREADS")]
    pub threads: Option<usize>,

    /// Instruction set of the kernels [default: the best one here]
    #[arg(long, env = "MILLPOND_ISA", value_parser = parse_isa)]
    pub isa: Option<Isa>,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn flags_after_the_command_and_defaults() {
        let cli = Cli::try_parse_from([
            "millpond",
            "serve",
            "--model",
            "mock",
            "--port",
            "0",
            "--header-timeout",
            "0.5",
        ]);
        let Ok(Cli {
            command: Command::Serve(args),
            ..
        }) = cli
        else {
            panic!("serve")
        };
        assert_eq!(
            (args.engine.model.as_str(), args.port, args.strict),
            ("mock", 0, false)
        );
        assert_eq!(args.http_limits.header_timeout, Duration::from_millis(500));
        assert_eq!(args.http_limits.max_body_bytes, 8 << 20);
        assert!(Cli::try_parse_from(["millpond", "serve", "--isa", "z80"]).is_err());
    }
}
