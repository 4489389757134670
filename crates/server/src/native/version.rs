//! `GET /version`, and `/`, which clients probe with `HEAD`.

use axum::Json;
use serde::Serialize;

/// This program's version.
#[derive(Debug, Serialize)]
pub struct Version {
    version: &'static str,
}

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// As vLLM's.
pub async fn version() -> Json<Version> {
    Json(Version { version: VERSION })
}

/// Says who answers here.
pub async fn root() -> String {
    format!("Millpond {VERSION}. The API is at /v1.\n")
}
