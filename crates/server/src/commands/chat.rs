//! `millpond chat`: one prompt, or a conversation in the terminal.

use std::io::IsTerminal;
use std::process::ExitCode;

use millpond_engine::llm::{ChatMessage, ChatRequest, Limits, Llm, Role};
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;

use super::model;
use super::terminal::{Outcome, Printer, is_broken_pipe, prompt_or_input};
use crate::cli::ChatArgs;

/// A shell's code for an interrupted command.
const EXIT_INTERRUPTED: u8 = 130;

const HELP: &str = "/reset begins anew, /exit or Ctrl-D ends, Ctrl-C interrupts an answer";

/// Runs the command.
pub fn run(args: &ChatArgs) -> anyhow::Result<ExitCode> {
    let llm = model::load(&args.engine.model, args.engine.options(Limits::default()))?;
    let chat = Chat {
        llm,
        printer: Printer::new()?,
        args,
    };
    let is_conversation = args.prompt.is_none() && std::io::stdin().is_terminal();
    let result = match is_conversation {
        true => chat.converse(),
        false => chat.answer_once(),
    };
    match result {
        Err(error) if is_broken_pipe(&error) => Ok(ExitCode::SUCCESS),
        result => result,
    }
}

struct Chat<'a> {
    llm: Llm,
    printer: Printer,
    args: &'a ChatArgs,
}

impl Chat<'_> {
    fn answer_once(&self) -> anyhow::Result<ExitCode> {
        let prompt = prompt_or_input(self.args.prompt.as_deref())?;
        let mut messages = self.opening();
        messages.push(ChatMessage::text(Role::User, prompt));
        Ok(match self.answer(&messages)? {
            Outcome::Complete(_) => ExitCode::SUCCESS,
            Outcome::Interrupted(_) => ExitCode::from(EXIT_INTERRUPTED),
        })
    }

    fn converse(&self) -> anyhow::Result<ExitCode> {
        let mut editor = DefaultEditor::new()?;
        let mut messages = self.opening();
        println!("{}. {HELP}.", self.llm.info().name);
        loop {
            match editor.readline("> ") {
                Ok(line) => match line.trim() {
                    "" => {}
                    "/exit" | "/quit" => break,
                    "/reset" => messages = self.opening(),
                    "/help" => println!("{HELP}"),
                    text => {
                        // History is a convenience; without it the conversation goes on.
                        let _ = editor.add_history_entry(text);
                        self.take_turn(text, &mut messages)?;
                    }
                },
                Err(ReadlineError::Interrupted) => {}
                Err(ReadlineError::Eof) => break,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(ExitCode::SUCCESS)
    }

    /// A message that is refused (too long for the context) leaves the conversation as it was.
    fn take_turn(&self, text: &str, messages: &mut Vec<ChatMessage>) -> anyhow::Result<()> {
        messages.push(ChatMessage::text(Role::User, text));
        match self.answer(messages) {
            Ok(Outcome::Complete(answer)) => {
                messages.push(ChatMessage::text(Role::Assistant, answer));
            }
            Ok(Outcome::Interrupted(answer)) => {
                println!();
                messages.push(ChatMessage::text(Role::Assistant, answer));
            }
            Err(error) if is_broken_pipe(&error) => return Err(error),
            Err(error) => {
                messages.pop();
                eprintln!("{error:#}");
            }
        }
        Ok(())
    }

    fn opening(&self) -> Vec<ChatMessage> {
        let system = self.args.system.as_deref();
        let message = |text| ChatMessage::text(Role::System, text);
        system.map(message).into_iter().collect()
    }

    fn answer(&self, messages: &[ChatMessage]) -> anyhow::Result<Outcome> {
        let request = ChatRequest {
            messages: messages.to_vec(),
            options: self.args.sampling.options(),
            ..ChatRequest::default()
        };
        self.printer.print(self.llm.chat(request)?)
    }
}
