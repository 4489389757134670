//! Which pieces of which transfers have come to a worker.
//!
//! It sees no bytes. Ask `Scheduler::is_receiving` before it is told of a piece, so that it only knows
//! transfers that the scheduler knows.

use std::collections::{BTreeMap, BTreeSet};

use crate::transfer::{Ticket, TransferId};

/// The transfers under way to one worker.
#[derive(Debug, Default)]
pub struct Inbox {
    transfers: BTreeMap<TransferId, Partial>,
}

#[derive(Debug)]
struct Partial {
    ticket: Ticket,
    num_pieces: u32,
    seen: BTreeSet<u32>,
}

/// What a piece means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Noted {
    /// Others are still to come.
    Partial,
    /// It was the last one; the transfer is forgotten here.
    Complete,
    /// It came before.
    Again,
    /// Its numbers cannot be.
    Nonsense,
}

impl Inbox {
    /// Piece `number` of `num_pieces` was imported. A new generation begins anew.
    pub fn note(&mut self, ticket: Ticket, number: u32, num_pieces: u32) -> Noted {
        if number >= num_pieces {
            return Noted::Nonsense;
        }
        let fresh = || Partial {
            ticket,
            num_pieces,
            seen: BTreeSet::new(),
        };
        let partial = self.transfers.entry(ticket.transfer).or_insert_with(fresh);
        if partial.ticket != ticket {
            *partial = fresh();
        }
        if partial.num_pieces != num_pieces {
            return Noted::Nonsense;
        }
        if !partial.seen.insert(number) {
            return Noted::Again;
        }
        if partial.seen.len() < num_pieces as usize {
            return Noted::Partial;
        }
        self.transfers.remove(&ticket.transfer);
        Noted::Complete
    }

    /// Forgets the transfers that nobody receives any more.
    pub fn sweep(&mut self, is_receiving: impl Fn(Ticket) -> bool) {
        self.transfers
            .retain(|_, partial| is_receiving(partial.ticket));
    }

    /// Transfers under way.
    pub fn len(&self) -> usize {
        self.transfers.len()
    }

    /// Nothing is under way.
    pub fn is_empty(&self) -> bool {
        self.transfers.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transfer_is_complete_with_its_last_piece_in_any_order() {
        let mut inbox = Inbox::default();
        let ticket = Ticket {
            transfer: TransferId(4),
            generation: 1,
        };
        assert_eq!(inbox.note(ticket, 2, 3), Noted::Partial);
        assert_eq!(inbox.note(ticket, 2, 3), Noted::Again);
        assert_eq!(inbox.note(ticket, 3, 3), Noted::Nonsense);
        assert_eq!(inbox.note(ticket, 0, 2), Noted::Nonsense);
        assert_eq!(inbox.note(ticket, 0, 3), Noted::Partial);
        let second = ticket.next();
        assert_eq!(inbox.note(second, 1, 2), Noted::Partial);
        assert_eq!(inbox.note(second, 0, 2), Noted::Complete);
        assert!(inbox.is_empty());
        inbox.note(ticket, 0, 2);
        assert_eq!(inbox.len(), 1);
        inbox.sweep(|known| known != ticket);
        assert!(inbox.is_empty());
    }
}
