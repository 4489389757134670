//! A request's progress: which choice it is, its output so far, and where it stands.
//!
//! It decides nothing and holds no block by itself: the block table here is accounted for by `KvManager`.

use std::cmp::Reverse;
use std::ops::{Index, IndexMut, Range};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::plan::{BlockId, Summary};
use crate::request::{DeadlineKind, FinishReason, Request, SequenceId, StopCause, TokenId};
use crate::time::Timestamp;
use crate::transfer::{Source, Ticket};

/// One choice of one request.
pub struct Sequence {
    /// Its name in plans.
    pub id: SequenceId,
    /// The ask.
    pub request: Arc<Request>,
    /// Which choice of it, from 0.
    pub choice: u32,
    /// Prompt and output never get longer than this.
    pub max_len: u32,
    /// Output tokens accepted so far.
    pub output: Vec<TokenId>,
    /// Where its keys and values can be fetched from when it is let in.
    pub source: Option<Source>,
    /// Where it stands.
    pub status: Status,
    /// Counts and times for its summary.
    pub progress: Progress,
}

/// Where a sequence stands.
pub enum Status {
    /// Waits until a sibling has computed their common prompt.
    Held,
    /// In the queue; holds no block.
    Waiting,
    /// Holds blocks and waits until another worker has filled those it lacks.
    Receiving(Reception),
    /// Holds blocks and is part of every step.
    Running(Residence),
    /// Holds blocks for another worker to fetch; this one has done its part.
    Offered(Offer),
    /// Ended while its row was being executed: the blocks go back when the step is committed.
    Leaving(Vec<BlockId>),
}

/// Blocks that are being filled from another worker, and until when they are kept for that.
pub struct Reception {
    /// All its blocks. Those from the first uncomputed position to the source's last are in transfer.
    pub home: Residence,
    /// What comes, under which ticket.
    pub source: Source,
    /// When it stops waiting and computes what it lacks.
    pub lease_end: Timestamp,
}

/// Blocks that are held for another worker, and until when.
pub struct Offer {
    /// All its blocks.
    pub home: Residence,
    /// When they go back.
    pub lease_end: Timestamp,
}

/// What a sequence has in the pool.
pub struct Residence {
    /// Entry i holds the keys and values of positions i × block size and on.
    pub table: Vec<BlockId>,
    /// Leading blocks of the table that are in the radix cache.
    pub num_published: u32,
    /// Leading tokens whose keys and values are valid.
    pub num_computed: u32,
    /// Leading tokens that are computed or in the plan in flight.
    pub num_scheduled: u32,
    /// Tokens it was admitted with: below, it prefills; from there on, it decodes.
    pub prefill_end: u32,
    /// The runner was told that it started, and not yet that it ended.
    pub is_started: bool,
}

/// Counts and times for the summary.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// When it was asked for.
    pub arrival: Timestamp,
    /// When it was first scheduled.
    pub first_scheduled: Option<Timestamp>,
    /// When its first token was committed.
    pub first_token: Option<Timestamp>,
    /// Prompt tokens found in the cache when it was first scheduled.
    pub num_cached_tokens: u32,
    /// Times it was sent back to the queue.
    pub num_preemptions: u32,
}

impl Progress {
    /// The summary of a sequence with so many tokens that ended at `now`.
    pub fn summary(&self, num_prompt: u32, num_output: u32, now: Timestamp) -> Summary {
        Summary {
            num_prompt_tokens: num_prompt,
            num_cached_tokens: self.num_cached_tokens,
            num_output_tokens: num_output,
            num_preemptions: self.num_preemptions,
            arrival: self.arrival,
            first_scheduled: self.first_scheduled,
            first_token: self.first_token,
            finished: now,
        }
    }
}

/// Who comes first among running sequences: higher priority, then earlier arrival, then lower id. The
/// last one is the first to be preempted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Standing {
    priority: Reverse<i32>,
    arrival: Timestamp,
    id: SequenceId,
}

impl Standing {
    /// Priority of the request.
    pub fn priority(&self) -> i32 {
        self.priority.0
    }

