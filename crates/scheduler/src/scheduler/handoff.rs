//! Hand-off between workers: what a prefill worker offers, and what another receives and where its blocks come from.
//!
//! It moves no keys or values and knows no other worker. What it is told about a transfer that it does not
//! know by this very ticket changes nothing (reliability lesson 7). After Splitwise (arXiv 2311.18677) and
//! DistServe (arXiv 2401.09670): the receiver reserves blocks first, then they are filled.

use super::Scheduler;
use super::refusal::ReceiveError;
use crate::plan::{BlockId, Event};
use crate::request::SequenceId;
use crate::sequence::{Reception, Residence, SequenceIndex, Status};
use crate::time::Timestamp;
use crate::transfer::{Arrival, OfferedBlocks, Source, Ticket, TransferOutcome};

impl Scheduler {
    /// Queues one choice that another worker began. What it accepts fits the pool alone, so it will end.
    ///
    /// When it is let in, `Event::Reserved` says which blocks are to come from its source; without a source
    /// it computes what the cache lacks. Of a request with several choices here, one leads and the others
    /// wait for its prompt, as with `add`.
    ///
    /// Times that it cannot have, such as an arrival later than `now`, are put right.
    pub fn receive(&mut self, begun: Arrival, now: Timestamp) -> Result<(), ReceiveError> {
        let max_len = self.receivable_len(&begun)?;
        let request = begun.request.id;
        self.roster.enter_begun(plausible(begun, now), max_len);
        self.roster.settle(request);
        Ok(())
    }

