//! The command line of `millpond bench`.

use std::str::FromStr;
use std::time::Duration;

use clap::builder::RangedU64ValueParser;
use clap::{Args, Subcommand};
use millpond_engine::kernels::cpu::Isa;
use millpond_engine::loader::TensorType;

use super::EngineArgs;
use crate::config::parse_isa;
use crate::http::limits::seconds;

/// `millpond bench`
#[derive(Debug, Args)]
pub struct BenchArgs {
    /// What to measure.
    #[command(subcommand)]
    pub command: BenchCommand,
}

/// What to measure.
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// Time matrix products and attention alone
    Kernel(KernelArgs),
    /// Time prefill and decode of a model in this process, without HTTP
    Offline(Box<OfflineArgs>),
    /// Load a running server, Millpond or another one that speaks the OpenAI API
    Serve(ServerLoadArgs),
}

/// How to measure and to print.
#[derive(Clone, Copy, Debug, Args)]
#[command(next_help_heading = "Measurement")]
pub struct MeasureArgs {
    /// Rounds that medians are taken over
    #[arg(long, default_value_t = 5, value_parser = at_least_one())]
    pub rounds: usize,

    /// MiB that are read to measure the bandwidth; kernels go through as much in turn [default: the weights of the
    /// model, else those of the default model]
    #[arg(long, value_name = "MIB", value_parser = RangedU64ValueParser::<usize>::new().range(1..1 << 20))]
    pub working_set: Option<usize>,

    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
}

/// Packed weights of the default model.
const DEFAULT_WORKING_SET: usize = 96 << 20;

impl MeasureArgs {
    /// The working set as asked, else `model_bytes`, else that of the default model.
    pub fn working_set_bytes(&self, model_bytes: Option<u64>) -> usize {
        let asked = self.working_set.map(|mebibytes| mebibytes << 20);
        let of_model = || model_bytes.and_then(|bytes| usize::try_from(bytes).ok());
        asked.or_else(of_model).unwrap_or(DEFAULT_WORKING_SET)
    }
}

/// `millpond bench kernel`
#[derive(Debug, Args)]
pub struct KernelArgs {
    /// Types of weights, as GGUF names them [default: all]
    #[arg(long, value_delimiter = ',', value_parser = parse_type)]
    pub types: Vec<TensorType>,

    /// Shapes of weights, outputs x inputs; the defaults are the MLP of the default model
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "1536x576,576x1536",
        value_name = "OUTxIN"
    )]
    pub shapes: Vec<Shape>,

    /// Rows multiplied at once
    #[arg(long, value_delimiter = ',', default_value = "1,8,32,512", value_parser = at_least_one())]
    pub rows: Vec<usize>,

    /// Worker threads [default: one per processor]
    #[arg(long, env = "MILLPOND_THREADS", value_parser = at_least_one())]
    pub threads: Option<usize>,

    /// Instruction set of the kernels [default: the best one here]
    #[arg(long, env = "MILLPOND_ISA", value_parser = parse_isa)]
    pub isa: Option<Isa>,

    /// How to measure and to print.
    #[command(flatten)]
    pub measure: MeasureArgs,
}

/// `millpond bench offline`
#[derive(Debug, Args)]
pub struct OfflineArgs {
    /// Tokens of the prompts whose prefill is timed
    #[arg(long, value_delimiter = ',', default_value = "512,2048", value_parser = at_least_one())]
    pub prefill: Vec<usize>,

    /// Sequences decoded at once, and tokens of each prompt before that
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "1x8,1x1152,8x128,32x128",
        value_name = "SEQUENCESxDEPTH"
    )]
    pub decode: Vec<Shape>,

    /// Tokens that each of those sequences generates
    #[arg(long, default_value_t = 128, value_parser = RangedU64ValueParser::<usize>::new().range(2..))]
    pub output_tokens: usize,

    /// How to measure and to print.
    #[command(flatten)]
    pub measure: MeasureArgs,

    /// Which model, and how its engine runs.
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// `millpond bench serve`
#[derive(Debug, Args)]
pub struct ServerLoadArgs {
    /// Where the server is, with or without `/v1`
    #[arg(long, default_value = "http://127.0.0.1:8000")]
    pub base_url: String,

    /// The model to ask for [default: the first one that the server lists]
    #[arg(long, short)]
    pub model: Option<String>,

    /// Sent as a bearer token
    #[arg(long, env = "OPENAI_API_KEY", hide_env_values = true)]
    pub api_key: Option<String>,

    /// Streams at once
    #[arg(long, value_delimiter = ',', default_value = "1,8,32", value_parser = at_least_one())]
    pub streams: Vec<usize>,

    /// Requests of a round [default: one per stream, but at least 4]
    #[arg(long, value_parser = at_least_one())]
    pub requests: Option<usize>,

    /// Tokens of each prompt; the server's own count is reported
    #[arg(long, default_value_t = 128, value_parser = at_least_one())]
    pub prompt_tokens: usize,

    /// How many of those all prompts of a round share
    #[arg(long, default_value_t = 0)]
    pub shared_prefix: usize,

    /// Tokens of each answer
    #[arg(long, default_value_t = 128, value_parser = at_least_one())]
    pub output_tokens: usize,

    /// Makes the prompts; an equal one repeats them, which a prefix cache will notice [default: a new one]
    #[arg(long)]
    pub seed: Option<u64>,

    /// Seconds that one request may take
    #[arg(long, default_value = "600", value_parser = seconds)]
    pub timeout: Duration,

    /// The model that the server runs on this machine, as `--model` of `serve` takes it; gives the shares of the
    /// ceilings
    #[arg(long, value_name = "MODEL")]
    pub weights: Option<String>,

    /// Threads that measure the ceilings [default: one per processor]
    #[arg(long, env = "MILLPOND_THREADS", value_parser = at_least_one())]
    pub threads: Option<usize>,

    /// How to measure and to print.
    #[command(flatten)]
    pub measure: MeasureArgs,
}

/// Two numbers, as in `1536x576`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape(pub usize, pub usize);

impl FromStr for Shape {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |part: &str| part.parse().ok().filter(|number| *number > 0);
        let parts = text.split_once('x');
        let shape = parts.and_then(|(left, right)| Some(Shape(number(left)?, number(right)?)));
        shape.ok_or_else(|| "must be two positive numbers, as in 1536x576".to_owned())
    }
}

fn at_least_one() -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..)
}

/// Reads the name of a type that kernels compute.
fn parse_type(name: &str) -> Result<TensorType, String> {
    let computed = TensorType::COMPUTED;
    let found = computed
        .into_iter()
        .find(|dtype| dtype.name().eq_ignore_ascii_case(name));
    found.ok_or_else(|| {
        let names = computed.map(TensorType::name).join(", ");
        format!("must be one of {names}")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_are_two_positive_numbers() {
        assert_eq!("1536x576".parse(), Ok(Shape(1536, 576)));
        for bad in ["", "5", "5x", "x5", "0x5", "5x0", "-1x5", "5x5x5", "5 x 5"] {
            assert!(bad.parse::<Shape>().is_err(), "{bad}");
        }
    }

    #[test]
    fn types_go_by_their_gguf_names() {
        assert_eq!(parse_type("q4_k"), Ok(TensorType::Q4K));
        assert_eq!(parse_type("BF16"), Ok(TensorType::BF16));
        let error = parse_type("IQ4_NL").expect_err("not computed");
        assert!(error.contains("Q4_1"), "{error}");
    }
}
