//! One simulated worker: the production scheduler, a mock model, and the time that its steps take.
//!
//! It does what the engine's driver does, with the time between execute and commit made explicit. What
//! goes wrong in a step is decided by its caller.

use super::cost_model::{CostModel, StepShape};
use super::workload::VOCABULARY;
use crate::config::{ConfigError, SchedulerConfig};
use crate::mock::{Fault, MockModel, RowSite, StepFailure};
use crate::plan::{BatchPlan, Event, ModelOutput};
use crate::ports::ModelRunner;
use crate::request::{RowError, TokenId};
use crate::scheduler::Scheduler;
use crate::time::{Span, Timestamp};
use std::num::NonZeroU32;

/// What stands in for a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stand {
    /// Counts upwards and looks at nothing: for long traces.
    Script,
    /// Reads every slot and notices every wrong one: for hunting bugs. Its work grows with the context.
    Oracle,
}

/// What goes wrong in a step.
#[derive(Clone, Debug, PartialEq)]
pub enum Trouble {
    /// The step takes so many times as long.
    Slow(u32),
    /// One row fails alone; an index beyond the last row wraps round.
    Row(u32, RowError),
    /// The step fails as a whole.
    Step(&'static str),
}

/// Steps of a worker between two checks that walk everything; the counts are checked after each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CheckEvery(pub u64);

/// Settings of a worker.
#[derive(Clone, Debug, PartialEq)]
pub struct WorkerConfig {
    /// Limits, policies and role.
    pub scheduler: SchedulerConfig,
    /// How long its steps take.
    pub cost: CostModel,
}

/// A worker.
pub struct Worker {
    /// What decides.
    pub scheduler: Scheduler,
    /// What executes.
    pub runner: MockModel,
    cost: CostModel,
    plan: BatchPlan,
    output: ModelOutput,
    /// Why the step under way is going to fail.
    failure: Option<String>,
    events: Vec<Event>,
    num_steps: u64,
}

/// A step that was begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Begun {
    /// Its number.
    pub step: u64,
    /// What it holds.
    pub shape: StepShape,
    /// How long it takes.
    pub time: Span,
}

impl Worker {
    /// A worker with nothing to do.
    pub fn new(config: &WorkerConfig, stand: Stand) -> Result<Self, ConfigError> {
        let scheduler = Scheduler::new(config.scheduler.clone())?;
        let limits = scheduler.config();
        let vocabulary = NonZeroU32::new(VOCABULARY).expect("a constant above zero");
        let block_size = NonZeroU32::new(limits.block_size).expect("validated above");
        let runner = match stand {
            Stand::Script => MockModel::scripted(vocabulary),
            Stand::Oracle => MockModel::oracle(vocabulary, block_size, limits.num_blocks),
        };
        Ok(Worker {
            scheduler,
            runner,
            cost: config.cost,
            plan: BatchPlan::default(),
            output: ModelOutput::default(),
            failure: None,
            events: Vec::new(),
            num_steps: 0,
        })
    }

    /// Plans and executes a step; its outcome is for `finish_step`, once its time has passed. `None` when
    /// there is nothing to run. Events of what ended by its deadline are due at once.
    pub fn begin_step(&mut self, now: Timestamp, trouble: Option<&Trouble>) -> Option<Begun> {
        self.scheduler
            .schedule(now, &mut self.plan, &mut self.events);
        if self.plan.is_empty() {
            return None;
        }
        let shape = StepShape::of(&self.plan);
        let mut time = self.cost.step_time(&shape);
        if let Some(trouble) = trouble {
            time = self.inject(trouble, time);
        }
        let executed = self.runner.execute(&self.plan, &mut self.output);
        self.failure = executed.err().map(|error| error.to_string());
        self.runner.clear_faults();
        self.num_steps += 1;
        Some(Begun {
            step: self.plan.step,
            shape,
            time,
        })
    }

    /// Commits the step that was begun, or fails it.
    pub fn finish_step(&mut self, now: Timestamp) {
        match self.failure.take() {
            None => {
                self.scheduler
                    .commit(&self.plan, &self.output, now, &mut self.events);
            }
            Some(error) => {
                self.scheduler
                    .fail_step(&self.plan, &error, now, &mut self.events);
            }
        }
    }

    /// Events since the last call go to `each`, in order, with the tokens that were accepted.
    pub fn drain_events(&mut self, mut each: impl FnMut(Event, &[TokenId])) {
        for event in self.events.drain(..) {
            let tokens: &[TokenId] = match &event {
                Event::Accepted {
                    row, num_tokens, ..
                } => {
                    let row = &self.output.rows[*row as usize];
                    &self.output.row_tokens(row)[..*num_tokens as usize]
                }
                _ => &[],
            };
            each(event, tokens);
        }
    }

    /// The scheduler, and where events go that do not come from a step.
    pub fn scheduler_and_events(&mut self) -> (&mut Scheduler, &mut Vec<Event>) {
        (&mut self.scheduler, &mut self.events)
    }

    /// Is there anything to drain?
    pub fn has_events(&self) -> bool {
        !self.events.is_empty()
    }

    /// Walks everything if it is time to.
    pub fn check(&self, every: CheckEvery) -> Result<(), String> {
        let blocks = self.scheduler.stats().blocks;
        if !blocks.adds_up() {
            return Err(format!("I1: {blocks:?} do not add up"));
        }
        match self.num_steps.is_multiple_of(every.0) {
            true => self.scheduler.check_invariants(),
            false => Ok(()),
        }
    }

    fn inject(&mut self, trouble: &Trouble, time: Span) -> Span {
        let step = self.plan.step;
        match trouble {
            Trouble::Slow(factor) => return Span(time.0.saturating_mul(u64::from(*factor))),
            Trouble::Row(row, error) => self.runner.inject(Fault::Row {
                site: RowSite::Index {
                    step,
                    row: row % self.plan.rows.len() as u32,
                },
                error: error.clone(),
            }),
            Trouble::Step(message) => self.runner.inject(Fault::Step {
                step,
                failure: StepFailure::Error((*message).to_owned()),
            }),
        }
        time
    }
}
