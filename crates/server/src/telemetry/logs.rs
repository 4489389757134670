//! Log output. What requests say is never logged; names from outside are printed escaped.

use std::io::IsTerminal;

use clap::ValueEnum;
use tracing_subscriber::EnvFilter;

/// How log lines look.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object per line.
    Json,
}

/// Starts logging to standard error. `filter` is a level or a `tracing` filter.
pub fn start(format: LogFormat, filter: &str) -> Result<(), String> {
    let filter = EnvFilter::try_new(without_downloaders(filter))
        .map_err(|error| format!("log level: {error}"))?;
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal());
    let started = match format {
        LogFormat::Text => builder.with_target(false).try_init(),
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
    };
    started.map_err(|error| error.to_string())
}

/// A bare level leaves out the Hub client, which logs as an error what is ordinary for us: a source that
/// does not answer, so that the next one is asked. A filter of modules is taken as it is.
fn without_downloaders(filter: &str) -> String {
    match filter.contains(['=', ',']) {
        true => filter.to_owned(),
        false => format!("{filter},hf_hub=off"),
    }
}
