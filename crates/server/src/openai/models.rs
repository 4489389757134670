//! `GET /v1/models` and `/v1/models/{id}`.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use serde::Serialize;

use super::errors::ApiResult;
use crate::app::App;

/// A list of one.
#[derive(Debug, Serialize)]
pub struct ModelList {
    object: &'static str,
    data: [ModelCard; 1],
}

/// One model, with vLLM's `max_model_len`, which routers read.
#[derive(Debug, Serialize)]
pub struct ModelCard {
    id: Arc<str>,
    object: &'static str,
    created: u64,
    owned_by: &'static str,
    root: String,
    parent: Option<()>,
    max_model_len: u32,
    capabilities: Capabilities,
}

#[derive(Debug, Serialize)]
struct Capabilities {
    completion: bool,
    chat: bool,
}

/// Lists the models: there is one.
pub async fn list(State(app): State<Arc<App>>) -> Json<ModelList> {
    Json(ModelList {
        object: "list",
        data: [card(&app)],
    })
}

/// One model by any of its names.
pub async fn retrieve(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
) -> ApiResult<Json<ModelCard>> {
    app.names.check(Some(&name))?;
    Ok(Json(card(&app)))
}

fn card(app: &App) -> ModelCard {
    let info = app.llm.info();
    ModelCard {
        id: Arc::clone(&app.names.served),
        object: "model",
        created: app.started,
        owned_by: "millpond",
        root: info.name.clone(),
        parent: None,
        max_model_len: info.max_context,
        capabilities: Capabilities {
            completion: true,
            chat: info.can_chat,
        },
    }
}
