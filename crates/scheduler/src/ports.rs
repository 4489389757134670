//! The ports of the design: what a driver needs besides the scheduler. A new trait needs an ADR.

use crate::plan::{BatchPlan, ModelOutput};
use crate::time::Timestamp;
use crate::transfer::{Peer, Piece};

/// Executes plans: forward pass and sampling together, so that logits never cross a crate.
pub trait ModelRunner {
    /// Runs one step. Clears and fills `output`, one row per row of `plan`.
    ///
    /// A row that fails alone is reported in its `RowVerdict`; `Err` means that the whole step failed and
    /// that no key or value it was to write may be relied upon.
    fn execute(&mut self, plan: &BatchPlan, output: &mut ModelOutput) -> Result<(), RunnerError>;
}

/// A step that failed as a whole.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("step {step}: {message}")]
pub struct RunnerError {
    /// Which step.
    pub step: u64,
    /// What went wrong.
    pub message: String,
}

/// Carries keys and values from one worker's blocks to another's, in pieces.
///
/// It knows neither schedulers nor runners: whoever owns a worker exports and sends, polls and imports. Pieces
/// may come late, twice, in another order, damaged or not at all; checksums, tickets and leases are there for
/// that, so an implementation need not repair anything.
pub trait KvTransfer {
    /// What a runner exports and imports.
    type Payload;

    /// Sends `piece` on its way and returns at once.
    fn start(&mut self, piece: Piece<Self::Payload>, now: Timestamp);

    /// Appends what has come for `at` since the last call.
    fn poll(&mut self, at: Peer, now: Timestamp, arrived: &mut Vec<Piece<Self::Payload>>);
}
