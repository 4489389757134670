//! The loop of simulated time: arrivals, steps, transfers and faults, in one order that the seed determines.
//!
//! It owns the workers and does what threads do elsewhere: it carries commands from the coordinator to
//! schedulers and events back. It decides nothing that a scheduler or the coordinator decides, and after
//! everything that happens it asks whether their promises still hold.

mod ledger;
mod transport;

use std::sync::Arc;

use super::agenda::{Agenda, Happening};
use super::dice::Dice;
use super::faults::{Fates, FaultRates, StepFate};
use super::journal::Journal;
use super::link::{Link, LinkSpeed};
use super::report::{Report, Slo};
use super::worker::{CheckEvery, Stand, Worker, WorkerConfig};
use super::workload::Workload;
use crate::config::ConfigError;
use crate::disagg::{Command, Coordinator, CoordinatorConfig, Refusal};
use crate::request::{CacheSalt, Deadlines, Request, RequestId, SamplingParams, StopConditions};
use crate::scheduler::AddError;
use crate::time::{Span, Timestamp};
use crate::transfer::{Peer, WorkerId};

use ledger::Ledger;
use transport::Parcel;

/// What is simulated, apart from the workload.
#[derive(Clone, Debug, PartialEq)]
pub struct SimulationConfig {
    /// The workers, with their roles.
    pub workers: Vec<WorkerConfig>,
    /// The way between them.
    pub link: LinkSpeed,
    /// What goes wrong.
    pub faults: FaultRates,
    /// Nothing goes wrong from then on.
    pub faults_until: Timestamp,
    /// Every request must have ended this long after the last arrival and the last fault.
    pub settle_within: Option<Span>,
    /// A request that has not ended after this long gives up.
    pub timeout: Option<Span>,
    /// Determines everything that is drawn by chance.
    pub seed: u64,
    /// What stands in for models.
    pub stand: Stand,
    /// How often every invariant is checked by walking everything.
    pub check: CheckEvery,
    /// The promise that goodput is measured against.
    pub slo: Option<Slo>,
}

/// Why a run ended before its time: something is wrong with the scheduler or the simulation.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("seed {seed}, at {at} ns: {what}")]
pub struct Violation {
    /// The seed that shows it again.
    pub seed: u64,
    /// When it was noticed.
    pub at: u64,
    /// What was broken.
    pub what: String,
}

/// How far a run has got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Requests ended.
    pub num_ended: u64,
    /// Requests in all.
    pub num_requests: u64,
}

/// Who watches a run.
#[derive(Default)]
pub struct Watch<'a> {
    /// Gets every line of the event log, without its newline.
    pub log: Option<&'a mut dyn FnMut(&str)>,
    /// Is told now and then how far it got.
    pub progress: Option<&'a mut dyn FnMut(Progress)>,
}

/// How long a client that leaves has waited, at most.
const PATIENCE: Span = Span::from_secs(5);

/// How long it takes, at most, until a lost worker is missed.
const MAX_DETECTION_MILLIS: u64 = 6_000;

/// Whether a worker is there, and what it does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Idle,
    Stepping,
    Down,
}

/// A worker and its place in the run.
struct Station {
    worker: Worker,
    /// Its present life: what an earlier one left on the agenda is void.
    peer: Peer,
    state: State,
    link: Link,
    /// The agenda has a wake-up for then.
    alarm: Option<Timestamp>,
}

/// A run.
pub struct Simulation<'a> {
    config: SimulationConfig,
    workload: &'a Workload,
    coordinator: Coordinator,
    coordinator_alarm: Option<Timestamp>,
    stations: Vec<Station>,
    agenda: Agenda<Parcel>,
    fates: Fates,
    chance: Dice,
    commands: Vec<Command>,
    ledger: Ledger,
    journal: Journal<'a>,
    progress: Option<&'a mut dyn FnMut(Progress)>,
    now: Timestamp,
}

/// Names of the streams of chance.
const FAULTS: u64 = 1;
const DELAYS: u64 = 2;

