//! The engine thread's remote control: a bounded inbox and counters that anyone may read.

use millpond_scheduler::RequestId;

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

/// The way to the engine thread. Cheap to clone.
#[derive(Clone)]
pub struct EngineHandle;

impl EngineHandle {
    /// Ends a request; unknown and finished ones are ignored.
    pub fn abort(&self, id: RequestId) {
        let _ = id;
        unimplemented!()
    }
}
