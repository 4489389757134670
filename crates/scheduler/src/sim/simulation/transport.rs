//! Keys and values on their way between workers, and what becomes of them there.

use super::super::agenda::Happening;
use super::super::faults::Carriage;
use super::Simulation;
use crate::mock::BlockImage;
use crate::plan::BlockId;
use crate::time::{Span, Timestamp};
use crate::transfer::{Peer, Ticket, TransferOrder, TransferOutcome};

/// A transfer that comes late comes after everybody gave it up.
const LATENESS: Span = Span::from_secs(11);

/// A transfer under way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parcel {
    ticket: Ticket,
    to: Peer,
    blocks: Vec<BlockId>,
    image: BlockImage,
    sent: Timestamp,
    /// The receiver has no memory for it.
    is_refused: bool,
}

impl Simulation<'_> {
    /// Exports the blocks of `order` and puts them on the link.
    pub(super) fn send(&mut self, order: TransferOrder) {
        let now = self.now;
        self.ledger.transfers().started += 1;
        let Some(image) = self.export(&order) else {
            self.transfer_failed(order.ticket);
            return;
        };
        let carriage = self.fates.of_transfer(now);
        self.journal.note(
            now,
            format_args!(
                "send transfer={} try={} from={} to={} blocks={} {carriage:?}",
                order.ticket.transfer.0,
                order.ticket.generation,
                order.from.worker.0,
                order.to.worker.0,
                order.blocks.len()
            ),
        );
        let num_tokens = order.blocks.len() as u64 * self.block_size(order.from);
        let speed = self.config.link;
        let Some(station) = self.station(order.from) else {
            return;
        };
        let at = station.link.send(&speed, num_tokens, now);
        let mut parcel = Parcel {
            ticket: order.ticket,
            to: order.to,
            blocks: order.blocks,
            image,
            sent: now,
            is_refused: carriage == Carriage::Refused,
        };
        if carriage != Carriage::Whole {
            self.ledger.count_fault();
        }
        let later = at + Span(self.chance.below(LATENESS.0));
        match carriage {
            Carriage::Whole | Carriage::Refused => self.agenda.add(at, Happening::Landed(parcel)),
            Carriage::Lost => {}
            Carriage::Late => self.agenda.add(later + LATENESS, Happening::Landed(parcel)),
            Carriage::Twice => {
                self.agenda.add(at, Happening::Landed(parcel.clone()));
                self.agenda.add(later, Happening::Landed(parcel));
            }
            Carriage::Corrupt => {
                parcel.image.flip_bit(self.chance.bits());
                self.agenda.add(at, Happening::Landed(parcel));
            }
        }
    }

    /// A transfer is there: written if it is still wanted and whole.
    pub(super) fn land(&mut self, parcel: Parcel) {
        let now = self.now;
        let Some(station) = self.station(parcel.to) else {
            return;
        };
        if !station.worker.scheduler.is_receiving(parcel.ticket) {
            self.note_landing(&parcel, "late");
            return;
        }
        let imported = station
            .worker
            .runner
            .import_blocks(&parcel.blocks, &parcel.image);
        if parcel.is_refused || imported.is_err() {
            self.note_landing(&parcel, "damaged");
            self.transfer_failed(parcel.ticket);
            return;
        }
        self.note_landing(&parcel, "whole");
        let transfers = self.ledger.transfers();
        transfers.completed += 1;
        transfers.num_blocks += parcel.blocks.len() as u64;
        transfers.time.0 += (now - parcel.sent).0;
        let outcome = TransferOutcome::Complete;
        self.coordinator
            .transfer_finished(parcel.ticket, outcome, now, &mut self.commands);
    }

    fn note_landing(&mut self, parcel: &Parcel, how: &str) {
        let Ticket {
            transfer,
            generation,
        } = parcel.ticket;
        self.journal.note(
            self.now,
            format_args!("landed transfer={} try={generation} {how}", transfer.0),
        );
    }

    fn transfer_failed(&mut self, ticket: Ticket) {
        self.ledger.transfers().failed += 1;
        let outcome = TransferOutcome::Failed;
        self.coordinator
            .transfer_finished(ticket, outcome, self.now, &mut self.commands);
    }

    /// What the source holds for the blocks of `order`, if it still offers them.
    fn export(&mut self, order: &TransferOrder) -> Option<BlockImage> {
        let worker = &self.station(order.from)?.worker;
        let offered = worker.scheduler.offered_blocks(order.sequence)?;
        let first = order.first_block as usize;
        let blocks = offered.blocks.get(first..first + order.blocks.len())?;
        worker.runner.export_blocks(blocks).ok()
    }

    fn block_size(&self, peer: Peer) -> u64 {
        let station = self.stations.get(peer.worker.0 as usize);
        let config = station.map(|station| station.worker.scheduler.config());
        config.map_or(1, |config| u64::from(config.block_size))
    }
}
