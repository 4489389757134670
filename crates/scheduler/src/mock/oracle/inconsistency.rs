//! What an oracle can find wrong with a plan, said with the names needed to find the cause.

use super::pool::Slot;
use crate::plan::{BlockId, Row};
use crate::request::{RowError, SequenceId, TokenId};

/// A plan that does not fit what happened before.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Inconsistency {
    /// A row of a sequence that was never started, or has ended.
    #[error("{0:?} is not running: never started, or ended")]
    UnknownSequence(SequenceId),
    /// A sequence was started again without having ended.
    #[error("{0:?} was started twice")]
    StartedTwice(SequenceId),
    /// A row without tokens.
    #[error("{0:?} has a row without tokens")]
    EmptyRow(SequenceId),
    /// A row leaves positions out or computes them again.
    #[error("{sequence:?} computes from position {found}, but {expected} positions are computed")]
    WrongPosition {
        /// Whose row.
        sequence: SequenceId,
        /// Positions computed before.
        expected: u32,
        /// `Row::first_position`.
        found: u32,
    },
    /// A row feeds a token that neither the prompt nor the model put there.
    #[error("{sequence:?} feeds {found:?} at position {position}, where {expected:?} stands")]
    WrongToken {
        /// Whose row.
        sequence: SequenceId,
        /// Where.
        position: u32,
        /// The token of prompt or output there, if any.
        expected: Option<TokenId>,
        /// The token in the plan.
        found: TokenId,
    },
    /// A token that the model does not have.
    #[error("{sequence:?} feeds {token:?} at position {position}, outside the vocabulary")]
    OutsideVocabulary {
        /// Whose row.
        sequence: SequenceId,
        /// Where.
        position: u32,
        /// The token in the plan.
        token: TokenId,
    },
    /// `Row::sample` must be true exactly when the row reaches the last known token.
    #[error(
        "{sequence:?} ends its row at {end} of {num_known} known tokens with sample = {sample}"
    )]
    WrongSample {
        /// Whose row.
        sequence: SequenceId,
        /// The position after the row's last token.
        end: u32,
        /// Tokens of prompt and output.
        num_known: u32,
        /// `Row::sample`.
        sample: bool,
    },
    /// The row's block table is too short for its last token.
    #[error("{sequence:?} has no block for position {position}")]
    NoBlock {
        /// Whose row.
        sequence: SequenceId,
        /// Where.
        position: u32,
    },
    /// A block outside the pool.
    #[error("{sequence:?} holds {block:?}, outside the pool")]
    OutsidePool {
        /// Whose row.
        sequence: SequenceId,
        /// The block.
        block: BlockId,
    },
    /// A block stands twice in one table.
    #[error("{sequence:?} holds {block:?} twice")]
    DuplicateBlock {
        /// Whose row.
        sequence: SequenceId,
        /// The block.
        block: BlockId,
    },
    /// A block that is written in this step stands in more than one table.
    #[error("{sequence:?} shares {block:?}, which is written in this step")]
    SharedWrite {
        /// Whose row.
        sequence: SequenceId,
        /// The block.
        block: BlockId,
    },
    /// A row writes slots that a copy of this step reads.
    #[error("{sequence:?} writes position {position} in {block:?}, the source of a copy")]
    SourceOverwritten {
        /// Whose row.
        sequence: SequenceId,
        /// Where.
        position: u32,
        /// The block.
        block: BlockId,
    },
    /// A slot that does not hold what the sequence needs there.
    #[error("{sequence:?} needs its position {position} in {block:?}, which holds {found}")]
    WrongSlot {
        /// Whose row.
        sequence: SequenceId,
        /// Where.
        position: u32,
        /// The block.
        block: BlockId,
        /// What is there.
        found: String,
    },
}

impl Inconsistency {
    pub(super) fn slot(row: &Row, position: u32, block: BlockId, found: &Slot) -> Self {
        Inconsistency::WrongSlot {
            sequence: row.sequence,
            position,
            block,
            found: format!("{found:?}"),
        }
    }
}

impl From<Inconsistency> for RowError {
    fn from(problem: Inconsistency) -> Self {
        RowError::Inconsistent(problem.to_string())
    }
}
