//! The engine thread: drain the inbox, schedule, execute, commit, publish.
//!
//! It owns the scheduler and the runner (A4). When there is nothing to run it blocks on its inbox. It makes
//! no scheduling decision and never waits for a reader.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::time::Duration;

use millpond_scheduler::{
    BatchPlan, Event, FinishReason, ModelOutput, ModelRunner, RequestId, RowError, Scheduler,
    SequenceId, Summary,
};

pub(crate) mod gauges;
pub(crate) mod stream;

pub(crate) use stream::{Submission, TextOptions};

use crate::handle::Command;
use crate::text::tokenizer::Tokenizer;
use gauges::Gauges;
use stream::Stream;

/// Steps between two full checks of the scheduler's invariants (each also follows when work runs out).
const STEPS_PER_CHECK: u64 = 1_000;

/// Failed steps in a row after which the engine gives up rather than answer errors for ever.
const MAX_FAILED_STEPS: u32 = 3;

/// Scheduler, runner and streams of one worker.
pub(crate) struct Driver<R> {
    scheduler: Scheduler,
    runner: R,
    tokenizer: Tokenizer,
    inbox: Receiver<Command>,
    gauges: Arc<Gauges>,
    streams: BTreeMap<RequestId, Stream>,
    /// Whose choice each sequence known to the runner is.
    sequences: BTreeMap<SequenceId, (RequestId, u32)>,
    plan: BatchPlan,
    output: ModelOutput,
    events: Vec<Event>,
    num_failed_steps: u32,
}

/// Why the engine thread ended.
#[derive(Debug)]
enum Exit {
    /// Nobody can submit any more.
    Disconnected,
    /// It could not go on; the message is for the log.
    Broken(String),
}

impl<R: ModelRunner> Driver<R> {
    pub(crate) fn new(
        scheduler: Scheduler,
        runner: R,
        tokenizer: Tokenizer,
        inbox: Receiver<Command>,
        gauges: Arc<Gauges>,
    ) -> Self {
        Driver {
            scheduler,
            runner,
            tokenizer,
            inbox,
            gauges,
            streams: BTreeMap::new(),
            sequences: BTreeMap::new(),
            plan: BatchPlan::default(),
            output: ModelOutput::default(),
            events: Vec::new(),
            num_failed_steps: 0,
        }
    }

    /// Runs until nobody can submit any more or the engine is broken. Streams left over end without a
    /// `Finished`, which their readers report as an error.
    pub(crate) fn run(mut self) {
        let exit = catch_unwind(AssertUnwindSafe(|| {
            loop {
                if let Err(exit) = self.receive().and_then(|()| self.step()) {
                    return exit;
                }
            }
        }))
        .unwrap_or_else(|panic| Exit::Broken(panic_message(&*panic)));
        self.gauges.set_dead();
        match exit {
            Exit::Disconnected => tracing::debug!("engine thread ends: nobody is left to ask"),
            Exit::Broken(message) => tracing::error!(%message, "engine thread gives up"),
        }
    }

    /// Takes everything out of the inbox; blocks when there is nothing to run.
    fn receive(&mut self) -> Result<(), Exit> {
        if !self.scheduler.has_work() {
            self.check_invariants()?;
            let command = self.inbox.recv().map_err(|_| Exit::Disconnected)?;
            self.obey(command);
        }
        loop {
            match self.inbox.try_recv() {
                Ok(command) => self.obey(command),
                Err(TryRecvError::Empty) => return Ok(()),
                Err(TryRecvError::Disconnected) => return Err(Exit::Disconnected),
            }
        }
    }

    fn obey(&mut self, command: Command) {
        let now = self.gauges.now();
        match command {
            Command::Submit(submission) => self.admit(submission),
            Command::Abort(id) => self.scheduler.abort(id, now, &mut self.events),
        }
        self.note_state();
        self.publish();
    }

    fn admit(&mut self, submission: Submission) {
        let request = Arc::clone(submission.request());
        let mut stream = Stream::new(submission, &self.tokenizer);
        match self.scheduler.add(Arc::clone(&request), self.gauges.now()) {
            Ok(()) => {
                let num_tokens = request.prompt.len() as u64;
                self.gauges
                    .num_prompt_tokens
                    .fetch_add(num_tokens, Ordering::Relaxed);
                self.streams.insert(request.id, stream);
            }
            Err(error) => {
                self.gauges.leave_queue(stream.num_queued());
                let reason = FinishReason::Error(RowError::StepFailed(error.to_string()));
                for choice in 0..request.num_choices {
                    stream.send_finished(choice, reason.clone(), Summary::default());
                }
            }
        }
    }

    /// One step: the whole machine.
    fn step(&mut self) -> Result<(), Exit> {
        self.scheduler
            .schedule(self.gauges.now(), &mut self.plan, &mut self.events);
        self.publish();
        self.note_started();
        if self.plan.is_empty() {
            return self.wait_for_change();
        }
        match self.execute() {
            Ok(()) => {
                self.read_text();
                let now = self.gauges.now();
                self.scheduler
                    .commit(&self.plan, &self.output, now, &mut self.events);
                self.num_failed_steps = 0;
            }
            Err(message) => self.fail_step(&message)?,
        }
        self.gauges.note_step(self.plan.tokens.len() as u64);
        self.note_state();
        self.publish();
        if self.plan.step.is_multiple_of(STEPS_PER_CHECK) {
            self.check_invariants()
        } else {
            Ok(())
        }
    }

