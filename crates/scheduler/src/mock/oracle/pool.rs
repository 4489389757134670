//! The oracle's slots, and who uses which block in the current step.
//!
//! It knows blocks and steps, not what a sequence expects to find.

use std::num::NonZeroU32;

use super::super::end_position;
use super::{Inconsistency, block_of};
use crate::plan::{BatchPlan, BlockCopy, BlockId, Row};
use crate::request::{SequenceId, TokenId};

/// What is known of the keys and values in one slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slot {
    /// Nothing was ever put here, or only a copy's tail that does not matter.
    Unwritten,
    /// Something was to be written and must not be relied upon.
    Void {
        /// Why.
        cause: VoidCause,
        /// `BatchPlan::step` that was to write it.
        step: u64,
    },
    /// A key and a value.
    Written {
        /// Whose context they belong to.
        entry: Entry,
        /// Who wrote them, for messages alone: equal entries are equal whoever wrote them.
        writer: Writer,
    },
}

/// Why a slot is void.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VoidCause {
    /// The whole step failed.
    StepFailed,
    /// The row failed.
    RowFailed,
    /// The block was the target of a copy whose meaning depends on the order of copies.
    CopyUndefined,
}

/// The context of a key and a value: two slots with equal entries hold the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Hash of the tenant's salt.
    pub salt: u64,
    /// Position in the sequence.
    pub position: u32,
    /// The token there.
    pub token: TokenId,
    /// Hash of salt and tokens up to here.
    pub running: u64,
}

/// Who wrote a slot, and when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Writer {
    /// The sequence whose row or copy it was.
    pub sequence: SequenceId,
    /// `BatchPlan::step`.
    pub step: u64,
}

impl Writer {
    pub(super) fn of(plan: &BatchPlan, row: &Row) -> Self {
        Writer {
            sequence: row.sequence,
            step: plan.step,
        }
    }
}

/// All slots, block after block.
#[derive(Debug)]
pub(super) struct SlotPool {
    block_size: u32,
    slots: Vec<Slot>,
    uses: Vec<BlockUse>,
    /// Counts `begin`, so that uses of earlier steps need no clearing.
    stamp: u64,
}

/// How one block is used in the step of its stamp.
#[derive(Clone, Copy, Debug, Default)]
struct BlockUse {
    stamp: u64,
    /// Rows whose tables hold it.
    num_rows: u32,
    /// The last of them, from 1.
    last_row: u32,
    /// It stands twice in the table of one row.
    duplicate: bool,
    /// A row writes it.
    written: bool,
    /// A copy writes it.
    copy_target: bool,
    /// Leading slots that copies read.
    num_copied: u32,
}

impl SlotPool {
    pub(super) fn new(block_size: NonZeroU32, num_blocks: u32) -> Self {
        let num_slots = block_size.get() as usize * num_blocks as usize;
        SlotPool {
            block_size: block_size.get(),
            slots: vec![Slot::Unwritten; num_slots],
            uses: vec![BlockUse::default(); num_blocks as usize],
            stamp: 0,
        }
    }

    /// Notes which rows and copies use which blocks, then performs the copies.
    pub(super) fn begin(&mut self, plan: &BatchPlan) {
        self.stamp += 1;
        for (index, row) in plan.rows.iter().enumerate() {
            self.note_row(plan, index, row);
        }
        for copy in &plan.copies {
            self.copy(copy, plan.step);
        }
    }

    fn note_row(&mut self, plan: &BatchPlan, index: usize, row: &Row) {
        let number = index as u32 + 1;
        let blocks = plan.row_blocks(row);
        let first = (row.first_position / self.block_size) as usize;
        let end = end_position(row).div_ceil(self.block_size) as usize;
        for (at, block) in blocks.iter().enumerate() {
            let Some(used) = self.use_of(*block) else {
                continue;
            };
            used.duplicate |= used.last_row == number;
            used.num_rows += 1;
            used.last_row = number;
            used.written |= (first..end).contains(&at);
        }
    }

    /// The block's use in this step.
    fn use_of(&mut self, block: BlockId) -> Option<&mut BlockUse> {
        let used = self.uses.get_mut(block.0 as usize)?;
        if used.stamp != self.stamp {
            *used = BlockUse {
                stamp: self.stamp,
                ..BlockUse::default()
            };
        }
        Some(used)
    }

