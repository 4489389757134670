//! What surrounds every request: its name (`X-Request-Id` in and out), the warnings header, the access log, and
//! a net for panics.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Instant;

use axum::extract::{FromRequestParts, Request};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderName, HeaderValue};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use futures_util::FutureExt;
use uuid::Uuid;

use crate::openai::errors::{ApiError, ErrorKind};
use crate::openai::fields::printable;

/// The caller's name for a request, or one that we made.
#[derive(Clone, Debug)]
pub struct RequestName(pub Arc<str>);

/// What to tell the caller besides the answer; becomes a header.
#[derive(Clone, Debug)]
pub struct Warnings(pub Vec<String>);

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const WARNINGS: HeaderName = HeaderName::from_static("x-millpond-warnings");

/// Characters of a caller's name.
const MAX_NAME_CHARS: usize = 128;

/// Bytes of the warnings header.
const MAX_WARNING_BYTES: usize = 1024;

impl RequestName {
    /// The caller's name if it is fit to be printed and sent back, else a new one.
    fn of(headers: &HeaderMap) -> Self {
        let given = headers
            .get(REQUEST_ID)
            .and_then(|value| value.to_str().ok());
        RequestName(match given.filter(|name| is_fit(name)) {
            Some(name) => name.into(),
            None => Uuid::new_v4().simple().to_string().into(),
        })
    }
}

fn is_fit(name: &str) -> bool {
    let fit = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    (1..=MAX_NAME_CHARS).contains(&name.len()) && name.bytes().all(fit)
}

impl<S: Sync> FromRequestParts<S> for RequestName {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, Infallible> {
        let name = parts.extensions.get::<RequestName>().cloned();
        Ok(name.unwrap_or_else(|| RequestName::of(&parts.headers)))
    }
}

/// Wraps every route.
pub async fn surround(mut request: Request, next: Next) -> Response {
    let started = Instant::now();
    let name = RequestName::of(request.headers());
    let method = request.method().clone();
    let path = printable(request.uri().path());
    request.extensions_mut().insert(name.clone());
    let running = std::panic::AssertUnwindSafe(next.run(request));
    let mut response = running.catch_unwind().await.unwrap_or_else(|_| {
        tracing::error!(request_id = %name.0, "a handler panicked");
        ApiError::new(ErrorKind::Engine, "internal error").into_response()
    });
    set_headers(&mut response, &name);
    tracing::info!(
        request_id = %name.0,
        %method,
        path,
        status = response.status().as_u16(),
        ms = started.elapsed().as_millis() as u64,
        error = response.extensions().get::<ApiError>().map(message),
        "request",
    );
    response
}

/// Error messages quote no content; what they quote is escaped already.
fn message(error: &ApiError) -> &str {
    &error.message
}

fn set_headers(response: &mut Response, name: &RequestName) {
    if let Ok(value) = HeaderValue::from_str(&name.0) {
        response.headers_mut().insert(REQUEST_ID, value);
    }
    let warnings = response.extensions_mut().remove::<Warnings>();
    let Some(Warnings(warnings)) = warnings.filter(|warnings| !warnings.0.is_empty()) else {
        return;
    };
    tracing::warn!(request_id = %name.0, warnings = %warnings.join("; "), "request");
    if let Ok(value) = HeaderValue::from_str(&header_text(&warnings)) {
        response.headers_mut().insert(WARNINGS, value);
    }
}

/// Headers are ASCII and short.
fn header_text(warnings: &[String]) -> String {
    let joined = warnings.join("; ");
    let visible = joined.chars().map(|char| match char {
        ' '..='~' => char,
        _ => '?',
    });
    visible.take(MAX_WARNING_BYTES).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_sent_back_only_when_fit() {
        for (name, expected) in [
            ("abc-1._Z", true),
            ("", false),
            ("a b", false),
            ("a\u{e9}", false),
            (&"x".repeat(128), true),
            (&"x".repeat(129), false),
        ] {
            assert_eq!(is_fit(name), expected, "{name}");
        }
    }

    #[test]
    fn the_warnings_header_is_short_ascii() {
        let warnings = vec!["unknown field é".to_owned(), "x".repeat(2000)];
        let text = header_text(&warnings);
        assert!(text.starts_with("unknown field ?; xxx"));
        assert_eq!(text.len(), MAX_WARNING_BYTES);
    }
}