    /// Runs the plan. A panic inside is caught and fails the step.
    fn execute(&mut self) -> Result<(), String> {
        let Driver {
            runner,
            plan,
            output,
            ..
        } = self;
        match catch_unwind(AssertUnwindSafe(|| runner.execute(plan, output))) {
            Ok(result) => result.map_err(|error| error.to_string()),
            Err(panic) => Err(panic_message(&*panic)),
        }
    }

    /// Ends the rows of a failed step. The keys and values it was to write are published nowhere, so the
    /// next step starts from a sound state; only a row of failures ends the engine.
    fn fail_step(&mut self, message: &str) -> Result<(), Exit> {
        tracing::error!(step = self.plan.step, message, "step failed");
        let now = self.gauges.now();
        self.scheduler
            .fail_step(&self.plan, message, now, &mut self.events);
        self.output.clear();
        self.num_failed_steps += 1;
        if self.num_failed_steps < MAX_FAILED_STEPS {
            return Ok(());
        }
        self.publish();
        Err(Exit::Broken(format!(
            "{MAX_FAILED_STEPS} steps in a row failed, the last with: {message}"
        )))
    }

    /// Nothing can run although something waits: sleep until a command or the next deadline.
    fn wait_for_change(&mut self) -> Result<(), Exit> {
        if !self.scheduler.has_work() {
            return Ok(());
        }
        let command = match self.scheduler.next_deadline() {
            Some(deadline) => {
                let timeout = Duration::from_nanos((deadline - self.gauges.now()).0);
                self.inbox.recv_timeout(timeout)
            }
            None => self
                .inbox
                .recv()
                .map_err(|_| RecvTimeoutError::Disconnected),
        };
        match command {
            Ok(command) => self.obey(command),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Err(Exit::Disconnected),
        }
        Ok(())
    }

    /// Sequences that enter the runner leave the queue.
    fn note_started(&mut self) {
        for ended in &self.plan.ended {
            self.sequences.remove(ended);
        }
        for started in &self.plan.started {
            let owner = (started.request.id, started.choice);
            self.sequences.insert(started.id, owner);
            let stream = self.streams.get_mut(&owner.0);
            if stream.is_some_and(|stream| stream.leave_queue(owner.1)) {
                self.gauges.leave_queue(1);
            }
        }
    }

    /// Detokenizes new tokens and looks for stop strings, between execute and commit.
    fn read_text(&mut self) {
        for (index, row) in self.plan.rows.iter().enumerate() {
            if let Some((request, choice)) = self.sequences.get(&row.sequence)
                && let Some(stream) = self.streams.get_mut(request)
            {
                stream.read_row(*choice, index, &mut self.output);
            }
        }
    }

    /// Sends what the scheduler reported to the streams concerned.
    fn publish(&mut self) {
        for event in self.events.drain(..) {
            match event {
                Event::Accepted {
                    request,
                    choice,
                    row,
                    num_tokens,
                } => {
                    let Some(row) = self.output.rows.get(row as usize) else {
                        continue;
                    };
                    self.gauges
                        .num_generated_tokens
                        .fetch_add(u64::from(num_tokens), Ordering::Relaxed);
                    if let Some(stream) = self.streams.get_mut(&request) {
                        stream.send_accepted(choice, row, num_tokens, &self.output);
                    }
                }
                Event::Finished {
                    request,
                    choice,
                    reason,
                    summary,
                } => {
                    let Some(stream) = self.streams.get_mut(&request) else {
                        continue;
                    };
                    let num_queued = stream.num_queued();
                    stream.send_finished(choice, reason, summary);
                    self.gauges.leave_queue(num_queued - stream.num_queued());
                    if stream.is_finished() {
                        self.streams.remove(&request);
                    }
                }
                // This worker does all of a request: it neither offers nor receives.
                Event::Prefilled { .. }
                | Event::OfferExpired { .. }
                | Event::Reserved { .. }
                | Event::TransferExpired { .. } => {}
            }
        }
    }

    /// Counters are brought up to date before events go out, so that who saw an end sees its effect.
    fn note_state(&self) {
        let stats = self.scheduler.stats();
        let gauges = &self.gauges;
        let store = |gauge: &AtomicU64, value| gauge.store(value, Ordering::Relaxed);
        let num_used_blocks = stats.blocks.total - stats.blocks.available();
        store(&gauges.num_running, u64::from(stats.num_running));
        store(&gauges.num_waiting, u64::from(stats.num_waiting));
        store(&gauges.num_used_blocks, u64::from(num_used_blocks));
        store(
            &gauges.prefix_query_tokens,
            stats.counters.prefix_query_tokens,
        );
        store(&gauges.prefix_hit_tokens, stats.counters.prefix_hit_tokens);
        store(&gauges.num_preemptions, stats.counters.num_preemptions);
        gauges.note_progress(self.scheduler.has_work(), stats.oldest_waiting_arrival);
    }

    /// A broken invariant means that answers can no longer be trusted: better no engine than a wrong one.
    fn check_invariants(&self) -> Result<(), Exit> {
        self.scheduler.check_invariants().map_err(Exit::Broken)
    }
}

/// The text of a panic.
fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "panic without a message".to_owned())
}
