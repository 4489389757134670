//! Streams generated text to standard output, until it ends or the person interrupts it.

use std::io::{self, IsTerminal, Read, Write};

use anyhow::Context;
use millpond_engine::llm::{ChoiceText, Generation, GenerationEvent};
use millpond_scheduler::{FinishReason, Summary};
use tokio::runtime::Runtime;

use crate::openai::errors::ApiError;

/// What came of a generation.
pub enum Outcome {
    /// It came to its end; the whole text.
    Complete(String),
    /// The person interrupted it; the text so far.
    Interrupted(String),
}

/// Writes generated text as it comes.
pub struct Printer {
    runtime: Runtime,
    is_terminal: bool,
}

impl Printer {
    /// A printer to standard output.
    pub fn new() -> anyhow::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .context("cannot start the runtime")?;
        Ok(Printer {
            runtime,
            is_terminal: io::stdout().is_terminal(),
        })
    }

    /// Prints a generation with one choice to its end; Ctrl-C ends it early.
    pub fn print(&self, generation: Generation) -> anyhow::Result<Outcome> {
        self.runtime.block_on(self.stream(generation))
    }

    async fn stream(&self, mut generation: Generation) -> anyhow::Result<Outcome> {
        let mut text = String::new();
        loop {
            let event = tokio::select! {
                event = generation.next() => event,
                _ = tokio::signal::ctrl_c() => return Ok(Outcome::Interrupted(text)),
            };
            match event {
                Some(GenerationEvent::PromptLogprobs(_)) => {}
                Some(GenerationEvent::Delta(delta)) => self.write(&delta, &mut text)?,
                Some(GenerationEvent::Finished {
                    last,
                    reason,
                    summary,
                    ..
                }) => {
                    self.write(&last, &mut text)?;
                    self.end(&reason, &summary)?;
                    return Ok(Outcome::Complete(text));
                }
                None => anyhow::bail!("the engine stopped"),
            }
        }
    }

    fn write(&self, delta: &ChoiceText, text: &mut String) -> io::Result<()> {
        text.push_str(&delta.text);
        let mut stdout = io::stdout().lock();
        if self.is_terminal {
            stdout.write_all(harmless(&delta.text).as_bytes())?;
        } else {
            stdout.write_all(delta.text.as_bytes())?;
        }
        stdout.flush()
    }

    fn end(&self, reason: &FinishReason, summary: &Summary) -> anyhow::Result<()> {
        writeln!(io::stdout())?;
        if let Some(error) = ApiError::of_finish(reason) {
            anyhow::bail!(error.message);
        }
        if io::stderr().is_terminal() {
            eprintln!("{}", describe(summary));
        }
        Ok(())
    }
}

/// Control characters of a model could move the cursor or worse.
fn harmless(text: &str) -> String {
    let harmless = |char: &char| !char.is_control() || matches!(char, '\n' | '\t');
    text.chars().filter(harmless).collect()
}

/// Counts and speeds in one line.
fn describe(summary: &Summary) -> String {
    let rate = |tokens: u32, seconds: f64| match seconds > 0.0 {
        true => f64::from(tokens) / seconds,
        false => 0.0,
    };
    let computed = summary
        .num_prompt_tokens
        .saturating_sub(summary.num_cached_tokens);
    format!(
        "({} prompt tokens, {} cached, {:.0} tokens/s; {} output tokens, {:.0} tokens/s)",
        summary.num_prompt_tokens,
        summary.num_cached_tokens,
        rate(computed, summary.prefill().as_secs_f64()),
        summary.num_output_tokens,
        rate(
            summary.num_output_tokens.saturating_sub(1),
            summary.decode().as_secs_f64()
        ),
    )
}

/// The prompt as an argument, or from standard input.
pub fn prompt_or_input(prompt: Option<&str>) -> anyhow::Result<String> {
    if let Some(prompt) = prompt {
        return Ok(prompt.to_owned());
    }
    let mut text = String::new();
    io::stdin()
        .read_to_string(&mut text)
        .context("cannot read standard input")?;
    Ok(text)
}

/// A pipe that was closed on the other side is a normal end.
pub fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let io = error.downcast_ref::<io::Error>();
    io.is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_do_not_reach_the_terminal() {
        assert_eq!(harmless("a\u{1b}[2Jb\n\tc\u{7}é\u{9b}"), "a[2Jb\n\tcé");
    }
}
