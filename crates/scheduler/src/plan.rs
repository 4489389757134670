//! The contract between deciding and executing: what to run, what came out, what happened.
//!
//! All buffers are flat and owned by the caller, so that a steady decode step allocates nothing.

use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::request::{FinishReason, Request, RequestId, RowError, SequenceId, TokenId};
use crate::sequence::Progress;
use crate::time::{Span, Timestamp};
use crate::transfer::Ticket;

/// A KV block. Only `BlockPool` makes them (A2).
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
#[repr(transparent)]
pub struct BlockId(pub u32);

/// A half-open range of a flat buffer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span32 {
    /// First index.
    pub start: u32,
    /// One past the last index.
    pub end: u32,
}

impl Span32 {
    /// Number of elements.
    pub fn len(self) -> u32 {
        self.end - self.start
    }

    /// True when there is no element.
    pub fn is_empty(self) -> bool {
        self.start == self.end
    }

    /// The same range for indexing.
    pub fn range(self) -> Range<usize> {
        self.start as usize..self.end as usize
    }
}

/// What the runner is to execute in one step. Order: forget `ended`, set up `started`, do `copies`, then `rows`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct BatchPlan {
    /// Counts steps from 1.
    pub step: u64,
    /// Sequences that appear in `rows` for the first time since they were created or preempted.
    pub started: Vec<StartedSequence>,
    /// Sequences that finished, were aborted or preempted since the last plan.
    pub ended: Vec<SequenceId>,
    /// Whole-block copies to perform before any write of this step.
    pub copies: Vec<BlockCopy>,
    /// One per scheduled sequence, decodes first.
    pub rows: Vec<Row>,
    /// The rows' uncomputed tokens, row after row.
    pub tokens: Vec<TokenId>,
    /// The rows' block tables, row after row.
    pub blocks: Vec<BlockId>,
}

impl BatchPlan {
    /// Empties every list and keeps the memory.
    pub fn clear(&mut self) {
        self.started.clear();
        self.ended.clear();
        self.copies.clear();
        self.rows.clear();
        self.tokens.clear();
        self.blocks.clear();
    }

    /// True when there is nothing for the runner to do (ended sequences may wait for the next plan).
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// The uncomputed tokens of `row`.
    pub fn row_tokens(&self, row: &Row) -> &[TokenId] {
        &self.tokens[row.tokens.range()]
    }

    /// The block table of `row`: entry i holds positions i × block size and on.
    pub fn row_blocks(&self, row: &Row) -> &[BlockId] {
        &self.blocks[row.blocks.range()]
    }
}

/// What the runner needs to rebuild its state of a sequence, a pure function of these fields.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StartedSequence {
    /// The sequence's name in `rows`.
    pub id: SequenceId,
    /// The ask.
    pub request: Arc<Request>,
    /// Which choice of the request, from 0.
    pub choice: u32,
    /// Output tokens committed before: not empty after preemption, or when another worker began.
    pub output: Vec<TokenId>,
}

/// Copy the whole block `from` to `to`. The scheduler keeps a reference to `from` until commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockCopy {
    /// Source, published and unchanged in this step up to `num_tokens`.
    pub from: BlockId,
    /// Destination, private to one sequence.
    pub to: BlockId,
    /// Leading slots that matter.
    pub num_tokens: u32,
}

/// One sequence's share of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Row {
    /// Whose row.
    pub sequence: SequenceId,
    /// Position of the first token of `tokens`; positions below have their keys and values in the blocks.
    pub first_position: u32,
    /// Range of `BatchPlan::tokens`; at least one token.
    pub tokens: Span32,
    /// Range of `BatchPlan::blocks`; covers every position up to the last token.
    pub blocks: Span32,
    /// Choose the token that follows the last one. False for a prefill chunk that is not the last.
    pub sample: bool,
    /// Report log-probabilities of the prompt tokens that follow these positions (empty: none).
    pub prompt_logprobs: Span32,
}

/// What came out of a step. Owned by the driver, refilled by the runner.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ModelOutput {
    /// Parallel to `BatchPlan::rows`.
    pub rows: Vec<OutputRow>,
    /// The rows' new tokens, row after row.
    pub tokens: Vec<TokenId>,
    /// Log-probabilities of new tokens, for the rows that asked.
    pub logprobs: Vec<PositionLogprobs>,
    /// Log-probabilities of prompt tokens, for the rows that asked.
    pub prompt_logprobs: Vec<PositionLogprobs>,
}

impl ModelOutput {
    /// Empties every list and keeps the memory.
    pub fn clear(&mut self) {
        self.rows.clear();
        self.tokens.clear();
        self.logprobs.clear();
        self.prompt_logprobs.clear();
    }

    /// The new tokens of `row`.
    pub fn row_tokens(&self, row: &OutputRow) -> &[TokenId] {
        &self.tokens[row.tokens.range()]
    }
}

