//! Who is there: every live sequence by place, by request, by turn, by standing and by deadline.
//!
//! It keeps these views in step and decides nothing; blocks are not its business.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::request::{Request, RequestId, SequenceId};
use crate::sequence::{
    Due, Offer, Progress, Reception, Residence, Sequence, SequenceIndex, SequenceSlab, Standing,
    Status,
};
use crate::time::Timestamp;
use crate::transfer::{Arrival, Ticket, TransferId};
use crate::waiting_queue::WaitingQueue;

/// The live choices of one request.
#[derive(Debug, Default)]
pub struct Choices {
    /// In order of their index.
    pub live: Vec<SequenceIndex>,
    /// Choices ever made; the next one gets this index.
    pub num_made: u32,
    /// Leading prompt positions whose log-probabilities were reported.
    pub num_reported: u32,
}

/// Every live sequence.
#[derive(Default)]
pub struct Roster {
    /// The sequences themselves, and those that leave at the next commit.
    pub sequences: SequenceSlab,
    /// Those that hold no block.
    pub queue: WaitingQueue,
    /// Those that are part of every step, by standing.
    pub running: Vec<SequenceIndex>,
    /// Those whose blocks are being filled from another worker.
    pub receiving: BTreeSet<SequenceIndex>,
    /// Those whose blocks another worker may fetch.
    pub offered: BTreeMap<SequenceId, SequenceIndex>,
    /// Those that expect something from another worker, waiting or receiving.
    expecting: BTreeMap<TransferId, SequenceIndex>,
    requests: BTreeMap<RequestId, Choices>,
    deadlines: BTreeSet<(Timestamp, SequenceIndex)>,
    num_made: u64,
}

impl Roster {
    /// Nothing runs or waits.
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// The live choices of `request`.
    pub fn choices(&self, request: RequestId) -> Option<&Choices> {
        self.requests.get(&request)
    }

    /// The live choices of `request`, to note what was reported.
    pub fn choices_mut(&mut self, request: RequestId) -> Option<&mut Choices> {
        self.requests.get_mut(&request)
    }

    /// One more choice of `request`, held until `settle` lets it wait in the queue. Returns its index.
    pub fn enter(&mut self, request: &Arc<Request>, arrival: Timestamp, max_len: u32) -> u32 {
        let choice = self.choices(request.id).map_or(0, |c| c.num_made);
        let begun = Arrival {
            request: Arc::clone(request),
            choice,
            output: Vec::new(),
            source: None,
            num_reported: 0,
            progress: Progress {
                arrival,
                ..Progress::default()
            },
        };
        self.enter_begun(begun, max_len);
        choice
    }

    /// A choice that another worker began, held like any other until `settle`.
    pub fn enter_begun(&mut self, begun: Arrival, max_len: u32) {
        let choices = self.requests.entry(begun.request.id).or_default();
        choices.num_made = choices.num_made.max(begun.choice.saturating_add(1));
        choices.num_reported = choices.num_reported.max(begun.num_reported);
        let sequence = Sequence {
            id: SequenceId(self.num_made),
            request: begun.request,
            choice: begun.choice,
            max_len,
            output: begun.output,
            source: begun.source,
            status: Status::Held,
            progress: begun.progress,
        };
        self.num_made += 1;
        self.queue.hold(&sequence);
        let (due, ticket) = (sequence.due(), sequence.ticket());
        let index = self.sequences.insert(sequence);
        choices.live.push(index);
        self.deadlines.extend(due.map(|(time, _due)| (time, index)));
        self.expecting
            .extend(ticket.map(|ticket| (ticket.transfer, index)));
    }

