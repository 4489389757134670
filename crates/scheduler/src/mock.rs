//! `MockModel`: a pure [`ModelRunner`] over integers, for property tests, simulations and `--model mock`.
//!
//! It must not compute anything that resembles a model, read a clock, start a thread or use an unordered map:
//! a slow step is reported as data ([`MockModel::take_delay`]). In oracle mode it is the referee of the
//! scheduler: see [`oracle`].

pub mod chain;
pub mod faults;
pub mod image;
pub mod oracle;
mod report;
mod sampling;
mod sequences;

use std::num::NonZeroU32;
use std::panic::resume_unwind;
use std::sync::Arc;

use crate::plan::{BatchPlan, BlockId, ModelOutput, OutputRow, Row, StartedSequence};
use crate::ports::{ModelRunner, RunnerError};
use crate::request::{Request, RowError, TokenId};
use crate::time::Span;

pub use chain::oracle_output;
use faults::Faults;
pub use faults::{Fault, RowSite, StepFailure};
pub use image::{BlockImage, ImageError};
pub use oracle::{Bursts, Inconsistency};
use oracle::{Oracle, VoidCause};
use sequences::SequenceTable;

/// A model without weights. Its vocabulary is the tokens below `vocabulary`.
#[derive(Debug)]
pub struct MockModel {
    vocabulary: NonZeroU32,
    mode: Mode,
    faults: Faults,
    delay: Span,
}

/// Where the next token comes from.
#[derive(Debug)]
enum Mode {
    /// (previous + 1) mod vocabulary; block tables are not looked at.
    Scripted(SequenceTable<Asked>),
    /// A hash of everything read through the block table.
    Oracle(Oracle),
}

/// What a sequence was started for.
#[derive(Clone, Debug)]
struct Asked {
    request: Arc<Request>,
    choice: u32,
}

impl Asked {
    fn new(started: &StartedSequence) -> Self {
        Asked {
            request: Arc::clone(&started.request),
            choice: started.choice,
        }
    }

    /// Which output token, counted from 1, stands at `position`.
    fn num_output_at(&self, position: u32) -> u32 {
        (position + 1).saturating_sub(self.request.prompt.len() as u32)
    }
}

/// What a row that went well has to say, besides its new tokens.
#[derive(Clone, Copy, Debug)]
struct Answer<'a> {
    asked: &'a Asked,
    /// Positions computed, counted from the row's first.
    num_computed: u32,
}

impl MockModel {
    /// The next token is (previous + 1) mod `vocabulary`. Steady decode allocates nothing.
    pub fn scripted(vocabulary: NonZeroU32) -> Self {
        MockModel::new(vocabulary, Mode::Scripted(SequenceTable::default()))
    }

    /// Checks every slot it reads and derives the next token from all of them.
    ///
    /// The pool has `num_blocks` blocks of `block_size` slots, as the scheduler's configuration says.
    pub fn oracle(vocabulary: NonZeroU32, block_size: NonZeroU32, num_blocks: u32) -> Self {
        MockModel::new(
            vocabulary,
            Mode::Oracle(Oracle::new(block_size, num_blocks)),
        )
    }

    /// Lets the rows of an oracle bring several tokens at once; a script goes on one by one.
    pub fn with_bursts(mut self, bursts: Bursts) -> Self {
        match &mut self.mode {
            Mode::Scripted(_) => {}
            Mode::Oracle(oracle) => oracle.bursts = bursts,
        }
        self
    }

    fn new(vocabulary: NonZeroU32, mode: Mode) -> Self {
        MockModel {
            vocabulary,
            mode,
            faults: Faults::default(),
            delay: Span::default(),
        }
    }

    /// Makes the model fail, or dawdle, where `fault` says.
    pub fn inject(&mut self, fault: Fault) {
        self.faults.add(fault);
    }

    /// Forgets all faults; slots that they voided stay void.
    pub fn clear_faults(&mut self) {
        self.faults = Faults::default();
    }

    /// The time that slow steps have cost since the last call, for the driver to add to its clock.
    pub fn take_delay(&mut self) -> Span {
        std::mem::take(&mut self.delay)
    }

    /// Sequences that were started and have not ended.
    pub fn num_sequences(&self) -> usize {
        match &self.mode {
            Mode::Scripted(sequences) => sequences.len(),
            Mode::Oracle(oracle) => oracle.num_sequences(),
        }
    }

