//! `POST /tokenize` and `/detokenize`, in vLLM's shapes.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use millpond_scheduler::TokenId;
use serde::Serialize;

use super::border::Notes;
use super::chat::ChatAsk;
use super::errors::{ApiError, ApiResult};
use super::fields::Fields;
use super::submit::blocking;
use crate::app::App;
use crate::http::body::JsonBody;
use crate::http::limits::MAX_DETOKENIZED;

/// Answer of `/tokenize`.
#[derive(Debug, Serialize)]
pub struct Tokenized {
    count: usize,
    max_model_len: u32,
    tokens: Vec<TokenId>,
    token_strs: Option<Vec<String>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    warnings: Vec<String>,
}

/// Answer of `/detokenize`.
#[derive(Debug, Serialize)]
pub struct Detokenized {
    prompt: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    warnings: Vec<String>,
}

/// Encodes a text, or the prompt of a conversation.
pub async fn tokenize(State(app): State<Arc<App>>, body: JsonBody) -> ApiResult<Json<Tokenized>> {
    blocking(&app, move |app| tokenize_body(app, &body).map(Json)).await
}

fn tokenize_body(app: &App, body: &JsonBody) -> ApiResult<Tokenized> {
    let mut fields = Fields::of_body(body.bytes(), app.limits.max_json_depth)?;
    let wants_strings = fields.take("return_token_strs")?.unwrap_or(false);
    let is_chat = fields.take_raw("messages").is_some();
    let (tokens, warnings) = match is_chat {
        true => tokenize_chat(app, body)?,
        false => tokenize_prompt(app, fields)?,
    };
    let spell = |token: &TokenId| {
        let bytes = app.llm.token_bytes(*token);
        String::from_utf8_lossy(&bytes).into_owned()
    };
    Ok(Tokenized {
        count: tokens.len(),
        max_model_len: app.llm.info().max_context,
        token_strs: wants_strings.then(|| tokens.iter().map(spell).collect()),
        tokens,
        warnings,
    })
}

fn tokenize_prompt(app: &App, mut fields: Fields) -> ApiResult<(Vec<TokenId>, Vec<String>)> {
    let mut notes = Notes::new(app.unknown_fields);
    app.names
        .check(fields.take::<String>("model")?.as_deref())?;
    let add_special_tokens = fields.take("add_special_tokens")?.unwrap_or(true);
    let prompt: String = fields.require("prompt")?;
    notes.finish(fields)?;
    let tokens = app.llm.tokenize(&prompt, add_special_tokens)?;
    Ok((tokens, notes.into_warnings()))
}

/// A conversation is read like any other; `return_token_strs` is no field of chats and would be unknown there.
fn tokenize_chat(app: &App, body: &JsonBody) -> ApiResult<(Vec<TokenId>, Vec<String>)> {
    let ask = ChatAsk::parse_with(body, app, &["return_token_strs"])?;
    let prompt = app.llm.render_chat(&ask.request)?;
    Ok((prompt.tokens.to_vec(), ask.shape.warnings))
}

/// Decodes token ids.
pub async fn detokenize(
    State(app): State<Arc<App>>,
    body: JsonBody,
) -> ApiResult<Json<Detokenized>> {
    blocking(&app, move |app| detokenize_body(app, &body).map(Json)).await
}

fn detokenize_body(app: &App, body: &JsonBody) -> ApiResult<Detokenized> {
    let mut fields = Fields::of_body(body.bytes(), app.limits.max_json_depth)?;
    let mut notes = Notes::new(app.unknown_fields);
    app.names
        .check(fields.take::<String>("model")?.as_deref())?;
    let tokens = fields
        .take_list::<u64>("tokens", MAX_DETOKENIZED)?
        .ok_or_else(|| ApiError::invalid("tokens", "is required"))?;
    notes.finish(fields)?;
    Ok(Detokenized {
        prompt: app.llm.detokenize(&tokens)?,
        warnings: notes.into_warnings(),
    })
}