    /// Arrival of the sequence.
    pub fn arrival(&self) -> Timestamp {
        self.arrival
    }

    /// The sequence.
    pub fn id(&self) -> SequenceId {
        self.id
    }
}

impl Status {
    /// What the sequence has in the pool, unless it is leaving.
    pub fn residence(&self) -> Option<&Residence> {
        match self {
            Status::Receiving(reception) => Some(&reception.home),
            Status::Running(residence) => Some(residence),
            Status::Offered(offer) => Some(&offer.home),
            Status::Held | Status::Waiting | Status::Leaving(_) => None,
        }
    }

    /// When it stops waiting for another worker, if it does.
    fn lease_end(&self) -> Option<Timestamp> {
        match self {
            Status::Receiving(reception) => Some(reception.lease_end),
            Status::Offered(offer) => Some(offer.lease_end),
            Status::Held | Status::Waiting | Status::Running(_) | Status::Leaving(_) => None,
        }
    }

    /// What the sequence has in the pool, to change it. Panics unless it runs.
    pub fn running_mut(&mut self) -> &mut Residence {
        match self {
            Status::Running(residence) => residence,
            Status::Held
            | Status::Waiting
            | Status::Receiving(_)
            | Status::Offered(_)
            | Status::Leaving(_) => {
                panic!("only running sequences are in the running list and in rows")
            }
        }
    }
}

impl Residence {
    /// All tokens it was admitted with are computed.
    pub fn is_decoding(&self) -> bool {
        self.num_computed >= self.prefill_end
    }

    /// A row of it is in the plan in flight.
    pub fn is_in_flight(&self) -> bool {
        self.num_scheduled > self.num_computed
    }
}

impl Sequence {
    /// Tokens of the prompt.
    pub fn num_prompt(&self) -> u32 {
        self.request.prompt.len() as u32
    }

    /// Tokens of prompt and output.
    pub fn num_tokens(&self) -> u32 {
        self.num_prompt() + self.output.len() as u32
    }

    /// Its place among running sequences.
    pub fn standing(&self) -> Standing {
        Standing {
            priority: Reverse(self.request.priority),
            arrival: self.progress.arrival,
            id: self.id,
        }
    }

    /// What it has in the pool. Panics unless it runs.
    pub fn running(&self) -> &Residence {
        match &self.status {
            Status::Running(residence) => residence,
            Status::Held
            | Status::Waiting
            | Status::Receiving(_)
            | Status::Offered(_)
            | Status::Leaving(_) => {
                panic!("only running sequences are in the running list and in rows")
            }
        }
    }

    /// Every block it holds, leaving or not.
    pub fn blocks(&self) -> &[BlockId] {
        match &self.status {
            Status::Held | Status::Waiting => &[],
            Status::Receiving(reception) => &reception.home.table,
            Status::Running(residence) => &residence.table,
            Status::Offered(offer) => &offer.home.table,
            Status::Leaving(table) => table,
        }
    }

    /// The ticket of what it expects from another worker, now or when it is let in.
    pub fn ticket(&self) -> Option<Ticket> {
        match &self.status {
            Status::Receiving(reception) => Some(reception.source.ticket),
            Status::Held | Status::Waiting => self.source.map(|source| source.ticket),
            Status::Running(_) | Status::Offered(_) | Status::Leaving(_) => None,
        }
    }

    /// Appends the tokens at `positions` to `into`.
    pub fn copy_tokens(&self, positions: Range<u32>, into: &mut Vec<TokenId>) {
        let prompt = &self.request.prompt;
        let (start, end) = (positions.start as usize, positions.end as usize);
        let border = prompt.len();
        if start < border {
            into.extend_from_slice(&prompt[start..end.min(border)]);
        }
        if end > border {
            into.extend_from_slice(&self.output[start.max(border) - border..end - border]);
        }
    }

    /// How many leading tokens of prompt and output are also the leading ones of `tokens`.
    pub fn num_common(&self, tokens: &[TokenId]) -> u32 {
        let own = self.request.prompt.iter().chain(&self.output);
        own.zip(tokens).take_while(|(a, b)| a == b).count() as u32
    }