    /// What the slots of `blocks` hold, to be imported by another mock of the same kind.
    pub fn export_blocks(&self, blocks: &[BlockId]) -> Result<BlockImage, ImageError> {
        match &self.mode {
            Mode::Scripted(_) => Ok(BlockImage::new(blocks.len(), Vec::new())),
            Mode::Oracle(oracle) => oracle.export_blocks(blocks),
        }
    }

    /// Puts what another mock exported into `blocks`, all of it or, if anything is wrong with it, nothing.
    pub fn import_blocks(
        &mut self,
        blocks: &[BlockId],
        image: &BlockImage,
    ) -> Result<(), ImageError> {
        image.check(blocks.len())?;
        match &mut self.mode {
            Mode::Scripted(_) => Ok(()),
            Mode::Oracle(oracle) => oracle.import_blocks(blocks, image),
        }
    }

    /// Fails the step as a whole, leaving nothing that may be relied upon.
    fn fail_step(&mut self, plan: &BatchPlan) {
        if let Mode::Oracle(oracle) = &mut self.mode {
            oracle.void_step(plan);
        }
    }

    fn run_row(&mut self, plan: &BatchPlan, index: usize, output: &mut ModelOutput) -> OutputRow {
        let row = &plan.rows[index];
        let (vocabulary, tokens) = (self.vocabulary, &mut output.tokens);
        let tokens_start = tokens.len();
        let fault = self.faults.of_row(plan, index);
        let answered = match (&mut self.mode, fault) {
            (Mode::Scripted(_), Some(error)) => Err(error),
            (Mode::Scripted(sequences), None) => {
                answer_script(sequences, plan, row, vocabulary, tokens)
            }
            (Mode::Oracle(oracle), Some(error)) => {
                oracle.void_row(plan, row, VoidCause::RowFailed);
                Err(error)
            }
            (Mode::Oracle(oracle), None) => oracle.answer(plan, index, vocabulary, tokens),
        };
        match answered {
            Ok(answer) => report::row(answer, row, tokens_start, vocabulary, output),
            Err(error) => {
                output.tokens.truncate(tokens_start);
                OutputRow::failed(error)
            }
        }
    }
}

impl ModelRunner for MockModel {
    fn execute(&mut self, plan: &BatchPlan, output: &mut ModelOutput) -> Result<(), RunnerError> {
        output.clear();
        match &mut self.mode {
            Mode::Scripted(sequences) => sequences.update(plan, Asked::new),
            Mode::Oracle(oracle) => oracle.begin(plan),
        }
        match self.faults.of_step(plan.step) {
            None => {}
            Some(StepFailure::Slow(span)) => self.delay = Span(self.delay.0.saturating_add(span.0)),
            Some(StepFailure::Error(message)) => {
                self.fail_step(plan);
                return Err(RunnerError {
                    step: plan.step,
                    message,
                });
            }
            Some(StepFailure::Panic(message)) => {
                self.fail_step(plan);
                // A panic that was asked for is no news: it unwinds without the hook's report.
                resume_unwind(Box::new(message));
            }
        }
        for index in 0..plan.rows.len() {
            let row = self.run_row(plan, index, output);
            output.rows.push(row);
        }
        Ok(())
    }
}

/// Chooses one more than the row's last token.
fn answer_script<'a>(
    sequences: &'a mut SequenceTable<Asked>,
    plan: &BatchPlan,
    row: &Row,
    vocabulary: NonZeroU32,
    tokens: &mut Vec<TokenId>,
) -> Result<Answer<'a>, RowError> {
    let asked = &*sequences
        .get_mut(row.sequence)
        .ok_or(Inconsistency::UnknownSequence(row.sequence))?;
    if let (true, Some(last)) = (row.sample, plan.row_tokens(row).last()) {
        let start = sampling::after(*last, 1, vocabulary);
        let num_output = asked.num_output_at(end_position(row));
        let token = sampling::first_allowed(&asked.request, start, num_output, vocabulary)?;
        tokens.push(token);
    }
    let num_computed = row.tokens.len();
    Ok(Answer {
        asked,
        num_computed,
    })
}

/// The position after the row's last token: where a sampled token will stand.
fn end_position(row: &Row) -> u32 {
    row.first_position + row.tokens.len()
}

#[cfg(test)]
mod tests;
