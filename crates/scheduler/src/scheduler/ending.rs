//! How a sequence ends, whatever the reason: one event, no trace left but what the cache keeps.

use super::Scheduler;
use crate::plan::Event;
use crate::request::{FinishReason, RowError};
use crate::sequence::{SequenceIndex, Status};
use crate::time::Timestamp;

impl Scheduler {
    /// Ends a live sequence. If its row is in flight, its blocks stay until the step is committed.
    pub(super) fn end(
        &mut self,
        index: SequenceIndex,
        reason: FinishReason,
        now: Timestamp,
        events: &mut Vec<Event>,
    ) {
        let home = self.roster.leave(index);
        let sequence = &mut self.roster.sequences[index];
        events.push(Event::Finished {
            request: sequence.request.id,
            choice: sequence.choice,
            reason,
            summary: sequence.summary(now),
        });
        self.counters.num_finished += 1;
        let Some(home) = home else {
            return self.roster.forget(index);
        };
        if home.is_started {
            self.flight.ended.push(sequence.id);
        }
        if home.is_in_flight() {
            sequence.status = Status::Leaving(home.table);
        } else {
            self.kv.release(&home.table);
            self.roster.forget(index);
        }
    }

    /// A row failed: what it was to write is void, and its sequence ends.
    pub(super) fn fail_row(
        &mut self,
        index: SequenceIndex,
        error: RowError,
        now: Timestamp,
        events: &mut Vec<Event>,
    ) {
        let home = self.roster.sequences[index].status.running_mut();
        home.num_scheduled = home.num_computed;
        self.end(index, FinishReason::Error(error), now, events);
    }

    /// Did the sequence end while its row was in flight? Then its blocks go back now.
    pub(super) fn has_left(&mut self, index: SequenceIndex) -> bool {
        match &self.roster.sequences[index].status {
            Status::Leaving(table) => self.kv.release(table),
            Status::Held
            | Status::Waiting
            | Status::Receiving(_)
            | Status::Running(_)
            | Status::Offered(_) => return false,
        }
        self.roster.forget(index);
        true
    }
}
