//! The invariants I1 to I6, I8 and I10, checked by walking everything.
//!
//! Nothing is repaired here: a violation is a bug.

use super::Scheduler;
use crate::block_pool::BlockState;
use crate::kv_manager::Start;
use crate::plan::BlockId;
use crate::sequence::{Residence, Sequence, Status};

impl Scheduler {
    /// Checks invariants I1 to I6, I8 and I10 by walking everything; the error names the first violation.
    pub fn check_invariants(&self) -> Result<(), String> {
        self.kv.check()?;
        self.check_holders()?;
        self.roster.check()?;
        self.check_limits()?;
        for sequence in self.roster.sequences.iter() {
            self.check_progress(sequence)
                .map_err(|what| format!("{:?}: {what}", sequence.id))?;
        }
        Ok(())
    }

    /// I2: every block has as many holders as tables and copies name it.
    fn check_holders(&self) -> Result<(), String> {
        let mut num_holders = vec![0; self.config.num_blocks as usize];
        let tables = self.roster.sequences.iter().flat_map(Sequence::blocks);
        for block in tables.chain(self.kv.copy_sources()) {
            num_holders[block.0 as usize] += 1;
        }
        for (number, found) in num_holders.into_iter().enumerate() {
            let block = BlockId(number as u32);
            let counted = match self.kv.state(block) {
                BlockState::Free => 0,
                BlockState::Private { holders } | BlockState::Cached { holders } => holders,
                BlockState::InTransfer => 1,
            };
            if counted != found {
                return Err(format!("{block:?} counts {counted} holders, has {found}"));
            }
        }
        Ok(())
    }

    /// I6: the limits of the configuration. Preempted sequences may exceed `max_waiting`.
    fn check_limits(&self) -> Result<(), String> {
        let num_running = (self.roster.running.len() + self.roster.receiving.len()) as u64;
        let num_waiting = u64::from(self.roster.queue.len());
        let max_running = u64::from(self.config.max_sequences);
        let max_waiting = u64::from(self.config.max_waiting) + max_running;
        match num_running <= max_running && num_waiting <= max_waiting {
            true => Ok(()),
            false => Err(format!(
                "{num_running} running or receiving of {max_running}, {num_waiting} waiting of {max_waiting}"
            )),
        }
    }

    /// I3 and I5: counts that fit together, and a published part that is what the cache has.
    fn check_progress(&self, sequence: &Sequence) -> Result<(), String> {
        if sequence.num_tokens() > sequence.max_len {
            return Err(format!("{} tokens", sequence.num_tokens()));
        }
        let Some(home) = sequence.status.residence() else {
            return Ok(());
        };
        let num_slots = home.table.len() as u32 * self.config.block_size;
        let in_order = home.num_computed <= home.num_scheduled
            && home.num_scheduled <= sequence.num_tokens()
            && home.num_computed < sequence.num_tokens()
            && home.num_scheduled <= num_slots;
        if !in_order || home.is_in_flight() && self.flight.rows.is_empty() {
            return Err(format!(
                "{} computed, {} scheduled, {} tokens, {num_slots} slots",
                home.num_computed,
                home.num_scheduled,
                sequence.num_tokens()
            ));
        }
        self.check_published(sequence, home)
    }

    /// I3: exactly the full computed blocks are in the cache, at the place that their tokens lead to.
    fn check_published(&self, sequence: &Sequence, home: &Residence) -> Result<(), String> {
        let block_size = self.config.block_size;
        let num_full = match self.kv.publishes() {
            true => home.num_computed / block_size,
            false => 0,
        };
        let mut tokens = Vec::new();
        sequence.copy_tokens(0..num_full * block_size, &mut tokens);
        let mut start = Start::default();
        self.kv.find(&sequence.request.salt, &tokens, &mut start);
        let (published, private) = home.table.split_at(num_full as usize);
        let coming = match &sequence.status {
            Status::Receiving(reception) => self.coming(reception),
            Status::Held
            | Status::Waiting
            | Status::Running(_)
            | Status::Offered(_)
            | Status::Leaving(_) => &[],
        };
        let is_own = |block: &BlockId| match self.kv.state(*block) {
            BlockState::InTransfer => coming.contains(block),
            BlockState::Private { .. } => !coming.contains(block),
            BlockState::Free | BlockState::Cached { .. } => false,
        };
        let agrees = home.num_published == num_full
            && start.shared == published
            && private.iter().all(is_own);
        match agrees {
            true => Ok(()),
            false => Err(format!(
                "{num_full} full blocks, {} published, {} found in the cache",
                home.num_published,
                start.shared.len()
            )),
        }
    }
}
