//! The life of a request across workers, as a state machine: who computes it, who hands it to whom, and what
//! becomes of it when a worker is lost.
//!
//! It owns no scheduler and moves no bytes. Whoever owns the loop tells it what happened (events of the
//! workers, ends of transfers, workers lost and back, time) and carries out the commands that come out. Of
//! everything delayed, repeated or lost on the way it only requires that the commands to one worker, and
//! the events of one worker, keep their order. Prefill and decode are split as in DistServe (arXiv
//! 2401.09670) and Splitwise (arXiv 2311.18677); a pool of aggregated workers is the case without hand-off.
//!
//! It records the tokens of every live choice, so a choice whose worker is lost goes on elsewhere: what
//! comes out is the same (A6), and each token is delivered once (I5).

mod choice;
mod handoff;
mod inbox;
mod loss;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::config::{ConfigError, Role, SchedulerConfig};
use crate::placement::{Placement, PlacementConfig};
use crate::plan::{Event, Summary};
use crate::request::{FinishReason, Request, RequestId, SequenceId, TokenId};
use crate::sequence::Progress;
use crate::time::{Span, Timestamp};
use crate::transfer::{
    Arrival, Peer, Ticket, TransferId, TransferOrder, TransferOutcome, WorkerId,
};

pub use inbox::{Inbox, Noted};

use choice::{Choice, ChoiceId, Due, Phase};

/// Limits of a `Coordinator`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CoordinatorConfig {
    /// Live requests; beyond it `submit` refuses.
    pub max_requests: u32,
    /// Tries at one hand-off; then the receiver computes what it lacks.
    pub max_tries: u32,
    /// A try that takes longer has failed.
    pub try_timeout: Span,
    /// Workers that one choice may lose before it is given up: it might be what kills them.
    pub max_migrations: u32,
    /// When nobody can take a choice, it is tried again after so long.
    pub retry_delay: Span,
    /// How workers are chosen.
    pub placement: PlacementConfig,
}

impl Default for CoordinatorConfig {
    fn default() -> Self {
        CoordinatorConfig {
            max_requests: 4096,
            max_tries: 3,
            // Three of them fit into a lease.
            try_timeout: Span::from_secs(10),
            max_migrations: 3,
            retry_delay: Span::from_millis(100),
            placement: PlacementConfig::default(),
        }
    }
}

/// What to do next. Commands to one worker are carried out in order; those to a life that is over are void.
#[derive(Clone, Debug, PartialEq)]
pub enum Command {
    /// `Scheduler::add`. Tell `refused` of every choice if it refuses.
    Add {
        /// Who.
        to: Peer,
        /// What.
        request: Arc<Request>,
    },
    /// `Scheduler::receive`. Tell `refused` if it refuses.
    Receive {
        /// Who.
        to: Peer,
        /// What.
        arrival: Arrival,
    },
    /// Copy blocks, then tell `transfer_finished`.
    StartTransfer(TransferOrder),
    /// `Scheduler::retry_transfer`; the order follows.
    RetryTransfer {
        /// Who receives.
        to: Peer,
        /// The new ticket.
        ticket: Ticket,
    },
    /// `Scheduler::transfer_finished`.
    FinishTransfer {
        /// Who receives.
        to: Peer,
        /// Which.
        ticket: Ticket,
        /// How it ended.
        outcome: TransferOutcome,
    },
    /// `Scheduler::release_offer`.
    ReleaseOffer {
        /// Who offers.
        to: Peer,
        /// What.
        sequence: SequenceId,
    },
    /// `Scheduler::abort`.
    Abort {
        /// Who has something of it.
        to: Peer,
        /// What.
        request: RequestId,
    },
    /// New tokens for the client: each once, in order.
    Deliver {
        /// Whose request.
        request: RequestId,
        /// Which choice.
        choice: u32,
        /// At least one.
        tokens: Vec<TokenId>,
    },
    /// The end, for the client: once per choice, after all its tokens.
    Finished {
        /// Whose request.
        request: RequestId,
        /// Which choice.
        choice: u32,
        /// Why.
        reason: FinishReason,
        /// Counts and times.
        summary: Summary,
    },
}

/// Why a worker did not take a sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// Its queue is full; later it may.
    Busy,
    /// It never will, for this reason.
    Never(String),
}

/// `Coordinator::submit` refused; nothing changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// A live request has the same id.
    #[error("request {request:?}: the id is in use")]
    DuplicateId {
        /// The request.
        request: RequestId,
    },
    /// Too many requests are live; later it may be taken.
    #[error("request {request:?}: {num_requests} requests are live, the limit is {max_requests}")]
    Full {
        /// The request.
        request: RequestId,
        /// Requests that are live.
        num_requests: u32,
        /// `CoordinatorConfig::max_requests`.
        max_requests: u32,
    },
    /// No worker, alive or not, could ever bring it to its end.
    #[error("request {request:?}: no worker could ever take it")]
    NobodyCan {
        /// The request.
        request: RequestId,
    },
}

