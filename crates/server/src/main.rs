//! The `millpond` binary: reads the command line, runs one command, turns its outcome into an exit code.
//!
//! Everything that understands models is in `millpond-engine`; this crate speaks protocols and to people.

mod app;
mod cli;
mod commands;
mod config;
mod http;
mod live;
mod native;
mod openai;
mod running;
mod telemetry;

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    match commands::run(cli::Cli::parse()) {
        Ok(code) => code,
        Err(error) => {
            let line = format!("{error:#}").replace(['\n', '\r'], " ");
            eprintln!("millpond: {line}");
            commands::exit_code(&error)
        }
    }
}
