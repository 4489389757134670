//! What the oracle knows of one running sequence, and so what its rows must say and its slots must hold.
//!
//! It never looks at blocks.

use super::super::chain::{Chain, salt_hash};
use super::super::{Asked, end_position};
use super::pool::{Entry, Slot};
use super::{Inconsistency, Sampling};
use crate::plan::{BatchPlan, Row, StartedSequence};
use crate::request::{RowError, SequenceId, TokenId};

/// One running sequence as the oracle has followed it.
#[derive(Debug)]
pub(super) struct Witness {
    pub(super) asked: Asked,
    /// It was started while it was running.
    pub(super) started_twice: bool,
    id: SequenceId,
    salt: u64,
    output: Vec<TokenId>,
    /// Positions computed, drafts included; none before the first row, which may begin anywhere (the prefix cache decides).
    pub(super) computed: Option<u32>,
    /// The running hashes of the leading known tokens, extended when first needed.
    running: Vec<u64>,
    chain: Chain,
}

impl Witness {
    pub(super) fn new(started: &StartedSequence) -> Self {
        let asked = Asked::new(started);
        Witness {
            id: started.id,
            salt: salt_hash(&asked.request.salt),
            chain: Chain::new(&asked.request.salt),
            asked,
            started_twice: false,
            output: started.output.clone(),
            computed: None,
            running: Vec::new(),
        }
    }

    /// Checks that the row continues the sequence where it stands, with the tokens it has.
    pub(super) fn check(&self, plan: &BatchPlan, row: &Row) -> Result<(), Inconsistency> {
        if self.started_twice {
            return Err(Inconsistency::StartedTwice(self.id));
        }
        if row.tokens.is_empty() {
            return Err(Inconsistency::EmptyRow(self.id));
        }
        self.check_position(row)?;
        self.check_tokens(plan, row)?;
        self.check_sample(row)
    }

    fn check_position(&self, row: &Row) -> Result<(), Inconsistency> {
        match self.computed {
            Some(expected) if expected != row.first_position => Err(Inconsistency::WrongPosition {
                sequence: self.id,
                expected,
                found: row.first_position,
            }),
            Some(_) | None => Ok(()),
        }
    }

    fn check_tokens(&self, plan: &BatchPlan, row: &Row) -> Result<(), Inconsistency> {
        for (position, found) in (row.first_position..).zip(plan.row_tokens(row)) {
            let expected = self.token(position);
            if expected != Some(*found) {
                return Err(Inconsistency::WrongToken {
                    sequence: self.id,
                    position,
                    expected,
                    found: *found,
                });
            }
        }
        Ok(())
    }

    fn check_sample(&self, row: &Row) -> Result<(), Inconsistency> {
        let end = end_position(row);
        let num_known = self.asked.request.prompt.len() as u32 + self.output.len() as u32;
        if row.sample == (end == num_known) {
            return Ok(());
        }
        Err(Inconsistency::WrongSample {
            sequence: self.id,
            end,
            num_known,
            sample: row.sample,
        })
    }

    /// The token of prompt or output at `position`.
    fn token(&self, position: u32) -> Option<TokenId> {
        let prompt = &self.asked.request.prompt;
        let position = position as usize;
        match position.checked_sub(prompt.len()) {
            None => prompt.get(position).copied(),
            Some(index) => self.output.get(index).copied(),
        }
    }

    /// What the slot of `position` holds once the sequence has computed it.
    pub(super) fn entry(&self, position: u32, token: TokenId, running: u64) -> Entry {
        Entry {
            salt: self.salt,
            position,
            token,
            running,
        }
    }

    /// The stored running hash, if the slot holds what this sequence needs at `position`.
    pub(super) fn recognise(&mut self, position: u32, slot: &Slot) -> Option<u64> {
        let Slot::Written { entry, .. } = slot else {
            return None;
        };
        let token = self.token(position)?;
        let running = self.expected_running(position)?;
        (*entry == self.entry(position, token, running)).then_some(entry.running)
    }

    fn expected_running(&mut self, position: u32) -> Option<u64> {
        while self.running.len() <= position as usize {
            let token = self.token(self.running.len() as u32)?;
            self.running.push(self.chain.compute(token));
        }
        self.running.get(position as usize).copied()
    }

    /// Chooses the token that follows what was computed, and remembers it.
    pub(super) fn choose(&mut self, sampling: &mut Sampling<'_>) -> Result<TokenId, RowError> {
        let asked = &self.asked;
        let token = sampling
            .chain
            .sample(&asked.request, asked.choice, sampling.vocabulary)?;
        self.output.push(token);
        sampling.tokens.push(token);
        Ok(token)
    }
}