    /// Appends `tokens` to the output up to and including the first that ends it; returns how many, and
    /// why it ended.
    pub fn accept(&mut self, tokens: &[TokenId], now: Timestamp) -> (u32, Option<FinishReason>) {
        for (index, &token) in tokens.iter().enumerate() {
            self.output.push(token);
            self.progress.first_token.get_or_insert(now);
            let finish = self
                .request
                .stop
                .finish_at(token, self.output.len() as u32)
                .or_else(|| (self.num_tokens() >= self.max_len).then_some(FinishReason::Length));
            if finish.is_some() {
                return (index as u32 + 1, finish);
            }
        }
        (tokens.len() as u32, None)
    }

    /// The earliest point in time at which something becomes of it unless it gets on before.
    pub fn due(&self) -> Option<(Timestamp, Due)> {
        let deadlines = &self.request.deadlines;
        let queue = deadlines
            .queue
            .filter(|_| self.progress.first_scheduled.is_none());
        let first_token = deadlines
            .first_token
            .filter(|_| self.progress.first_token.is_none());
        let candidates = [
            (queue, Due::Deadline(DeadlineKind::Queue)),
            (first_token, Due::Deadline(DeadlineKind::FirstToken)),
            (deadlines.total, Due::Deadline(DeadlineKind::Total)),
            (self.status.lease_end(), Due::Lease),
        ];
        candidates
            .into_iter()
            .filter_map(|(time, due)| Some((time?, due)))
            .min_by_key(|(time, _)| *time)
    }

    /// Counts and times, as of its end at `now`.
    pub fn summary(&self, now: Timestamp) -> Summary {
        self.progress
            .summary(self.num_prompt(), self.output.len() as u32, now)
    }
}

/// What is over at a point in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Due {
    /// The sequence's own time.
    Deadline(DeadlineKind),
    /// Its wait for another worker.
    Lease,
}

/// The reason of a sequence whose last accepted token completed a stop string: a stop of its own wins,
/// the length limit does not.
pub fn stop_string_or(finish: Option<FinishReason>) -> FinishReason {
    match finish {
        Some(FinishReason::Stop(cause)) => FinishReason::Stop(cause),
        Some(
            FinishReason::Length
            | FinishReason::Cancelled
            | FinishReason::Timeout(_)
            | FinishReason::Error(_),
        )
        | None => FinishReason::Stop(StopCause::StopString),
    }
}

/// Where a sequence lives in the slab, until it is removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SequenceIndex(u32);

/// All live sequences at stable places, so that a step touches no tree of ids.
#[derive(Default)]
pub struct SequenceSlab {
    places: Vec<Option<Sequence>>,
    vacant: Vec<SequenceIndex>,
}

impl SequenceSlab {
    /// Takes `sequence` in.
    pub fn insert(&mut self, sequence: Sequence) -> SequenceIndex {
        match self.vacant.pop() {
            Some(index) => {
                self.places[index.0 as usize] = Some(sequence);
                index
            }
            None => {
                self.places.push(Some(sequence));
                SequenceIndex(self.places.len() as u32 - 1)
            }
        }
    }

    /// Gives its place to others. Panics if it is not there.
    pub fn remove(&mut self, index: SequenceIndex) -> Sequence {
        self.vacant.push(index);
        self.places[index.0 as usize]
            .take()
            .expect("an index is valid until its sequence is removed, once")
    }

    /// Every sequence, leaving ones included.
    pub fn iter(&self) -> impl Iterator<Item = &Sequence> {
        self.places.iter().flatten()
    }
}

impl Index<SequenceIndex> for SequenceSlab {
    type Output = Sequence;

    fn index(&self, index: SequenceIndex) -> &Sequence {
        self.places[index.0 as usize]
            .as_ref()
            .expect("an index is valid until its sequence is removed")
    }
}

impl IndexMut<SequenceIndex> for SequenceSlab {
    fn index_mut(&mut self, index: SequenceIndex) -> &mut Sequence {
        self.places[index.0 as usize]
            .as_mut()
            .expect("an index is valid until its sequence is removed")
    }
}