/// Sizes of the tables, and what happened since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CoordinatorStats {
    /// Requests with a choice that has not ended.
    pub num_requests: u32,
    /// Choices that wait until a worker can take them.
    pub num_parked: u32,
    /// Offers that have not ended.
    pub num_offers: u32,
    /// What happened since the start.
    pub counters: CoordinatorCounters,
}

/// What happened since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CoordinatorCounters {
    /// Sequences that a prefill worker offered.
    pub num_handoffs: u64,
    /// Transfers ordered, each try counted.
    pub num_tries: u64,
    /// Hand-offs that brought all blocks.
    pub num_transfers: u64,
    /// Hand-offs whose receiver had every block.
    pub num_spared: u64,
    /// Hand-offs after which the receiver computed what it lacked.
    pub num_recomputed: u64,
    /// Choices that went on elsewhere after their worker was lost.
    pub num_migrations: u64,
    /// Words of an earlier life of a worker, or of an earlier try, that changed nothing.
    pub num_fenced: u64,
}

/// The life of every live request. All tables are empty when nothing is live.
#[derive(Debug)]
pub struct Coordinator {
    config: CoordinatorConfig,
    workers: BTreeMap<WorkerId, Worker>,
    placement: Placement,
    requests: BTreeMap<RequestId, Live>,
    offers: BTreeMap<TransferId, ChoiceId>,
    deadlines: BTreeSet<(Timestamp, ChoiceId)>,
    num_parked: u32,
    num_transfers: u64,
    counters: CoordinatorCounters,
}

#[derive(Debug)]
struct Worker {
    config: SchedulerConfig,
    epoch: u32,
    is_alive: bool,
}

#[derive(Debug)]
struct Live {
    request: Arc<Request>,
    choices: Vec<Choice>,
    num_live: u32,
}

impl Coordinator {
    /// Over workers that live their first life, numbered from 0 in the order of `workers`.
    ///
    /// They must all have the same block size, or they could not exchange blocks.
    pub fn new(
        config: CoordinatorConfig,
        workers: &[SchedulerConfig],
    ) -> Result<Self, ConfigError> {
        let sizes = workers.iter().map(|worker| worker.block_size);
        for (first, other) in sizes.clone().zip(sizes.skip(1)) {
            if first != other {
                return Err(ConfigError::MixedBlockSizes { first, other });
            }
        }
        let worker = |config: &SchedulerConfig| Worker {
            config: config.clone(),
            epoch: 1,
            is_alive: true,
        };
        let ids = (0..).map(WorkerId);
        Ok(Coordinator {
            placement: Placement::new(config.placement),
            workers: ids.zip(workers.iter().map(worker)).collect(),
            requests: BTreeMap::new(),
            offers: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            num_parked: 0,
            num_transfers: 0,
            counters: CoordinatorCounters::default(),
            config,
        })
    }

    /// The present life of a worker, lost or not.
    pub fn peer(&self, worker: WorkerId) -> Option<Peer> {
        let epoch = self.workers.get(&worker)?.epoch;
        Some(Peer { worker, epoch })
    }

    /// Takes a request in. All its choices begin on one worker, which computes the prompt once.
    pub fn submit(
        &mut self,
        request: Arc<Request>,
        now: Timestamp,
        commands: &mut Vec<Command>,
    ) -> Result<(), SubmitError> {
        self.check_admissible(&request)?;
        let id = request.id;
        let progress = Progress {
            arrival: request.arrival.min(now),
            ..Progress::default()
        };
        let choices = (0..request.num_choices).map(|_| Choice::new(progress));
        let live = Live {
            choices: choices.collect(),
            num_live: request.num_choices,
            request: Arc::clone(&request),
        };
        self.requests.insert(id, live);
        let ids = (0..request.num_choices).map(|choice| ChoiceId {
            request: id,
            choice,
        });
        match self.choose_worker(&request, Stage::Prompt) {
            Some(to) => {
                for id in ids {
                    // The choices after the first share its prompt.
                    let charge = match id.choice {
                        0 => request.prompt.len() as u64,
                        _ => 1,
                    };
                    self.set_phase(id, Phase::Running { on: to, charge });
                }
                commands.push(Command::Add { to, request });
            }
            None => ids.for_each(|id| self.park(id, None, now)),
        }
        Ok(())
    }

    /// Ends all choices of `request` with `FinishReason::Cancelled`. Unknown and ended requests are ignored.
    pub fn abort(&mut self, request: RequestId, now: Timestamp, commands: &mut Vec<Command>) {
        let Some(live) = self.requests.get(&request) else {
            return;
        };
        let peers: BTreeSet<Peer> = live.choices.iter().flat_map(Choice::peers).collect();
        let aborts = peers.into_iter().map(|to| Command::Abort { to, request });
        commands.extend(aborts);
        for choice in 0..live.choices.len() as u32 {
            let id = ChoiceId::of(request, choice);
            self.close(id, FinishReason::Cancelled, now, commands);
        }
    }

