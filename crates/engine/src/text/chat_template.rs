//! Messages to prompt text and tokens; content never becomes control tokens.
//!
//! It decides nothing about which template a model uses, and adds no beginning-of-sequence token of its own: templates
//! write it where they want it.

use std::io;
use std::time::SystemTime;

use millpond_scheduler::TokenId;
use minijinja::{Environment, ErrorKind, Value};

use super::TextError;
use super::tokenizer::Tokenizer;
use crate::llm::ChatRequest;

mod calendar;
mod conversation;
mod environment;
mod marks;
mod python_json;
#[cfg(test)]
mod tests;

use conversation::Variables;
use environment::Refusal;
use marks::Marks;

const PLAIN: &str = "\
{%- for message in messages -%}
{{ message.role }}: {{ message.content }}
{% endfor -%}
{%- if add_generation_prompt -%}
assistant: {% endif -%}";

/// The environment's only template.
const NAME: &str = "chat";

/// Enough for a body of 8 MiB through any template that looks at each message a bounded number of times; bounds time
/// to about a second and memory to 256 MiB.
const MAX_FUEL: u64 = 4_000_000;

/// Nested calls of macros and loops; the deepest known template needs four.
const MAX_RECURSION: usize = 64;

/// A conversation is shorter than a body is.
const MAX_RENDERED_BYTES: usize = 16 << 20;

/// A model's chat template, compiled.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    source_marks: Marks,
    ends: SpelledEnds,
    tokenizer: Tokenizer,
}

/// What the template may ask for as `bos_token` and `eos_token`.
#[derive(Clone, Debug, Default)]
struct SpelledEnds {
    bos: Option<String>,
    eos: Option<String>,
}

impl ChatTemplate {
    /// Compiles a template of the model that `tokenizer` belongs to.
    ///
    /// # Errors
    /// A template that is not valid, or is nested too deeply.
    pub fn new(source: &str, tokenizer: &Tokenizer) -> Result<Self, TextError> {
        let spelled = |token: Option<TokenId>| {
            let bytes = tokenizer.token_bytes(token?)?;
            Some(String::from_utf8_lossy(bytes).into_owned())
        };
        let ends = SpelledEnds {
            bos: spelled(tokenizer.bos()),
            eos: spelled(tokenizer.eos()),
        };
        Self::compile(source, ends, tokenizer.clone())
    }

    /// The mock model's template: who speaks, a colon and what is said, a line each.
    pub fn plain(tokenizer: &Tokenizer) -> Result<Self, TextError> {
        Self::new(PLAIN, tokenizer)
    }

    fn compile(source: &str, ends: SpelledEnds, tokenizer: Tokenizer) -> Result<Self, TextError> {
        let mut environment = environment::new(MAX_FUEL, MAX_RECURSION);
        environment
            .add_template_owned(NAME, environment::without_generation_tags(source))
            .map_err(|error| TextError::TemplateSyntax(error.to_string()))?;
        let mut source_marks = Marks::default();
        source_marks.note(source);
        Ok(ChatTemplate {
            environment,
            source_marks,
            ends,
            tokenizer,
        })
    }

    /// Renders a conversation now, in UTC, which only templates that print the date notice.
    ///
    /// # Errors
    /// As `render_at`.
    pub fn render(&self, request: &ChatRequest) -> Result<Rendered, TextError> {
        self.render_at(request, SystemTime::now())
    }

    /// Renders a conversation at a point in time. Special tokens that any string of the request spells out will be text
    /// when the result is encoded.
    ///
    /// # Errors
    /// The template's own refusal, in its words; its failure on this conversation; its use of too much work or memory.
    pub fn render_at(&self, request: &ChatRequest, now: SystemTime) -> Result<Rendered, TextError> {
        let mut marks = self.source_marks;
        marks.note_request(request);
        let breaker = marks.pick().ok_or(TextError::NoMarkerLeft)?;
        let end = marks.pick().ok_or(TextError::NoMarkerLeft)?;
        let variables = Variables {
            request,
            bos: self.ends.bos.as_deref(),
            eos: self.ends.eos.as_deref(),
            specials: self.tokenizer.special_spellings(),
            breaker,
            end,
            now,
        };
        let mut broken_text = self.run(variables.to_value()?)?;
        if request.continue_final_message {
            cut_after_final_message(&mut broken_text, end)?;
        }
        Ok(Rendered {
            broken_text,
            breaker,
        })
    }

    fn run(&self, variables: Value) -> Result<String, TextError> {
        let template = self
            .environment
            .get_template(NAME)
            .map_err(|error| TextError::TemplateFailed(error.to_string()))?;
        let mut output = BoundedOutput::default();
        template
            .render_captured_to(variables, &mut output)
            .map_err(|error| failure(&error))?;
        String::from_utf8(output.bytes)
            .map_err(|error| TextError::TemplateFailed(error.to_string()))
    }
}

/// A conversation as the model reads it, which still knows what came from its content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rendered {
    /// With a breaker inside every special token that content spelled out.
    broken_text: String,
    breaker: char,
}

impl Rendered {
    /// The prompt's text.
    pub fn text(&self) -> String {
        self.broken_text.replace(self.breaker, "")
    }

    /// The prompt's tokens: the template's special tokens are parsed, those in content are text.
    ///
    /// # Errors
    /// As `Tokenizer::encode`.
    pub fn encode(&self, tokenizer: &Tokenizer) -> Result<Vec<TokenId>, TextError> {
        tokenizer.encode_broken(&self.broken_text, self.breaker)
    }
}

/// Cuts what follows the final message: its end is marked by `end` and a space, of which a template that trims messages
/// takes the space off; then white space before it goes too.
fn cut_after_final_message(text: &mut String, end: char) -> Result<(), TextError> {
    let at = text.rfind(end).ok_or(TextError::CannotContinue(
        "the chat template does not show it",
    ))?;
    let keeps_spaces = text[at + end.len_utf8()..].starts_with(' ');
    text.truncate(at);
    if !keeps_spaces {
        text.truncate(text.trim_end().len());
    }
    if text.contains(end) {
        return Err(TextError::CannotContinue(
            "the chat template shows it more than once",
        ));
    }
    Ok(())
}

/// Collects at most so many bytes.
#[derive(Default)]
struct BoundedOutput {
    bytes: Vec<u8>,
}

impl io::Write for BoundedOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + bytes.len() > MAX_RENDERED_BYTES {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn failure(error: &minijinja::Error) -> TextError {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = cause {
        if let Some(Refusal(message)) = error.downcast_ref() {
            return TextError::TemplateRefused(message.clone());
        }
        cause = error.source();
    }
    match error.kind() {
        ErrorKind::OutOfFuel => TextError::TemplateLimit { limit: "work" },
        ErrorKind::WriteFailure => TextError::TemplateLimit { limit: "output" },
        _ => TextError::TemplateFailed(error.to_string()),
    }
}
