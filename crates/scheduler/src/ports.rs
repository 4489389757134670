//! The ports of the design: what a driver needs besides the scheduler. A new trait needs an ADR.

use crate::plan::{BatchPlan, ModelOutput};

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