    /// The blocks of an offered sequence; `None` as soon as the offer has ended. Ask again before every
    /// read: what was read before the end is good, what is read after it may be anybody's.
    pub fn offered_blocks(&self, sequence: SequenceId) -> Option<OfferedBlocks<'_>> {
        let index = *self.roster.offered.get(&sequence)?;
        let home = self.roster.sequences[index].status.residence()?;
        let num_blocks = self.kv.blocks_for(home.num_computed) as usize;
        Some(OfferedBlocks {
            blocks: home.table.get(..num_blocks)?,
            num_tokens: home.num_computed,
        })
    }

    /// Nobody will fetch the blocks of `sequence` any more: they go back, and stay cached while there is
    /// room. False, and counted, if it is not offered (any more).
    pub fn release_offer(&mut self, sequence: SequenceId) -> bool {
        match self.roster.offered.get(&sequence) {
            Some(&index) => {
                self.withdraw(index);
                true
            }
            None => self.fence(),
        }
    }

    /// May bytes that came under `ticket` be written to its blocks now? Whoever writes must ask before every
    /// write: afterwards the blocks may be anybody's.
    pub fn is_receiving(&self, ticket: Ticket) -> bool {
        let Some(index) = self.roster.expecting(ticket) else {
            return false;
        };
        matches!(self.roster.sequences[index].status, Status::Receiving(_))
    }

    /// The transfer under `ticket` ended. Complete: its positions count as computed, full blocks are
    /// published, and the sequence decodes in the next step. Failed: it computes what it lacks; if it has
    /// not been let in yet, it forgets the source.
    ///
    /// False, and counted, if nobody here waits for it under this ticket.
    pub fn transfer_finished(&mut self, ticket: Ticket, outcome: TransferOutcome) -> bool {
        let Some(index) = self.roster.expecting(ticket) else {
            return self.fence();
        };
        let is_receiving = matches!(self.roster.sequences[index].status, Status::Receiving(_));
        match (is_receiving, outcome) {
            (true, outcome) => self.end_reception(index, outcome),
            (false, TransferOutcome::Failed) => self.roster.forget_source(index),
            // It has no blocks yet that could have been filled.
            (false, TransferOutcome::Complete) => return self.fence(),
        }
        true
    }

    /// The transfer is tried again under `ticket`; what comes under an earlier generation is late from now
    /// on. The lease stays as it is.
    ///
    /// False, and counted, if nobody here waits for an earlier generation of it.
    pub fn retry_transfer(&mut self, ticket: Ticket) -> bool {
        let Some(index) = self.roster.expecting_any(ticket.transfer) else {
            return self.fence();
        };
        let sequence = &mut self.roster.sequences[index];
        let source = match &mut sequence.status {
            Status::Receiving(reception) => Some(&mut reception.source),
            Status::Held | Status::Waiting => sequence.source.as_mut(),
            Status::Running(_) | Status::Offered(_) | Status::Leaving(_) => None,
        };
        match source {
            Some(source) if source.ticket.generation < ticket.generation => {
                source.ticket = ticket;
                true
            }
            Some(_) | None => self.fence(),
        }
    }

    /// A sequence of this prefill worker goes on after its first token: on another one.
    pub(super) fn offer(&mut self, index: SequenceIndex, now: Timestamp, events: &mut Vec<Event>) {
        let sequence = &self.roster.sequences[index];
        self.flight.ended.push(sequence.id);
        self.counters.num_offers += 1;
        events.push(Event::Prefilled {
            request: sequence.request.id,
            choice: sequence.choice,
            sequence: sequence.id,
            num_tokens: sequence.running().num_computed,
            progress: sequence.progress,
        });
        self.roster.offer(index, now + self.config.transfer_lease);
    }

    /// What a waiting sequence lacks beyond the start just found for it, if it can come from elsewhere.
    ///
    /// Then the start is whole blocks alone: a copy would write to a block that the transfer fills.
    pub(super) fn lacking(&mut self, index: SequenceIndex) -> Option<Source> {
        let source = self.roster.sequences[index].source?;
        let start = &mut self.scratch.start;
        if start.num_tokens(self.config.block_size) >= source.num_tokens {
            return None;
        }
        start.copy = None;
        Some(source)
    }

    /// A waiting sequence has blocks for all its tokens and waits until `source` has filled those it lacks.
    pub(super) fn reserve(
        &mut self,
        index: SequenceIndex,
        home: Residence,
        source: Source,
        now: Timestamp,
        events: &mut Vec<Event>,
    ) {
        let reception = Reception {
            home,
            source,
            lease_end: now + self.config.transfer_lease,
        };
        let blocks = self.coming(&reception);
        self.kv.begin_transfer(blocks);
        let sequence = &self.roster.sequences[index];
        events.push(Event::Reserved {
            request: sequence.request.id,
            choice: sequence.choice,
            ticket: source.ticket,
            first_block: reception.home.num_computed / self.config.block_size,
            blocks: blocks.to_vec(),
        });
        self.counters.num_reservations += 1;
        self.roster.reserve(index, reception, now);
    }

    /// A waiting sequence lacks nothing of what its source has, if it has one: says so.
    pub(super) fn spare_source(&self, index: SequenceIndex, events: &mut Vec<Event>) {
        let sequence = &self.roster.sequences[index];
        if let Some(source) = sequence.source {
            events.push(Event::Reserved {
                request: sequence.request.id,
                choice: sequence.choice,
                ticket: source.ticket,
                first_block: 0,
                blocks: Vec::new(),
            });
        }
    }

    /// The blocks of a reception that are in transfer.
    pub(super) fn coming<'a>(&self, reception: &'a Reception) -> &'a [BlockId] {
        let first = reception.home.num_computed / self.config.block_size;
        let end = self.kv.blocks_for(reception.source.num_tokens);
        &reception.home.table[first as usize..end as usize]
    }

    /// Somebody waited long enough for another worker.
    pub(super) fn end_lease(&mut self, index: SequenceIndex, events: &mut Vec<Event>) {
        self.counters.num_expired_leases += 1;
        let sequence = &self.roster.sequences[index];
        let (request, choice) = (sequence.request.id, sequence.choice);
        match sequence.ticket() {
            Some(ticket) => {
                events.push(Event::TransferExpired {
                    request,
                    choice,
                    ticket,
                });
                self.end_reception(index, TransferOutcome::Failed);
            }
            None => {
                events.push(Event::OfferExpired {
                    request,
                    choice,
                    sequence: sequence.id,
                });
                self.withdraw(index);
            }
        }
    }

    /// An offered sequence is gone from here.
    fn withdraw(&mut self, index: SequenceIndex) {
        if let Some(home) = self.roster.leave(index) {
            self.kv.release(&home.table);
        }
        self.roster.forget(index);
    }

    /// A receiving sequence runs, with what came or without.
    fn end_reception(&mut self, index: SequenceIndex, outcome: TransferOutcome) {
        if let Status::Receiving(reception) = &self.roster.sequences[index].status {
            self.kv.end_transfer(self.coming(reception));
        }
        self.roster.end_reception(index, |reception| {
            let mut home = reception.home;
            if outcome == TransferOutcome::Complete {
                home.num_computed = reception.source.num_tokens;
                home.num_scheduled = reception.source.num_tokens;
                home.prefill_end = reception.source.num_tokens;
            }
            home
        });
        self.publish(index);
        // Other choices may have waited for the prompt.
        let request = self.roster.sequences[index].request.id;
        self.roster.settle(request);
    }

    /// Something came too late, or was never asked for.
    fn fence(&mut self) -> bool {
        self.counters.num_fenced += 1;
        false
    }
}

/// The same with an order of times that its deadlines can rely on.
fn plausible(mut begun: Arrival, now: Timestamp) -> Arrival {
    let progress = &mut begun.progress;
    progress.arrival = progress.arrival.min(now);
    if !begun.output.is_empty() {
        let first_token = *progress.first_token.get_or_insert(now);
        progress.first_scheduled.get_or_insert(first_token);
    }
    begun
}
