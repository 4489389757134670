//! `POST /v1/chat/completions/render` and `/v1/completions/render`: the prompt as the model would read it,
//! without generation. Routers tokenize with these; shapes are vLLM's, with the text besides.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use millpond_engine::llm::{GenerationOptions, PromptInfo};
use millpond_scheduler::TokenId;
use serde::Serialize;
use uuid::Uuid;

use super::chat::ChatAsk;
use super::completions::CompletionAsk;
use super::errors::{ApiError, ApiResult};
use super::submit::blocking;
use crate::app::App;
use crate::http::body::JsonBody;

/// One prompt, rendered.
#[derive(Debug, Serialize)]
pub struct Rendered {
    request_id: String,
    model: Arc<str>,
    prompt: Arc<str>,
    token_ids: Arc<[TokenId]>,
    sampling_params: RenderedParams,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    warnings: Vec<String>,
}

/// The options that the prompt came with.
#[derive(Debug, Serialize)]
struct RenderedParams {
    n: u64,
    max_tokens: Option<u64>,
    min_tokens: u64,
    temperature: f64,
    top_p: f64,
    top_k: i64,
    min_p: f64,
    presence_penalty: f64,
    frequency_penalty: f64,
    repetition_penalty: f64,
    seed: Option<i64>,
    stop: Vec<String>,
    stop_token_ids: Vec<u64>,
    ignore_eos: bool,
    logprobs: Option<u64>,
    prompt_logprobs: Option<u64>,
}

/// The prompt of a conversation.
pub async fn chat(State(app): State<Arc<App>>, body: JsonBody) -> ApiResult<Json<Rendered>> {
    let render = move |app: &App| {
        let ask = ChatAsk::parse(&body, app)?;
        let prompt = app.llm.render_chat(&ask.request)?;
        let rendered = Rendered::new(app, "chatcmpl", prompt, &ask.request.options);
        Ok(Json(Rendered {
            warnings: ask.shape.warnings,
            ..rendered
        }))
    };
    blocking(&app, render).await
}

/// One or several raw prompts.
pub async fn completions(
    State(app): State<Arc<App>>,
    body: JsonBody,
) -> ApiResult<Json<Vec<Rendered>>> {
    let render = move |app: &App| {
        let ask = CompletionAsk::parse(&body, app)?;
        let rendered = |prompt| {
            let prompt = app.llm.render_prompt(prompt).map_err(ApiError::from)?;
            let rendered = Rendered::new(app, "cmpl", prompt, &ask.options);
            Ok(Rendered {
                warnings: ask.shape.common.warnings.clone(),
                ..rendered
            })
        };
        let rendered: ApiResult<_> = ask.prompts.iter().map(rendered).collect();
        rendered.map(Json)
    };
    blocking(&app, render).await
}

impl Rendered {
    fn new(app: &App, prefix: &str, prompt: PromptInfo, options: &GenerationOptions) -> Self {
        Rendered {
            request_id: format!("{prefix}-{}", Uuid::new_v4().simple()),
            model: Arc::clone(&app.names.served),
            prompt: prompt.text,
            token_ids: prompt.tokens,
            sampling_params: RenderedParams::of(options),
            warnings: Vec::new(),
        }
    }
}

impl RenderedParams {
    fn of(options: &GenerationOptions) -> Self {
        RenderedParams {
            n: options.n,
            max_tokens: options.max_tokens,
            min_tokens: options.min_tokens,
            temperature: options.temperature,
            top_p: options.top_p,
            top_k: options.top_k,
            min_p: options.min_p,
            presence_penalty: options.presence_penalty,
            frequency_penalty: options.frequency_penalty,
            repetition_penalty: options.repetition_penalty,
            seed: options.seed.map(super::options::seed_to_wire),
            stop: options.stop.clone(),
            stop_token_ids: options.stop_token_ids.clone(),
            ignore_eos: options.ignore_eos,
            logprobs: options.logprobs,
            prompt_logprobs: options.prompt_logprobs,
        }
    }
}
