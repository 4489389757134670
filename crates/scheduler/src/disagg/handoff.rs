//! From the first token to the next worker: offers, tries, and what happens when a try fails.
//!
//! A hand-off that fails is never an error of the request: the receiver has the tokens and computes what it lacks.

use std::sync::Arc;

use super::choice::{Choice, ChoiceId, Handoff, Offer, Phase, Try};
use super::{Arrival, Command, Coordinator, Refusal};
use crate::plan::{BlockId, Summary};
use crate::request::{FinishReason, RequestId, RowError, SequenceId, TokenId};
use crate::sequence::Progress;
use crate::time::{Span, Timestamp};
use crate::transfer::{Peer, Source, Ticket, TransferId, TransferOrder, TransferOutcome};

impl Coordinator {
    /// The copying that `Command::StartTransfer` asked for ended. Late words about earlier tries are ignored.
    pub fn transfer_finished(
        &mut self,
        ticket: Ticket,
        outcome: TransferOutcome,
        now: Timestamp,
        commands: &mut Vec<Command>,
    ) {
        let Some((id, handoff)) = self.handoff(ticket.transfer) else {
            self.counters.num_fenced += 1;
            return;
        };
        let is_transferring = matches!(handoff.progress, Try::Transferring { .. });
        if handoff.offer.ticket != ticket || !is_transferring {
            self.counters.num_fenced += 1;
            return;
        }
        match outcome {
            TransferOutcome::Complete => {
                self.counters.num_transfers += 1;
                self.settle(id, &handoff, outcome, commands);
            }
            TransferOutcome::Failed => self.try_failed(id, now, commands),
        }
    }

    /// A worker did not take what `Command::Add` or `Command::Receive` sent, one choice at a time.
    pub fn refused(
        &mut self,
        by: Peer,
        request: RequestId,
        choice: u32,
        refusal: Refusal,
        now: Timestamp,
        commands: &mut Vec<Command>,
    ) {
        let id = ChoiceId::of(request, choice);
        let computing = self.phase(id).and_then(Phase::computing);
        if !self.is_heard(by) || computing != Some(by) {
            self.counters.num_fenced += 1;
            return;
        }
        match refusal {
            Refusal::Busy => self.park(id, self.offer(id), now),
            Refusal::Never(why) => {
                let reason = FinishReason::Error(RowError::Abandoned(why));
                self.end(id, reason, now, commands);
            }
        }
    }

    /// New tokens of a choice.
    pub(super) fn accept(
        &mut self,
        id: ChoiceId,
        from: Peer,
        tokens: &[TokenId],
        now: Timestamp,
        commands: &mut Vec<Command>,
    ) {
        let choice = self.choice_mut(id);
        let Some(choice) = choice.filter(|c| c.phase.computing() == Some(from)) else {
            return;
        };
        if tokens.is_empty() {
            return;
        }
        choice.output.extend_from_slice(tokens);
        let first_token = *choice.progress.first_token.get_or_insert(now);
        choice.progress.first_scheduled.get_or_insert(first_token);
        commands.push(Command::Deliver {
            request: id.request,
            choice: id.choice,
            tokens: tokens.to_vec(),
        });
    }

    pub(super) fn new_offer(&mut self, on: Peer, sequence: SequenceId, num_tokens: u32) -> Offer {
        self.num_transfers += 1;
        Offer {
            on,
            sequence,
            num_tokens,
            ticket: Ticket {
                transfer: TransferId(self.num_transfers),
                generation: 1,
            },
        }
    }

    /// A prefill worker has done its part.
    pub(super) fn prefilled(
        &mut self,
        id: ChoiceId,
        offer: Offer,
        progress: Progress,
        now: Timestamp,
        commands: &mut Vec<Command>,
    ) {
        let choice = self.choice_mut(id);
        let is_running =
            |phase: &Phase| matches!(phase, Phase::Running { on, .. } if *on == offer.on);
        match choice.filter(|choice| is_running(&choice.phase)) {
            Some(choice) => {
                choice.progress = progress;
                self.counters.num_handoffs += 1;
                self.place(id, Some(offer), now, commands);
            }
            // It was aborted meanwhile.
            None => self.release(offer, commands),
        }
    }

