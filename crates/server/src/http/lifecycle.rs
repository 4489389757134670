//! Serving, draining, stopping: the three phases of the server's life, each entered once.

use tokio_util::sync::CancellationToken;

/// The phase, shared by everything that must notice its end.
#[derive(Clone, Debug, Default)]
pub struct Lifecycle {
    draining: CancellationToken,
    stopping: CancellationToken,
}

impl Lifecycle {
    /// New requests are refused from now on; running ones go on.
    pub fn drain(&self) {
        self.draining.cancel();
    }

    /// Running requests end from now on.
    pub fn stop(&self) {
        self.draining.cancel();
        self.stopping.cancel();
    }

    /// Are new requests refused?
    pub fn is_draining(&self) -> bool {
        self.draining.is_cancelled()
    }

    /// Must running requests end?
    pub fn is_stopping(&self) -> bool {
        self.stopping.is_cancelled()
    }

    /// Cancelled when a connection that begins now is to close: with the next phase. One that begins while
    /// draining has come to be told so, and must not be closed before it was.
    pub fn closing(&self) -> CancellationToken {
        match self.is_draining() {
            true => self.stopping.clone(),
            false => self.draining.clone(),
        }
    }

    /// Cancelled when running requests must end.
    pub fn stopping(&self) -> &CancellationToken {
        &self.stopping
    }
}
