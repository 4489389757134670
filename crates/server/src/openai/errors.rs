//! Errors as OpenAI's API words them: one table of kinds, one JSON body.
//!
//! It must not decide what is an error; it only says how one looks on the wire.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use millpond_engine::llm::RequestError;
use millpond_scheduler::{DeadlineKind, FinishReason};
use serde::Serialize;

/// Seconds after which an overloaded server may be asked again.
const RETRY_AFTER_SECS: u64 = 1;

/// What went wrong, by the row of the table below.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// A field has a value that it may not have, or the body is no JSON.
    Invalid,
    /// We know the field and cannot honour it.
    Unsupported,
    /// We do not know the field (`--strict`).
    UnknownField,
    /// Prompt and output can never fit.
    ContextLength,
    /// No model of that name.
    ModelNotFound,
    /// No such path, or no such object.
    NotFound,
    /// The path exists, for other methods.
    MethodNotAllowed,
    /// The body made no progress.
    BodyTimeout,
    /// The body is larger than its limit.
    BodyTooLarge,
    /// The body is not plain JSON.
    MediaType,
    /// Too many connections from one address.
    TooManyConnections,
    /// We are at a limit of ours.
    Overloaded,
    /// It waited too long to be scheduled.
    QueueTimeout,
    /// It was admitted and took too long.
    Timeout,
    /// The server is draining or has stopped.
    ShuttingDown,
    /// Somebody aborted it.
    Aborted,
    /// The engine failed.
    Engine,
}

impl ErrorKind {
    /// Status, `type` and `code`.
    fn row(self) -> (StatusCode, &'static str, &'static str) {
        const INVALID: &str = "invalid_request_error";
        const SERVER: &str = "server_error";
        match self {
            ErrorKind::Invalid => (StatusCode::BAD_REQUEST, INVALID, "invalid_value"),
            ErrorKind::Unsupported => (StatusCode::BAD_REQUEST, INVALID, "unsupported_parameter"),
            ErrorKind::UnknownField => (StatusCode::BAD_REQUEST, INVALID, "unknown_parameter"),
            ErrorKind::ContextLength => {
                (StatusCode::BAD_REQUEST, INVALID, "context_length_exceeded")
            }
            ErrorKind::ModelNotFound => (StatusCode::NOT_FOUND, INVALID, "model_not_found"),
            ErrorKind::NotFound => (StatusCode::NOT_FOUND, INVALID, "not_found"),
            ErrorKind::MethodNotAllowed => (
                StatusCode::METHOD_NOT_ALLOWED,
                INVALID,
                "method_not_allowed",
            ),
            ErrorKind::BodyTimeout => (StatusCode::REQUEST_TIMEOUT, INVALID, "body_timeout"),
            ErrorKind::BodyTooLarge => (StatusCode::PAYLOAD_TOO_LARGE, INVALID, "body_too_large"),
            ErrorKind::MediaType => (
                StatusCode::UNSUPPORTED_MEDIA_TYPE,
                INVALID,
                "unsupported_media_type",
            ),
            ErrorKind::TooManyConnections => (
                StatusCode::TOO_MANY_REQUESTS,
                "rate_limit_error",
                "too_many_connections",
            ),
            ErrorKind::Overloaded => (StatusCode::SERVICE_UNAVAILABLE, SERVER, "server_overloaded"),
            ErrorKind::QueueTimeout => (StatusCode::SERVICE_UNAVAILABLE, SERVER, "queue_timeout"),
            ErrorKind::Timeout => (StatusCode::GATEWAY_TIMEOUT, SERVER, "timeout"),
            ErrorKind::ShuttingDown => (StatusCode::SERVICE_UNAVAILABLE, SERVER, "server_shutdown"),
            ErrorKind::Aborted => (StatusCode::CONFLICT, INVALID, "request_aborted"),
            ErrorKind::Engine => (StatusCode::INTERNAL_SERVER_ERROR, SERVER, "engine_error"),
        }
    }

    /// The same request may succeed later, here or elsewhere.
    fn is_transient(self) -> bool {
        let (status, ..) = self.row();
        status == StatusCode::SERVICE_UNAVAILABLE || status == StatusCode::TOO_MANY_REQUESTS
    }
}

/// A refusal or failure, ready for the wire.
#[derive(Clone, Debug, PartialEq)]
pub struct ApiError {
    /// Row of the table.
    pub kind: ErrorKind,
    /// For people; names the limit where one was met.
    pub message: String,
    /// The field, as the request spelled it.
    pub param: Option<String>,
}

/// Result of everything that a request can be refused for.
pub type ApiResult<T> = Result<T, ApiError>;

