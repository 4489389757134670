//! A driver without threads: `Scheduler` and oracle in lockstep, with every check after every operation.
//!
//! It stands where the engine's driver stands and does what that does, faults and stop strings included.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use millpond_scheduler::mock::{Bursts, Fault, MockModel, RowSite, StepFailure};
use millpond_scheduler::scheduler::{AddError, ForkError, Scheduler};
use millpond_scheduler::{
    BatchPlan, Event, ModelOutput, ModelRunner, Request, RequestId, RowError, RowVerdict,
    SchedulerConfig, SequenceId, Span, Timestamp,
};

use crate::ledger::{ChoiceId, Excuse, Ledger};
use crate::workload::VOCABULARY;

/// What one step takes.
const STEP_TIME: Span = Span::from_millis(1);

/// Steps in a row that may pass with sequences waiting and none running (S05).
const MAX_IDLE_STEPS: u32 = 2;

/// What the driver's text pipeline found between execute and commit.
#[derive(Clone, Copy, Debug)]
pub struct StopString {
    pub row: usize,
    /// Tokens of the row up to the one that completes the match; at least 1.
    pub num_tokens: u32,
}

/// The scheduler under test, the model that referees it, and what the clients saw.
pub struct Harness {
    pub scheduler: Scheduler,
    pub model: MockModel,
    pub ledger: Ledger,
    pub now: Timestamp,
    pub plan: BatchPlan,
    output: ModelOutput,
    events: Vec<Event>,
    names: BTreeMap<SequenceId, ChoiceId>,
    /// Sequences that must be in the next plan, for they sampled in the last one.
    decoding: BTreeSet<SequenceId>,
    idle_steps: u32,
    /// Running sequences when the step was planned.
    num_planned_running: usize,
}

impl Harness {
    /// A fresh world under an oracle that brings one token per row.
    pub fn new(config: SchedulerConfig) -> Self {
        Harness::with_bursts(config, Bursts::default())
    }

    /// A fresh world under an oracle that may bring several tokens per row.
    pub fn with_bursts(config: SchedulerConfig, bursts: Bursts) -> Self {
        let block_size = NonZeroU32::new(config.block_size).expect("configurations are valid");
        let model = MockModel::oracle(VOCABULARY, block_size, config.num_blocks);
        Harness {
            model: model.with_bursts(bursts),
            ledger: Ledger::new(config.max_context),
            scheduler: Scheduler::new(config).expect("configurations are valid"),
            now: Timestamp(0),
            plan: BatchPlan::default(),
            output: ModelOutput::default(),
            events: Vec::new(),
            names: BTreeMap::new(),
            decoding: BTreeSet::new(),
            idle_steps: 0,
            num_planned_running: 0,
        }
    }

    /// Submits a request; a refusal must be right and change nothing.
    pub fn add(&mut self, request: Request) -> Result<(), AddError> {
        let request = Arc::new(request);
        let added = self.scheduler.add(Arc::clone(&request), self.now);
        match &added {
            Ok(()) => {
                for choice in 0..request.num_choices {
                    self.open(&request, choice);
                }
            }
            Err(error) => self.check_refusal(&request, error),
        }
        self.check();
        added
    }

    /// Submits a request that must be taken.
    pub fn submit(&mut self, request: Request) -> RequestId {
        let id = request.id;
        let added = self.add(request);
        added.unwrap_or_else(|error| panic!("{error}"));
        id
    }

    fn open(&mut self, request: &Arc<Request>, choice: u32) {
        let id = ChoiceId {
            request: request.id,
            choice,
        };
        self.ledger.open(id, request);
    }

    /// What fits is not refused for its size.
    fn check_refusal(&self, request: &Request, error: &AddError) {
        let config = self.scheduler.config();
        let num_prompt = request.prompt.len() as u32;
        let max_len = config.max_context.min(num_prompt + request.stop.max_tokens);
        let fits = max_len.div_ceil(config.block_size) <= config.num_blocks;
        match error {
            AddError::NeverFits { .. } => assert!(!fits, "{error}"),
            AddError::PromptTooLong { .. } => {
                assert!(num_prompt >= config.max_context, "{error}");
            }
            AddError::QueueFull { .. } => {
                let waiting = self.scheduler.stats().num_waiting;
                assert!(
                    waiting + request.num_choices > config.max_waiting,
                    "{error}"
                );
            }
            AddError::TooManyChoices { .. } => {
                assert!(request.num_choices > config.max_waiting, "{error}");
            }
            AddError::EmptyPrompt { .. }
            | AddError::NoChoices { .. }
            | AddError::NoOutput { .. }
            | AddError::DuplicateId { .. } => panic!("{error}"),
        }
    }

