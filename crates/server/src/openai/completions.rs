//! `POST /v1/completions`: wire types and their conversion.
//!
//! Echo is made here: the prompt's text goes before each choice, its tokens before the choice's tokens.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use millpond_engine::llm::{
    ChoiceText, CompletionRequest, Generation, GenerationEvent, GenerationOptions, Prompt,
    PromptInfo,
};
use millpond_scheduler::{FinishReason, PositionLogprobs, TokenId};
use serde::Serialize;

use super::answer::{Answer, deliver};
use super::border::{Notes, settle_known};
use super::envelope::{Extras, Stamp, chunk_usage, closing_extras};
use super::errors::{ApiError, ApiResult};
use super::fields::Fields;
use super::finish::{StopReason, finish_reason};
use super::logprobs::{LegacyLogprobs, PromptLogprobs, Spelling, TextOffset};
use super::options::{refuse, seed_to_wire, take_options};
use super::prompt::{PromptBounds, parse_prompts};
use super::shape::{AnswerShape, refuse_streamed_prompt_logprobs, take_shape};
use super::submit::{Submission, observe_options};
use super::tally::Tally;
use crate::app::App;
use crate::http::body::JsonBody;
use crate::http::request_name::RequestName;
use crate::http::sse::write_event;
use crate::running::PromptEvent;

/// What OpenAI's API generates when `max_tokens` is not given.
const DEFAULT_MAX_TOKENS: u64 = 16;

const OBJECT: &str = "text_completion";

/// Continues one or several prompts.
pub async fn create(
    State(app): State<Arc<App>>,
    name: RequestName,
    body: JsonBody,
) -> ApiResult<Response> {
    let max_waiting = app.limits.max_stream_buffer_bytes;
    let submission = Submission::enter(app, name, "cmpl");
    let id = Arc::clone(&submission.id);
    let submit = move |app: &App| {
        let ask = CompletionAsk::parse(&body, app)?;
        observe_options(app, &ask.options);
        let generations = ask.submit(app)?;
        let spelling = Spelling::new(app.llm.clone());
        let answer = CompletionAnswer::new(app.stamp(id), ask.shape, &generations, spelling);
        Ok((generations, answer))
    };
    let (running, answer) = submission.run(submit).await?;
    deliver(running, Answer::Completion(answer), max_waiting).await
}

/// A request for completions, in the engine's terms.
pub struct CompletionAsk {
    /// What to continue.
    pub prompts: Vec<Prompt>,
    /// How to generate, the same for every prompt.
    pub options: GenerationOptions,
    /// How the answer is to look.
    pub shape: CompletionShape,
}

/// How the answer to completions is to look.
#[derive(Clone, Debug)]
pub struct CompletionShape {
    /// What all answers share.
    pub common: AnswerShape,
    /// What is returned besides or instead of new text.
    pub echo: Echo,
    /// Log-probabilities of the prompt were asked for by themselves.
    pub prompt_logprobs: bool,
}

/// What is returned besides or instead of new text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Echo {
    /// New text only.
    None,
    /// The prompt, then new text.
    Prompt,
    /// The prompt alone (`max_tokens` 0): one token is generated and dropped.
    PromptOnly,
}

impl CompletionAsk {
    /// Reads a body.
    pub fn parse(body: &JsonBody, app: &App) -> ApiResult<Self> {
        let mut fields = Fields::of_body(body.bytes(), app.limits.max_json_depth)?;
        let mut notes = Notes::new(app.unknown_fields);
        app.names
            .check(fields.take::<String>("model")?.as_deref())?;
        settle_known(&mut fields, &mut notes)?;
        let prompts = take_prompts(&mut fields, app)?;
        let mut options = take_options(&mut fields, app.llm.limits())?;
        options.max_tokens = options.max_tokens.or(Some(DEFAULT_MAX_TOKENS));
        options.logprobs = fields.take("logprobs")?;
        let mut common = take_shape(&mut fields)?;
        common.logprobs = options.logprobs;
        refuse_streamed_prompt_logprobs(&common, options.prompt_logprobs)?;
        let prompt_logprobs = options.prompt_logprobs.is_some();
        let echo = take_echo(&mut fields, &mut options)?;
        notes.finish(fields)?;
        common.warnings = notes.into_warnings();
        Ok(CompletionAsk {
            prompts,
            options,
            shape: CompletionShape {
                common,
                echo,
                prompt_logprobs,
            },
        })
    }

