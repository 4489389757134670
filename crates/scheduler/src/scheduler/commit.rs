//! Taking in what a step produced: tokens, stop conditions, and the publishing of full blocks (A7).
//!
//! A row that contradicts its plan ends with an error; it is never trusted in part.

use super::Scheduler;
use crate::config::Role;
use crate::plan::{BatchPlan, Event, ModelOutput, OutputRow, Row, RowVerdict};
use crate::request::{FinishReason, RowError, TokenId};
use crate::sequence::{SequenceIndex, stop_string_or};
use crate::time::Timestamp;

/// A plan and what came of it.
pub(super) struct Executed<'a> {
    pub(super) plan: &'a BatchPlan,
    pub(super) output: &'a ModelOutput,
    pub(super) now: Timestamp,
}

/// What a row that did not fail brought.
struct RowResult<'a> {
    tokens: &'a [TokenId],
    /// Valid positions counted from the row's first.
    num_computed: u32,
    found_stop_string: bool,
}

impl Scheduler {
    /// Settles row `number` of the step, which belongs to `index`.
    pub(super) fn commit_row(
        &mut self,
        index: SequenceIndex,
        number: usize,
        step: &Executed<'_>,
        events: &mut Vec<Event>,
    ) {
        if self.has_left(index) {
            return;
        }
        let (row, now) = (&step.plan.rows[number], step.now);
        let capacity =
            self.roster.sequences[index].running().table.len() as u32 * self.config.block_size;
        let result = match read_row(row, number, step.output, capacity) {
            Ok(result) => result,
            Err(error) => return self.fail_row(index, error, now, events),
        };
        let (num_tokens, finish) = self.advance(index, row, &result, now);
        if row.sample || !row.prompt_logprobs.is_empty() {
            let sequence = &self.roster.sequences[index];
            events.push(Event::Accepted {
                request: sequence.request.id,
                choice: sequence.choice,
                row: number as u32,
                num_tokens,
            });
        }
        let is_over = finish.is_some();
        match finish {
            Some(reason) => self.end(index, reason, now, events),
            None => self.after_prefill(index, row),
        }
        if !is_over && row.sample && self.config.role == Role::Prefill {
            self.offer(index, now, events);
        }
    }

    /// Accepts the tokens of a row and publishes the blocks they filled; says how many were accepted, and
    /// whether the sequence is at its end.
    fn advance(
        &mut self,
        index: SequenceIndex,
        row: &Row,
        result: &RowResult<'_>,
        now: Timestamp,
    ) -> (u32, Option<FinishReason>) {
        let mut num_tokens = 0;
        let mut finish = None;
        if self.roster.sequences[index].output.is_empty() {
            self.roster.update(index, |sequence| {
                (num_tokens, finish) = sequence.accept(result.tokens, now);
            });
        } else {
            // After the first token no deadline moves.
            (num_tokens, finish) = self.roster.sequences[index].accept(result.tokens, now);
        }
        if result.found_stop_string && num_tokens as usize == result.tokens.len() {
            finish = Some(stop_string_or(finish));
        }
        let sequence = &mut self.roster.sequences[index];
        // Keys and values behind a stop are nobody's.
        let num_computed = (row.first_position + result.num_computed).min(sequence.num_tokens());
        let home = sequence.status.running_mut();
        home.num_computed = num_computed;
        home.num_scheduled = num_computed;
        self.counters.num_output_tokens += u64::from(num_tokens);
        self.publish(index);
        (num_tokens, finish)
    }

    /// Puts the blocks that became full into the radix cache.
    pub(super) fn publish(&mut self, index: SequenceIndex) {
        let block_size = self.config.block_size;
        let sequence = &mut self.roster.sequences[index];
        let num_full = sequence.running().num_computed / block_size;
        if !self.kv.publishes() || sequence.running().num_published == num_full {
            return;
        }
        let max_blocks = self.kv.blocks_for(sequence.max_len);
        for number in sequence.running().num_published..num_full {
            let tokens = &mut self.scratch.tokens;
            tokens.clear();
            sequence.copy_tokens(number * block_size..(number + 1) * block_size, tokens);
            let salt = &sequence.request.salt;
            let num_following = max_blocks.saturating_sub(number + 1) as usize;
            let table = &mut sequence.status.running_mut().table;
            self.kv
                .publish(salt, table, number as usize, tokens, num_following);
        }
        sequence.status.running_mut().num_published = num_full;
    }

    /// What a prefill that went on makes possible: siblings may start, and nothing is reported twice.
    fn after_prefill(&mut self, index: SequenceIndex, row: &Row) {
        let sequence = &self.roster.sequences[index];
        if row.first_position >= sequence.num_prompt() {
            return;
        }
        let request = sequence.request.id;
        if let Some(choices) = self.roster.choices_mut(request) {
            choices.num_reported = choices.num_reported.max(row.prompt_logprobs.end);
        }
        self.roster.settle(request);
    }
}

/// The result of row `number`, unless it failed or contradicts the plan.
fn read_row<'a>(
    row: &Row,
    number: usize,
    output: &'a ModelOutput,
    capacity: u32,
) -> Result<RowResult<'a>, RowError> {
    let inconsistent = |what: &str| RowError::Inconsistent(format!("row {number}: {what}"));
    let out: &OutputRow = output
        .rows
        .get(number)
        .ok_or_else(|| inconsistent("the output has no such row"))?;
    let found_stop_string = match &out.verdict {
        RowVerdict::Continue => false,
        RowVerdict::StopString => true,
        RowVerdict::Failed(error) => return Err(error.clone()),
    };
    let tokens = output
        .tokens
        .get(out.tokens.start as usize..out.tokens.end as usize)
        .ok_or_else(|| inconsistent("its tokens lie outside the output"))?;
    let result = RowResult {
        tokens,
        num_computed: out.num_computed,
        found_stop_string,
    };
    match contradiction(row, &result, capacity) {
        Some(what) => Err(inconsistent(what)),
        None => Ok(result),
    }
}

/// What about a result cannot be, given the plan and the `capacity` of the row's blocks in tokens.
fn contradiction(row: &Row, result: &RowResult<'_>, capacity: u32) -> Option<&'static str> {
    if result.tokens.is_empty() == row.sample {
        return Some("sampled tokens and the plan disagree");
    }
    let end = row.first_position.checked_add(result.num_computed);
    if end.is_none_or(|end| end > capacity) {
        return Some("computed positions lie outside its blocks");
    }
    // Beyond the row's own tokens there are accepted drafts. The token after them is computed by nobody
    // yet, unless the tokens were cut at a stop string.
    let num_drafts = result.num_computed.checked_sub(row.tokens.len());
    let max_drafts = match result.found_stop_string {
        true => u32::MAX,
        false => result.tokens.len().saturating_sub(1) as u32,
    };
    num_drafts
        .is_none_or(|drafts| drafts > max_drafts)
        .then_some("computed positions and tokens disagree")
}