    /// Lets held choices of `request` into the queue: all of them once a sibling has computed the prompt
    /// (or if it is a single token, which each computes itself); one, to lead, if no sibling is on its way.
    pub fn settle(&mut self, request: RequestId) {
        let Some(choices) = self.requests.get(&request) else {
            return;
        };
        let is_held = |index: &SequenceIndex| matches!(self.sequences[*index].status, Status::Held);
        let held = choices.live.iter().copied().filter(is_held);
        let held: Vec<SequenceIndex> = held.collect();
        let Some(&first) = held.first() else {
            return;
        };
        let nothing_to_share = self.sequences[first].num_prompt() == 1;
        let num_released = if nothing_to_share || self.siblings_with_prompt(first).next().is_some()
        {
            held.len()
        } else {
            usize::from(held.len() == choices.live.len())
        };
        for index in held.into_iter().take(num_released) {
            let sequence = &mut self.sequences[index];
            sequence.status = Status::Waiting;
            self.queue.push(index, sequence);
        }
    }

    /// The choices of the same request whose blocks have the whole prompt. What a running one is to get by
    /// a copy in the plan that is being made counts already.
    pub fn siblings_with_prompt(
        &self,
        index: SequenceIndex,
    ) -> impl Iterator<Item = SequenceIndex> + '_ {
        let sequence = &self.sequences[index];
        let num_prompt = sequence.num_prompt();
        let choices = self.requests.get(&sequence.request.id);
        let live = choices.into_iter().flat_map(|choices| &choices.live);
        live.copied().filter(move |sibling| {
            let home = self.sequences[*sibling].status.residence();
            home.is_some_and(|home| home.num_computed >= num_prompt)
        })
    }

    /// The first in the queue, or any waiting sequence, starts to run with the blocks of `residence`.
    pub fn start(&mut self, index: SequenceIndex, residence: Residence, now: Timestamp) {
        self.queue.remove(&self.sequences[index]);
        self.expect_nothing(index);
        self.update(index, |sequence| {
            sequence.source = None;
            sequence.progress.first_scheduled.get_or_insert(now);
        });
        self.run(index, residence);
    }

    /// A waiting sequence is let in and waits for another worker to fill its blocks.
    pub fn reserve(&mut self, index: SequenceIndex, reception: Reception, now: Timestamp) {
        self.queue.remove(&self.sequences[index]);
        self.update(index, |sequence| {
            sequence.source = None;
            sequence.status = Status::Receiving(reception);
            sequence.progress.first_scheduled.get_or_insert(now);
        });
        self.receiving.insert(index);
    }

    /// A receiving sequence starts to run, with what `change` makes of its reception.
    pub fn end_reception(
        &mut self,
        index: SequenceIndex,
        change: impl FnOnce(Reception) -> Residence,
    ) {
        self.expect_nothing(index);
        self.receiving.remove(&index);
        let home = self.update(index, |sequence| {
            match std::mem::replace(&mut sequence.status, Status::Waiting) {
                Status::Receiving(reception) => change(reception),
                Status::Held
                | Status::Waiting
                | Status::Running(_)
                | Status::Offered(_)
                | Status::Leaving(_) => unreachable!("only a receiving sequence has a reception"),
            }
        });
        self.run(index, home);
    }

    /// A waiting sequence has nothing to expect from another worker any more.
    pub fn forget_source(&mut self, index: SequenceIndex) {
        self.expect_nothing(index);
        self.sequences[index].source = None;
    }

    /// Who expects something under `ticket`; nobody if it is of another generation.
    pub fn expecting(&self, ticket: Ticket) -> Option<SequenceIndex> {
        let index = *self.expecting.get(&ticket.transfer)?;
        (self.sequences[index].ticket() == Some(ticket)).then_some(index)
    }

    /// Who expects something of this transfer, of whatever generation.
    pub fn expecting_any(&self, transfer: TransferId) -> Option<SequenceIndex> {
        self.expecting.get(&transfer).copied()
    }

    fn expect_nothing(&mut self, index: SequenceIndex) {
        if let Some(ticket) = self.sequences[index].ticket() {
            self.expecting.remove(&ticket.transfer);
        }
    }

    fn run(&mut self, index: SequenceIndex, residence: Residence) {
        let sequence = &mut self.sequences[index];
        sequence.status = Status::Running(residence);
        // Decoding steps allocate nothing.
        let num_to_come = sequence.max_len - sequence.num_tokens();
        sequence.output.reserve(num_to_come as usize);
        let standing = sequence.standing();
        let at = self.running_before(standing);
        self.running.insert(at, index);
    }

    /// A running sequence has done its part here and is another worker's to go on with.
    pub fn offer(&mut self, index: SequenceIndex, lease_end: Timestamp) {
        let at = self.running_before(self.sequences[index].standing());
        self.running.remove(at);
        self.update(index, |sequence| {
            match std::mem::replace(&mut sequence.status, Status::Waiting) {
                Status::Running(mut home) => {
                    home.is_started = false;
                    sequence.status = Status::Offered(Offer { home, lease_end });
                }
                Status::Held
                | Status::Waiting
                | Status::Receiving(_)
                | Status::Offered(_)
                | Status::Leaving(_) => unreachable!("only a running sequence is offered"),
            }
        });
        self.offered.insert(self.sequences[index].id, index);
    }

    /// The last by standing returns to the queue. Gives its blocks to the caller.
    pub fn preempt_last(&mut self) -> Option<(SequenceIndex, Residence)> {
        let index = self.running.pop()?;
        let sequence = &mut self.sequences[index];
        let Status::Running(residence) = std::mem::replace(&mut sequence.status, Status::Waiting)
        else {
            unreachable!("only running sequences are in the running list");
        };
        sequence.progress.num_preemptions += 1;
        self.queue.push(index, sequence);
        Some((index, residence))
    }

    /// Changes a sequence and keeps the deadlines in step.
    pub fn update<T>(
        &mut self,
        index: SequenceIndex,
        change: impl FnOnce(&mut Sequence) -> T,
    ) -> T {
        let sequence = &mut self.sequences[index];
        let before = sequence.due();
        let changed = change(sequence);
        let after = sequence.due();
        if before != after {
            self.set_due(index, before, after);
        }
        changed
    }

    /// `index` ended: it leaves every view. Gives its blocks to the caller if it has any, and keeps its place
    /// until `forget`.
    pub fn leave(&mut self, index: SequenceIndex) -> Option<Residence> {
        let sequence = &mut self.sequences[index];
        let (id, standing, due) = (sequence.request.id, sequence.standing(), sequence.due());
        if let Some(ticket) = sequence.ticket() {
            self.expecting.remove(&ticket.transfer);
        }
        let residence = match std::mem::replace(&mut sequence.status, Status::Leaving(Vec::new())) {
            Status::Held | Status::Waiting => {
                self.queue.remove(sequence);
                None
            }
            Status::Receiving(reception) => {
                self.receiving.remove(&index);
                Some(reception.home)
            }
            Status::Running(residence) => {
                let at = self.running_before(standing);
                self.running.remove(at);
                Some(residence)
            }
            Status::Offered(offer) => {
                self.offered.remove(&sequence.id);
                Some(offer.home)
            }
            Status::Leaving(_) => unreachable!("a sequence ends once"),
        };
        self.set_due(index, due, None);
        self.leave_request(id, index);
        residence
    }

    /// Gives the place of a sequence that left to others.
    pub fn forget(&mut self, index: SequenceIndex) {
        self.sequences.remove(index);
    }

    /// The sequence whose deadline or lease passed longest ago, as of `now`.
    pub fn overdue(&self, now: Timestamp) -> Option<(SequenceIndex, Due)> {
        let &(time, index) = self.deadlines.first()?;
        let (_, due) = self.sequences[index].due()?;
        (time <= now).then_some((index, due))
    }

    /// The earliest deadline or end of a lease.
    pub fn next_deadline(&self) -> Option<Timestamp> {
        self.deadlines.first().map(|(time, _)| *time)
    }

    fn set_due(
        &mut self,
        index: SequenceIndex,
        before: Option<(Timestamp, Due)>,
        after: Option<(Timestamp, Due)>,
    ) {
        if let Some((time, _)) = before {
            self.deadlines.remove(&(time, index));
        }
        self.deadlines.extend(after.map(|(time, _)| (time, index)));
    }

    /// How many running sequences come before `standing`.
    fn running_before(&self, standing: Standing) -> usize {
        self.running
            .partition_point(|other| self.sequences[*other].standing() < standing)
    }

    fn leave_request(&mut self, id: RequestId, index: SequenceIndex) {
        let Some(choices) = self.requests.get_mut(&id) else {
            unreachable!("a live sequence is among the choices of its request");
        };
        choices.live.retain(|other| *other != index);
        if choices.live.is_empty() {
            self.requests.remove(&id);
        } else {
            self.settle(id);
        }
    }

    /// I4, I6 and I10: every live sequence is in exactly the views that its status says, and every ticket
    /// has one owner.
    pub fn check(&self) -> Result<(), String> {
        let mut num_live = 0;
        let mut num_due = 0;
        let mut num_expecting = 0;
        for (id, choices) in &self.requests {
            for &index in &choices.live {
                let sequence = &self.sequences[index];
                if sequence.request.id != *id {
                    return Err(format!("{:?} is listed under {id:?}", sequence.id));
                }
                num_live += 1;
                num_due += usize::from(sequence.due().is_some());
                num_expecting += usize::from(sequence.ticket().is_some());
                self.check_views(index)?;
            }
        }
        let is_live = |s: &&Sequence| !matches!(s.status, Status::Leaving(_));
        let num_placed = self.sequences.iter().filter(is_live).count();
        let num_elsewhere = self.receiving.len() + self.offered.len();
        let num_listed = self.running.len() + self.queue.len() as usize + num_elsewhere;
        if num_expecting != self.expecting.len() {
            return Err(format!(
                "{num_expecting} expect a transfer, {} noted",
                self.expecting.len()
            ));
        }
        if num_live != num_placed || num_live != num_listed || num_due != self.deadlines.len() {
            return Err(format!(
                "{num_live} live, {num_placed} placed, {num_listed} in one list or another; \
                 {num_due} with a deadline, {} noted",
                self.deadlines.len()
            ));
        }
        let standing = |index: &SequenceIndex| self.sequences[*index].standing();
        match self.running.is_sorted_by(|a, b| standing(a) < standing(b)) {
            true => Ok(()),
            false => Err("the running list is not sorted by standing".into()),
        }
    }

    fn check_views(&self, index: SequenceIndex) -> Result<(), String> {
        let sequence = &self.sequences[index];
        let is_ready = self.queue.position_of(sequence) == Some(index);
        let is_running = self.running.contains(&index);
        let is_receiving = self.receiving.contains(&index);
        let is_offered = self.offered.get(&sequence.id) == Some(&index);
        let is_expected = match sequence.ticket() {
            Some(ticket) => self.expecting.get(&ticket.transfer) == Some(&index),
            None => true,
        };
        let is_due = match sequence.due() {
            Some((time, _)) => self.deadlines.contains(&(time, index)),
            None => true,
        };
        let views = [is_ready, is_receiving, is_running, is_offered];
        let expected = match sequence.status {
            Status::Held => [false, false, false, false],
            Status::Waiting => [true, false, false, false],
            Status::Receiving(_) => [false, true, false, false],
            Status::Running(_) => [false, false, true, false],
            Status::Offered(_) => [false, false, false, true],
            // It is among the choices of no request.
            Status::Leaving(_) => return Err(format!("{:?} left and is live", sequence.id)),
        };
        match is_due && is_expected && views == expected {
            true => Ok(()),
            false => Err(format!(
                "{:?} is in a view it should not be in",
                sequence.id
            )),
        }
    }
}