impl<'a> Simulation<'a> {
    /// Everything in place, nothing happened yet.
    pub fn new(
        config: SimulationConfig,
        workload: &'a Workload,
        watch: Watch<'a>,
    ) -> Result<Self, ConfigError> {
        let schedulers: Vec<_> = config.workers.iter().map(|w| w.scheduler.clone()).collect();
        let coordinator = Coordinator::new(
            CoordinatorConfig {
                max_requests: u32::MAX,
                ..CoordinatorConfig::default()
            },
            &schedulers,
        )?;
        let mut stations = Vec::new();
        for (number, worker) in (0..).zip(&config.workers) {
            let worker = Worker::new(worker, config.stand)?;
            stations.push(Station {
                worker,
                peer: coordinator.peer(WorkerId(number)).unwrap_or_default(),
                state: State::Idle,
                link: Link::default(),
                alarm: None,
            });
        }
        let mut agenda = Agenda::default();
        for (session, start) in (0..).zip(workload.sessions.iter().map(|s| s.start)) {
            agenda.add(start, Happening::Arrive { session, turn: 0 });
        }
        let dice = Dice::new(config.seed);
        Ok(Simulation {
            fates: Fates::new(config.faults, config.faults_until, &dice.fork(FAULTS)),
            chance: dice.fork(DELAYS),
            ledger: Ledger::new(workload, &config),
            coordinator,
            coordinator_alarm: None,
            stations,
            agenda,
            commands: Vec::new(),
            journal: Journal::new(watch.log),
            progress: watch.progress,
            now: Timestamp(0),
            config,
            workload,
        })
    }

    /// Runs until nothing is left to happen.
    pub fn run(mut self) -> Result<Report, Violation> {
        match self.run_to_the_end() {
            Ok(()) => {
                let workers = self.stations.iter().map(|station| &station.worker);
                Ok(self.ledger.close(workers, self.journal.digest()))
            }
            Err(what) => Err(Violation {
                seed: self.config.seed,
                at: self.now.0,
                what,
            }),
        }
    }

    fn run_to_the_end(&mut self) -> Result<(), String> {
        while let Some((at, happening)) = self.agenda.pop() {
            self.now = at;
            self.happen(happening)?;
            self.settle()?;
            self.set_alarms();
            self.ledger
                .sample(at, self.stations.iter().map(|station| &station.worker));
            self.ledger.check_time(at)?;
        }
        self.check_rest()
    }

    fn happen(&mut self, happening: Happening<Parcel>) -> Result<(), String> {
        match happening {
            Happening::Arrive { session, turn } => self.arrive(session, turn),
            Happening::StepDone(peer) => self.step_done(peer)?,
            Happening::Alarm(peer) => {
                if let Some(station) = self.station(peer) {
                    station.alarm = None;
                }
            }
            Happening::Crash(peer) => self.crash(peer),
            Happening::Missed(worker) => {
                self.journal
                    .note(self.now, format_args!("missed worker={}", worker.0));
                self.coordinator
                    .worker_lost(worker, self.now, &mut self.commands);
            }
            Happening::Back(worker) => self.back(worker)?,
            Happening::Gone(request) => {
                if self.ledger.is_live(request) {
                    self.journal
                        .note(self.now, format_args!("gone request={}", request.0));
                    self.ledger.count_fault();
                    self.coordinator
                        .abort(request, self.now, &mut self.commands);
                }
            }
            Happening::Landed(parcel) => self.land(parcel),
            Happening::CoordinatorAlarm => {
                self.coordinator_alarm = None;
                self.coordinator.expire(self.now, &mut self.commands);
            }
        }
        Ok(())
    }

    /// A session sends its next request.
    fn arrive(&mut self, session: u32, turn: u32) {
        let now = self.now;
        let asked = &self.workload.sessions[session as usize];
        let ask = &asked.turns[turn as usize];
        let id = self.ledger.mint_id();
        let prompt = self.ledger.prompt(session, &ask.prompt);
        let request = Arc::new(Request {
            id,
            prompt,
            sampling: SamplingParams::default(),
            stop: StopConditions {
                max_tokens: ask.num_output,
                min_tokens: 0,
                stop_token_ids: Vec::new(),
                eos_token_ids: Vec::new(),
                ignore_eos: true,
            },
            num_choices: ask.num_choices,
            priority: asked.priority,
            salt: CacheSalt::default(),
            arrival: now,
            deadlines: Deadlines {
                queue: None,
                first_token: None,
                total: self.config.timeout.map(|timeout| now + timeout),
            },
        });
        self.journal.note(
            now,
            format_args!(
                "arrive request={} session={session} turn={turn} prompt={} output={} choices={}",
                id.0,
                request.prompt.len(),
                ask.num_output,
                ask.num_choices
            ),
        );
        self.ledger.open(&request, session, turn, now);
        if let Some(after) = self.fates.of_client(now, PATIENCE) {
            self.agenda.add(now + after, Happening::Gone(id));
        }
        let submitted = self.coordinator.submit(request, now, &mut self.commands);
        if let Err(error) = submitted {
            self.journal
                .note(now, format_args!("refused request={}: {error}", id.0));
            self.ledger.refuse(id);
        }
    }

