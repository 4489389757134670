//! Workers, a coordinator and a faulty link under one clock of milliseconds, with clients that check every word.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use millpond_scheduler::mock::{Bursts, oracle_output};
use millpond_scheduler::sim::dice::Dice;
use millpond_scheduler::{
    Command, Coordinator, CoordinatorConfig, DeadlineKind, FinishReason, KvTransfer, Peer, Request,
    RequestId, RowError, SchedulerConfig, Span, SubmitError, Summary, Timestamp, TokenId, WorkerId,
};

use super::link::{FaultyLink, LinkFaults};
use super::node::{Node, Report};
use crate::workload::VOCABULARY;

pub const TICK: Span = Span::from_millis(1);

/// A world is expected to come to rest within so many ticks.
const MAX_TICKS: u32 = 30_000;

/// What goes wrong outside the link. Probabilities are per tick.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    pub worker_loss: f64,
    /// A lost worker lives on unheard, rather than dies.
    pub zombie: f64,
    pub abort: f64,
    /// Words between coordinator and workers take up to so many ticks.
    pub max_delay: u64,
}

/// Everything that a world is made of.
#[derive(Clone, Debug)]
pub struct Setup {
    pub workers: Vec<SchedulerConfig>,
    pub coordinator: CoordinatorConfig,
    pub bursts: Bursts,
    pub piece_size: usize,
    pub faults: Faults,
    pub link: LinkFaults,
    pub seed: u64,
}

/// How a worker does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Life {
    Healthy,
    /// It went at this time; the coordinator may not know yet.
    Dead,
    Zombie,
}

struct Place {
    node: Node,
    life: Life,
    /// When the coordinator notices a loss, and when the worker is back.
    notice: Option<Timestamp>,
    back: Option<Timestamp>,
    reports: VecDeque<(Timestamp, Peer, Report)>,
}

/// What one client was told.
struct Client {
    request: Arc<Request>,
    tokens: Vec<TokenId>,
    end: Option<FinishReason>,
}

pub struct World {
    pub coordinator: Coordinator,
    pub link: FaultyLink,
    pub now: Timestamp,
    pub met: BTreeMap<&'static str, u64>,
    setup: Setup,
    places: Vec<Place>,
    clients: BTreeMap<(RequestId, u32), Client>,
    aborted: BTreeSet<RequestId>,
    dice: Dice,
}

impl World {
    pub fn new(setup: Setup) -> Self {
        let dice = Dice::new(setup.seed);
        let coordinator = Coordinator::new(setup.coordinator.clone(), &setup.workers);
        let coordinator = coordinator.expect("one block size");
        let place = |(number, config): (u32, &SchedulerConfig)| {
            let peer = coordinator.peer(WorkerId(number)).expect("configured");
            Place {
                node: Node::new(peer, config, setup.bursts, setup.piece_size),
                life: Life::Healthy,
                notice: None,
                back: None,
                reports: VecDeque::new(),
            }
        };
        World {
            places: (0..).zip(&setup.workers).map(place).collect(),
            link: FaultyLink::new(setup.link, dice.fork(1)),
            now: Timestamp(0),
            met: BTreeMap::new(),
            clients: BTreeMap::new(),
            aborted: BTreeSet::new(),
            dice: dice.fork(2),
            coordinator,
            setup,
        }
    }

    fn meet(&mut self, what: &'static str) {
        *self.met.entry(what).or_default() += 1;
    }

    /// A client asks. Only what nobody could ever do may be refused.
    pub fn submit(&mut self, request: Request) {
        let request = Arc::new(request);
        let mut commands = Vec::new();
        let submitted = self
            .coordinator
            .submit(Arc::clone(&request), self.now, &mut commands);
        match submitted {
            Ok(()) => {
                for choice in 0..request.num_choices {
                    let client = Client {
                        request: Arc::clone(&request),
                        tokens: Vec::new(),
                        end: None,
                    };
                    self.clients.insert((request.id, choice), client);
                }
            }
            Err(SubmitError::NobodyCan { .. }) => self.meet("nobody can"),
            Err(error) => panic!("{error}"),
        }
        self.carry_out(commands);
    }