    /// Asks for one more choice of a request, live or not.
    pub fn fork(&mut self, request: RequestId) {
        let live = self.ledger.live().find(|(id, _)| id.request == request);
        let live = live.map(|(_, record)| Arc::clone(&record.request));
        match (self.scheduler.fork(request, self.now), live) {
            (Ok(choice), Some(request)) => self.open(&request, choice),
            (Err(ForkError::UnknownRequest { .. }), None)
            | (Err(ForkError::QueueFull { .. }), _) => {}
            (forked, live) => panic!("fork gave {forked:?}, live: {}", live.is_some()),
        }
        self.check();
    }

    /// Aborts a request, at any time; all its choices end at once.
    pub fn abort(&mut self, request: RequestId) {
        let live: Vec<ChoiceId> = self.ledger.live().map(|(id, _)| id).collect();
        for id in live.into_iter().filter(|id| id.request == request) {
            self.ledger.excuse(id, Excuse::Aborted);
        }
        self.scheduler.abort(request, self.now, &mut self.events);
        self.take_events();
        self.ledger.check_excused_have_ended();
        self.check();
    }

    /// Plans the next step; false when there is nothing to run.
    pub fn schedule(&mut self) -> bool {
        self.now = self.now + STEP_TIME;
        self.scheduler
            .schedule(self.now, &mut self.plan, &mut self.events);
        self.note_started();
        self.take_events();
        self.ledger.check_deadlines(self.now);
        self.check_next_deadline();
        self.check_plan();
        self.check_progress();
        self.check();
        self.num_planned_running = self.scheduler.stats().num_running as usize;
        !self.plan.is_empty()
    }

    /// Names the sequences of the plan that are new to it.
    fn note_started(&mut self) {
        for started in &self.plan.started {
            let id = ChoiceId {
                request: started.request.id,
                choice: started.choice,
            };
            let previous = self.names.insert(started.id, id);
            assert!(previous.is_none_or(|before| before == id), "{id:?}");
            assert_eq!(started.output, self.ledger.record(id).tokens, "{id:?}");
            self.ledger.scheduled(id);
        }
    }

    /// Makes a row of the planned step fail.
    pub fn fail_row(&mut self, row: usize, error: RowError) {
        let (step, id) = (self.plan.step, self.row_choice(row));
        self.ledger.excuse(id, Excuse::Failed(error.clone()));
        let row = row as u32;
        let site = RowSite::Index { step, row };
        self.model.inject(Fault::Row { site, error });
    }

    /// Makes the planned step fail as a whole.
    pub fn fail_step(&mut self, failure: StepFailure) {
        let step = self.plan.step;
        for row in 0..self.plan.rows.len() {
            let id = self.row_choice(row);
            if self.ledger.record(id).end.is_none() {
                self.ledger.excuse(id, Excuse::StepFailed);
            }
        }
        self.model.inject(Fault::Step { step, failure });
    }

    /// Whose row it is.
    pub fn row_choice(&self, row: usize) -> ChoiceId {
        self.names[&self.plan.rows[row].sequence]
    }

    /// Executes and commits the planned step.
    pub fn finish_step(&mut self) {
        self.finish_step_with(None);
    }

    /// The same, with a stop string found in one row after so many of its new tokens, if it has as many.
    pub fn finish_step_with(&mut self, stop_string: Option<StopString>) {
        match self.execute() {
            Ok(()) => {
                if let Some(found) = stop_string {
                    self.find_stop_string(found);
                }
                self.commit();
            }
            Err(message) => self.commit_failure(&message),
        }
        // The runner keeps nothing of a sequence that is not running any more.
        assert!(self.model.num_sequences() <= self.num_planned_running);
        self.model.clear_faults();
        self.take_events();
        self.ledger.check_excused_have_ended();
        self.check();
    }

    fn execute(&mut self) -> Result<(), String> {
        let Harness {
            model,
            plan,
            output,
            ..
        } = self;
        let executed = catch_unwind(AssertUnwindSafe(|| model.execute(plan, output)));
        match executed {
            Ok(result) => result.map_err(|error| error.to_string()),
            Err(_) => Err("the step panicked".into()),
        }
    }

    fn commit_failure(&mut self, message: &str) {
        let Harness {
            scheduler, plan, ..
        } = self;
        scheduler.fail_step(plan, message, self.now, &mut self.events);
        self.decoding.clear();
    }

    /// The driver's part between execute and commit.
    fn find_stop_string(&mut self, found: StopString) {
        let id = self.row_choice(found.row);
        let out = &mut self.output.rows[found.row];
        let is_live = self.ledger.record(id).end.is_none();
        if is_live && out.verdict == RowVerdict::Continue && out.tokens.len() >= found.num_tokens {
            out.tokens.end = out.tokens.start + found.num_tokens;
            out.verdict = RowVerdict::StopString;
            self.ledger.excuse(id, Excuse::StopString);
        }
    }

    fn commit(&mut self) {
        self.report_prompt_logprobs();
        self.now = self.now + STEP_TIME;
        let Harness {
            scheduler,
            plan,
            output,
            events,
            ..
        } = self;
        scheduler.commit(plan, output, self.now, events);
        let sampled = plan.rows.iter().filter(|row| row.sample);
        self.decoding = sampled.map(|row| row.sequence).collect();
    }