    /// Performs one copy; slots beyond those that matter are unwritten afterwards.
    ///
    /// A target that another copy reads or writes would make the result depend on the order of copies: it is void.
    fn copy(&mut self, copy: &BlockCopy, step: u64) {
        let size = self.block_size as usize;
        let num_tokens = (copy.num_tokens as usize).min(size);
        let (Some(from), Some(to)) = (self.first_slot(copy.from), self.first_slot(copy.to)) else {
            return;
        };
        let source_clashes = self.note_copy_source(copy);
        let target_clashes = self.note_copy_target(copy);
        if source_clashes || target_clashes {
            return self.void_block(copy.to, step, VoidCause::CopyUndefined);
        }
        self.slots.copy_within(from..from + num_tokens, to);
        self.slots[to + num_tokens..to + size].fill(Slot::Unwritten);
    }

    /// Was the source the target of an earlier copy?
    fn note_copy_source(&mut self, copy: &BlockCopy) -> bool {
        let Some(used) = self.use_of(copy.from) else {
            return true;
        };
        used.num_copied = used.num_copied.max(copy.num_tokens);
        used.copy_target
    }

    /// Is the target a source, or the target of an earlier copy?
    fn note_copy_target(&mut self, copy: &BlockCopy) -> bool {
        let Some(used) = self.use_of(copy.to) else {
            return true;
        };
        let clashes = used.copy_target || used.num_copied > 0;
        used.copy_target = true;
        clashes
    }

    /// Checks that the row's table is sound and that what is written stands in it alone.
    pub(super) fn check_table(&mut self, plan: &BatchPlan, row: &Row) -> Result<(), Inconsistency> {
        let sequence = row.sequence;
        for block in plan.row_blocks(row).iter().copied() {
            let used = self
                .use_of(block)
                .ok_or(Inconsistency::OutsidePool { sequence, block })?;
            if used.duplicate {
                return Err(Inconsistency::DuplicateBlock { sequence, block });
            }
            if used.num_rows > 1 && (used.written || used.copy_target) {
                return Err(Inconsistency::SharedWrite { sequence, block });
            }
        }
        for position in row.first_position..end_position(row) {
            self.check_write(plan, row, position)?;
        }
        Ok(())
    }

    fn check_write(
        &mut self,
        plan: &BatchPlan,
        row: &Row,
        position: u32,
    ) -> Result<(), Inconsistency> {
        let sequence = row.sequence;
        let offset = position % self.block_size;
        let block = block_of(plan, row, position, self.block_size)
            .ok_or(Inconsistency::NoBlock { sequence, position })?;
        match self.use_of(block) {
            Some(used) if offset < used.num_copied => Err(Inconsistency::SourceOverwritten {
                sequence,
                position,
                block,
            }),
            Some(_) => Ok(()),
            None => Err(Inconsistency::OutsidePool { sequence, block }),
        }
    }

    /// The slot that holds `position` of the row, and its block.
    pub(super) fn slot(
        &self,
        plan: &BatchPlan,
        row: &Row,
        position: u32,
    ) -> Result<(BlockId, Slot), Inconsistency> {
        let (block, index) = self.locate(plan, row, position)?;
        Ok((block, self.slots[index]))
    }

    /// The slot that holds `position` of the row.
    pub(super) fn slot_mut(
        &mut self,
        plan: &BatchPlan,
        row: &Row,
        position: u32,
    ) -> Result<&mut Slot, Inconsistency> {
        let (_, index) = self.locate(plan, row, position)?;
        Ok(&mut self.slots[index])
    }

    fn locate(
        &self,
        plan: &BatchPlan,
        row: &Row,
        position: u32,
    ) -> Result<(BlockId, usize), Inconsistency> {
        let sequence = row.sequence;
        let block = block_of(plan, row, position, self.block_size)
            .ok_or(Inconsistency::NoBlock { sequence, position })?;
        let first = self
            .first_slot(block)
            .ok_or(Inconsistency::OutsidePool { sequence, block })?;
        Ok((block, first + (position % self.block_size) as usize))
    }

    fn first_slot(&self, block: BlockId) -> Option<usize> {
        let first = block.0 as usize * self.block_size as usize;
        (first < self.slots.len()).then_some(first)
    }

    pub(super) fn block_size(&self) -> u32 {
        self.block_size
    }

    /// The slots of a block.
    pub(super) fn block(&self, block: BlockId) -> Option<&[Slot]> {
        let first = self.first_slot(block)?;
        self.slots.get(first..first + self.block_size as usize)
    }

    /// Overwrites the slots of a block.
    pub(super) fn fill_block(&mut self, block: BlockId, slots: &[Slot]) {
        let size = self.block_size as usize;
        if let Some(first) = self.first_slot(block) {
            self.slots[first..first + size].copy_from_slice(slots);
        }
    }

    /// Nothing in the block may be relied upon.
    pub(super) fn void_block(&mut self, block: BlockId, step: u64, cause: VoidCause) {
        let size = self.block_size as usize;
        if let Some(first) = self.first_slot(block) {
            self.slots[first..first + size].fill(Slot::Void { cause, step });
        }
    }
}