    /// Submits every prompt. A seed that was not given is minted once and shared, so that the one in the
    /// answer reproduces all of it.
    fn submit(&self, app: &App) -> ApiResult<Vec<Generation>> {
        let mut options = self.options.clone();
        let mut generations = Vec::with_capacity(self.prompts.len());
        for prompt in &self.prompts {
            let request = CompletionRequest {
                prompt: prompt.clone(),
                echo: false,
                options: options.clone(),
            };
            let generation = app
                .llm
                .complete(request)
                .map_err(|error| refuse(error, &Vec::new()))?;
            options.seed = Some(generation.seed);
            generations.push(generation);
        }
        Ok(generations)
    }
}

/// Prompts as texts or tokens; texts are encoded here when special tokens are not to be added.
pub fn take_prompts(fields: &mut Fields, app: &App) -> ApiResult<Vec<Prompt>> {
    let add_special_tokens = fields.take("add_special_tokens")?.unwrap_or(true);
    let value = fields
        .take_raw("prompt")
        .ok_or_else(|| ApiError::invalid("prompt", "is required"))?;
    let bounds = PromptBounds {
        max_prompts: app.limits.max_prompts,
        max_context: app.llm.info().max_context as usize,
    };
    let prompts = parse_prompts(value, bounds)?;
    let encode = |prompt| match prompt {
        Prompt::Text(text) if !add_special_tokens => {
            let tokens = app.llm.tokenize(&text, false)?;
            Ok(Prompt::Tokens(tokens))
        }
        Prompt::Text(_) | Prompt::Tokens(_) => Ok(prompt),
    };
    prompts.into_iter().map(encode).collect()
}

/// Legacy log-probabilities of an echoed prompt are prompt log-probabilities to the engine.
fn take_echo(fields: &mut Fields, options: &mut GenerationOptions) -> ApiResult<Echo> {
    if !fields.take("echo")?.unwrap_or(false) {
        return Ok(Echo::None);
    }
    options.prompt_logprobs = options.prompt_logprobs.max(options.logprobs);
    if options.max_tokens == Some(0) {
        options.max_tokens = Some(1);
        return Ok(Echo::PromptOnly);
    }
    Ok(Echo::Prompt)
}

/// The answer to completions in the making: events add to choices; a stream takes away what was added.
pub struct CompletionAnswer {
    /// How it is to look, in general.
    pub shape: AnswerShape,
    echo: Echo,
    wants_prompt_logprobs: bool,
    stamp: Stamp,
    spelling: Spelling,
    seed: Option<u64>,
    prompts: Vec<PromptPart>,
    tally: Tally,
    opened: bool,
}

/// One prompt with its choices.
struct PromptPart {
    info: PromptInfo,
    logprobs: Vec<PositionLogprobs>,
    begun: bool,
    choices: Vec<ChoicePart>,
}

/// What was added to one choice, and where its text stands.
struct ChoicePart {
    wire: CompletionChoice,
    offset: TextOffset,
}

#[derive(Debug, Serialize)]
struct CompletionChoice {
    index: usize,
    text: String,
    logprobs: Option<LegacyLogprobs>,
    finish_reason: Option<&'static str>,
    stop_reason: Option<StopReason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<TokenId>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<Arc<[TokenId]>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<PromptLogprobs>,
}

impl CompletionChoice {
    fn empty(index: usize, shape: &AnswerShape) -> Self {
        CompletionChoice {
            index,
            text: String::new(),
            logprobs: shape.logprobs.map(|_| LegacyLogprobs::default()),
            finish_reason: None,
            stop_reason: None,
            token_ids: shape.token_ids.then(Vec::new),
            prompt_token_ids: None,
            prompt_logprobs: None,
        }
    }

