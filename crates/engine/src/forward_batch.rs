//! `ForwardBatch`: a `BatchPlan` as the flat metadata that the decoder reads.
//!
//! Every index that a kernel will follow is checked here, once. A row that fails the check is left out
//! and reported; the others run (A3). Nothing is scheduled and no tensor is touched here.

use millpond_scheduler::config::BLOCK_SIZE;
use millpond_scheduler::{BatchPlan, BlockId, Row, RowError, Span32, TokenId};

use crate::kernels::cpu::TokenPath;

/// What the rows of a batch may refer to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchLimits {
    /// Tokens computed in one step.
    pub max_tokens: usize,
    /// Positions that the rotary tables cover.
    pub max_positions: usize,
    /// Token ids lie below it.
    pub vocab_size: usize,
    /// Blocks in the pool.
    pub num_blocks: usize,
}

/// A plan that cannot run as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BatchError {
    /// The activations of this many tokens have no room.
    #[error("the plan has {num_tokens} tokens, the limit is {max_tokens}")]
    TooManyTokens {
        /// In the plan.
        num_tokens: usize,
        /// The limit.
        max_tokens: usize,
    },
    /// A copy names a block that does not exist.
    #[error("copy of block {from} to block {to}: the pool has {num_blocks} blocks")]
    CopyOutsidePool {
        /// Source.
        from: u32,
        /// Destination.
        to: u32,
        /// Blocks in the pool.
        num_blocks: usize,
    },
}

/// Metadata of one step, token by token; the memory is reused from step to step.
#[derive(Debug, Default)]
pub struct ForwardBatch {
    tokens: Vec<TokenId>,
    positions: Vec<u32>,
    slots: Vec<u32>,
    paths: Vec<TokenPath>,
    blocks: Vec<BlockId>,
    rows: Vec<Result<Span32, RowError>>,
}

impl ForwardBatch {
    /// Replaces the content by that of `plan`.
    pub fn fill(&mut self, plan: &BatchPlan, limits: &BatchLimits) -> Result<(), BatchError> {
        self.clear();
        check_size(plan, limits)?;
        check_copies(plan, limits)?;
        self.blocks.extend_from_slice(&plan.blocks);
        for row in &plan.rows {
            let span = check_row(plan, row, limits).map(|()| self.push_row(plan, row));
            self.rows.push(span);
        }
        Ok(())
    }

    /// Tokens to compute.
    pub fn num_tokens(&self) -> usize {
        self.tokens.len()
    }

    /// The tokens, row after row.
    pub fn tokens(&self) -> &[TokenId] {
        &self.tokens
    }

    /// The tokens' absolute positions.
    pub fn positions(&self) -> &[u32] {
        &self.positions
    }

    /// Where the tokens' keys and values go: block × 16 + offset.
    pub fn slots(&self) -> &[u32] {
        &self.slots
    }

    /// What the tokens attend to.
    pub fn paths(&self) -> &[TokenPath] {
        &self.paths
    }

    /// Block tables that `paths` refer to.
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// Parallel to the plan's rows: the row's range of `tokens`, or why it is not in the batch.
    pub fn rows(&self) -> &[Result<Span32, RowError>] {
        &self.rows
    }

    fn clear(&mut self) {
        self.tokens.clear();
        self.positions.clear();
        self.slots.clear();
        self.paths.clear();
        self.blocks.clear();
        self.rows.clear();
    }

    /// Appends a checked row and returns its range of tokens.
    fn push_row(&mut self, plan: &BatchPlan, row: &Row) -> Span32 {
        let tokens = plan.row_tokens(row);
        let start = self.tokens.len() as u32;
        let end = start + tokens.len() as u32;
        self.tokens.extend_from_slice(tokens);
        let slots = slots_from(plan.row_blocks(row), row.first_position);
        self.slots.extend(slots.take(tokens.len()));
        for position in (row.first_position..).take(tokens.len()) {
            self.positions.push(position);
            self.paths.push(TokenPath {
                position,
                table: row.blocks,
                tail: Span32::default(),
            });
        }
        Span32 { start, end }
    }
}

/// The slots of positions `first` and on.
fn slots_from(blocks: &[BlockId], first: u32) -> impl Iterator<Item = u32> + '_ {
    let whole_blocks = (first / BLOCK_SIZE) as usize;
    let slots_of = |block: &BlockId| {
        let base = block.0 * BLOCK_SIZE;
        base..base + BLOCK_SIZE
    };
    let later = blocks.iter().skip(whole_blocks).flat_map(slots_of);
    later.skip((first % BLOCK_SIZE) as usize)
}

fn check_size(plan: &BatchPlan, limits: &BatchLimits) -> Result<(), BatchError> {
    if plan.tokens.len() > limits.max_tokens {
        return Err(BatchError::TooManyTokens {
            num_tokens: plan.tokens.len(),
            max_tokens: limits.max_tokens,
        });
    }
    Ok(())
}

fn check_copies(plan: &BatchPlan, limits: &BatchLimits) -> Result<(), BatchError> {
    let outside = |block: BlockId| block.0 as usize >= limits.num_blocks;
    match plan
        .copies
        .iter()
        .find(|copy| outside(copy.from) || outside(copy.to))
    {
        Some(copy) => Err(BatchError::CopyOutsidePool {
            from: copy.from.0,
            to: copy.to.0,
            num_blocks: limits.num_blocks,
        }),
        None => Ok(()),
    }
}

