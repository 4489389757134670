//! Request bodies: plain JSON, bounded while they are read, never waiting for a sender that stands still.

use std::sync::Arc;

use axum::extract::{FromRequest, Request};
use axum::http::{HeaderMap, header};
use http_body_util::BodyExt;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::limits::HttpLimits;
use crate::app::App;
use crate::openai::errors::{ApiError, ApiResult, ErrorKind};

/// A body within its limits, not yet parsed. Holds its share of the memory for bodies.
pub struct JsonBody {
    bytes: Vec<u8>,
    _share: BodyShare,
}

/// Memory for the bodies that are being read or parsed, counted in KiB.
#[derive(Clone, Debug)]
pub struct BodyBudget {
    kibibytes: Arc<Semaphore>,
}

/// What one body takes of the budget.
struct BodyShare {
    budget: BodyBudget,
    permits: Option<OwnedSemaphorePermit>,
    num_kibibytes: usize,
}

/// How many times its limit a body that is too large may send before we stop listening. Clients that write
/// their whole body before they read would otherwise never see the refusal.
const MAX_DISCARDED_BODIES: usize = 4;

impl JsonBody {
    /// The bytes as they came.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

impl FromRequest<Arc<App>> for JsonBody {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &Arc<App>) -> ApiResult<Self> {
        check_headers(request.headers(), &app.limits)?;
        read_body(request, &app.limits, app.body_budget.clone()).await
    }
}

/// Refuses what is no plain JSON, and what says itself that it is too large if the sender waits to be told so
/// or would be cut off anyway.
fn check_headers(headers: &HeaderMap, limits: &HttpLimits) -> ApiResult<()> {
    let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
    if !text(header::CONTENT_TYPE).is_some_and(is_json) {
        let message = "the content type must be application/json";
        return Err(ApiError::new(ErrorKind::MediaType, message));
    }
    if headers.contains_key(header::CONTENT_ENCODING) {
        let message = "encoded bodies are not supported";
        return Err(ApiError::new(ErrorKind::MediaType, message));
    }
    let allowed = match headers.contains_key(header::EXPECT) {
        true => limits.max_body_bytes,
        false => limits.max_body_bytes.saturating_mul(MAX_DISCARDED_BODIES),
    };
    if stated_length(headers).is_some_and(|length| length > allowed) {
        return Err(too_large(limits));
    }
    Ok(())
}

fn stated_length(headers: &HeaderMap) -> Option<usize> {
    let length = headers.get(header::CONTENT_LENGTH)?;
    length.to_str().ok()?.parse().ok()
}

fn is_json(content_type: &str) -> bool {
    let essence = content_type.split(';').next().unwrap_or_default().trim();
    essence.eq_ignore_ascii_case("application/json")
}

fn too_large(limits: &HttpLimits) -> ApiError {
    let message = format!(
        "the body has more than {} bytes (max_body_bytes)",
        limits.max_body_bytes
    );
    ApiError::new(ErrorKind::BodyTooLarge, message)
}

async fn read_body(
    request: Request,
    limits: &HttpLimits,
    budget: BodyBudget,
) -> ApiResult<JsonBody> {
    // Room for all of it at once; what does not come costs no memory.
    let stated = stated_length(request.headers()).unwrap_or(0);
    let mut bytes = Vec::with_capacity(stated.min(limits.max_body_bytes));
    let mut body = request.into_body();
    let mut share = BodyShare::empty(budget);
    let mut num_read = 0_usize;
    while let Some(frame) = next_frame(&mut body, limits).await? {
        num_read += frame.len();
        if num_read <= limits.max_body_bytes {
            share.grow_to(num_read)?;
            bytes.extend_from_slice(&frame);
        } else if num_read > limits.max_body_bytes.saturating_mul(MAX_DISCARDED_BODIES) {
            return Err(too_large(limits));
        } else {
            bytes = Vec::new();
        }
    }
    if num_read > limits.max_body_bytes {
        return Err(too_large(limits));
    }
    Ok(JsonBody {
        bytes,
        _share: share,
    })
}

/// The next piece of data; `None` at the end.
async fn next_frame(
    body: &mut axum::body::Body,
    limits: &HttpLimits,
) -> ApiResult<Option<axum::body::Bytes>> {
    loop {
        let Ok(frame) = tokio::time::timeout(limits.body_timeout, body.frame()).await else {
            let message = format!(
                "the body made no progress for {} s (body_timeout)",
                limits.body_timeout.as_secs_f64()
            );
            return Err(ApiError::new(ErrorKind::BodyTimeout, message));
        };
        let Some(frame) = frame else { return Ok(None) };
        let frame = frame.map_err(|error| {
            ApiError::new(ErrorKind::Invalid, format!("the body broke off: {error}"))
        })?;
        // Trailers carry nothing for us.
        if let Ok(data) = frame.into_data() {
            return Ok(Some(data));
        }
    }
}

impl BodyBudget {
    /// Memory for `max_bytes` of bodies.
    pub fn new(max_bytes: usize) -> Self {
        let kibibytes = max_bytes.div_ceil(1024).min(Semaphore::MAX_PERMITS);
        BodyBudget {
            kibibytes: Arc::new(Semaphore::new(kibibytes)),
        }
    }
}

impl BodyShare {
    fn empty(budget: BodyBudget) -> Self {
        BodyShare {
            budget,
            permits: None,
            num_kibibytes: 0,
        }
    }

    /// Takes more of the budget, or refuses: bodies that waited for each other would never be complete.
    fn grow_to(&mut self, num_bytes: usize) -> ApiResult<()> {
        let missing = num_bytes.div_ceil(1024).saturating_sub(self.num_kibibytes);
        if missing == 0 {
            return Ok(());
        }
        let full = || {
            let message = "too many large bodies at once (max_total_body_bytes)";
            ApiError::new(ErrorKind::Overloaded, message)
        };
        let count = u32::try_from(missing).map_err(|_| full())?;
        let semaphore = Arc::clone(&self.budget.kibibytes);
        let more = semaphore
            .try_acquire_many_owned(count)
            .map_err(|_| full())?;
        match &mut self.permits {
            Some(permits) => permits.merge(more),
            None => self.permits = Some(more),
        }
        self.num_kibibytes += missing;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_by_any_spelling() {
        for (content_type, expected) in [
            ("application/json", true),
            ("Application/JSON; charset=utf-8", true),
            ("text/json", false),
            ("application/jsonx", false),
            ("", false),
        ] {
            assert_eq!(is_json(content_type), expected, "{content_type}");
        }
    }

    #[test]
    fn the_budget_is_refused_not_awaited_and_given_back() {
        let budget = BodyBudget::new(10 * 1024);
        let mut first = BodyShare::empty(budget.clone());
        let mut second = BodyShare::empty(budget.clone());
        assert!(first.grow_to(6 * 1024).is_ok());
        assert!(second.grow_to(4 * 1024).is_ok());
        assert!(second.grow_to(4 * 1024 + 1).is_err());
        drop(first);
        assert!(second.grow_to(10 * 1024).is_ok());
        drop(second);
        assert_eq!(budget.kibibytes.available_permits(), 10);
    }
}
