//! The state machine: add, receive, fork, abort, schedule, commit, next_deadline.
//!
//! It never runs a model, reads a clock or waits. Whoever owns the loop calls `schedule`, lets a
//! `ModelRunner` execute the plan, and hands the result to `commit`. Batching is stall-free (Sarathi-Serve,
//! arXiv 2403.02310): decodes first, then prefills in chunks, within one budget of tokens per step.

mod admission;
mod commit;
mod decode;
mod ending;
mod handoff;
mod invariants;
mod preemption;
mod prefill;
mod refusal;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use crate::config::{ConfigError, SchedulerConfig};
use crate::kv_manager::{KvManager, Start};
use crate::plan::{BatchPlan, Event, ModelOutput};
use crate::request::{FinishReason, Request, RequestId, RowError, SequenceId, TokenId};
use crate::roster::Roster;
use crate::sequence::{Due, SequenceIndex};
use crate::stats::{Counters, SchedulerStats};
use crate::time::Timestamp;

use commit::Executed;
pub use refusal::{AddError, ForkError, ReceiveError};

/// Decides which tokens of which sequences run next and where their keys and values live.
///
/// At most one plan is in flight: after `schedule` gave a plan with rows, call `commit` or `fail_step`
/// with that plan before the next `schedule` (which panics otherwise). Everything else may come at any
/// time. A plan without rows needs no commit.
pub struct Scheduler {
    config: SchedulerConfig,
    kv: KvManager,
    roster: Roster,
    flight: Flight,
    scratch: Scratch,
    counters: Counters,
}

/// What the runner has been told, or will be told next.
#[derive(Default)]
struct Flight {
    /// The last step.
    step: u64,
    /// Whose rows the plan in flight has, in order; empty when none is in flight.
    rows: Vec<SequenceIndex>,
    /// Sequences that the runner may forget, for the next plan that has rows.
    ended: Vec<SequenceId>,
}

/// Buffers that keep their memory from step to step.
#[derive(Default)]
struct Scratch {
    tokens: Vec<TokenId>,
    start: Start,
}

impl Scheduler {
    /// A scheduler with an empty pool.
    pub fn new(config: SchedulerConfig) -> Result<Self, ConfigError> {
        config.validate()?;
        Ok(Scheduler {
            kv: KvManager::new(&config),
            roster: Roster::default(),
            flight: Flight::default(),
            scratch: Scratch::default(),
            counters: Counters::default(),
            config,
        })
    }

    /// The limits it works under.
    pub fn config(&self) -> &SchedulerConfig {
        &self.config
    }

    /// Queues every choice of `request`. What it accepts fits the pool alone, so it will end.
    ///
    /// An arrival later than `now` counts as `now`.
    pub fn add(&mut self, request: Arc<Request>, now: Timestamp) -> Result<(), AddError> {
        let max_len = self.admissible_len(&request)?;
        let arrival = request.arrival.min(now);
        for _ in 0..request.num_choices {
            self.roster.enter(&request, arrival, max_len);
        }
        self.roster.settle(request.id);
        Ok(())
    }

    /// Adds one more choice to a live request and returns its index. It starts from the prompt, shares
    /// the keys and values of a sibling that has computed them, and depends on no prefix cache.
    pub fn fork(&mut self, request: RequestId, now: Timestamp) -> Result<u32, ForkError> {
        let choices = self.roster.choices(request);
        let Some(&sibling) = choices.and_then(|choices| choices.live.first()) else {
            return Err(ForkError::UnknownRequest { request });
        };
        let num_waiting = self.roster.queue.len();
        if num_waiting >= self.config.max_waiting {
            return Err(ForkError::QueueFull {
                request,
                num_waiting,
                max_waiting: self.config.max_waiting,
            });
        }
        let sibling = &self.roster.sequences[sibling];
        let (ask, max_len) = (Arc::clone(&sibling.request), sibling.max_len);
        let choice = self.roster.enter(&ask, now, max_len);
        self.roster.settle(request);
        Ok(choice)
    }

    /// Ends all choices of `request` with `FinishReason::Cancelled`. Unknown and ended requests are ignored.
    ///
    /// Blocks that the runner may be writing go back when the step is committed.
    pub fn abort(&mut self, request: RequestId, now: Timestamp, events: &mut Vec<Event>) {
        while let Some(&index) = self.roster.choices(request).and_then(|c| c.live.first()) {
            self.end(index, FinishReason::Cancelled, now, events);
        }
    }