    pub fn abort(&mut self, request: RequestId) {
        self.aborted.insert(request);
        let mut commands = Vec::new();
        self.coordinator.abort(request, self.now, &mut commands);
        self.carry_out(commands);
        let ended = |((id, _), client): (&(RequestId, u32), &Client)| {
            *id != request || client.end.is_some()
        };
        assert!(self.clients.iter().all(ended), "an abort ends at once");
    }

    /// One millisecond.
    pub fn tick(&mut self) {
        self.now = self.now + TICK;
        self.break_something();
        for number in 0..self.places.len() {
            self.turn(number);
            self.hear(number);
        }
        let mut commands = Vec::new();
        self.coordinator.expire(self.now, &mut commands);
        self.carry_out(commands);
        let next = self.coordinator.next_deadline();
        assert!(next.is_none_or(|next| next > self.now));
    }

    /// Lets faults happen, be noticed and be mended.
    fn break_something(&mut self) {
        let faults = self.setup.faults;
        if self.dice.chance(faults.worker_loss) {
            let victim = self.dice.below(self.places.len() as u64) as usize;
            let is_zombie = self.dice.chance(faults.zombie);
            self.lose(victim, is_zombie);
        }
        if self.dice.chance(faults.abort) {
            let live = self.live();
            if let Some(&request) = self.dice.pick(&live) {
                self.abort(request);
                self.meet("abort");
            }
        }
        for number in 0..self.places.len() {
            self.mend(number);
        }
    }

    fn live(&self) -> Vec<RequestId> {
        let live = self.clients.iter().filter(|(_, c)| c.end.is_none());
        live.map(|((request, _), _)| *request).collect()
    }

    /// A worker dies, or is only thought to.
    pub fn lose(&mut self, victim: usize, is_zombie: bool) {
        let notice = self.now + Span(self.dice.below(8) * TICK.0);
        let back = notice + Span((1 + self.dice.below(40)) * TICK.0);
        let place = &mut self.places[victim];
        if place.life != Life::Healthy {
            return;
        }
        place.life = match is_zombie {
            true => Life::Zombie,
            false => Life::Dead,
        };
        place.notice = Some(notice);
        place.back = Some(back);
    }

    fn mend(&mut self, number: usize) {
        let worker = WorkerId(number as u32);
        let is_due = |time: Option<Timestamp>, now| time.is_some_and(|time| time <= now);
        let mut commands = Vec::new();
        if is_due(self.places[number].notice, self.now) {
            self.places[number].notice = None;
            self.coordinator
                .worker_lost(worker, self.now, &mut commands);
            self.carry_out(std::mem::take(&mut commands));
        }
        if is_due(self.places[number].back, self.now) {
            let peer = self
                .coordinator
                .worker_back(worker, self.now, &mut commands);
            let peer = peer.expect("it is configured");
            let config = &self.setup.workers[number];
            let place = &mut self.places[number];
            place.node = Node::new(peer, config, self.setup.bursts, self.setup.piece_size);
            place.life = Life::Healthy;
            place.back = None;
            self.carry_out(commands);
        }
    }

    /// A worker's share of the millisecond.
    fn turn(&mut self, number: usize) {
        let World {
            places,
            link,
            now,
            dice,
            setup,
            ..
        } = self;
        let Place {
            node,
            life,
            reports,
            ..
        } = &mut places[number];
        if *life == Life::Dead {
            node.orders.clear();
            return;
        }
        let mut said = Vec::new();
        while node.orders.front().is_some_and(|(due, _)| due <= now) {
            if let Some((_, command)) = node.orders.pop_front() {
                node.obey(command, *now, link, &mut said);
            }
        }
        let mut arrived = Vec::new();
        link.poll(node.peer, *now, &mut arrived);
        for piece in &arrived {
            node.take(piece, &mut said);
        }
        if dice.chance(0.8) {
            node.step(*now, &mut said);
        }
        let earliest = reports.back().map_or(*now, |(due, ..)| *due);
        let due = earliest.max(*now + Span(dice.below(setup.faults.max_delay + 1) * TICK.0));
        reports.extend(said.into_iter().map(|report| (due, node.peer, report)));
    }