/// What came out of one row.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OutputRow {
    /// Range of `ModelOutput::tokens`: none for an unfinished prefill; else the sampled token, preceded by
    /// accepted drafts and followed by forced tokens, in order of position.
    pub tokens: Span32,
    /// Positions whose keys and values are valid after this step, counted from the row's `first_position`:
    /// the row's tokens plus accepted drafts.
    pub num_computed: u32,
    /// Range of `ModelOutput::logprobs`, one per new token when asked for, else empty.
    pub logprobs: Span32,
    /// Range of `ModelOutput::prompt_logprobs`.
    pub prompt_logprobs: Span32,
    /// Whether the row may go on.
    pub verdict: RowVerdict,
}

/// Whether a row may go on after this step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RowVerdict {
    /// As far as the runner and the driver can tell.
    Continue,
    /// The driver found a stop string; it cut `tokens` after the token that completed the match.
    StopString,
    /// The row failed; its tokens and blocks of this step are void.
    Failed(RowError),
}

/// Log-probabilities at one position, from the raw logits (before bias, penalties, mask and temperature).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PositionLogprobs {
    /// The token at this position.
    pub chosen: TokenLogprob,
    /// Rank of the chosen token, from 1.
    pub rank: u32,
    /// The most likely tokens, most likely first, ties by lower id.
    pub top: Vec<TokenLogprob>,
}

/// A token and its natural log-probability.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokenLogprob {
    /// The token.
    pub token: TokenId,
    /// Natural logarithm of its probability.
    pub logprob: f32,
}

/// What `Scheduler::schedule`, `commit`, `abort` and expired deadlines and leases report, in order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Event {
    /// The first `num_tokens` tokens of row `row` were accepted.
    Accepted {
        /// Whose request.
        request: RequestId,
        /// Which choice.
        choice: u32,
        /// Index into `BatchPlan::rows`.
        row: u32,
        /// Accepted tokens: less than the row's when a stop condition was met inside it.
        num_tokens: u32,
    },
    /// A prefill worker has done its part: nothing follows but that the offer ends. It ends by
    /// `release_offer`, `OfferExpired` or `Finished`, whichever comes first.
    Prefilled {
        /// Whose request.
        request: RequestId,
        /// Which choice.
        choice: u32,
        /// Under which name its blocks can be asked for here.
        sequence: SequenceId,
        /// Leading tokens of prompt and output whose keys and values it has.
        num_tokens: u32,
        /// Counts and times so far.
        progress: Progress,
    },
    /// A prefill worker waited long enough; the blocks are gone.
    OfferExpired {
        /// Whose request.
        request: RequestId,
        /// Which choice.
        choice: u32,
        /// Its name here.
        sequence: SequenceId,
    },
    /// A sequence that came with a source was let in and has blocks for every token of it.
    ///
    /// It runs when `transfer_finished` says that `blocks` are filled; if there are none to fill it runs
    /// already, and the ticket is worth nothing.
    Reserved {
        /// Whose request.
        request: RequestId,
        /// Which choice.
        choice: u32,
        /// Under which the blocks are to come.
        ticket: Ticket,
        /// Index of the first of `blocks` in the block tables of both workers.
        first_block: u32,
        /// Those to fill, in order. Ask `is_receiving` before every write.
        blocks: Vec<BlockId>,
    },
    /// A sequence waited long enough for its blocks and computes what it lacks.
    TransferExpired {
        /// Whose request.
        request: RequestId,
        /// Which choice.
        choice: u32,
        /// Worth nothing from now on.
        ticket: Ticket,
    },
    /// A sequence reached its end; nothing about it follows.
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

/// Counts and times of a finished sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Summary {
    /// Tokens of the prompt.
    pub num_prompt_tokens: u32,
    /// Prompt tokens whose keys and values came from the cache when it was first scheduled.
    pub num_cached_tokens: u32,
    /// Output tokens accepted.
    pub num_output_tokens: u32,
    /// Times it was preempted.
    pub num_preemptions: u32,
    /// Arrival.
    pub arrival: Timestamp,
    /// When it was first scheduled, if ever.
    pub first_scheduled: Option<Timestamp>,
    /// When its first token was committed, if ever.
    pub first_token: Option<Timestamp>,
    /// When it ended.
    pub finished: Timestamp,
}

impl Summary {
    /// Time from arrival until first scheduled (until the end, if never).
    pub fn queue(&self) -> Span {
        self.first_scheduled.unwrap_or(self.finished) - self.arrival
    }

    /// Time from first scheduled until the first token.
    pub fn prefill(&self) -> Span {
        match self.first_scheduled {
            Some(scheduled) => self.first_token.unwrap_or(self.finished) - scheduled,
            None => Span(0),
        }
    }

    /// Time from the first token until the end.
    pub fn decode(&self) -> Span {
        self.first_token
            .map_or(Span(0), |first| self.finished - first)
    }
}

/// Used by runners to report a row that failed.
impl OutputRow {
    /// A row without tokens that ended in `error`.
    pub fn failed(error: RowError) -> Self {
        OutputRow {
            tokens: Span32::default(),
            num_computed: 0,
            logprobs: Span32::default(),
            prompt_logprobs: Span32::default(),
            verdict: RowVerdict::Failed(error),
        }
    }
}