    /// Is there anything to tell? Tokens without text count when something about them was asked for.
    fn is_empty(&self) -> bool {
        self.text.is_empty()
            && self.finish_reason.is_none()
            && self.logprobs.as_ref().is_none_or(LegacyLogprobs::is_empty)
            && self.token_ids.as_ref().is_none_or(Vec::is_empty)
    }
}

impl CompletionAnswer {
    /// An answer without any text yet. Choices are numbered through all prompts.
    pub fn new(
        stamp: Stamp,
        shape: CompletionShape,
        generations: &[Generation],
        spelling: Spelling,
    ) -> Self {
        let mut tally = Tally::default();
        let mut prompts = Vec::with_capacity(generations.len());
        let mut index = 0;
        for generation in generations {
            tally.add_prompt(generation.prompt.tokens.len());
            let next = index + generation.num_choices as usize;
            let choice = |index| ChoicePart {
                wire: CompletionChoice::empty(index, &shape.common),
                offset: TextOffset::default(),
            };
            prompts.push(PromptPart {
                info: generation.prompt.clone(),
                logprobs: Vec::new(),
                begun: false,
                choices: (index..next).map(choice).collect(),
            });
            index = next;
        }
        CompletionAnswer {
            shape: shape.common,
            echo: shape.echo,
            wants_prompt_logprobs: shape.prompt_logprobs,
            seed: generations.first().map(|generation| generation.seed),
            opened: false,
            stamp,
            spelling,
            prompts,
            tally,
        }
    }

    /// Adds an event to its prompt's choices.
    pub fn collect(&mut self, event: PromptEvent) {
        let PromptEvent { prompt, event } = event;
        match event {
            GenerationEvent::PromptLogprobs(positions) => {
                if let Some(part) = self.prompts.get_mut(prompt) {
                    part.logprobs = positions;
                }
            }
            GenerationEvent::Delta(delta) => {
                self.begin(prompt);
                self.append(prompt, &delta);
            }
            GenerationEvent::Finished {
                last,
                reason,
                matched_stop,
                summary,
            } => {
                self.begin(prompt);
                self.append(prompt, &last);
                self.tally.finish(last.choice, &summary);
                self.finish(prompt, last.choice, &reason, matched_stop);
            }
        }
    }

    /// Before its first token every choice of a prompt gets what was asked for about the prompt.
    fn begin(&mut self, prompt: usize) {
        let Some(part) = self.prompts.get_mut(prompt) else {
            return;
        };
        if std::mem::replace(&mut part.begun, true) {
            return;
        }
        for choice in &mut part.choices {
            if self.echo != Echo::None {
                choice.echo(
                    &part.info,
                    &part.logprobs,
                    self.shape.logprobs,
                    &self.spelling,
                );
            }
            if self.shape.token_ids {
                choice.wire.prompt_token_ids = Some(Arc::clone(&part.info.tokens));
            }
            if self.wants_prompt_logprobs {
                let logprobs = PromptLogprobs::new(&part.logprobs, &self.spelling);
                choice.wire.prompt_logprobs = Some(logprobs);
            }
        }
    }

    fn append(&mut self, prompt: usize, delta: &ChoiceText) {
        if self.echo == Echo::PromptOnly {
            return;
        }
        self.tally.add_output(delta.tokens.len());
        if let Some(choice) = self.choice_mut(prompt, delta.choice) {
            choice.wire.text.push_str(&delta.text);
            if let Some(token_ids) = &mut choice.wire.token_ids {
                token_ids.extend_from_slice(&delta.tokens);
            }
        }
        let num_top = self.shape.logprobs.unwrap_or(0) as usize;
        let spelling = self.spelling.clone();
        if let Some(ChoicePart { wire, offset }) = self.choice_mut(prompt, delta.choice)
            && let Some(logprobs) = &mut wire.logprobs
        {
            logprobs.extend(&delta.logprobs, num_top, offset, &spelling);
        }
    }

