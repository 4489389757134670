//! `millpond bench`: kernels alone, a model in this process, or a server under load, beside what the machine can do.
//!
//! Results are lines as they come, or one JSON document at the end. What each number means: `bench/README.md`.

mod ceilings;
mod kernel;
mod noise;
mod offline;
mod samples;
mod serve;
mod stream;
mod words;

use std::fmt::Display;
use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

use millpond_engine::loader;
use millpond_engine::model::TokenCost;
use serde::Serialize;

use super::machine::Machine;
use super::terminal::is_broken_pipe;
use crate::cli::{BenchArgs, BenchCommand};
use ceilings::Ceilings;

pub use stream::StreamError;

/// Runs the command.
pub fn run(args: &BenchArgs) -> anyhow::Result<ExitCode> {
    let result = match &args.command {
        BenchCommand::Kernel(args) => kernel::run(args),
        BenchCommand::Offline(args) => offline::run(args),
        BenchCommand::Serve(args) => serve::run(args),
    };
    match result {
        Err(error) if is_broken_pipe(&error) => Ok(ExitCode::SUCCESS),
        result => result.map(|()| ExitCode::SUCCESS),
    }
}

/// One measurement as data. `R` is what a line of results holds.
#[derive(Serialize)]
struct Report<R> {
    version: &'static str,
    machine: Machine,
    ceilings: Ceilings,
    /// What was measured, with the settings that the results depend on.
    setting: Setting,
    results: Vec<R>,
}

/// What was measured.
#[derive(Serialize)]
#[serde(untagged)]
enum Setting {
    /// Kernels alone.
    Kernel { isa: &'static str },
    /// A model in this process.
    Offline(offline::LoadedModel),
    /// A server.
    Serve(serve::Target),
}

/// Where results go.
#[derive(Clone, Copy)]
enum Output {
    /// Lines as they come.
    Text,
    /// One document at the end.
    Json,
}

impl Output {
    fn new(json: bool) -> Self {
        if json { Output::Json } else { Output::Text }
    }

    /// A line for people.
    fn line(self, line: impl Display) -> io::Result<()> {
        match self {
            Output::Text => writeln!(io::stdout(), "{line}"),
            Output::Json => Ok(()),
        }
    }

    /// The document for programs.
    fn document(self, report: &impl Serialize) -> anyhow::Result<()> {
        match self {
            Output::Text => Ok(()),
            Output::Json => {
                let text = serde_json::to_string_pretty(report)?;
                Ok(writeln!(io::stdout(), "{text}")?)
            }
        }
    }
}

/// What a token of the model at `path` costs.
fn token_cost(path: &Path) -> anyhow::Result<TokenCost> {
    let files = loader::open(path)?;
    Ok(TokenCost::of(&files.config, &files.weights))
}

/// A share for people.
fn percent(share: Option<f64>) -> String {
    share.map_or_else(|| "-".to_owned(), |share| format!("{:.1}", share * 100.0))
}
