//! What a runner remembers per sequence, found by id without hashing.
//!
//! It holds no more than the plans' `started` and `ended` say.

use crate::plan::{BatchPlan, StartedSequence};
use crate::request::SequenceId;

/// Values in the order of their sequences' ids.
///
/// Ids are minted in order, so inserting is nearly always a push; rows mostly come in order, so the value after
/// the last one found is the first guess.
#[derive(Debug)]
pub(super) struct SequenceTable<T> {
    ids: Vec<SequenceId>,
    values: Vec<T>,
    guess: usize,
}

impl<T> Default for SequenceTable<T> {
    fn default() -> Self {
        SequenceTable {
            ids: Vec::new(),
            values: Vec::new(),
            guess: 0,
        }
    }
}

impl<T> SequenceTable<T> {
    /// Forgets the plan's `ended`, then adds its `started`; one that is already there is replaced.
    pub(super) fn update(&mut self, plan: &BatchPlan, new: impl Fn(&StartedSequence) -> T) {
        self.forget(&plan.ended);
        for started in &plan.started {
            self.insert(started.id, new(started));
        }
    }

    /// Removes the sequences; unknown ones are ignored, for they may have ended before they ever ran.
    pub(super) fn forget(&mut self, ended: &[SequenceId]) {
        for id in ended {
            if let Ok(index) = self.ids.binary_search(id) {
                self.ids.remove(index);
                self.values.remove(index);
            }
        }
    }

    /// Adds or replaces a sequence.
    pub(super) fn insert(&mut self, id: SequenceId, value: T) {
        match self.ids.binary_search(&id) {
            Ok(index) => self.values[index] = value,
            Err(index) => {
                self.ids.insert(index, id);
                self.values.insert(index, value);
            }
        }
    }

    pub(super) fn len(&self) -> usize {
        self.ids.len()
    }

    pub(super) fn get_mut(&mut self, id: SequenceId) -> Option<&mut T> {
        let index = match self.ids.get(self.guess) {
            Some(guessed) if *guessed == id => self.guess,
            Some(_) | None => self.ids.binary_search(&id).ok()?,
        };
        self.guess = index + 1;
        self.values.get_mut(index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_replaces_and_forgets_in_any_order() {
        let mut table = SequenceTable::default();
        for id in [3, 1, 2] {
            table.insert(SequenceId(id), id);
        }
        for id in [1, 2, 3, 2, 1] {
            assert_eq!(table.get_mut(SequenceId(id)).copied(), Some(id));
        }
        table.insert(SequenceId(2), 20);
        table.forget(&[SequenceId(1), SequenceId(9)]);
        assert_eq!(table.get_mut(SequenceId(1)), None);
        assert_eq!(table.get_mut(SequenceId(2)).copied(), Some(20));
    }
}
