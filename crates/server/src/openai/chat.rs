//! `POST /v1/chat/completions`: wire types and their conversion.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use millpond_engine::llm::{ChatRequest, ChoiceText, Generation, GenerationEvent};
use millpond_scheduler::{FinishReason, PositionLogprobs, TokenId};
use serde::Serialize;
use serde_json::{Map, Value};

use super::answer::{Answer, deliver};
use super::border::{Notes, settle_known};
use super::envelope::{Extras, Stamp, chunk_usage, closing_extras};
use super::errors::{ApiError, ApiResult};
use super::fields::Fields;
use super::finish::{StopReason, finish_reason};
use super::logprobs::{ChatLogprobs, PromptLogprobs, Spelling};
use super::messages::take_messages;
use super::options::{Renames, refuse, seed_to_wire, take_options};
use super::shape::{AnswerShape, refuse_streamed_prompt_logprobs, take_shape};
use super::submit::{Submission, observe_options};
use super::tally::Tally;
use crate::app::App;
use crate::http::body::JsonBody;
use crate::http::limits::MAX_FREE_JSON_BYTES;
use crate::http::request_name::RequestName;
use crate::http::sse::write_event;
use crate::running::PromptEvent;

/// Template variables that are ours to set.
const RESERVED_KWARGS: &[&str] = &[
    "chat_template",
    "tokenize",
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "return_dict",
];

/// Most template variables of one request.
const MAX_KWARGS: usize = 64;

/// Answers a conversation.
pub async fn create(
    State(app): State<Arc<App>>,
    name: RequestName,
    body: JsonBody,
) -> ApiResult<Response> {
    let max_waiting = app.limits.max_stream_buffer_bytes;
    let submission = Submission::enter(app, name, "chatcmpl");
    let id = Arc::clone(&submission.id);
    let submit = move |app: &App| {
        let ChatAsk {
            request,
            shape,
            renames,
        } = ChatAsk::parse(&body, app)?;
        observe_options(app, &request.options);
        let generation = app
            .llm
            .chat(request)
            .map_err(|error| refuse(error, &renames))?;
        let spelling = Spelling::new(app.llm.clone());
        let answer = ChatAnswer::new(app.stamp(id), shape, &generation, spelling);
        Ok((vec![generation], answer))
    };
    let (running, answer) = submission.run(submit).await?;
    deliver(running, Answer::Chat(answer), max_waiting).await
}

/// A request for a chat, in the engine's terms.
pub struct ChatAsk {
    /// What to continue.
    pub request: ChatRequest,
    /// How the answer is to look.
    pub shape: AnswerShape,
    /// How the request spelled fields that the engine calls otherwise.
    pub renames: Renames,
}

impl ChatAsk {
    /// Reads a body.
    pub fn parse(body: &JsonBody, app: &App) -> ApiResult<Self> {
        ChatAsk::parse_with(body, app, &[])
    }

    /// Reads a body that may have fields besides, which the caller has taken.
    pub fn parse_with(body: &JsonBody, app: &App, taken: &[&str]) -> ApiResult<Self> {
        let mut fields = Fields::of_body(body.bytes(), app.limits.max_json_depth)?;
        for name in taken {
            fields.take_raw(name);
        }
        let mut notes = Notes::new(app.unknown_fields);
        app.names
            .check(fields.take::<String>("model")?.as_deref())?;
        settle_known(&mut fields, &mut notes)?;
        refuse_chat_fields(&mut fields)?;
        let limits = app.llm.limits();
        let mut renames = Renames::new();
        let mut options = take_options(&mut fields, limits)?;
        if let Some(max_tokens) = fields.take("max_completion_tokens")? {
            options.max_tokens = Some(max_tokens);
            renames.push(("max_tokens", "max_completion_tokens"));
        }
        options.logprobs = take_logprobs(&mut fields)?;
        renames.push(("logprobs", "top_logprobs"));
        let mut shape = take_shape(&mut fields)?;
        shape.logprobs = options.logprobs;
        refuse_streamed_prompt_logprobs(&shape, options.prompt_logprobs)?;
        let request = ChatRequest {
            messages: take_messages(&mut fields, limits.max_messages, &mut notes)?,
            tools: Vec::new(),
            documents: take_documents(&mut fields)?,
            template_kwargs: take_kwargs(&mut fields)?,
            add_generation_prompt: fields.take("add_generation_prompt")?,
            continue_final_message: fields.take("continue_final_message")?.unwrap_or(false),
            options,
        };
        notes.finish(fields)?;
        shape.warnings = notes.into_warnings();
        Ok(ChatAsk {
            request,
            shape,
            renames,
        })
    }
}

/// Fields of completions that change what is returned; a chat has no way to honour them.
fn refuse_chat_fields(fields: &mut Fields) -> ApiResult<()> {
    for name in ["echo", "add_special_tokens"] {
        if fields.take::<bool>(name)?.unwrap_or(false) {
            return Err(ApiError::invalid(name, "is not supported for chats"));
        }
    }
    Ok(())
}

