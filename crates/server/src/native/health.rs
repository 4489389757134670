//! `GET /health`, `/ready` and `/live`. Health means progress: a probe looks at what the engine did last and
//! never queues work.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use millpond_engine::llm::EngineStats;
use serde::Serialize;

use crate::app::App;

/// A step that takes longer is no step any more.
const MAX_STALL: Duration = Duration::from_secs(30);

/// Requests that wait longer than their queue timeout by this much are not being looked after.
const WAITING_GRACE: Duration = Duration::from_secs(10);

#[derive(Debug, Serialize)]
struct Health {
    status: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'static str>,
}

/// 200 only while new requests will be served.
pub async fn ready(State(app): State<Arc<App>>) -> Response {
    let queue_timeout = Duration::try_from_secs_f64(app.llm.limits().queue_timeout_secs);
    let max_waiting = queue_timeout
        .unwrap_or(Duration::MAX)
        .saturating_add(WAITING_GRACE);
    answer(unready_because(
        &app.llm.stats(),
        app.lifecycle.is_draining(),
        max_waiting,
    ))
}

/// 200 while a restart would not help.
pub async fn live(State(app): State<Arc<App>>) -> Response {
    let dead = !app.llm.stats().alive && !app.lifecycle.is_draining();
    answer(dead.then_some("the engine has stopped"))
}

fn unready_because(
    stats: &EngineStats,
    is_draining: bool,
    max_waiting: Duration,
) -> Option<&'static str> {
    match () {
        () if is_draining || stats.draining => Some("draining"),
        () if !stats.alive => Some("the engine has stopped"),
        () if stats.stalled_for > MAX_STALL => Some("the engine makes no progress"),
        () if stats.oldest_waiting > max_waiting => Some("requests wait too long"),
        () => None,
    }
}

fn answer(reason: Option<&'static str>) -> Response {
    let (code, status) = match reason {
        None => (StatusCode::OK, "ok"),
        Some(_) => (StatusCode::SERVICE_UNAVAILABLE, "unavailable"),
    };
    (code, Json(Health { status, reason })).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(change: impl FnOnce(&mut EngineStats), expected: Option<&str>) {
        let mut stats = EngineStats {
            alive: true,
            ..EngineStats::default()
        };
        change(&mut stats);
        assert_eq!(
            unready_because(&stats, false, Duration::from_secs(40)),
            expected
        );
    }

    #[test]
    fn ready_means_progress() {
        check(|_| {}, None);
        check(|stats| stats.alive = false, Some("the engine has stopped"));
        check(|stats| stats.draining = true, Some("draining"));
        check(|stats| stats.stalled_for = Duration::from_secs(29), None);
        check(
            |stats| stats.stalled_for = Duration::from_secs(31),
            Some("the engine makes no progress"),
        );
        check(
            |stats| stats.oldest_waiting = Duration::from_secs(41),
            Some("requests wait too long"),
        );
    }
}
