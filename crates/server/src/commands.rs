//! The commands, one file each, and what they share: getting a model, and talking to the terminal.

use std::process::ExitCode;

use millpond_engine::fetch::FetchError;
use millpond_engine::llm::LoadFailure;
use millpond_engine::loader::LoadError;

use crate::cli::{Cli, Command, LogArgs};
use crate::telemetry::logs;
use bench::StreamError;

mod bench;
mod chat;
mod complete;
mod doctor;
mod inspect;
mod lines;
mod machine;
mod model;
mod progress;
mod pull;
mod serve;
pub mod simulate;
mod terminal;

/// Exit codes of `sysexits.h`: unavailable, internal error, configuration error.
const EXIT_UNAVAILABLE: u8 = 69;
const EXIT_ENGINE: u8 = 70;
const EXIT_BAD_MODEL: u8 = 78;

/// Runs a command.
pub fn run(cli: Cli) -> anyhow::Result<ExitCode> {
    let Cli { command, log } = cli;
    match command {
        Command::Serve(args) => {
            start_logs(&log, "info")?;
            serve::run(&args)
        }
        Command::Chat(args) => {
            start_logs(&log, "warn")?;
            chat::run(&args)
        }
        Command::Complete(args) => {
            start_logs(&log, "warn")?;
            complete::run(&args)
        }
        Command::Pull(args) => {
            start_logs(&log, "warn")?;
            pull::run(&args)
        }
        Command::Inspect(args) => {
            start_logs(&log, "warn")?;
            inspect::run(&args)
        }
        Command::Bench(args) => {
            start_logs(&log, "warn")?;
            bench::run(&args)
        }
        Command::Simulate(args) => {
            start_logs(&log, "warn")?;
            let given: Vec<_> = std::env::args_os().collect();
            simulate::run(&args, &given)?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Doctor(args) => {
            start_logs(&log, "warn")?;
            doctor::run(&args)
        }
    }
}

fn start_logs(log: &LogArgs, default_level: &str) -> anyhow::Result<()> {
    let level = log.log_level.as_deref().unwrap_or(default_level);
    logs::start(log.log_format, level).map_err(anyhow::Error::msg)
}

/// The exit code that an error stands for.
pub fn exit_code(error: &anyhow::Error) -> ExitCode {
    let code = match () {
        () if error.is::<LoadError>() || error.is::<LoadFailure>() => EXIT_BAD_MODEL,
        () if error.is::<FetchError>() || error.is::<StreamError>() => EXIT_UNAVAILABLE,
        () => 1,
    };
    ExitCode::from(code)
}