/// `logprobs` switches them on, `top_logprobs` counts the alternatives.
fn take_logprobs(fields: &mut Fields) -> ApiResult<Option<u64>> {
    let wanted: bool = fields.take("logprobs")?.unwrap_or(false);
    match (wanted, fields.take::<u64>("top_logprobs")?) {
        (true, num_top) => Ok(Some(num_top.unwrap_or(0))),
        (false, None | Some(0)) => Ok(None),
        (false, Some(_)) => Err(ApiError::invalid(
            "top_logprobs",
            "is only allowed when logprobs is true",
        )),
    }
}

fn take_documents(fields: &mut Fields) -> ApiResult<Vec<Value>> {
    let documents = fields.take_free("documents", MAX_FREE_JSON_BYTES)?;
    Ok(documents.unwrap_or_default())
}

fn take_kwargs(fields: &mut Fields) -> ApiResult<Map<String, Value>> {
    const NAME: &str = "chat_template_kwargs";
    let kwargs: Map<String, Value> = fields
        .take_free(NAME, MAX_FREE_JSON_BYTES)?
        .unwrap_or_default();
    if kwargs.len() > MAX_KWARGS {
        let message = format!("at most {MAX_KWARGS} variables allowed");
        return Err(ApiError::invalid(NAME, message));
    }
    match RESERVED_KWARGS
        .iter()
        .find(|name| kwargs.contains_key(**name))
    {
        Some(name) => Err(ApiError::invalid(
            format!("{NAME}.{name}"),
            "may not be set here",
        )),
        None => Ok(kwargs),
    }
}

/// The answer to a chat in the making.
pub struct ChatAnswer {
    /// How it is to look.
    pub shape: AnswerShape,
    stamp: Stamp,
    spelling: Spelling,
    seed: u64,
    prompt_tokens: Arc<[TokenId]>,
    prompt_logprobs: Option<PromptLogprobs>,
    choices: Vec<ChatChoice>,
    tally: Tally,
    begun: bool,
}

#[derive(Debug, Serialize)]
struct ChatChoice {
    index: u32,
    message: ChatAnswerMessage,
    logprobs: Option<ChatLogprobs>,
    finish_reason: Option<&'static str>,
    stop_reason: Option<StopReason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<TokenId>>,
}

#[derive(Debug, Serialize)]
struct ChatAnswerMessage {
    role: &'static str,
    content: String,
    refusal: Option<()>,
}

#[derive(Debug, Serialize)]
struct ChatChunkChoice<'a> {
    index: u32,
    delta: ChatDelta<'a>,
    logprobs: Option<ChatLogprobs>,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stop_reason: Option<StopReason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<&'a [TokenId]>,
}

#[derive(Debug, Default, Serialize)]
struct ChatDelta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<&'a str>,
}

const ASSISTANT: &str = "assistant";
const WHOLE: &str = "chat.completion";
const CHUNK: &str = "chat.completion.chunk";

impl ChatAnswer {
    /// An answer without any text yet.
    pub fn new(
        stamp: Stamp,
        shape: AnswerShape,
        generation: &Generation,
        spelling: Spelling,
    ) -> Self {
        let mut tally = Tally::default();
        tally.add_prompt(generation.prompt.tokens.len());
        let choice = |index| ChatChoice {
            index,
            message: ChatAnswerMessage {
                role: ASSISTANT,
                content: String::new(),
                refusal: None,
            },
            logprobs: shape.logprobs.map(|_| ChatLogprobs::default()),
            finish_reason: None,
            stop_reason: None,
            token_ids: shape.token_ids.then(Vec::new),
        };
        ChatAnswer {
            choices: (0..generation.num_choices).map(choice).collect(),
            seed: generation.seed,
            prompt_tokens: Arc::clone(&generation.prompt.tokens),
            prompt_logprobs: None,
            begun: false,
            shape,
            stamp,
            spelling,
            tally,
        }
    }

    /// Adds an event to the whole answer.
    pub fn collect(&mut self, event: PromptEvent) {
        match event.event {
            GenerationEvent::PromptLogprobs(positions) => {
                self.prompt_logprobs = Some(PromptLogprobs::new(&positions, &self.spelling));
            }
            GenerationEvent::Delta(delta) => self.append(&delta),
            GenerationEvent::Finished {
                last,
                reason,
                matched_stop,
                summary,
            } => {
                self.append(&last);
                self.tally.finish(last.choice, &summary);
                if let Some(choice) = self.choices.get_mut(last.choice as usize) {
                    choice.finish_reason = Some(finish_reason(&reason));
                    choice.stop_reason = StopReason::of(&reason, matched_stop);
                }
            }
        }
    }

