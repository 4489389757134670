//! Who waits, and who comes next: priority, then those sent back before fresh ones, then arrival, then id.
//!
//! It admits nobody. Choices that wait for a sibling's prompt are counted here but cannot come next.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use crate::request::SequenceId;
use crate::sequence::{Sequence, SequenceIndex, Standing};
use crate::time::Timestamp;

/// Orders the queue. Derived from a sequence, and constant while it waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Turn {
    priority: Reverse<i32>,
    entry: Entry,
    standing: Standing,
}

/// A preempted sequence has waited before and lost work: it goes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Entry {
    Returning,
    Fresh,
}

impl Turn {
    fn of(sequence: &Sequence) -> Self {
        let standing = sequence.standing();
        Turn {
            priority: Reverse(standing.priority()),
            entry: match sequence.progress.num_preemptions {
                0 => Entry::Fresh,
                _ => Entry::Returning,
            },
            standing,
        }
    }
}

/// The sequences that hold no block.
#[derive(Default)]
pub struct WaitingQueue {
    ready: BTreeMap<Turn, SequenceIndex>,
    /// Ready and held ones, oldest first.
    all: BTreeSet<(Timestamp, SequenceId)>,
}

impl WaitingQueue {
    /// `sequence` waits and may come next when its turn has come.
    pub fn push(&mut self, index: SequenceIndex, sequence: &Sequence) {
        self.ready.insert(Turn::of(sequence), index);
        self.hold(sequence);
    }

    /// `sequence` waits and cannot come next until it is pushed.
    pub fn hold(&mut self, sequence: &Sequence) {
        let standing = sequence.standing();
        self.all.insert((standing.arrival(), standing.id()));
    }

    /// `sequence` waits no longer. Call it before anything that its turn depends on changes.
    pub fn remove(&mut self, sequence: &Sequence) {
        let turn = Turn::of(sequence);
        self.ready.remove(&turn);
        self.all
            .remove(&(turn.standing.arrival(), turn.standing.id()));
    }

    /// Whose turn it is.
    pub fn first(&self) -> Option<SequenceIndex> {
        self.ready.values().next().copied()
    }

    /// Sequences waiting, held ones included.
    pub fn len(&self) -> u32 {
        self.all.len() as u32
    }

    /// Nobody waits.
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Sequences that may come next.
    pub fn num_ready(&self) -> u32 {
        self.ready.len() as u32
    }

    /// Arrival of the sequence that waits longest.
    pub fn oldest_arrival(&self) -> Option<Timestamp> {
        self.all.first().map(|(arrival, _)| *arrival)
    }

    /// The place of `sequence`, if it may come next.
    pub fn position_of(&self, sequence: &Sequence) -> Option<SequenceIndex> {
        self.ready.get(&Turn::of(sequence)).copied()
    }
}
