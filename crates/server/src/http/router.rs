//! The routes, in one table; whatever is not in it is a 404 or 405 in the API's own form.

use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{Method, Uri};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};

use super::request_name::surround;
use crate::app::App;
use crate::native::{health, metrics, requests, version};
use crate::openai::errors::{ApiError, ErrorKind};
use crate::openai::fields::printable;
use crate::openai::{chat, completions, models, render, tokenize};

/// All routes.
pub fn router(app: Arc<App>) -> Router {
    let refuse_while_draining = from_fn_with_state(Arc::clone(&app), refuse_while_draining);
    let api = Router::new()
        .route("/v1/chat/completions", post(chat::create))
        .route("/v1/chat/completions/render", post(render::chat))
        .route("/v1/completions", post(completions::create))
        .route("/v1/completions/render", post(render::completions))
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*name}", get(models::retrieve))
        .route("/tokenize", post(tokenize::tokenize))
        .route("/detokenize", post(tokenize::detokenize))
        .route_layer(refuse_while_draining);
    Router::new()
        .merge(api)
        .route("/", get(version::root))
        .route("/health", get(health::ready))
        .route("/ready", get(health::ready))
        .route("/live", get(health::live))
        .route("/metrics", get(metrics::scrape))
        .route("/version", get(version::version))
        .route("/v1/requests/{id}/abort", post(requests::abort))
        .method_not_allowed_fallback(method_not_allowed)
        .fallback(not_found)
        .layer(from_fn(surround))
        .with_state(app)
}

/// Running requests finish; new ones go elsewhere.
async fn refuse_while_draining(
    State(app): State<Arc<App>>,
    request: Request,
    next: Next,
) -> Response {
    if app.lifecycle.is_draining() {
        return ApiError::new(ErrorKind::ShuttingDown, "the server is shutting down")
            .into_response();
    }
    next.run(request).await
}

async fn not_found(uri: Uri) -> ApiError {
    let path = printable(uri.path());
    ApiError::new(ErrorKind::NotFound, format!("there is nothing at {path}"))
}

async fn method_not_allowed(method: Method, uri: Uri) -> ApiError {
    let path = printable(uri.path());
    let method = printable(method.as_str());
    ApiError::new(
        ErrorKind::MethodNotAllowed,
        format!("{path} does not take {method}"),
    )
}