    fn append(&mut self, delta: &ChoiceText) {
        self.tally.add_output(delta.tokens.len());
        let Some(choice) = self.choices.get_mut(delta.choice as usize) else {
            return;
        };
        choice.message.content.push_str(&delta.text);
        if let Some(logprobs) = &mut choice.logprobs {
            logprobs.extend(&delta.logprobs, &self.spelling);
        }
        if let Some(token_ids) = &mut choice.token_ids {
            token_ids.extend_from_slice(&delta.tokens);
        }
    }

    /// The whole answer as JSON.
    pub fn whole(&self) -> Vec<u8> {
        let extras = Extras {
            usage: Some(Some(self.tally.usage())),
            timings: self.tally.timings(),
            prompt_logprobs: self.prompt_logprobs.as_ref(),
            ..self.opening_extras()
        };
        let envelope = self.stamp.envelope(WHOLE, &self.choices, extras);
        serde_json::to_vec(&envelope).expect("an answer is plain data with text keys")
    }

    /// Appends the chunks that an event causes.
    pub fn write_chunks(&mut self, event: PromptEvent, out: &mut Vec<u8>) {
        if !self.begun {
            self.begun = true;
            self.write_opening(out);
        }
        match event.event {
            // Refused together with `stream`.
            GenerationEvent::PromptLogprobs(_) => {}
            GenerationEvent::Delta(delta) => self.write_delta(&delta, out),
            GenerationEvent::Finished {
                last,
                reason,
                matched_stop,
                summary,
            } => {
                self.write_delta(&last, out);
                self.tally.finish(last.choice, &summary);
                self.write_finish(last.choice, &reason, matched_stop, out);
            }
        }
    }

    /// Every choice opens with its role; the first chunk carries what is known before any token.
    fn write_opening(&self, out: &mut Vec<u8>) {
        for choice in &self.choices {
            let delta = ChatDelta {
                role: Some(ASSISTANT),
                content: Some(""),
            };
            let extras = match choice.index {
                0 => self.opening_extras(),
                _ => Extras::default(),
            };
            self.write_chunk(chunk_choice(choice.index, delta), extras, out);
        }
    }

    fn opening_extras(&self) -> Extras<'_> {
        Extras {
            seed: Some(seed_to_wire(self.seed)),
            prompt_token_ids: self.shape.token_ids.then_some(&*self.prompt_tokens),
            warnings: &self.shape.warnings,
            ..Extras::default()
        }
    }

    /// Tokens without text make no chunk unless something else about them was asked for.
    fn write_delta(&mut self, delta: &ChoiceText, out: &mut Vec<u8>) {
        self.tally.add_output(delta.tokens.len());
        let wants_tokens = self.shape.token_ids || self.shape.logprobs.is_some();
        if delta.text.is_empty() && (delta.tokens.is_empty() || !wants_tokens) {
            return;
        }
        let content = ChatDelta {
            role: None,
            content: Some(&delta.text),
        };
        let choice = ChatChunkChoice {
            logprobs: self.delta_logprobs(&delta.logprobs),
            token_ids: self.shape.token_ids.then_some(&*delta.tokens),
            ..chunk_choice(delta.choice, content)
        };
        self.write_chunk(choice, Extras::default(), out);
    }

    fn delta_logprobs(&self, positions: &[PositionLogprobs]) -> Option<ChatLogprobs> {
        self.shape.logprobs.map(|_| {
            let mut logprobs = ChatLogprobs::default();
            logprobs.extend(positions, &self.spelling);
            logprobs
        })
    }

    fn write_finish(
        &self,
        choice: u32,
        reason: &FinishReason,
        matched_stop: Option<String>,
        out: &mut Vec<u8>,
    ) {
        let choice = ChatChunkChoice {
            finish_reason: Some(finish_reason(reason)),
            stop_reason: StopReason::of(reason, matched_stop),
            ..chunk_choice(choice, ChatDelta::default())
        };
        let extras = Extras {
            timings: self.tally.timings(),
            ..Extras::default()
        };
        self.write_chunk(choice, extras, out);
    }

    fn write_chunk(&self, choice: ChatChunkChoice, extras: Extras, out: &mut Vec<u8>) {
        let extras = Extras {
            usage: chunk_usage(&self.shape, &self.tally),
            ..extras
        };
        write_event(&self.stamp.envelope(CHUNK, &[choice], extras), out);
    }

    /// Appends the usage, when asked for.
    pub fn write_end(&self, out: &mut Vec<u8>) {
        if let Some(extras) = closing_extras(&self.shape, &self.tally) {
            let choices: &[ChatChunkChoice] = &[];
            write_event(&self.stamp.envelope(CHUNK, choices, extras), out);
        }
    }
}

fn chunk_choice(index: u32, delta: ChatDelta) -> ChatChunkChoice {
    ChatChunkChoice {
        index,
        delta,
        logprobs: None,
        finish_reason: None,
        stop_reason: None,
        token_ids: None,
    }
}
