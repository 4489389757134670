//! The registry of live requests: who generates right now, and the way to end one of them.
//!
//! An entry lives as long as its guard; whoever runs the request holds the guard.

use std::sync::Arc;

use dashmap::DashMap;
use millpond_scheduler::RequestId;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

/// Requests by the id of their answer.
#[derive(Clone, Default)]
pub struct LiveRequests {
    inner: Arc<Inner>,
}

#[derive(Default)]
struct Inner {
    requests: DashMap<Arc<str>, LiveRequest>,
    idle: Notify,
}

/// One live request.
struct LiveRequest {
    /// The caller's own name for it (`X-Request-Id`).
    name: Arc<str>,
    phase: Phase,
    abort: CancellationToken,
}

/// How far a request is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Being parsed and validated.
    Preparing,
    /// In the engine, under these names (one per prompt).
    Generating(Vec<RequestId>),
}

/// Keeps an entry in the registry.
pub struct LiveGuard {
    registry: LiveRequests,
    id: Arc<str>,
    abort: CancellationToken,
}

impl LiveRequests {
    /// Enters a request. `stop` ends it together with the server.
    pub fn enter(&self, id: Arc<str>, name: Arc<str>, stop: &CancellationToken) -> LiveGuard {
        let abort = stop.child_token();
        let request = LiveRequest {
            name,
            phase: Phase::Preparing,
            abort: abort.clone(),
        };
        self.inner.requests.insert(Arc::clone(&id), request);
        LiveGuard {
            registry: self.clone(),
            id,
            abort,
        }
    }

    /// Ends the request with this answer id or caller's name; tells how far it was.
    pub fn abort(&self, id: &str) -> Option<Phase> {
        let abort = |request: &LiveRequest| {
            request.abort.cancel();
            request.phase.clone()
        };
        if let Some(request) = self.inner.requests.get(id) {
            return Some(abort(&request));
        }
        let mut named = self.inner.requests.iter();
        named
            .find(|request| *request.name == *id)
            .map(|request| abort(&request))
    }

    /// Requests alive.
    pub fn len(&self) -> usize {
        self.inner.requests.len()
    }

    /// Returns once no request is alive.
    pub async fn idle(&self) {
        loop {
            let changed = self.inner.idle.notified();
            if self.inner.requests.is_empty() {
                return;
            }
            changed.await;
        }
    }
}

impl LiveGuard {
    /// The request is in the engine now.
    pub fn generating(&self, ids: Vec<RequestId>) {
        if let Some(mut request) = self.registry.inner.requests.get_mut(&self.id) {
            request.phase = Phase::Generating(ids);
        }
    }

    /// Cancelled when the request is to end early.
    pub fn aborted(&self) -> &CancellationToken {
        &self.abort
    }
}

impl Drop for LiveGuard {
    fn drop(&mut self) {
        self.registry.inner.requests.remove(&self.id);
        self.registry.inner.idle.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_found_by_either_name_while_its_guard_lives() {
        let registry = LiveRequests::default();
        let stop = CancellationToken::new();
        let guard = registry.enter("chatcmpl-1".into(), "mine".into(), &stop);
        assert_eq!(registry.abort("other"), None);
        assert!(!guard.aborted().is_cancelled());
        assert_eq!(registry.abort("mine"), Some(Phase::Preparing));
        assert!(guard.aborted().is_cancelled());
        guard.generating(vec![RequestId(7)]);
        assert_eq!(
            registry.abort("chatcmpl-1"),
            Some(Phase::Generating(vec![RequestId(7)]))
        );
        drop(guard);
        assert_eq!((registry.len(), registry.abort("mine")), (0, None));
    }

    #[test]
    fn stopping_the_server_ends_every_request_and_not_the_reverse() {
        let registry = LiveRequests::default();
        let stop = CancellationToken::new();
        let [first, second] = ["1", "2"].map(|id| registry.enter(id.into(), id.into(), &stop));
        registry.abort("1");
        assert!(first.aborted().is_cancelled() && !second.aborted().is_cancelled());
        assert!(!stop.is_cancelled());
        stop.cancel();
        assert!(second.aborted().is_cancelled());
    }
}
