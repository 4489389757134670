//! From a body to running generations: parsing, validation, templates and tokenization happen on a thread for
//! blocking work, so that no other request waits for them.

use std::sync::Arc;

use millpond_engine::llm::{Generation, GenerationOptions};
use uuid::Uuid;

use super::errors::{ApiError, ApiResult, ErrorKind};
use crate::app::App;
use crate::http::request_name::RequestName;
use crate::live::LiveGuard;
use crate::running::Running;

/// A request that has entered the registry and is about to be prepared.
pub struct Submission {
    app: Arc<App>,
    /// The id its answer will have.
    pub id: Arc<str>,
    live: LiveGuard,
}

impl Submission {
    /// Enters a request under a new id that begins with `prefix`.
    pub fn enter(app: Arc<App>, name: RequestName, prefix: &str) -> Self {
        let id: Arc<str> = format!("{prefix}-{}", Uuid::new_v4().simple()).into();
        let live = app
            .live
            .enter(Arc::clone(&id), name.0, app.lifecycle.stopping());
        Submission { app, id, live }
    }

    /// Runs `prepare`, which submits to the engine, and takes over what it submitted.
    pub async fn run<A: Send + 'static>(
        self,
        prepare: impl FnOnce(&App) -> ApiResult<(Vec<Generation>, A)> + Send + 'static,
    ) -> ApiResult<(Running, A)> {
        let Submission { app, live, .. } = self;
        let prepared = blocking(&app, prepare).await;
        let (generations, answer) = prepared.inspect_err(|error| {
            if error.kind == ErrorKind::Overloaded {
                app.metrics.requests.count_rejection();
            }
        })?;
        Ok((Running::new(app, live, generations), answer))
    }
}

/// Runs work that takes a processor's time on a thread meant for that.
pub async fn blocking<T: Send + 'static>(
    app: &Arc<App>,
    work: impl FnOnce(&App) -> ApiResult<T> + Send + 'static,
) -> ApiResult<T> {
    let app = Arc::clone(app);
    match tokio::task::spawn_blocking(move || work(&app)).await {
        Ok(result) => result,
        Err(error) => {
            tracing::error!(%error, "a request could not be prepared");
            Err(ApiError::new(ErrorKind::Engine, "internal error"))
        }
    }
}

/// Notes what a request asked for.
pub fn observe_options(app: &App, options: &GenerationOptions) {
    if let Some(max_tokens) = options.max_tokens {
        let histogram = &app.metrics.requests.counts.params_max_tokens;
        histogram.observe(max_tokens as f64);
    }
}