    /// Ends what is past its deadline or lease, then fills `plan` with the next step. `events` is appended to.
    ///
    /// Panics if the last plan had rows and was neither committed nor failed.
    pub fn schedule(&mut self, now: Timestamp, plan: &mut BatchPlan, events: &mut Vec<Event>) {
        assert!(
            self.flight.rows.is_empty(),
            "step {} is in flight: commit or fail it first",
            self.flight.step
        );
        self.expire(now, events);
        self.open(plan);
        let mut budget = self.config.max_batch_tokens;
        let num_preempted = self.plan_decodes(&mut budget, plan);
        self.plan_prefills(&mut budget, plan);
        // Blocks are short: whoever came in now would push out the next one.
        if num_preempted == 0 {
            self.admit(&mut budget, now, plan, events);
        }
        if !plan.started.is_empty() {
            self.set_memory_aside(plan);
        }
        self.seal(plan);
    }

    /// Takes in what came out of `plan`. `events` is appended to, in the order of the rows.
    ///
    /// On a prefill worker, a sequence that goes on after its first token is offered to others.
    ///
    /// `Event::Accepted` is given for every row that sampled, and with `num_tokens` 0 for a row that
    /// reports nothing but log-probabilities of prompt tokens. Panics if `plan` is not the one in flight.
    pub fn commit(
        &mut self,
        plan: &BatchPlan,
        output: &ModelOutput,
        now: Timestamp,
        events: &mut Vec<Event>,
    ) {
        self.kv.release_copy_sources();
        let rows = self.land(plan);
        let step = Executed { plan, output, now };
        for (number, &index) in rows.iter().enumerate() {
            self.commit_row(index, number, &step, events);
        }
        self.reuse(rows);
    }

    /// The step failed as a whole: its rows end with `RowError::StepFailed`, nothing it wrote is published.
    ///
    /// Panics if `plan` is not the one in flight.
    pub fn fail_step(
        &mut self,
        plan: &BatchPlan,
        error: &str,
        now: Timestamp,
        events: &mut Vec<Event>,
    ) {
        self.kv.release_copy_sources();
        let rows = self.land(plan);
        for &index in &rows {
            if !self.has_left(index) {
                self.fail_row(index, RowError::StepFailed(error.to_owned()), now, events);
            }
        }
        self.reuse(rows);
    }

    /// The earliest deadline or end of a lease: call `schedule` at that time even if nothing else happens.
    pub fn next_deadline(&self) -> Option<Timestamp> {
        self.roster.next_deadline()
    }

    /// True while anything runs, waits or is held for another worker.
    pub fn has_work(&self) -> bool {
        !self.roster.is_empty()
    }

    /// Counters, in constant time.
    pub fn stats(&self) -> SchedulerStats {
        SchedulerStats {
            num_running: self.roster.running.len() as u32,
            num_waiting: self.roster.queue.len(),
            num_receiving: self.roster.receiving.len() as u32,
            num_offered: self.roster.offered.len() as u32,
            oldest_waiting_arrival: self.roster.queue.oldest_arrival(),
            blocks: self.kv.counts(),
            counters: Counters {
                num_evicted_blocks: self.kv.num_evicted(),
                ..self.counters
            },
        }
    }

    /// Ends what is past its deadline or its lease.
    fn expire(&mut self, now: Timestamp, events: &mut Vec<Event>) {
        while let Some((index, due)) = self.roster.overdue(now) {
            match due {
                Due::Deadline(kind) => self.end(index, FinishReason::Timeout(kind), now, events),
                Due::Lease => self.end_lease(index, events),
            }
        }
    }

    fn open(&mut self, plan: &mut BatchPlan) {
        plan.clear();
        plan.step = self.flight.step + 1;
    }

    /// A plan with rows is in flight from here on; one without has told the runner nothing.
    fn seal(&mut self, plan: &mut BatchPlan) {
        if plan.is_empty() {
            return;
        }
        self.flight.step = plan.step;
        self.counters.num_steps += 1;
        plan.ended.append(&mut self.flight.ended);
    }

    /// The plan is no longer in flight; its rows are the caller's to settle.
    fn land(&mut self, plan: &BatchPlan) -> Vec<SequenceIndex> {
        let rows = std::mem::take(&mut self.flight.rows);
        assert!(
            plan.step == self.flight.step && plan.rows.len() == rows.len(),
            "step {} is not the plan in flight",
            plan.step
        );
        rows
    }

    fn reuse(&mut self, mut rows: Vec<SequenceIndex>) {
        rows.clear();
        self.flight.rows = rows;
    }
}
