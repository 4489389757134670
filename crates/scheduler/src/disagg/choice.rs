//! Where a choice stands, and the tables that follow from it.
//!
//! `set_phase` is the only place where a phase changes; deadlines, offers and loads are kept in step there.

use std::collections::{BTreeMap, BTreeSet};

use super::{Command, Coordinator, Live, Stage};
use crate::placement::Load;
use crate::plan::{BlockId, Summary};
use crate::request::{DeadlineKind, FinishReason, Request, RequestId, SequenceId, TokenId};
use crate::sequence::Progress;
use crate::time::Timestamp;
use crate::transfer::{Peer, Ticket, TransferId, WorkerId};

/// Names one choice of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ChoiceId {
    pub(super) request: RequestId,
    pub(super) choice: u32,
}

impl ChoiceId {
    pub(super) fn of(request: RequestId, choice: u32) -> Self {
        ChoiceId { request, choice }
    }
}

/// One choice, with all that another worker would need to go on with it.
#[derive(Debug)]
pub(super) struct Choice {
    pub(super) output: Vec<TokenId>,
    pub(super) progress: Progress,
    pub(super) num_migrations: u32,
    pub(super) phase: Phase,
}

/// Where a choice stands.
#[derive(Clone, Debug)]
pub(super) enum Phase {
    /// Nobody has it yet.
    New,
    /// A worker computes it.
    Running { on: Peer, charge: u64 },
    /// A prefill worker offers it, and another was told to receive it.
    Moving(Handoff),
    /// Nobody can take it now.
    Parked {
        offer: Option<Offer>,
        retry_at: Timestamp,
    },
    /// Its end was told.
    Ended,
}

/// Blocks that a prefill worker holds, and the ticket of the try at hand or the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Offer {
    pub(super) on: Peer,
    pub(super) sequence: SequenceId,
    pub(super) num_tokens: u32,
    pub(super) ticket: Ticket,
}

/// A choice on its way from one worker to another.
#[derive(Clone, Debug)]
pub(super) struct Handoff {
    pub(super) offer: Offer,
    pub(super) to: Peer,
    pub(super) charge: u64,
    pub(super) progress: Try,
}

/// How far a try has come.
#[derive(Clone, Debug)]
pub(super) enum Try {
    /// The receiver has no blocks yet.
    Queued,
    /// Blocks are being copied.
    Transferring {
        until: Timestamp,
        first_block: u32,
        blocks: Vec<BlockId>,
    },
}

/// What is to be done about a choice at a point in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Due {
    /// It has waited too long for a worker.
    Deadline(DeadlineKind),
    /// A worker may have room for it now.
    Retry,
    /// The try has taken too long.
    Try,
}

impl Choice {
    pub(super) fn new(progress: Progress) -> Self {
        Choice {
            output: Vec::new(),
            progress,
            num_migrations: 0,
            phase: Phase::New,
        }
    }

    /// Everybody who has something of it.
    pub(super) fn peers(&self) -> impl Iterator<Item = Peer> + use<> {
        let offer = self.phase.offer().map(|offer| offer.on);
        self.phase.computing().into_iter().chain(offer)
    }

    pub(super) fn stage(&self) -> Stage {
        match self.output.is_empty() {
            true => Stage::Prompt,
            false => Stage::Output,
        }
    }

    /// What has to happen when; a worker that has it minds the request's own deadlines.
    fn due(&self, request: &Request) -> Option<(Timestamp, Due)> {
        match &self.phase {
            Phase::Moving(Handoff {
                progress: Try::Transferring { until, .. },
                ..
            }) => Some((*until, Due::Try)),
            Phase::Parked { retry_at, .. } => {
                let deadlines = &request.deadlines;
                let before = |time: Option<Timestamp>, met: bool| time.filter(|_| !met);
                let progress = &self.progress;
                let queue = before(deadlines.queue, progress.first_scheduled.is_some());
                let first_token = before(deadlines.first_token, progress.first_token.is_some());
                let candidates = [
                    (queue, Due::Deadline(DeadlineKind::Queue)),
                    (first_token, Due::Deadline(DeadlineKind::FirstToken)),
                    (deadlines.total, Due::Deadline(DeadlineKind::Total)),
                    (Some(*retry_at), Due::Retry),
                ];
                let times = candidates.into_iter();
                times
                    .filter_map(|(time, due)| Some((time?, due)))
                    .min_by_key(|(time, _)| *time)
            }
            Phase::New | Phase::Running { .. } | Phase::Moving(_) | Phase::Ended => None,
        }
    }
}