    /// The coordinator hears what a worker said some time ago.
    fn hear(&mut self, number: usize) {
        let mut commands = Vec::new();
        loop {
            let reports = &mut self.places[number].reports;
            if reports.front().is_none_or(|(due, ..)| *due > self.now) {
                break;
            }
            let Some((_, from, report)) = reports.pop_front() else {
                break;
            };
            let (coordinator, now) = (&mut self.coordinator, self.now);
            match report {
                Report::Event(event, tokens) => {
                    coordinator.event(from, &event, &tokens, now, &mut commands);
                }
                Report::Refused {
                    request,
                    choice,
                    refusal,
                } => {
                    coordinator.refused(from, request, choice, refusal, now, &mut commands);
                    self.meet("busy");
                }
                Report::Transfer(ticket, outcome) => {
                    coordinator.transfer_finished(ticket, outcome, now, &mut commands);
                }
            }
            self.check_coordinator();
        }
        self.carry_out(commands);
    }

    fn check_coordinator(&self) {
        if let Err(broken) = self.coordinator.check_invariants() {
            panic!("{:?}: {broken}", self.now);
        }
    }

    fn carry_out(&mut self, commands: Vec<Command>) {
        self.check_coordinator();
        for command in commands {
            match command {
                Command::Deliver {
                    request,
                    choice,
                    tokens,
                } => self.deliver(request, choice, &tokens),
                Command::Finished {
                    request,
                    choice,
                    reason,
                    summary,
                } => self.finish(request, choice, reason, summary),
                Command::Add { to, .. }
                | Command::Receive { to, .. }
                | Command::RetryTransfer { to, .. }
                | Command::FinishTransfer { to, .. }
                | Command::ReleaseOffer { to, .. }
                | Command::Abort { to, .. } => self.order(to, command),
                Command::StartTransfer(ref order) => self.order(order.from, command),
            }
        }
    }

    /// Commands to one worker keep their order.
    fn order(&mut self, to: Peer, command: Command) {
        let delay = self.dice.below(self.setup.faults.max_delay + 1);
        let orders = &mut self.places[to.worker.0 as usize].node.orders;
        let earliest = orders.back().map_or(self.now, |(due, _)| *due);
        let due = earliest.max(self.now + Span(delay * TICK.0));
        orders.push_back((due, command));
    }

    fn live_client(&mut self, request: RequestId, choice: u32) -> &mut Client {
        let client = self.clients.get_mut(&(request, choice));
        let client = client.expect("it was submitted");
        assert_eq!(client.end, None, "{request:?} was heard of after its end");
        client
    }

    /// I5: the right tokens, in order, once.
    fn deliver(&mut self, request: RequestId, choice: u32, tokens: &[TokenId]) {
        assert!(!tokens.is_empty());
        self.live_client(request, choice).tokens.extend(tokens);
    }

    /// I4: one end, and the one it should be.
    fn finish(&mut self, id: RequestId, choice: u32, reason: FinishReason, summary: Summary) {
        let max_context = self.setup.workers[0].max_context;
        let is_aborted = self.aborted.contains(&id);
        let now = self.now;
        let client = self.live_client(id, choice);
        let (expected, natural) = client.expected(choice, max_context);
        assert!(expected.starts_with(&client.tokens), "{id:?} {choice}");
        assert_eq!(summary.num_output_tokens as usize, client.tokens.len());
        assert_eq!(summary.arrival, client.request.arrival);
        let what = match &reason {
            FinishReason::Stop(_) | FinishReason::Length => {
                assert_eq!((&client.tokens, &reason), (&expected, &natural), "{id:?}");
                let times = [summary.first_scheduled, summary.first_token];
                let times = times.map(|time| time.expect("it has output"));
                let [scheduled, first] = times;
                let ends = [summary.arrival, scheduled, first, summary.finished];
                assert!(ends.is_sorted(), "{summary:?}");
                "own end"
            }
            FinishReason::Cancelled => {
                assert!(is_aborted, "{id:?} was not aborted");
                "cancelled"
            }
            FinishReason::Timeout(kind) => {
                let deadlines = &client.request.deadlines;
                let deadline = match kind {
                    DeadlineKind::Queue => deadlines.queue,
                    DeadlineKind::FirstToken => deadlines.first_token,
                    DeadlineKind::Total => deadlines.total,
                };
                assert!(deadline.is_some_and(|at| at <= now), "{id:?} {kind:?}");
                "timeout"
            }
            FinishReason::Error(RowError::Abandoned(_)) => "abandoned",
            FinishReason::Error(error) => panic!("{id:?}: {error}"),
        };
        client.end = Some(reason);
        self.meet(what);
        if what == "abandoned" {
            let stats = self.coordinator.stats().counters;
            let needed = u64::from(self.setup.coordinator.max_migrations);
            assert!(stats.num_migrations >= needed, "{stats:?}");
        }
    }

