//! The engine thread's remote control: an inbox and counters that anyone may read.
//!
//! It decides nothing but whether there is room to wait. Submissions are bounded by `max_waiting`;
//! aborts by the live requests, each of which holds one guard.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;

use millpond_scheduler::{Request, RequestId, Timestamp};

use crate::driver::Submission;
use crate::driver::gauges::Gauges;
use crate::llm::RequestError;

/// What the engine thread is told.
pub(crate) enum Command {
    /// Run this.
    Submit(Submission),
    /// Stop running this.
    Abort(RequestId),
}

/// The way to the engine thread. Cheap to clone; the thread ends with the last clone.
#[derive(Clone)]
pub struct EngineHandle {
    inbox: mpsc::Sender<Command>,
    gauges: Arc<Gauges>,
    next_id: Arc<AtomicU64>,
    max_waiting: u64,
}

impl EngineHandle {
    pub(crate) fn new(inbox: mpsc::Sender<Command>, gauges: Arc<Gauges>, max_waiting: u32) -> Self {
        EngineHandle {
            inbox,
            gauges,
            next_id: Arc::new(AtomicU64::new(1)),
            max_waiting: u64::from(max_waiting),
        }
    }

    /// A name for a new request.
    pub(crate) fn mint_id(&self) -> RequestId {
        RequestId(self.next_id.fetch_add(1, Ordering::Relaxed))
    }

    /// The engine's clock.
    pub(crate) fn now(&self) -> Timestamp {
        self.gauges.now()
    }

    /// Counters and gauges of the engine thread.
    pub(crate) fn gauges(&self) -> &Gauges {
        &self.gauges
    }

    /// Puts a request into the inbox, or says at once why not.
    pub(crate) fn submit(&self, submission: Submission) -> Result<AbortOnDrop, RequestError> {
        if self.gauges.is_draining() || !self.gauges.is_alive() {
            return Err(RequestError::ShuttingDown);
        }
        let request = Arc::clone(submission.request());
        self.reserve_waiting(&request)?;
        let id = request.id;
        if self.inbox.send(Command::Submit(submission)).is_err() {
            self.gauges.leave_queue(u64::from(request.num_choices));
            return Err(RequestError::ShuttingDown);
        }
        Ok(AbortOnDrop {
            abort: Some((id, self.clone())),
        })
    }

    /// Ends a request; unknown and finished ones are ignored.
    pub fn abort(&self, id: RequestId) {
        // A closed inbox means that the engine thread and with it the request are gone.
        let _ = self.inbox.send(Command::Abort(id));
    }

    /// Takes the places that the request's choices will wait in.
    fn reserve_waiting(&self, request: &Request) -> Result<(), RequestError> {
        let num_choices = u64::from(request.num_choices);
        if self.gauges.enter_queue(num_choices, self.max_waiting) {
            return Ok(());
        }
        Err(RequestError::Overloaded {
            message: format!(
                "{} sequences are waiting already (max_waiting)",
                self.max_waiting
            ),
        })
    }
}

/// Aborts a request when dropped, unless disarmed.
pub(crate) struct AbortOnDrop {
    abort: Option<(RequestId, EngineHandle)>,
}

impl AbortOnDrop {
    /// The request ended by itself.
    pub(crate) fn disarm(&mut self) {
        self.abort = None;
    }
}

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        if let Some((id, handle)) = self.abort.take() {
            handle.abort(id);
        }
    }
}
