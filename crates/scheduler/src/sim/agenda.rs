//! What is still to happen, in order of time and, at one time, in the order it was put down.

use std::collections::BTreeMap;

use crate::request::RequestId;
use crate::time::Timestamp;
use crate::transfer::{Peer, WorkerId};

/// Something that happens at a point in time. A `Peer` is one life of a worker: what is meant for an earlier
/// one is void.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Happening<P> {
    /// A session sends its next request.
    Arrive {
        /// Which session.
        session: u32,
        /// Which of its turns.
        turn: u32,
    },
    /// A step has taken its time.
    StepDone(Peer),
    /// A deadline of a worker's scheduler is due.
    Alarm(Peer),
    /// A worker dies.
    Crash(Peer),
    /// It is noticed that a worker is not there.
    Missed(WorkerId),
    /// A worker is there again, empty.
    Back(WorkerId),
    /// A client goes away.
    Gone(RequestId),
    /// A transfer arrives.
    Landed(P),
    /// A deadline of the coordinator is due.
    CoordinatorAlarm,
}

/// The list.
#[derive(Clone, Debug)]
pub struct Agenda<P> {
    entries: BTreeMap<(Timestamp, u64), Happening<P>>,
    num_made: u64,
}

impl<P> Default for Agenda<P> {
    fn default() -> Self {
        Agenda {
            entries: BTreeMap::new(),
            num_made: 0,
        }
    }
}

impl<P> Agenda<P> {
    /// Puts something down.
    pub fn add(&mut self, at: Timestamp, happening: Happening<P>) {
        self.entries.insert((at, self.num_made), happening);
        self.num_made += 1;
    }

    /// Takes what happens next.
    pub fn pop(&mut self) -> Option<(Timestamp, Happening<P>)> {
        let ((at, _), happening) = self.entries.pop_first()?;
        Some((at, happening))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn things_happen_in_order_of_time_then_of_entry() {
        let mut agenda = Agenda::<()>::default();
        agenda.add(Timestamp(5), Happening::Back(WorkerId(0)));
        agenda.add(Timestamp(3), Happening::Back(WorkerId(1)));
        agenda.add(Timestamp(5), Happening::Back(WorkerId(2)));
        let mut next = || match agenda.pop() {
            Some((at, Happening::Back(worker))) => (at.0, worker.0),
            other => panic!("{other:?}"),
        };
        assert_eq!([next(), next(), next()], [(3, 1), (5, 0), (5, 2)]);
        assert_eq!(agenda.pop(), None);
    }
}