    /// The faults stop, every worker is back; everything must come to its end.
    pub fn come_to_rest(&mut self) {
        self.setup.faults.worker_loss = 0.0;
        self.setup.faults.abort = 0.0;
        self.link.faults = LinkFaults::default();
        for _ in 0..MAX_TICKS {
            if self.is_at_rest() {
                return self.check_empty();
            }
            self.tick();
        }
        let nodes = self.places.iter();
        let stats: Vec<_> = nodes.map(|place| place.node.scheduler.stats()).collect();
        panic!("no rest: {:?}\n{stats:?}", self.coordinator.stats());
    }

    pub fn is_at_rest(&self) -> bool {
        let is_quiet = |place: &Place| {
            place.life == Life::Healthy && place.node.is_quiet() && place.reports.is_empty()
        };
        self.coordinator.is_idle() && self.places.iter().all(is_quiet)
    }

    fn check_empty(&mut self) {
        let stats = self.coordinator.stats();
        let sizes = (stats.num_requests, stats.num_parked, stats.num_offers);
        assert_eq!(sizes, (0, 0, 0));
        assert_eq!(self.coordinator.next_deadline(), None);
        for place in &mut self.places {
            // A last plan's worth of bookkeeping may still be due.
            place.node.step(self.now, &mut Vec::new());
            place.node.check_empty();
        }
        let mut ends = self.clients.values().map(|client| &client.end);
        assert!(ends.all(Option::is_some));
    }

    /// What every client was told, to compare runs.
    pub fn transcript(&self) -> String {
        let told = self.clients.values().map(|c| (&c.tokens, &c.end));
        let told: Vec<_> = told.collect();
        format!("{:?} {told:?} {:?}", self.now, self.coordinator.stats())
    }

    /// Adds what the workers counted to what was met.
    pub fn count(&mut self) {
        let counters = self.coordinator.stats().counters;
        let mut counted = vec![
            ("hand-off", counters.num_handoffs),
            ("try", counters.num_tries),
            ("transfer", counters.num_transfers),
            ("nothing lacking", counters.num_spared),
            ("computed again", counters.num_recomputed),
            ("migration", counters.num_migrations),
            ("fenced by the coordinator", counters.num_fenced),
            ("corrupted piece", self.link.num_corrupted),
        ];
        for place in &self.places {
            let counters = place.node.scheduler.stats().counters;
            counted.push(("fenced by a worker", counters.num_fenced));
            counted.push(("expired lease", counters.num_expired_leases));
            counted.push(("preemption", counters.num_preemptions));
            counted.push(("eviction", counters.num_evicted_blocks));
        }
        for (what, times) in counted {
            *self.met.entry(what).or_default() += times;
        }
    }
}

impl Client {
    /// The whole output and its natural end, however and wherever it is computed.
    fn expected(&self, choice: u32, max_context: u32) -> (Vec<TokenId>, FinishReason) {
        let request = &self.request;
        let mut tokens = oracle_output(request, choice, VOCABULARY);
        tokens.truncate(max_context as usize - request.prompt.len());
        let last = tokens.last().copied().unwrap_or_default();
        let natural = request.stop.finish_at(last, tokens.len() as u32);
        (tokens, natural.unwrap_or(FinishReason::Length))
    }
}