impl ApiError {
    /// An error that no single field caused.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        ApiError {
            kind,
            message: message.into(),
            param: None,
        }
    }

    /// A field's value is not allowed.
    pub fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        ApiError::of_field(ErrorKind::Invalid, param, message)
    }

    /// An error that `param` caused; the message is prefixed with its name.
    pub fn of_field(kind: ErrorKind, param: impl Into<String>, message: impl Into<String>) -> Self {
        let param = param.into();
        ApiError {
            kind,
            message: format!("{param}: {}", message.into()),
            param: Some(param),
        }
    }

    /// The body `{"error": {…}}`.
    pub fn body(&self) -> ErrorBody<'_> {
        let (_, kind, code) = self.kind.row();
        ErrorBody {
            error: ErrorFields {
                message: &self.message,
                kind,
                param: self.param.as_deref(),
                code,
            },
        }
    }

    /// HTTP status.
    pub fn status(&self) -> StatusCode {
        self.kind.row().0
    }

    /// Why a sequence that did not come to its own end ended; `None` for one that did.
    pub fn of_finish(reason: &FinishReason) -> Option<Self> {
        match reason {
            FinishReason::Stop(_) | FinishReason::Length => None,
            FinishReason::Cancelled => {
                Some(ApiError::new(ErrorKind::Aborted, "the request was aborted"))
            }
            FinishReason::Timeout(deadline) => Some(ApiError::of_deadline(*deadline)),
            FinishReason::Error(error) => Some(ApiError::new(ErrorKind::Engine, error.to_string())),
        }
    }

    fn of_deadline(deadline: DeadlineKind) -> Self {
        match deadline {
            DeadlineKind::Queue => ApiError::new(
                ErrorKind::QueueTimeout,
                "the request waited too long to be scheduled (queue timeout)",
            ),
            DeadlineKind::FirstToken => ApiError::new(
                ErrorKind::Timeout,
                "no token within the first-token timeout",
            ),
            DeadlineKind::Total => ApiError::new(
                ErrorKind::Timeout,
                "the request did not finish within its time limit (total timeout)",
            ),
        }
    }
}

impl From<RequestError> for ApiError {
    fn from(error: RequestError) -> Self {
        match error {
            RequestError::Invalid { param, message } => ApiError::invalid(param, message),
            RequestError::NeverFits { param, message } => {
                ApiError::of_field(ErrorKind::ContextLength, param, message)
            }
            RequestError::Overloaded { message } => ApiError::new(ErrorKind::Overloaded, message),
            RequestError::ShuttingDown => {
                ApiError::new(ErrorKind::ShuttingDown, "the server is shutting down")
            }
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status(), Json(self.body())).into_response();
        let headers = response.headers_mut();
        if self.kind.is_transient() {
            headers.insert(header::RETRY_AFTER, RETRY_AFTER_SECS.into());
        }
        if self.kind == ErrorKind::ShuttingDown {
            headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        response.extensions_mut().insert(self);
        response
    }
}

/// `{"error": {…}}`
#[derive(Debug, Serialize)]
pub struct ErrorBody<'a> {
    error: ErrorFields<'a>,
}

#[derive(Debug, Serialize)]
struct ErrorFields<'a> {
    message: &'a str,
    #[serde(rename = "type")]
    kind: &'static str,
    param: Option<&'a str>,
    code: &'static str,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(error: ApiError, status: u16, json: &str) {
        let body = serde_json::to_string(&error.body()).expect("an error is plain data");
        assert_eq!(body, json);
        assert_eq!(error.into_response().status().as_u16(), status);
    }

    #[test]
    fn a_field_is_named_in_message_and_param() {
        check(
            RequestError::Invalid {
                param: "top_p",
                message: "must be above 0".to_owned(),
            }
            .into(),
            400,
            r#"{"error":{"message":"top_p: must be above 0","type":"invalid_request_error","param":"top_p","code":"invalid_value"}}"#,
        );
    }

    #[test]
    fn overload_can_be_retried() {
        let error = ApiError::from(RequestError::Overloaded {
            message: "full".to_owned(),
        });
        let response = error.into_response();
        assert_eq!(response.status().as_u16(), 503);
        assert!(response.headers().contains_key(header::RETRY_AFTER));
    }

    #[test]
    fn an_end_of_its_own_is_no_error() {
        assert_eq!(ApiError::of_finish(&FinishReason::Length), None);
        let timeout = ApiError::of_finish(&FinishReason::Timeout(DeadlineKind::Queue));
        assert_eq!(timeout.map(|error| error.status().as_u16()), Some(503));
    }
}
