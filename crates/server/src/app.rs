//! What every handler shares: the model, the limits, the live requests, the metrics.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use millpond_engine::llm::Llm;

use crate::http::body::BodyBudget;
use crate::http::lifecycle::Lifecycle;
use crate::http::limits::HttpLimits;
use crate::live::LiveRequests;
use crate::openai::border::UnknownFields;
use crate::openai::envelope::Stamp;
use crate::openai::errors::{ApiError, ApiResult, ErrorKind};
use crate::telemetry::metrics::Metrics;

/// Shared by all connections.
pub struct App {
    /// The model.
    pub llm: Llm,
    /// Names the model goes by.
    pub names: ModelNames,
    /// Limits of the HTTP door.
    pub limits: HttpLimits,
    /// Memory for request bodies.
    pub body_budget: BodyBudget,
    /// What to do with fields that we do not know.
    pub unknown_fields: UnknownFields,
    /// Counters and histograms.
    pub metrics: Metrics,
    /// Requests that generate right now.
    pub live: LiveRequests,
    /// Serving, draining or stopping.
    pub lifecycle: Lifecycle,
    /// Unix seconds of the start.
    pub started: u64,
}

/// Names the model goes by.
#[derive(Clone, Debug)]
pub struct ModelNames {
    /// The name in answers, lists and metrics.
    pub served: Arc<str>,
    /// What `--model` said; accepted in requests too.
    pub asked: Arc<str>,
}

/// Every server answers to this name.
const DEFAULT_NAME: &str = "default";

impl ModelNames {
    /// Refuses a request for a model that is not here. A request that names none means the one we have.
    pub fn check(&self, model: Option<&str>) -> ApiResult<()> {
        match model {
            None => Ok(()),
            Some(name) if self.contains(name) => Ok(()),
            Some(name) => Err(ApiError::of_field(
                ErrorKind::ModelNotFound,
                "model",
                format!(
                    "there is no model \"{}\" here; this server has \"{}\"",
                    crate::openai::fields::printable(name),
                    self.served
                ),
            )),
        }
    }

    /// Is this one of the names?
    pub fn contains(&self, name: &str) -> bool {
        name == DEFAULT_NAME || *name == *self.served || *name == *self.asked
    }
}

impl App {
    /// The fields that all chunks of an answer share.
    pub fn stamp(&self, id: Arc<str>) -> Stamp {
        Stamp {
            id,
            created: unix_seconds(),
            model: Arc::clone(&self.names.served),
            fingerprint: self.llm.info().fingerprint.as_str().into(),
        }
    }
}

/// Now, in seconds since 1970; 0 on a machine whose clock stands before that.
pub fn unix_seconds() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |elapsed| elapsed.as_secs())
}
