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
use super::sequences::SequenceTable;
use super::{Answer, end_position};
use crate::plan::{BatchPlan, BlockId, Row};
use crate::request::RowError;

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
}

impl Oracle {
    pub(super) fn new(block_size: NonZeroU32, num_blocks: u32) -> Self {
        Oracle {
            pool: SlotPool::new(block_size, num_blocks),
            witnesses: SequenceTable::default(),
            readings: Vec::new(),
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
            let replaced = self.witnesses.insert(started.id, Witness::new(started));
            if replaced.is_some()
                && let Some(witness) = self.witnesses.get_mut(started.id)
            {
                witness.started_twice = true;
            }
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

    /// Writes the `index`-th row's tokens and chooses the one that follows, if it is to.
    pub(super) fn answer(
        &mut self,
        plan: &BatchPlan,
        index: usize,
        vocabulary: NonZeroU32,
    ) -> Result<Answer<'_>, RowError> {
        let row = &plan.rows[index];
        let reading = self.readings[index].clone();
        let written = reading.and_then(|chain| self.write(plan, row, chain, vocabulary));
        if written.is_err() {
            self.void_row(plan, row, VoidCause::RowFailed);
        }
        let chain = written?;
        let witness = self.witness(row)?;
        let next = witness.advance(row, &chain, vocabulary)?;
        let asked = &witness.asked;
        Ok(Answer { asked, next })
    }

    fn witness(&mut self, row: &Row) -> Result<&mut Witness, Inconsistency> {
        self.witnesses
            .get_mut(row.sequence)
            .ok_or(Inconsistency::UnknownSequence(row.sequence))
    }

    fn write(
        &mut self,
        plan: &BatchPlan,
        row: &Row,
        mut chain: Chain,
        vocabulary: NonZeroU32,
    ) -> Result<Chain, Inconsistency> {
        let writer = Writer {
            sequence: row.sequence,
            step: plan.step,
        };
        let witness = self
            .witnesses
            .get_mut(row.sequence)
            .ok_or(Inconsistency::UnknownSequence(row.sequence))?;
        for (position, token) in (row.first_position..).zip(plan.row_tokens(row)) {
            if token.0 >= vocabulary.get() {
                return Err(Inconsistency::OutsideVocabulary {
                    sequence: row.sequence,
                    position,
                    token: *token,
                });
            }
            let running = chain.compute(*token);
            let entry = witness.entry(position, *token, running);
            *self.pool.slot_mut(plan, row, position)? = Slot::Written { entry, writer };
        }
        Ok(chain)
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

/// Which block of the row's table holds `position`.
fn block_of(plan: &BatchPlan, row: &Row, position: u32, block_size: u32) -> Option<BlockId> {
    let index = position / block_size;
    plan.row_blocks(row).get(index as usize).copied()
}