    fn finish(
        &mut self,
        prompt: usize,
        choice: u32,
        reason: &FinishReason,
        matched_stop: Option<String>,
    ) {
        // The only token of a prompt-only request was dropped; its own end says nothing.
        let reason = match self.echo {
            Echo::PromptOnly => &FinishReason::Length,
            Echo::None | Echo::Prompt => reason,
        };
        if let Some(choice) = self.choice_mut(prompt, choice) {
            choice.wire.finish_reason = Some(finish_reason(reason));
            choice.wire.stop_reason = StopReason::of(reason, matched_stop);
        }
    }

    fn choice_mut(&mut self, prompt: usize, choice: u32) -> Option<&mut ChoicePart> {
        let part = self.prompts.get_mut(prompt)?;
        part.choices.get_mut(choice as usize)
    }

    /// The whole answer as JSON.
    pub fn whole(&self) -> Vec<u8> {
        let choices: Vec<&CompletionChoice> = self
            .prompts
            .iter()
            .flat_map(|prompt| prompt.choices.iter().map(|choice| &choice.wire))
            .collect();
        let extras = Extras {
            usage: Some(Some(self.tally.usage())),
            timings: self.tally.timings(),
            ..self.opening_extras()
        };
        let envelope = self.stamp.envelope(OBJECT, &choices, extras);
        serde_json::to_vec(&envelope).expect("an answer is plain data with text keys")
    }

    /// Appends the chunks that an event causes: whatever it added to its prompt's choices.
    pub fn write_chunks(&mut self, event: PromptEvent, out: &mut Vec<u8>) {
        let prompt = event.prompt;
        self.collect(event);
        for choice in self.take_added(prompt) {
            let opening = match std::mem::replace(&mut self.opened, true) {
                true => Extras::default(),
                false => self.opening_extras(),
            };
            let finished = choice.finish_reason.is_some();
            let extras = Extras {
                usage: chunk_usage(&self.shape, &self.tally),
                timings: self.tally.timings().filter(|_| finished),
                ..opening
            };
            write_event(&self.stamp.envelope(OBJECT, &[choice], extras), out);
        }
    }

    fn take_added(&mut self, prompt: usize) -> Vec<CompletionChoice> {
        let Some(part) = self.prompts.get_mut(prompt) else {
            return Vec::new();
        };
        let shape = &self.shape;
        let take = |choice: &mut ChoicePart| {
            let empty = CompletionChoice::empty(choice.wire.index, shape);
            std::mem::replace(&mut choice.wire, empty)
        };
        part.choices
            .iter_mut()
            .filter(|choice| !choice.wire.is_empty())
            .map(take)
            .collect()
    }

    fn opening_extras(&self) -> Extras<'_> {
        Extras {
            seed: self.seed.map(seed_to_wire),
            warnings: &self.shape.warnings,
            ..Extras::default()
        }
    }

    /// Appends the usage, when asked for.
    pub fn write_end(&self, out: &mut Vec<u8>) {
        if let Some(extras) = closing_extras(&self.shape, &self.tally) {
            let choices: &[CompletionChoice] = &[];
            write_event(&self.stamp.envelope(OBJECT, choices, extras), out);
        }
    }
}

impl ChoicePart {
    /// The prompt's text, and its tokens' log-probabilities when wanted: the first token has none.
    fn echo(
        &mut self,
        prompt: &PromptInfo,
        positions: &[PositionLogprobs],
        num_top: Option<u64>,
        spelling: &Spelling,
    ) {
        self.wire.text.push_str(&prompt.text);
        let (Some(logprobs), Some(first)) = (&mut self.wire.logprobs, prompt.tokens.first()) else {
            return;
        };
        let num_top = num_top.unwrap_or(0) as usize;
        logprobs.push_first(*first, &mut self.offset, spelling);
        logprobs.extend(positions, num_top, &mut self.offset, spelling);
    }
}
