//! Who is there: every live sequence by place, by request, by turn, by standing and by deadline.
//!
//! It keeps these views in step and decides nothing; blocks are not its business.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::request::{DeadlineKind, Request, RequestId, SequenceId};
use crate::sequence::{
    Progress, Residence, Sequence, SequenceIndex, SequenceSlab, Standing, Status,
};
use crate::time::Timestamp;
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
    /// Those that hold blocks, by standing.
    pub running: Vec<SequenceIndex>,
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
        let choices = self.requests.entry(request.id).or_default();
        let choice = choices.num_made;
        let sequence = Sequence {
            id: SequenceId(self.num_made),
            request: Arc::clone(request),
            choice,
            max_len,
            output: Vec::new(),
            status: Status::Held,
            progress: Progress {
                arrival,
                first_scheduled: None,
                first_token: None,
                num_cached_tokens: 0,
                num_preemptions: 0,
            },
        };
        self.num_made += 1;
        choices.num_made += 1;
        self.queue.hold(&sequence);
        let due = sequence.due();
        let index = self.sequences.insert(sequence);
        choices.live.push(index);
        self.deadlines
            .extend(due.map(|(time, _kind)| (time, index)));
        choice
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
        let num_released = if nothing_to_share || self.sibling_with_prompt(first).is_some() {
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

    /// A running choice of the same request that has computed the whole prompt.
    ///
    /// One token less would do to share it, but not for a sibling that is to get that much by a copy in
    /// the very plan that is being made.
    pub fn sibling_with_prompt(&self, index: SequenceIndex) -> Option<SequenceIndex> {
        let sequence = &self.sequences[index];
        let choices = self.requests.get(&sequence.request.id)?;
        let has_prompt = |sibling: &SequenceIndex| {
            self.sequences[*sibling]
                .status
                .residence()
                .is_some_and(|home| home.num_computed >= sequence.num_prompt())
        };
        choices.live.iter().copied().find(has_prompt)
    }

    /// The first in the queue, or any waiting sequence, starts to run with the blocks of `residence`.
    pub fn start(&mut self, index: SequenceIndex, residence: Residence, now: Timestamp) {
        self.queue.remove(&self.sequences[index]);
        self.update(index, |sequence| {
            sequence.status = Status::Running(residence);
            // Decoding steps allocate nothing.
            let num_to_come = sequence.max_len - sequence.num_tokens();
            sequence.output.reserve(num_to_come as usize);
            sequence.progress.first_scheduled.get_or_insert(now);
        });
        let standing = self.sequences[index].standing();
        let at = self.running_before(standing);
        self.running.insert(at, index);
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
    pub fn update(&mut self, index: SequenceIndex, change: impl FnOnce(&mut Sequence)) {
        let sequence = &mut self.sequences[index];
        let before = sequence.due();
        change(sequence);
        let after = sequence.due();
        if before != after {
            self.set_due(index, before, after);
        }
    }

    /// `index` ended: it leaves every view. Gives its blocks to the caller if it ran, and keeps its place
    /// until `forget`.
    pub fn leave(&mut self, index: SequenceIndex) -> Option<Residence> {
        let sequence = &mut self.sequences[index];
        let (id, standing, due) = (sequence.request.id, sequence.standing(), sequence.due());
        let residence = match std::mem::replace(&mut sequence.status, Status::Leaving(Vec::new())) {
            Status::Held | Status::Waiting => {
                self.queue.remove(sequence);
                None
            }
            Status::Running(residence) => {
                let at = self.running_before(standing);
                self.running.remove(at);
                Some(residence)
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

    /// The sequence whose deadline passed longest ago, as of `now`.
    pub fn overdue(&self, now: Timestamp) -> Option<(SequenceIndex, DeadlineKind)> {
        let &(time, index) = self.deadlines.first()?;
        let (_, kind) = self.sequences[index].due()?;
        (time <= now).then_some((index, kind))
    }

    /// The earliest deadline.
    pub fn next_deadline(&self) -> Option<Timestamp> {
        self.deadlines.first().map(|(time, _)| *time)
    }

    fn set_due(
        &mut self,
        index: SequenceIndex,
        before: Option<(Timestamp, DeadlineKind)>,
        after: Option<(Timestamp, DeadlineKind)>,
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

    /// I4 and I6: every live sequence is in exactly the views that its status says.
    pub fn check(&self) -> Result<(), String> {
        let mut num_live = 0;
        let mut num_due = 0;
        for (id, choices) in &self.requests {
            for &index in &choices.live {
                let sequence = &self.sequences[index];
                if sequence.request.id != *id {
                    return Err(format!("{:?} is listed under {id:?}", sequence.id));
                }
                num_live += 1;
                num_due += usize::from(sequence.due().is_some());
                self.check_views(index)?;
            }
        }
        let is_live = |s: &&Sequence| !matches!(s.status, Status::Leaving(_));
        let num_placed = self.sequences.iter().filter(is_live).count();
        let num_listed = self.running.len() + self.queue.len() as usize;
        if num_live != num_placed || num_live != num_listed || num_due != self.deadlines.len() {
            return Err(format!(
                "{num_live} live, {num_placed} placed, {num_listed} waiting or running; \
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
        let is_due = match sequence.due() {
            Some((time, _)) => self.deadlines.contains(&(time, index)),
            None => true,
        };
        let agrees = is_due
            && match sequence.status {
                Status::Held => !is_ready && !is_running,
                Status::Waiting => is_ready && !is_running,
                Status::Running(_) => !is_ready && is_running,
                Status::Leaving(_) => false,
            };
        match agrees {
            true => Ok(()),
            false => Err(format!(
                "{:?} is in a view it should not be in",
                sequence.id
            )),
        }
    }
}
