//! `millpond complete`: continues a text.

use std::process::ExitCode;

use millpond_engine::llm::{CompletionRequest, Limits, Prompt};

use super::model;
use super::terminal::{Outcome, Printer, is_broken_pipe, prompt_or_input};
use crate::cli::CompleteArgs;

/// Runs the command.
pub fn run(args: &CompleteArgs) -> anyhow::Result<ExitCode> {
    let prompt = prompt_or_input(args.prompt.as_deref())?;
    let llm = model::load(&args.engine.model, args.engine.options(Limits::default()))?;
    let generation = llm.complete(CompletionRequest {
        prompt: Prompt::Text(prompt),
        echo: false,
        options: args.sampling.options(),
    })?;
    match Printer::new()?.print(generation) {
        Ok(Outcome::Complete(_) | Outcome::Interrupted(_)) => Ok(ExitCode::SUCCESS),
        Err(error) if is_broken_pipe(&error) => Ok(ExitCode::SUCCESS),
        Err(error) => Err(error),
    }
}