fn check_row(plan: &BatchPlan, row: &Row, limits: &BatchLimits) -> Result<(), RowError> {
    let tokens = plan.tokens.get(row.tokens.range()).unwrap_or_default();
    let blocks = plan.blocks.get(row.blocks.range()).unwrap_or_default();
    let end = row.first_position as usize + tokens.len();
    if tokens.is_empty() {
        return Err(inconsistent("a row without tokens".into()));
    }
    if end > limits.max_positions || end > blocks.len() * BLOCK_SIZE as usize {
        let (num_blocks, max) = (blocks.len(), limits.max_positions);
        return Err(inconsistent(format!(
            "a row ends at position {end}: it has {num_blocks} blocks, the model {max} positions"
        )));
    }
    if let Some(block) = blocks
        .iter()
        .find(|block| block.0 as usize >= limits.num_blocks)
    {
        return Err(inconsistent(format!(
            "block {} is outside the pool",
            block.0
        )));
    }
    match tokens
        .iter()
        .find(|token| token.0 as usize >= limits.vocab_size)
    {
        Some(token) => Err(inconsistent(format!(
            "token {} is outside the vocabulary",
            token.0
        ))),
        None => Ok(()),
    }
}

fn inconsistent(message: String) -> RowError {
    RowError::Inconsistent(message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use millpond_scheduler::SequenceId;

    const LIMITS: BatchLimits = BatchLimits {
        max_tokens: 64,
        max_positions: 100,
        vocab_size: 10,
        num_blocks: 8,
    };

    /// A plan of rows (first position, tokens, blocks).
    fn plan(rows: &[(u32, &[u32], &[u32])]) -> BatchPlan {
        let mut plan = BatchPlan::default();
        for (index, (first_position, tokens, blocks)) in rows.iter().enumerate() {
            let tokens_start = plan.tokens.len() as u32;
            let blocks_start = plan.blocks.len() as u32;
            plan.tokens.extend(tokens.iter().copied().map(TokenId));
            plan.blocks.extend(blocks.iter().copied().map(BlockId));
            plan.rows.push(Row {
                sequence: SequenceId(index as u64),
                first_position: *first_position,
                tokens: Span32 {
                    start: tokens_start,
                    end: plan.tokens.len() as u32,
                },
                blocks: Span32 {
                    start: blocks_start,
                    end: plan.blocks.len() as u32,
                },
                sample: true,
                prompt_logprobs: Span32::default(),
            });
        }
        plan
    }

    fn filled(plan: &BatchPlan) -> ForwardBatch {
        let mut batch = ForwardBatch::default();
        batch.fill(plan, &LIMITS).expect("the plan fits");
        batch
    }

    #[test]
    fn slots_follow_the_block_table() {
        let batch = filled(&plan(&[(35, &[1], &[7, 0, 5]), (14, &[2, 3, 4], &[6, 2])]));
        assert_eq!(
            batch.slots(),
            [5 * 16 + 3, 6 * 16 + 14, 6 * 16 + 15, 2 * 16]
        );
        assert_eq!(batch.positions(), [35, 14, 15, 16]);
        assert_eq!(batch.paths()[3].table, Span32 { start: 3, end: 5 });
        assert_eq!(
            batch.rows(),
            [
                Ok(Span32 { start: 0, end: 1 }),
                Ok(Span32 { start: 1, end: 4 })
            ]
        );
    }

    #[test]
    fn a_row_that_refers_to_what_does_not_exist_is_left_out_alone() {
        let bad: [(u32, &[u32], &[u32]); 5] = [
            (0, &[], &[1]),
            (0, &[10], &[1]),
            (0, &[1], &[8]),
            (16, &[1], &[1]),
            (99, &[1, 1], &[1, 1, 1, 1, 1, 1, 1]),
        ];
        for row in bad {
            let batch = filled(&plan(&[(0, &[1], &[0]), row, (0, &[2], &[3])]));
            assert_eq!(batch.tokens(), [TokenId(1), TokenId(2)], "{row:?}");
            assert!(
                matches!(batch.rows()[1], Err(RowError::Inconsistent(_))),
                "{row:?}"
            );
            assert_eq!(batch.rows()[2], Ok(Span32 { start: 1, end: 2 }), "{row:?}");
        }
    }

    #[test]
    fn a_plan_that_cannot_run_at_all_is_refused() {
        let tokens = [1_u32; 65];
        let too_long = plan(&[(0, &tokens, &[0, 1, 2, 3, 4])]);
        let refused = ForwardBatch::default().fill(&too_long, &LIMITS);
        assert!(matches!(
            refused,
            Err(BatchError::TooManyTokens { num_tokens: 65, .. })
        ));
        let mut copying = plan(&[]);
        copying.copies.push(millpond_scheduler::BlockCopy {
            from: BlockId(0),
            to: BlockId(8),
            num_tokens: 1,
        });
        let refused = ForwardBatch::default().fill(&copying, &LIMITS);
        assert!(matches!(
            refused,
            Err(BatchError::CopyOutsidePool { to: 8, .. })
        ));
    }
}
