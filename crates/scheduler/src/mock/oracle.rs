//! The oracle: KV slots that remember who wrote what, and rows that are believed only if every slot fits.
//!
//! A real model reads a wrong, stale, foreign or unwritten block without complaint and answers with other words.
//! The oracle names the sequence, the position and the block instead, and its tokens depend on every slot read.
//! It never repairs: an inconsistent row fails, and what it was to write is void.

mod inconsistency;
mod pool;
mod witness;

use std::num::NonZeroU32;

use super::chain::Chain;
use super::image::{BlockImage, ImageError};
use super::sequences::SequenceTable;
use super::{Answer, end_position};
use crate::plan::{BatchPlan, BlockId, Row};
use crate::request::{RowError, TokenId};

pub use inconsistency::Inconsistency;
pub use pool::{Slot, VoidCause};
use pool::{SlotPool, Writer};
use witness::Witness;

/// A model whose keys and values are facts about their writers.
#[derive(Debug)]
pub(super) struct Oracle {
    pool: SlotPool,
    witnesses: SequenceTable<Witness>,
    /// What each row of the step read, before any row wrote.
    readings: Vec<Result<Chain, Inconsistency>>,
    pub(super) bursts: Bursts,
}

/// How many tokens a row may bring besides the one that it must: what speculation and grammars do to a scheduler.
///
/// How many it brings is drawn from what it read, so it depends on the sequence alone. The tokens are the same
/// as one by one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bursts {
    /// Accepted drafts, computed in the same step as far as the row's last block has room.
    pub max_drafts: u32,
    /// Tokens that follow without being computed, like those that a grammar forces.
    pub max_forced: u32,
}

impl Bursts {
    /// Numbers of drafts and of forced tokens, each from 0 to its maximum.
    fn draw(&self, chain: &Chain) -> (u32, u32) {
        let drawn = chain.draw();
        let up_to = |max: u32, half: u64| (half % (u64::from(max) + 1)) as u32;
        (
            up_to(self.max_drafts, drawn >> 32),
            up_to(self.max_forced, drawn & u64::from(u32::MAX)),
        )
    }
}

impl Oracle {
    pub(super) fn new(block_size: NonZeroU32, num_blocks: u32) -> Self {
        Oracle {
            pool: SlotPool::new(block_size, num_blocks),
            witnesses: SequenceTable::default(),
            readings: Vec::new(),
            bursts: Bursts::default(),
        }
    }

    pub(super) fn num_sequences(&self) -> usize {
        self.witnesses.len()
    }

    /// Everything up to the first write: sequences, copies, and the reading of all rows.
    ///
    /// Rows read before any row writes, so that a block handed over within one step is found out (A7).
    pub(super) fn begin(&mut self, plan: &BatchPlan) {
        self.witnesses.forget(&plan.ended);
        for started in &plan.started {
            let mut witness = Witness::new(started);
            witness.started_twice = self.witnesses.get_mut(started.id).is_some();
            self.witnesses.insert(started.id, witness);
        }
        self.pool.begin(plan);
        self.readings.clear();
        for index in 0..plan.rows.len() {
            let reading = self.read(plan, index);
            self.readings.push(reading);
        }
    }

    /// Checks the `index`-th row and all it reads.
    fn read(&mut self, plan: &BatchPlan, index: usize) -> Result<Chain, Inconsistency> {
        let row = &plan.rows[index];
        let witness = self
            .witnesses
            .get_mut(row.sequence)
            .ok_or(Inconsistency::UnknownSequence(row.sequence))?;
        witness.check(plan, row)?;
        self.pool.check_table(plan, row)?;
        let mut chain = Chain::new(&witness.asked.request.salt);
        for position in 0..row.first_position {
            let (block, slot) = self.pool.slot(plan, row, position)?;
            let running = witness
                .recognise(position, &slot)
                .ok_or_else(|| Inconsistency::slot(row, position, block, &slot))?;
            chain.read(running);
        }
        Ok(chain)
    }

