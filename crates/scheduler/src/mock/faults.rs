//! Failures on demand: where a `MockModel` goes wrong, and how.
//!
//! Nothing is random here: a fault fires every time its place is reached.

use crate::plan::{BatchPlan, Row};
use crate::request::{RowError, SequenceId, TokenId};
use crate::time::Span;

/// One thing that goes wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A row fails alone; nothing it wrote in the step may be relied upon.
    Row {
        /// Which one.
        site: RowSite,
        /// With what; `RowError::NonFiniteLogits` for a NaN.
        error: RowError,
    },
    /// Something happens to a whole step.
    Step {
        /// `BatchPlan::step`.
        step: u64,
        /// What.
        failure: StepFailure,
    },
}

/// Which rows a fault hits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowSite {
    /// The `row`-th row of a step.
    Index {
        /// `BatchPlan::step`.
        step: u64,
        /// Index into `BatchPlan::rows`.
        row: u32,
    },
    /// The row in which a sequence computes a position.
    Position {
        /// Whose row.
        sequence: SequenceId,
        /// The position.
        position: u32,
    },
    /// Every row that feeds this token: a fault that a client can ask for over HTTP.
    Token(TokenId),
}

/// What happens to a whole step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StepFailure {
    /// `execute` returns an error.
    Error(String),
    /// `execute` panics; the model can be used again afterwards.
    Panic(String),
    /// The step succeeds and takes this much longer.
    Slow(Span),
}

/// The faults still to come.
#[derive(Debug, Default)]
pub(super) struct Faults {
    rows: Vec<(RowSite, RowError)>,
    steps: Vec<(u64, StepFailure)>,
}

impl Faults {
    pub(super) fn add(&mut self, fault: Fault) {
        match fault {
            Fault::Row { site, error } => self.rows.push((site, error)),
            Fault::Step { step, failure } => self.steps.push((step, failure)),
        }
    }

    /// What happens to the step.
    pub(super) fn of_step(&self, step: u64) -> Option<StepFailure> {
        let found = self.steps.iter().find(|(at, _)| *at == step);
        found.map(|(_, failure)| failure.clone())
    }

    /// The error of the `index`-th row.
    pub(super) fn of_row(&self, plan: &BatchPlan, index: usize) -> Option<RowError> {
        let found = self
            .rows
            .iter()
            .find(|(site, _)| site.hits(plan, index, &plan.rows[index]));
        found.map(|(_, error)| error.clone())
    }
}

impl RowSite {
    fn hits(&self, plan: &BatchPlan, index: usize, row: &Row) -> bool {
        match *self {
            RowSite::Index { step, row } => plan.step == step && row as usize == index,
            RowSite::Position { sequence, position } => {
                let start = row.first_position;
                let positions = start..super::end_position(row);
                row.sequence == sequence && positions.contains(&position)
            }
            RowSite::Token(token) => plan.row_tokens(row).contains(&token),
        }
    }
}
