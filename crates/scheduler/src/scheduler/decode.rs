//! The rows of decoding sequences: every one of them runs in every step, whatever else waits.

use super::Scheduler;
use crate::plan::BatchPlan;
use crate::sequence::SequenceIndex;

impl Scheduler {
    /// A row for each decoding sequence, by standing. Where blocks run out the last by standing is
    /// preempted, which is never one that has a row already. Returns how many were.
    pub(super) fn plan_decodes(&mut self, budget: &mut u32, plan: &mut BatchPlan) -> u32 {
        let mut num_preempted = 0;
        let mut position = 0;
        while let Some(&index) = self.roster.running.get(position) {
            position += 1;
            let sequence = &self.roster.sequences[index];
            if !sequence.running().is_decoding() {
                continue;
            }
            let num_uncomputed = sequence.num_tokens() - sequence.running().num_computed;
            num_preempted += self.make_room(index);
            if self.roster.running.len() < position {
                break;
            }
            // More than one token only after forced ones; each later sequence keeps one of the budget.
            let num_later = (self.roster.running.len() - position) as u32;
            let num_tokens = num_uncomputed.min(*budget - num_later);
            *budget -= num_tokens;
            self.push_row(index, num_tokens, plan);
        }
        num_preempted
    }

    /// Extends the table of `index` to all its tokens, preempting from the end of the running list, in the
    /// last resort `index` itself. Returns how many were preempted.
    fn make_room(&mut self, index: SequenceIndex) -> u32 {
        let mut num_preempted = 0;
        loop {
            let sequence = &mut self.roster.sequences[index];
            let num_blocks = self.kv.blocks_for(sequence.num_tokens());
            let table = &mut sequence.status.running_mut().table;
            if self.kv.extend(table, num_blocks) {
                return num_preempted;
            }
            num_preempted += 1;
            if self.preempt_last() == Some(index) {
                return num_preempted;
            }
        }
    }
}