    /// Writes the `index`-th row's tokens and appends those that follow to `tokens`, if it is to sample.
    pub(super) fn answer(
        &mut self,
        plan: &BatchPlan,
        index: usize,
        vocabulary: NonZeroU32,
        tokens: &mut Vec<TokenId>,
    ) -> Result<Answer<'_>, RowError> {
        let row = &plan.rows[index];
        let reading = self.readings[index].clone();
        let written = reading.and_then(|chain| self.write_row(plan, row, chain, vocabulary));
        if written.is_err() {
            self.void_row(plan, row, VoidCause::RowFailed);
        }
        let mut sampling = Sampling {
            chain: written?,
            vocabulary,
            tokens,
        };
        let num_drafts = match row.sample {
            true => self.sample(plan, row, &mut sampling)?,
            false => 0,
        };
        let witness = self.witness(row)?;
        witness.computed = Some(end_position(row) + num_drafts);
        Ok(Answer {
            asked: &witness.asked,
            num_computed: row.tokens.len() + num_drafts,
        })
    }

    fn witness(&mut self, row: &Row) -> Result<&mut Witness, Inconsistency> {
        self.witnesses
            .get_mut(row.sequence)
            .ok_or(Inconsistency::UnknownSequence(row.sequence))
    }

    /// Chooses the token that follows and those of a burst; returns how many of them were computed as drafts.
    fn sample(
        &mut self,
        plan: &BatchPlan,
        row: &Row,
        sampling: &mut Sampling<'_>,
    ) -> Result<u32, RowError> {
        let (max_drafts, num_forced) = self.bursts.draw(&sampling.chain);
        let mut token = self.witness(row)?.choose(sampling)?;
        let mut num_drafts = 0;
        while num_drafts < max_drafts {
            let at = (end_position(row) + num_drafts, token);
            if self.write(plan, row, at, &mut sampling.chain).is_err() {
                break;
            }
            num_drafts += 1;
            token = self.witness(row)?.choose(sampling)?;
        }
        for _ in 0..num_forced {
            sampling.chain.compute(token);
            token = self.witness(row)?.choose(sampling)?;
        }
        Ok(num_drafts)
    }

    /// Writes all tokens of the row.
    fn write_row(
        &mut self,
        plan: &BatchPlan,
        row: &Row,
        mut chain: Chain,
        vocabulary: NonZeroU32,
    ) -> Result<Chain, Inconsistency> {
        for (position, token) in (row.first_position..).zip(plan.row_tokens(row).iter().copied()) {
            if token.0 >= vocabulary.get() {
                return Err(Inconsistency::OutsideVocabulary {
                    sequence: row.sequence,
                    position,
                    token,
                });
            }
            self.write(plan, row, (position, token), &mut chain)?;
        }
        Ok(chain)
    }

    /// Computes one position and writes its slot.
    fn write(
        &mut self,
        plan: &BatchPlan,
        row: &Row,
        (position, token): (u32, TokenId),
        chain: &mut Chain,
    ) -> Result<(), Inconsistency> {
        let slot = self.pool.slot_mut(plan, row, position)?;
        let witness = self
            .witnesses
            .get_mut(row.sequence)
            .ok_or(Inconsistency::UnknownSequence(row.sequence))?;
        let running = chain.compute(token);
        *slot = Slot::Written {
            entry: witness.entry(position, token, running),
            writer: Writer::of(plan, row),
        };
        Ok(())
    }

    pub(super) fn export_blocks(&self, blocks: &[BlockId]) -> Result<BlockImage, ImageError> {
        let mut slots = Vec::new();
        for &block in blocks {
            let held = self.pool.block(block);
            slots.extend_from_slice(held.ok_or(ImageError::OutsidePool { block })?);
        }
        Ok(BlockImage::new(blocks.len(), slots))
    }

    pub(super) fn import_blocks(
        &mut self,
        blocks: &[BlockId],
        image: &BlockImage,
    ) -> Result<(), ImageError> {
        let is_outside = |block: &&BlockId| self.pool.block(**block).is_none();
        if let Some(&block) = blocks.iter().find(is_outside) {
            return Err(ImageError::OutsidePool { block });
        }
        let block_size = self.pool.block_size() as usize;
        let expected = block_size * blocks.len();
        if image.slots().len() != expected {
            return Err(ImageError::WrongSize {
                expected,
                found: image.slots().len(),
            });
        }
        for (&block, slots) in blocks.iter().zip(image.slots().chunks_exact(block_size)) {
            self.pool.fill_block(block, slots);
        }
        Ok(())
    }

    /// Nothing the row was to write may be relied upon.
    pub(super) fn void_row(&mut self, plan: &BatchPlan, row: &Row, cause: VoidCause) {
        let step = plan.step;
        for position in row.first_position..end_position(row) {
            if let Ok(slot) = self.pool.slot_mut(plan, row, position) {
                *slot = Slot::Void { cause, step };
            }
        }
    }

    /// Nothing the step was to write, copies included, may be relied upon.
    pub(super) fn void_step(&mut self, plan: &BatchPlan) {
        for copy in &plan.copies {
            self.pool
                .void_block(copy.to, plan.step, VoidCause::StepFailed);
        }
        for row in &plan.rows {
            self.void_row(plan, row, VoidCause::StepFailed);
        }
    }
}

/// What a row has computed so far, and where the tokens go that it chooses.
struct Sampling<'a> {
    chain: Chain,
    vocabulary: NonZeroU32,
    tokens: &'a mut Vec<TokenId>,
}

/// Which block of the row's table holds `position`.
fn block_of(plan: &BatchPlan, row: &Row, position: u32, block_size: u32) -> Option<BlockId> {
    let index = position / block_size;
    plan.row_blocks(row).get(index as usize).copied()
}