    /// Carries out commands and begins steps until nobody has anything to say.
    fn settle(&mut self) -> Result<(), String> {
        loop {
            self.hear_workers();
            for command in std::mem::take(&mut self.commands) {
                self.obey(command)?;
            }
            self.hear_workers();
            if self.commands.is_empty() && !self.begin_steps()? && self.commands.is_empty() {
                return Ok(());
            }
        }
    }

    /// Tells the coordinator what the workers reported.
    fn hear_workers(&mut self) {
        let Simulation {
            coordinator,
            stations,
            commands,
            now,
            ..
        } = self;
        for station in stations {
            let peer = station.peer;
            station.worker.drain_events(|event, tokens| {
                coordinator.event(peer, &event, tokens, *now, commands);
            });
        }
    }

    /// Begins a step on every worker that is idle and has something to run. Says whether any did, or had
    /// something to report.
    fn begin_steps(&mut self) -> Result<bool, String> {
        let mut any = false;
        for number in 0..self.stations.len() {
            let station = &self.stations[number];
            if station.state == State::Idle && station.worker.scheduler.has_work() {
                any |= self.begin_step(number)?;
            }
        }
        Ok(any)
    }

    fn begin_step(&mut self, number: usize) -> Result<bool, String> {
        let now = self.now;
        let fate = self.fates.of_step(now);
        let station = &mut self.stations[number];
        let (trouble, crash) = match &fate {
            StepFate::Run(trouble) => (trouble.as_ref(), false),
            StepFate::Crash => (None, true),
        };
        let Some(begun) = station.worker.begin_step(now, trouble) else {
            return Ok(station.worker.has_events());
        };
        station.state = State::Stepping;
        let peer = station.peer;
        self.ledger.note_step(begun.time);
        let shape = begun.shape;
        self.journal.note(
            now,
            format_args!(
                "step worker={number} number={} prefill={} decode={} context={} takes={}",
                begun.step,
                shape.prefill_tokens,
                shape.decode_rows,
                shape.decode_context,
                begun.time.0
            ),
        );
        if let Some(trouble) = trouble {
            self.ledger.count_fault();
            self.journal
                .note(now, format_args!("fault worker={number} {trouble:?}"));
        }
        if crash {
            let half = Span(begun.time.0 / 2);
            self.agenda.add(now + half, Happening::Crash(peer));
        } else {
            self.agenda.add(now + begun.time, Happening::StepDone(peer));
        }
        Ok(true)
    }

    fn step_done(&mut self, peer: Peer) -> Result<(), String> {
        let (now, every) = (self.now, self.config.check);
        let Some(station) = self.station(peer) else {
            return Ok(());
        };
        station.state = State::Idle;
        station.worker.finish_step(now);
        station
            .worker
            .check(every)
            .map_err(|what| format!("worker {}: {what}", peer.worker.0))
    }

    /// The worker dies; until it is missed, what is sent to it vanishes.
    fn crash(&mut self, peer: Peer) {
        let Some(station) = self.station(peer) else {
            return;
        };
        station.state = State::Down;
        self.ledger
            .bury(&self.stations[peer.worker.0 as usize].worker);
        self.ledger.count_fault();
        let (detection, absence) = (
            Span::from_millis(self.chance.below(MAX_DETECTION_MILLIS)),
            Span::from_millis(1 + self.chance.below(2 * MAX_DETECTION_MILLIS)),
        );
        self.journal
            .note(self.now, format_args!("crash worker={}", peer.worker.0));
        if detection < absence {
            self.agenda
                .add(self.now + detection, Happening::Missed(peer.worker));
        }
        self.agenda
            .add(self.now + absence, Happening::Back(peer.worker));
    }

    /// The worker is there again, empty.
    fn back(&mut self, worker: WorkerId) -> Result<(), String> {
        self.journal
            .note(self.now, format_args!("back worker={}", worker.0));
        let peer = self
            .coordinator
            .worker_back(worker, self.now, &mut self.commands)
            .ok_or("the coordinator does not know a worker that it was made with")?;
        let number = worker.0 as usize;
        let fresh = Worker::new(&self.config.workers[number], self.config.stand);
        self.stations[number] = Station {
            worker: fresh.map_err(|error| error.to_string())?,
            peer,
            state: State::Idle,
            link: Link::default(),
            alarm: None,
        };
        Ok(())
    }

    /// The station where `peer` lives; `None` if that life is over.
    fn station(&mut self, peer: Peer) -> Option<&mut Station> {
        let station = self.stations.get_mut(peer.worker.0 as usize)?;
        (station.peer == peer && station.state != State::Down).then_some(station)
    }

