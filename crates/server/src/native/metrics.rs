//! `GET /metrics`.

use std::sync::Arc;

use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};

use crate::app::App;
use crate::openai::errors::{ApiError, ErrorKind};

const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Everything, in Prometheus' text format.
pub async fn scrape(State(app): State<Arc<App>>) -> Response {
    match app.metrics.render(&app.llm.stats()) {
        Ok(text) => ([(header::CONTENT_TYPE, CONTENT_TYPE)], text).into_response(),
        Err(error) => ApiError::new(ErrorKind::Engine, error.to_string()).into_response(),
    }
}
