//! What passes between workers: tickets for keys and values in transfer, and sequences that begin in the middle.
//!
//! Data alone. Who hands over to whom is `disagg`'s business, what a worker makes of it is `Scheduler`'s.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::plan::BlockId;
use crate::request::{Request, SequenceId, TokenId};
use crate::sequence::Progress;

/// Names a worker for as long as it is configured.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct WorkerId(pub u32);

/// One life of a worker. What an earlier life still says is not heard.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct Peer {
    /// The worker.
    pub worker: WorkerId,
    /// Which life, from 1: it begins empty.
    pub epoch: u32,
}

/// Names the hand-off of one sequence from one worker to another. Never reused.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct TransferId(pub u64);

/// The right to fill certain blocks. What comes with another generation than the one that the receiver
/// knows is late, and ignored.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct Ticket {
    /// The hand-off.
    pub transfer: TransferId,
    /// Which try at it, from 1.
    pub generation: u32,
}

impl Ticket {
    /// The ticket of the next try; this one is worth nothing from then on.
    pub fn next(self) -> Self {
        Ticket {
            transfer: self.transfer,
            generation: self.generation + 1,
        }
    }
}

/// Keys and values that another worker has of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Source {
    /// Under which they come.
    pub ticket: Ticket,
    /// Leading tokens of prompt and output that have them.
    pub num_tokens: u32,
}

/// A choice that another worker began, with all that is needed to go on with it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Arrival {
    /// The ask.
    pub request: Arc<Request>,
    /// Which choice of it.
    pub choice: u32,
    /// Output tokens accepted before.
    pub output: Vec<TokenId>,
    /// Where its keys and values can be had; without, they are computed again.
    pub source: Option<Source>,
    /// Leading prompt positions whose log-probabilities were reported before.
    pub num_reported: u32,
    /// Counts and times so far, for its deadlines and its summary.
    pub progress: Progress,
}

/// What a worker that prefilled a sequence holds for another to fetch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OfferedBlocks<'a> {
    /// Entry i holds the keys and values of positions i × block size and on.
    pub blocks: &'a [BlockId],
    /// Leading positions that are valid; the last block may be filled in part.
    pub num_tokens: u32,
}

/// Copy blocks from one worker to another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TransferOrder {
    /// Under which everything about it goes.
    pub ticket: Ticket,
    /// Who has the blocks.
    pub from: Peer,
    /// Under which name `from` offers them.
    pub sequence: SequenceId,
    /// Index of the first in the source's block table.
    pub first_block: u32,
    /// Who needs them.
    pub to: Peer,
    /// Where they go there, in order of the table.
    pub blocks: Vec<BlockId>,
}

/// Part of the bytes of a transfer: some layers, some blocks, or all at once. On a network, at least 64 KiB.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece<P> {
    /// Under which it comes.
    pub ticket: Ticket,
    /// Who needs it.
    pub to: Peer,
    /// Which piece, from 0.
    pub number: u32,
    /// How many the transfer has.
    pub num_pieces: u32,
    /// Where the bytes go.
    pub blocks: Vec<BlockId>,
    /// The bytes, in the form that a runner exports and imports, with their checksum.
    pub payload: P,
}

/// How a transfer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum TransferOutcome {
    /// Every block was written, and its bytes are those that were sent.
    Complete,
    /// At least one block was not: none is relied upon.
    Failed,
}
