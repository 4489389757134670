//! `millpond pull`: fetches a model and prints where it is.

use std::process::ExitCode;

use super::model;
use crate::cli::PullArgs;

/// Runs the command.
pub fn run(args: &PullArgs) -> anyhow::Result<ExitCode> {
    let path = model::fetch(&args.model)?;
    println!("{}", path.display());
    Ok(ExitCode::SUCCESS)
}