    /// Takes in what a worker reported. `tokens` are those that an `Event::Accepted` is about.
    pub fn event(
        &mut self,
        from: Peer,
        event: &Event,
        tokens: &[TokenId],
        now: Timestamp,
        commands: &mut Vec<Command>,
    ) {
        if !self.is_heard(from) {
            self.counters.num_fenced += 1;
            return;
        }
        match event {
            Event::Accepted {
                request, choice, ..
            } => self.accept(ChoiceId::of(*request, *choice), from, tokens, now, commands),
            Event::Prefilled {
                request,
                choice,
                sequence,
                num_tokens,
                progress,
            } => {
                let id = ChoiceId::of(*request, *choice);
                let offer = self.new_offer(from, *sequence, *num_tokens);
                self.prefilled(id, offer, *progress, now, commands);
            }
            Event::OfferExpired {
                request,
                choice,
                sequence,
            } => {
                let id = ChoiceId::of(*request, *choice);
                if self
                    .offer(id)
                    .is_some_and(|o| (o.on, o.sequence) == (from, *sequence))
                {
                    self.lose_source(id, commands);
                }
            }
            Event::Reserved {
                ticket,
                first_block,
                blocks,
                ..
            } => self.reserved(from, *ticket, *first_block, blocks, now, commands),
            Event::TransferExpired { ticket, .. } => {
                self.transfer_expired(from, ticket.transfer, commands);
            }
            Event::Finished {
                request,
                choice,
                reason,
                summary,
            } => {
                let id = ChoiceId::of(*request, *choice);
                self.finished(id, from, reason.clone(), *summary, commands);
            }
        }
    }

    /// The earliest time at which `expire` has something to do.
    pub fn next_deadline(&self) -> Option<Timestamp> {
        self.deadlines.first().map(|(time, _)| *time)
    }

    /// Ends tries that took too long and choices that nobody took in time; looks again for workers.
    pub fn expire(&mut self, now: Timestamp, commands: &mut Vec<Command>) {
        while let Some(&(time, id)) = self.deadlines.first() {
            let due = self.due(id);
            let Some((_, due)) = due.filter(|_| time <= now) else {
                return;
            };
            match due {
                Due::Deadline(kind) => self.end(id, FinishReason::Timeout(kind), now, commands),
                Due::Retry => self.retry_parked(id, now, commands),
                Due::Try => self.try_failed(id, now, commands),
            }
        }
    }

    /// Nothing is live, and every table is empty.
    pub fn is_idle(&self) -> bool {
        self.requests.is_empty()
    }

    /// Counters, in constant time.
    pub fn stats(&self) -> CoordinatorStats {
        CoordinatorStats {
            num_requests: self.requests.len() as u32,
            num_parked: self.num_parked,
            num_offers: self.offers.len() as u32,
            counters: self.counters,
        }
    }

    fn check_admissible(&self, request: &Request) -> Result<(), SubmitError> {
        let id = request.id;
        if self.requests.contains_key(&id) {
            return Err(SubmitError::DuplicateId { request: id });
        }
        let num_requests = self.requests.len() as u32;
        if num_requests >= self.config.max_requests {
            return Err(SubmitError::Full {
                request: id,
                num_requests,
                max_requests: self.config.max_requests,
            });
        }
        // Whoever can decode it can also prefill it, if need be.
        let can_finish = |worker: &Worker| {
            worker.config.role != Role::Prefill && worker.config.can_take(request)
        };
        match self.workers.values().any(can_finish) {
            true => Ok(()),
            false => Err(SubmitError::NobodyCan { request: id }),
        }
    }

    /// Does `peer` live its present life?
    fn is_heard(&self, peer: Peer) -> bool {
        let worker = self.workers.get(&peer.worker);
        worker.is_some_and(|worker| worker.is_alive && worker.epoch == peer.epoch)
    }

    /// A worker for what comes next of `request`, and notes that it will have the prompt.
    fn choose_worker(&mut self, request: &Request, stage: Stage) -> Option<Peer> {
        let chain = self.placement.chain(&request.salt, &request.prompt);
        let of_roles = |roles: &'static [Role]| {
            let workers = self.workers.iter();
            let can = move |worker: &Worker| {
                let config = &worker.config;
                worker.is_alive && roles.contains(&config.role) && config.can_take(request)
            };
            workers
                .filter(move |(_, worker)| can(worker))
                .map(|(id, _)| *id)
        };
        let choose = |roles| self.placement.choose(of_roles(roles), &chain);
        let worker = match stage {
            Stage::Prompt => {
                choose(&[Role::Prefill, Role::Aggregated]).or_else(|| choose(&[Role::Decode]))
            }
            Stage::Output => choose(&[Role::Decode, Role::Aggregated]),
        }?;
        self.placement.note(worker, &chain);
        self.peer(worker)
    }

    /// Walks everything; the error names the first thing that does not fit (I6, I10).
    pub fn check_invariants(&self) -> Result<(), String> {
        choice::check(self)
    }
}

/// What is to be done next for a choice.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Its prompt is to be computed.
    Prompt,
    /// It has output and goes on.
    Output,
}