    /// Gives a choice to a worker, which fetches what it lacks from `offer`, or parks it.
    pub(super) fn place(
        &mut self,
        id: ChoiceId,
        offer: Option<Offer>,
        now: Timestamp,
        commands: &mut Vec<Command>,
    ) {
        let offer = self.worth_trying(offer, commands);
        let Some(live) = self.requests.get(&id.request) else {
            return;
        };
        let Some(choice) = live.choices.get(id.choice as usize) else {
            return;
        };
        let (request, stage) = (Arc::clone(&live.request), choice.stage());
        let has_output = |choice: &Choice| !choice.output.is_empty();
        let num_reported = match live.choices.iter().any(has_output) {
            true => request.prompt.len() as u32 - 1,
            false => 0,
        };
        let arrival = Arrival {
            choice: id.choice,
            output: choice.output.clone(),
            source: offer.map(|offer| Source {
                ticket: offer.ticket,
                num_tokens: offer.num_tokens,
            }),
            num_reported,
            progress: choice.progress,
            request: Arc::clone(&request),
        };
        let Some(to) = self.choose_worker(&request, stage) else {
            return self.park(id, offer, now);
        };
        let charge = (request.prompt.len() + arrival.output.len()) as u64;
        let phase = match offer {
            Some(offer) => Phase::Moving(Handoff {
                offer,
                to,
                charge,
                progress: Try::Queued,
            }),
            None => Phase::Running { on: to, charge },
        };
        self.set_phase(id, phase);
        commands.push(Command::Receive { to, arrival });
    }

    /// Nobody can take the choice now: it is tried again a little later.
    pub(super) fn park(&mut self, id: ChoiceId, offer: Option<Offer>, now: Timestamp) {
        // Never at once: whoever calls `expire` would not come back.
        let retry_at = now + Span(self.config.retry_delay.0.max(1));
        self.set_phase(id, Phase::Parked { offer, retry_at });
    }

    /// A little later has come.
    pub(super) fn retry_parked(
        &mut self,
        id: ChoiceId,
        now: Timestamp,
        commands: &mut Vec<Command>,
    ) {
        self.place(id, self.offer(id), now, commands);
    }

    /// The receiver has blocks: copying begins, if there is anything to copy.
    pub(super) fn reserved(
        &mut self,
        by: Peer,
        ticket: Ticket,
        first_block: u32,
        blocks: &[BlockId],
        now: Timestamp,
        commands: &mut Vec<Command>,
    ) {
        let found = self.handoff(ticket.transfer);
        let Some((id, mut handoff)) = found.filter(|(_, h)| h.to == by && h.offer.ticket == ticket)
        else {
            self.counters.num_fenced += 1;
            return;
        };
        if blocks.is_empty() {
            self.counters.num_spared += 1;
            self.release(handoff.offer, commands);
            return self.run(id, &handoff);
        }
        handoff.progress = Try::Transferring {
            until: now + self.config.try_timeout,
            first_block,
            blocks: blocks.to_vec(),
        };
        self.begin_try(id, handoff, commands);
    }

    fn begin_try(&mut self, id: ChoiceId, handoff: Handoff, commands: &mut Vec<Command>) {
        if let Try::Transferring {
            first_block,
            blocks,
            ..
        } = &handoff.progress
        {
            self.counters.num_tries += 1;
            commands.push(Command::StartTransfer(TransferOrder {
                ticket: handoff.offer.ticket,
                from: handoff.offer.on,
                sequence: handoff.offer.sequence,
                first_block: *first_block,
                to: handoff.to,
                blocks: blocks.clone(),
            }));
        }
        self.set_phase(id, Phase::Moving(handoff));
    }

    /// A try failed or took too long: another one, or none.
    pub(super) fn try_failed(&mut self, id: ChoiceId, now: Timestamp, commands: &mut Vec<Command>) {
        let Some(Phase::Moving(handoff)) = self.phase(id) else {
            return;
        };
        let mut handoff = handoff.clone();
        if handoff.offer.ticket.generation >= self.config.max_tries {
            return self.settle(id, &handoff, TransferOutcome::Failed, commands);
        }
        handoff.offer = next_try(handoff.offer);
        if let Try::Transferring { until, .. } = &mut handoff.progress {
            *until = now + self.config.try_timeout;
        }
        commands.push(Command::RetryTransfer {
            to: handoff.to,
            ticket: handoff.offer.ticket,
        });
        self.begin_try(id, handoff, commands);
    }