    fn obey(&mut self, command: Command) -> Result<(), String> {
        let now = self.now;
        match command {
            Command::Add { to, request } => {
                let Some(station) = self.station(to) else {
                    return Ok(());
                };
                if let Err(error) = station.worker.scheduler.add(Arc::clone(&request), now) {
                    let refusal = match &error {
                        AddError::QueueFull { .. } => Refusal::Busy,
                        _ => Refusal::Never(error.to_string()),
                    };
                    for choice in 0..request.num_choices {
                        self.refused(to, request.id, choice, refusal.clone());
                    }
                }
            }
            Command::Receive { to, arrival } => {
                let Some(station) = self.station(to) else {
                    return Ok(());
                };
                let (request, choice) = (arrival.request.id, arrival.choice);
                if let Err(error) = station.worker.scheduler.receive(arrival, now) {
                    let refusal = match error.is_busy() {
                        true => Refusal::Busy,
                        false => Refusal::Never(error.to_string()),
                    };
                    self.refused(to, request, choice, refusal);
                }
            }
            Command::StartTransfer(order) => self.send(order),
            Command::RetryTransfer { to, ticket } => {
                if let Some(station) = self.station(to) {
                    station.worker.scheduler.retry_transfer(ticket);
                }
            }
            Command::FinishTransfer {
                to,
                ticket,
                outcome,
            } => {
                if let Some(station) = self.station(to) {
                    station.worker.scheduler.transfer_finished(ticket, outcome);
                }
            }
            Command::ReleaseOffer { to, sequence } => {
                if let Some(station) = self.station(to) {
                    station.worker.scheduler.release_offer(sequence);
                }
            }
            Command::Abort { to, request } => {
                if let Some(station) = self.station(to) {
                    let (scheduler, events) = station.worker.scheduler_and_events();
                    scheduler.abort(request, now, events);
                }
            }
            Command::Deliver {
                request,
                choice,
                tokens,
            } => self.ledger.deliver(request, choice, &tokens, now)?,
            Command::Finished {
                request,
                choice,
                reason,
                summary,
            } => {
                self.journal.note(
                    now,
                    format_args!(
                        "end request={} choice={choice} reason={reason:?} output={} cached={} preemptions={}",
                        request.0,
                        summary.num_output_tokens,
                        summary.num_cached_tokens,
                        summary.num_preemptions
                    ),
                );
                let next = self.ledger.finish(request, choice, &reason, &summary)?;
                if let Some(next) = next {
                    self.agenda.add(
                        now + next.pause,
                        Happening::Arrive {
                            session: next.session,
                            turn: next.turn,
                        },
                    );
                }
                self.show_progress();
            }
        }
        Ok(())
    }

    fn refused(&mut self, by: Peer, request: RequestId, choice: u32, refusal: Refusal) {
        self.coordinator
            .refused(by, request, choice, refusal, self.now, &mut self.commands);
    }

    /// Wakes workers and the coordinator for their deadlines.
    fn set_alarms(&mut self) {
        for station in &mut self.stations {
            if station.state != State::Idle {
                continue;
            }
            let due = station.worker.scheduler.next_deadline();
            if let Some(due) = due.filter(|due| station.alarm.is_none_or(|set| *due < set)) {
                station.alarm = Some(due);
                self.agenda
                    .add(due.max(self.now), Happening::Alarm(station.peer));
            }
        }
        let due = self.coordinator.next_deadline();
        if let Some(due) = due.filter(|due| self.coordinator_alarm.is_none_or(|set| *due < set)) {
            self.coordinator_alarm = Some(due);
            self.agenda
                .add(due.max(self.now), Happening::CoordinatorAlarm);
        }
    }

    fn show_progress(&mut self) {
        let progress = self.ledger.progress();
        if let Some(show) = &mut self.progress
            && (progress.num_ended.is_multiple_of(64)
                || progress.num_ended == progress.num_requests)
        {
            show(progress);
        }
    }

    /// Nothing is left to happen: nobody waits, no block is held, no table has an entry.
    fn check_rest(&self) -> Result<(), String> {
        self.ledger.check_rest()?;
        self.coordinator.check_invariants()?;
        if !self.coordinator.is_idle() {
            return Err(format!(
                "the coordinator still has {:?}",
                self.coordinator.stats()
            ));
        }
        for (number, station) in self.stations.iter().enumerate() {
            let scheduler = &station.worker.scheduler;
            let stats = scheduler.stats();
            let blocks = stats.blocks;
            if scheduler.has_work() || blocks.free + blocks.cached_evictable != blocks.total {
                return Err(format!("worker {number} still has {stats:?}"));
            }
            scheduler
                .check_invariants()
                .map_err(|what| format!("worker {number}: {what}"))?;
        }
        Ok(())
    }
}
