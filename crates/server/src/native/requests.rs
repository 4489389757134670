//! `POST /v1/requests/{id}/abort`: ends a live request.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use millpond_scheduler::RequestId;
use serde::Serialize;

use crate::app::App;
use crate::live::Phase;
use crate::openai::errors::{ApiError, ApiResult, ErrorKind};
use crate::openai::fields::printable;

/// What was ended.
#[derive(Debug, Serialize)]
pub struct Aborted {
    id: String,
    status: &'static str,
    /// How far it was.
    phase: &'static str,
    /// Its names in the engine, one per prompt.
    engine_ids: Vec<RequestId>,
}

/// Ends the request with this answer id or `X-Request-Id`.
pub async fn abort(
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
) -> ApiResult<Json<Aborted>> {
    let Some(phase) = app.live.abort(&id) else {
        let message = format!("no live request is named \"{}\"", printable(&id));
        return Err(ApiError::new(ErrorKind::NotFound, message));
    };
    let (phase, engine_ids) = match phase {
        Phase::Preparing => ("preparing", Vec::new()),
        Phase::Generating(ids) => ("generating", ids),
    };
    Ok(Json(Aborted {
        id,
        status: "aborted",
        phase,
        engine_ids,
    }))
}