impl Phase {
    /// Who computes it, or will.
    pub(super) fn computing(&self) -> Option<Peer> {
        match self {
            Phase::Running { on, .. } => Some(*on),
            Phase::Moving(handoff) => Some(handoff.to),
            Phase::New | Phase::Parked { .. } | Phase::Ended => None,
        }
    }

    /// Who has blocks of it to fetch.
    pub(super) fn offer(&self) -> Option<Offer> {
        match self {
            Phase::Moving(handoff) => Some(handoff.offer),
            Phase::Parked { offer, .. } => *offer,
            Phase::New | Phase::Running { .. } | Phase::Ended => None,
        }
    }

    /// What it weighs on whom.
    fn charge(&self) -> Option<(WorkerId, u64)> {
        match self {
            Phase::Running { on, charge } => Some((on.worker, *charge)),
            Phase::Moving(handoff) => Some((handoff.to.worker, handoff.charge)),
            Phase::New | Phase::Parked { .. } | Phase::Ended => None,
        }
    }
}

impl Coordinator {
    pub(super) fn choice(&self, id: ChoiceId) -> Option<&Choice> {
        let live = self.requests.get(&id.request)?;
        live.choices.get(id.choice as usize)
    }

    pub(super) fn choice_mut(&mut self, id: ChoiceId) -> Option<&mut Choice> {
        let live = self.requests.get_mut(&id.request)?;
        live.choices.get_mut(id.choice as usize)
    }

    pub(super) fn phase(&self, id: ChoiceId) -> Option<&Phase> {
        self.choice(id).map(|choice| &choice.phase)
    }

    pub(super) fn offer(&self, id: ChoiceId) -> Option<Offer> {
        self.phase(id)?.offer()
    }

    pub(super) fn due(&self, id: ChoiceId) -> Option<(Timestamp, Due)> {
        let live = self.requests.get(&id.request)?;
        live.choices.get(id.choice as usize)?.due(&live.request)
    }

    /// Changes where a choice stands, and everything that follows from it.
    pub(super) fn set_phase(&mut self, id: ChoiceId, phase: Phase) {
        let due = self.due(id);
        let Some(choice) = self.choice_mut(id) else {
            return;
        };
        let before = std::mem::replace(&mut choice.phase, phase.clone());
        if let Some((time, _)) = due {
            self.deadlines.remove(&(time, id));
        }
        if let Some(offer) = before.offer() {
            self.offers.remove(&offer.ticket.transfer);
        }
        if let Some((worker, charge)) = before.charge() {
            self.placement.discharge(worker, charge);
        }
        self.num_parked -= u32::from(matches!(before, Phase::Parked { .. }));
        let due = self.due(id);
        self.deadlines.extend(due.map(|(time, _)| (time, id)));
        let offer = phase.offer();
        self.offers
            .extend(offer.map(|offer| (offer.ticket.transfer, id)));
        if let Some((worker, charge)) = phase.charge() {
            self.placement.charge(worker, charge);
        }
        self.num_parked += u32::from(matches!(phase, Phase::Parked { .. }));
    }

    /// Ends a choice that no worker computes, and gives up what was offered of it.
    pub(super) fn end(
        &mut self,
        id: ChoiceId,
        reason: FinishReason,
        now: Timestamp,
        commands: &mut Vec<Command>,
    ) {
        if let Some(offer) = self.offer(id) {
            self.release(offer, commands);
        }
        self.close(id, reason, now, commands);
    }