    /// The blocks of an offer are gone.
    pub(super) fn lose_source(&mut self, id: ChoiceId, commands: &mut Vec<Command>) {
        match self.phase(id) {
            Some(Phase::Moving(handoff)) => {
                let handoff = handoff.clone();
                self.counters.num_recomputed += 1;
                commands.push(Command::FinishTransfer {
                    to: handoff.to,
                    ticket: handoff.offer.ticket,
                    outcome: TransferOutcome::Failed,
                });
                self.run(id, &handoff);
            }
            Some(Phase::Parked { retry_at, .. }) => {
                let retry_at = *retry_at;
                let offer = None;
                self.set_phase(id, Phase::Parked { offer, retry_at });
            }
            Some(Phase::New | Phase::Running { .. } | Phase::Ended) | None => {}
        }
    }

    /// The receiver did not want to wait any longer.
    pub(super) fn transfer_expired(
        &mut self,
        by: Peer,
        transfer: TransferId,
        commands: &mut Vec<Command>,
    ) {
        let found = self.handoff(transfer).filter(|(_, h)| h.to == by);
        if let Some((id, handoff)) = found {
            self.counters.num_recomputed += 1;
            self.release(handoff.offer, commands);
            self.run(id, &handoff);
        }
    }

    /// A worker reported an end: of the choice if it computes it, of its offer if it only holds that.
    pub(super) fn finished(
        &mut self,
        id: ChoiceId,
        from: Peer,
        reason: FinishReason,
        summary: Summary,
        commands: &mut Vec<Command>,
    ) {
        let Some(phase) = self.phase(id) else {
            return;
        };
        let offer = phase.offer();
        if phase.computing() == Some(from) {
            if let Some(offer) = offer {
                self.release(offer, commands);
            }
            self.close_with(id, reason, summary, commands);
        } else if offer.is_some_and(|offer| offer.on == from) {
            self.lose_source(id, commands);
        }
    }

    pub(super) fn release(&self, offer: Offer, commands: &mut Vec<Command>) {
        commands.push(Command::ReleaseOffer {
            to: offer.on,
            sequence: offer.sequence,
        });
    }

    /// The hand-off of a transfer, if it is under way.
    fn handoff(&self, transfer: TransferId) -> Option<(ChoiceId, Handoff)> {
        let id = *self.offers.get(&transfer)?;
        match self.phase(id)? {
            Phase::Moving(handoff) => Some((id, handoff.clone())),
            Phase::New | Phase::Running { .. } | Phase::Parked { .. } | Phase::Ended => None,
        }
    }

    /// The last try ended; both sides are told.
    fn settle(
        &mut self,
        id: ChoiceId,
        handoff: &Handoff,
        outcome: TransferOutcome,
        commands: &mut Vec<Command>,
    ) {
        if outcome == TransferOutcome::Failed {
            self.counters.num_recomputed += 1;
        }
        commands.push(Command::FinishTransfer {
            to: handoff.to,
            ticket: handoff.offer.ticket,
            outcome,
        });
        self.release(handoff.offer, commands);
        self.run(id, handoff);
    }

    /// The choice is the receiver's alone.
    fn run(&mut self, id: ChoiceId, handoff: &Handoff) {
        let phase = Phase::Running {
            on: handoff.to,
            charge: handoff.charge,
        };
        self.set_phase(id, phase);
    }

    /// The offer, unless it has been tried often enough: then it is released.
    fn worth_trying(&mut self, offer: Option<Offer>, commands: &mut Vec<Command>) -> Option<Offer> {
        let offer = offer?;
        if offer.ticket.generation <= self.config.max_tries {
            return Some(offer);
        }
        self.counters.num_recomputed += 1;
        self.release(offer, commands);
        None
    }
}

/// The offer with the ticket of the next try.
pub(super) fn next_try(offer: Offer) -> Offer {
    Offer {
        ticket: offer.ticket.next(),
        ..offer
    }
}
