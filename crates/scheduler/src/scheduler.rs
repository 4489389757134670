//! The state machine: add, fork, abort, schedule, commit, next_deadline.
//!
//! It never runs a model, reads a clock or waits. Whoever owns the loop calls `schedule`, lets a
//! `ModelRunner` execute the plan, and hands the result to `commit`.

mod refusal;

use std::sync::Arc;

use crate::config::{ConfigError, SchedulerConfig};
use crate::plan::{BatchPlan, Event, ModelOutput};
use crate::request::{Request, RequestId};
use crate::stats::SchedulerStats;
use crate::time::Timestamp;

pub use refusal::{AddError, ForkError};

/// Decides which tokens of which sequences run next and where their keys and values live.
///
/// At most one plan is in flight: after `schedule` gave a plan with rows, call `commit` or `fail_step`
/// with that plan before the next `schedule` (which panics otherwise). `add`, `fork` and `abort` may
/// come at any time. A plan without rows needs no commit.
pub struct Scheduler {
    config: SchedulerConfig,
}

impl Scheduler {
    /// A scheduler with an empty pool.
    pub fn new(config: SchedulerConfig) -> Result<Self, ConfigError> {
        config.validate()?;
        Ok(Scheduler { config })
    }

    /// The limits it works under.
    pub fn config(&self) -> &SchedulerConfig {
        &self.config
    }

    /// Queues every choice of `request`. What it accepts fits the pool alone, so it will end.
    pub fn add(&mut self, request: Arc<Request>, now: Timestamp) -> Result<(), AddError> {
        unimplemented!()
    }

    /// Adds one more choice to a live request and returns its index. It starts from the prompt, shares
    /// the keys and values of a sibling that has computed them, and depends on no prefix cache.
    pub fn fork(&mut self, request: RequestId, now: Timestamp) -> Result<u32, ForkError> {
        unimplemented!()
    }

    /// Ends all choices of `request` with `FinishReason::Cancelled`. Unknown and ended requests are ignored.
    pub fn abort(&mut self, request: RequestId, now: Timestamp, events: &mut Vec<Event>) {
        unimplemented!()
    }

    /// Ends what is past its deadline, then fills `plan` with the next step. `events` is appended to.
    pub fn schedule(&mut self, now: Timestamp, plan: &mut BatchPlan, events: &mut Vec<Event>) {
        unimplemented!()
    }

    /// Takes in what came out of `plan`. `events` is appended to, in the order of the rows.
    pub fn commit(&mut self, plan: &BatchPlan, output: &ModelOutput, now: Timestamp, events: &mut Vec<Event>) {
        unimplemented!()
    }

    /// The step failed as a whole: its rows end with `RowError::StepFailed`, nothing it wrote is published.
    pub fn fail_step(&mut self, plan: &BatchPlan, error: &str, now: Timestamp, events: &mut Vec<Event>) {
        unimplemented!()
    }

    /// The earliest deadline of a live sequence: call `schedule` at that time even if nothing else happens.
    pub fn next_deadline(&self) -> Option<Timestamp> {
        unimplemented!()
    }

    /// True while anything runs or waits.
    pub fn has_work(&self) -> bool {
        unimplemented!()
    }

    /// Counters, in constant time.
    pub fn stats(&self) -> SchedulerStats {
        unimplemented!()
    }

    /// Checks invariants I1 to I6 and I8 by walking everything; the error names the first violation.
    pub fn check_invariants(&self) -> Result<(), String> {
        unimplemented!()
    }
}