    /// Ends a choice, as far as the client is concerned.
    pub(super) fn close(
        &mut self,
        id: ChoiceId,
        reason: FinishReason,
        now: Timestamp,
        commands: &mut Vec<Command>,
    ) {
        if let Some(live) = self.requests.get(&id.request)
            && let Some(choice) = live.choices.get(id.choice as usize)
        {
            let num_prompt = live.request.prompt.len() as u32;
            let num_output = choice.output.len() as u32;
            let summary = choice.progress.summary(num_prompt, num_output, now);
            self.close_with(id, reason, summary, commands);
        }
    }

    /// Tells the client the end of a choice, unless it was told before, and forgets the request with its last one.
    pub(super) fn close_with(
        &mut self,
        id: ChoiceId,
        reason: FinishReason,
        summary: Summary,
        commands: &mut Vec<Command>,
    ) {
        if matches!(self.phase(id), None | Some(Phase::Ended)) {
            return;
        }
        self.set_phase(id, Phase::Ended);
        commands.push(Command::Finished {
            request: id.request,
            choice: id.choice,
            reason,
            summary,
        });
        if let Some(live) = self.requests.get_mut(&id.request) {
            live.num_live -= 1;
            if live.num_live == 0 {
                self.requests.remove(&id.request);
            }
        }
    }
}

/// Every table agrees with the phases of the choices.
pub(super) fn check(coordinator: &Coordinator) -> Result<(), String> {
    let mut found = Tables::default();
    for (request, live) in &coordinator.requests {
        found.add(*request, live);
        let is_live = |choice: &&Choice| !matches!(choice.phase, Phase::Ended);
        let num_live = live.choices.iter().filter(is_live).count();
        if num_live as u32 != live.num_live || num_live == 0 {
            return Err(format!(
                "{request:?}: {num_live} live, {} noted",
                live.num_live
            ));
        }
        for choice in &live.choices {
            if matches!(choice.phase, Phase::New) {
                return Err(format!("{request:?} has a choice that nobody has"));
            }
            if let Some(peer) = choice.peers().find(|peer| !coordinator.is_heard(*peer)) {
                return Err(format!("{request:?} counts on {peer:?}, which is lost"));
            }
        }
    }
    let num_parked = coordinator.num_parked as usize;
    let agrees = found.deadlines == coordinator.deadlines
        && found.offers == coordinator.offers
        && found.num_parked == num_parked;
    if !agrees {
        return Err(format!(
            "{found:?}\nbut noted are {num_parked} parked, {:?}, {:?}",
            coordinator.offers, coordinator.deadlines
        ));
    }
    for worker in coordinator.workers.keys() {
        let (walked, noted) = (found.load(*worker), coordinator.placement.load(*worker));
        if walked != noted {
            return Err(format!("{worker:?} has {walked:?}, noted is {noted:?}"));
        }
    }
    match coordinator.requests.len() <= coordinator.config.max_requests as usize {
        true => Ok(()),
        false => Err("more requests than allowed".into()),
    }
}

/// The tables as they follow from the phases.
#[derive(Debug, Default)]
struct Tables {
    deadlines: BTreeSet<(Timestamp, ChoiceId)>,
    offers: BTreeMap<TransferId, ChoiceId>,
    loads: BTreeMap<WorkerId, Load>,
    num_parked: usize,
}

impl Tables {
    fn add(&mut self, request: RequestId, live: &Live) {
        for (number, choice) in live.choices.iter().enumerate() {
            let id = ChoiceId::of(request, number as u32);
            let due = choice.due(&live.request);
            self.deadlines.extend(due.map(|(time, _)| (time, id)));
            let offer = choice.phase.offer();
            self.offers.extend(offer.map(|o| (o.ticket.transfer, id)));
            self.num_parked += usize::from(matches!(choice.phase, Phase::Parked { .. }));
            if let Some((worker, charge)) = choice.phase.charge() {
                let load = self.loads.entry(worker).or_default();
                load.num_sequences += 1;
                load.num_tokens += charge;
            }
        }
    }

    fn load(&self, worker: WorkerId) -> Load {
        self.loads.get(&worker).copied().unwrap_or_default()
    }
}
