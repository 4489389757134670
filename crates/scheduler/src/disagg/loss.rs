//! Workers that are lost and come back.
//!
//! Who decides that a worker is lost (missed beats, a broken connection) is outside; a worker that lives on
//! all the same is not heard any more, and its offers end with their leases.

use super::choice::{ChoiceId, Phase};
use super::handoff::next_try;
use super::{Command, Coordinator};
use crate::request::{FinishReason, RowError};
use crate::time::Timestamp;
use crate::transfer::{Peer, WorkerId};

impl Coordinator {
    /// `worker` is gone with all it had. What it computed goes on elsewhere, from the tokens accepted so far.
    pub fn worker_lost(&mut self, worker: WorkerId, now: Timestamp, commands: &mut Vec<Command>) {
        let Some(lost) = self.workers.get_mut(&worker).filter(|w| w.is_alive) else {
            return;
        };
        lost.is_alive = false;
        self.placement.forget(worker);
        for id in self.ids_on(worker) {
            self.move_on(id, worker, now, commands);
        }
    }

    /// `worker` is back, empty. Returns its new life; whatever an earlier one still says is not heard.
    ///
    /// `None` if there is no such worker. One that was not lost is lost now.
    pub fn worker_back(
        &mut self,
        worker: WorkerId,
        now: Timestamp,
        commands: &mut Vec<Command>,
    ) -> Option<Peer> {
        self.worker_lost(worker, now, commands);
        let back = self.workers.get_mut(&worker)?;
        back.epoch += 1;
        back.is_alive = true;
        for id in self.parked() {
            self.retry_parked(id, now, commands);
        }
        self.peer(worker)
    }

    /// Choices of which `worker` has something.
    fn ids_on(&self, worker: WorkerId) -> Vec<ChoiceId> {
        let is_on = |phase: &Phase| {
            let offer = phase.offer().map(|offer| offer.on);
            let mut peers = phase.computing().into_iter().chain(offer);
            peers.any(|peer| peer.worker == worker)
        };
        self.ids_where(is_on)
    }

    fn parked(&self) -> Vec<ChoiceId> {
        self.ids_where(|phase| matches!(phase, Phase::Parked { .. }))
    }

    fn ids_where(&self, is_wanted: impl Fn(&Phase) -> bool) -> Vec<ChoiceId> {
        let mut ids = Vec::new();
        for (request, live) in &self.requests {
            let phases = live.choices.iter().map(|choice| &choice.phase);
            let wanted = (0..).zip(phases).filter(|(_, phase)| is_wanted(phase));
            ids.extend(wanted.map(|(choice, _)| ChoiceId::of(*request, choice)));
        }
        ids
    }

    /// A choice lost `worker`: the one that computes it, the one that is to receive it, or its source.
    fn move_on(
        &mut self,
        id: ChoiceId,
        worker: WorkerId,
        now: Timestamp,
        commands: &mut Vec<Command>,
    ) {
        let Some(phase) = self.phase(id) else {
            return;
        };
        if phase.computing().is_none_or(|peer| peer.worker != worker) {
            return self.lose_source(id, commands);
        }
        let offer = phase.offer();
        if self.may_migrate(id) {
            self.place(id, offer.map(next_try), now, commands);
        } else {
            let why = "too many workers were lost while they had it".to_owned();
            let reason = FinishReason::Error(RowError::Abandoned(why));
            self.end(id, reason, now, commands);
        }
    }

    /// Counts the loss of a worker.
    fn may_migrate(&mut self, id: ChoiceId) -> bool {
        let max_migrations = self.config.max_migrations;
        let Some(choice) = self.choice_mut(id) else {
            return false;
        };
        if choice.num_migrations >= max_migrations {
            return false;
        }
        choice.num_migrations += 1;
        self.counters.num_migrations += 1;
        true
    }
}