    fn report_prompt_logprobs(&mut self) {
        for row in 0..self.plan.rows.len() {
            let id = self.row_choice(row);
            let reported = self.output.rows[row].prompt_logprobs.range();
            if self.ledger.record(id).end.is_none() && !reported.is_empty() {
                let positions = &self.output.prompt_logprobs[reported];
                let tokens = positions.iter().map(|position| position.chosen.token);
                self.ledger.report_prompt(id, tokens);
            }
        }
    }

    /// One whole step; false when there was nothing to run.
    pub fn step(&mut self) -> bool {
        let planned = self.schedule();
        if planned {
            self.finish_step();
        }
        planned
    }

    /// Runs until nothing is left, then checks that every block can be had again.
    pub fn drain(&mut self) {
        let work: usize = self
            .ledger
            .live()
            .map(|(_, record)| size(&record.request))
            .sum();
        // Every step advances at least one sequence by one token; preemption makes some tokens be computed again.
        let mut left = 16 * work + 16;
        while self.scheduler.has_work() {
            self.step();
            left -= 1;
            assert!(left > 0, "no end in sight: {:?}", self.scheduler.stats());
        }
        assert_eq!(self.ledger.num_live(), 0);
        let blocks = self.scheduler.stats().blocks;
        assert_eq!(blocks.available(), blocks.total, "{blocks:?}");
    }

    fn take_events(&mut self) {
        for event in self.events.drain(..) {
            match event {
                Event::Accepted {
                    request,
                    choice,
                    row,
                    num_tokens,
                } => {
                    let id = ChoiceId { request, choice };
                    let row = row as usize;
                    assert_eq!(self.names[&self.plan.rows[row].sequence], id);
                    let tokens = self.output.row_tokens(&self.output.rows[row]);
                    self.ledger.accept(id, &tokens[..num_tokens as usize]);
                }
                Event::Finished {
                    request,
                    choice,
                    reason,
                    summary,
                } => {
                    let id = ChoiceId { request, choice };
                    self.ledger.close(id, reason, summary);
                }
                Event::Prefilled { .. }
                | Event::OfferExpired { .. }
                | Event::Reserved { .. }
                | Event::TransferExpired { .. } => panic!("{event:?} where nobody hands over"),
            }
        }
    }

    /// I1 to I6 and I8 inside, I1 and I6 as they are told outside.
    pub fn check(&self) {
        let step = self.plan.step;
        if let Err(broken) = self.scheduler.check_invariants() {
            panic!("after step {step}: {broken}");
        }
        let (stats, config) = (self.scheduler.stats(), self.scheduler.config());
        let live = self.ledger.num_live();
        assert_eq!(stats.num_running + stats.num_waiting, live, "{stats:?}");
        assert!(stats.num_running <= config.max_sequences, "{stats:?}");
        assert_eq!(self.scheduler.has_work(), live > 0, "{stats:?}");
        let blocks = stats.blocks;
        let sum = blocks.free + blocks.active + blocks.cached_evictable + blocks.cached_pinned;
        assert_eq!((sum, blocks.total), (config.num_blocks, config.num_blocks));
    }

    /// The plan keeps the limits, and no decode stalls for a prefill.
    fn check_plan(&self) {
        let (plan, config) = (&self.plan, self.scheduler.config());
        assert!(plan.tokens.len() <= config.max_batch_tokens as usize);
        assert!(plan.rows.len() <= config.max_sequences as usize);
        let planned: BTreeSet<SequenceId> = plan.rows.iter().map(|row| row.sequence).collect();
        assert_eq!(planned.len(), plan.rows.len(), "a sequence has two rows");
        let is_due = |sequence: &&SequenceId| {
            let record = self.ledger.record(self.names[*sequence]);
            record.end.is_none() && !plan.ended.contains(sequence)
        };
        let stalled = self.decoding.difference(&planned).find(is_due);
        assert_eq!(stalled, None, "it decoded and stands still");
    }

    fn check_next_deadline(&self) {
        let Some(earliest) = self.ledger.next_deadline() else {
            return;
        };
        let next = self.scheduler.next_deadline();
        let in_time = next.is_some_and(|at| at <= earliest);
        assert!(in_time, "{next:?}, but a choice ends at {earliest:?}");
    }

    /// Something runs whenever something waits (S05).
    fn check_progress(&mut self) {
        let idle = self.plan.is_empty() && self.scheduler.has_work();
        self.idle_steps = if idle { self.idle_steps + 1 } else { 0 };
        let stats = self.scheduler.stats();
        assert!(self.idle_steps <= MAX_IDLE_STEPS, "nothing runs: {stats:?}");
    }
}

/// Tokens a request may come to, over all choices.
fn size(request: &Request) -> usize {
    request.prompt.len() + request.stop.max_tokens as usize
}
