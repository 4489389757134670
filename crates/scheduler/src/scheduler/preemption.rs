//! Preemption by recompute: the last by standing gives its blocks back and returns to the queue.
//!
//! Its output stays, and its published blocks stay cached as long as nobody needs them, so that
//! recomputing is mostly a hit.

use super::Scheduler;
use crate::sequence::SequenceIndex;

impl Scheduler {
    /// Preempts the last by standing, if anything runs.
    pub(super) fn preempt_last(&mut self) -> Option<SequenceIndex> {
        let (index, home) = self.roster.preempt_last()?;
        assert!(
            !home.is_in_flight(),
            "a sequence that has a row in the plan is not preempted"
        );
        self.kv.release(&home.table);
        if home.is_started {
            self.flight.ended.push(self.roster.sequences[index].id);
        }
        self.counters.num_preemptions += 1;
        Some(index)
    }
}
