//! Rows: how a sequence's uncomputed tokens become part of a plan, and the chunks of running prefills.
//!
//! No block is allocated here: a sequence is admitted with blocks for every token it has.

use super::Scheduler;
use crate::plan::{BatchPlan, Row, Span32};
use crate::sequence::SequenceIndex;

impl Scheduler {
    /// Gives what is left of the budget to the sequences that have part of their tokens computed.
    pub(super) fn plan_prefills(&mut self, budget: &mut u32, plan: &mut BatchPlan) {
        for position in 0..self.roster.running.len() {
            if *budget == 0 {
                return;
            }
            let index = self.roster.running[position];
            let home = self.roster.sequences[index].running();
            if !home.is_decoding() {
                self.plan_chunk(index, budget, plan);
            }
        }
    }

    /// A row with as many uncomputed tokens as the budget allows.
    pub(super) fn plan_chunk(
        &mut self,
        index: SequenceIndex,
        budget: &mut u32,
        plan: &mut BatchPlan,
    ) {
        let sequence = &self.roster.sequences[index];
        let num_tokens = (*budget).min(sequence.num_tokens() - sequence.running().num_computed);
        *budget -= num_tokens;
        self.counters.num_prefill_tokens += u64::from(num_tokens);
        let row = self.push_row(index, num_tokens, plan);
        let prompt_logprobs = self.unreported(index, plan.rows[row].first_position, num_tokens);
        plan.rows[row].prompt_logprobs = prompt_logprobs;
    }

    /// Appends a row with the next `num_tokens` uncomputed tokens; returns its index.
    pub(super) fn push_row(
        &mut self,
        index: SequenceIndex,
        num_tokens: u32,
        plan: &mut BatchPlan,
    ) -> usize {
        let num_blocks = {
            let home = self.roster.sequences[index].running();
            self.kv.blocks_for(home.num_computed + num_tokens) as usize
        };
        if !self.roster.sequences[index].running().is_started {
            plan.started.push(self.started(index));
        }
        let sequence = &mut self.roster.sequences[index];
        let home = sequence.status.running_mut();
        home.is_started = true;
        let (first, end) = (home.num_computed, home.num_computed + num_tokens);
        home.num_scheduled = end;
        let blocks_start = plan.blocks.len() as u32;
        plan.blocks.extend_from_slice(&home.table[..num_blocks]);
        let tokens_start = plan.tokens.len() as u32;
        sequence.copy_tokens(first..end, &mut plan.tokens);
        plan.rows.push(Row {
            sequence: sequence.id,
            first_position: first,
            tokens: span(tokens_start, plan.tokens.len()),
            blocks: span(blocks_start, plan.blocks.len()),
            sample: end == sequence.num_tokens(),
            prompt_logprobs: Span32::default(),
        });
        self.flight.rows.push(index);
        plan.rows.len() - 1
    }

    /// Positions of the row whose following prompt token was asked for and not reported yet.
    fn unreported(&self, index: SequenceIndex, first: u32, num_tokens: u32) -> Span32 {
        let sequence = &self.roster.sequences[index];
        if sequence.request.sampling.prompt_logprobs.is_none() {
            return Span32::default();
        }
        let reported = self.num_reported(index);
        let start = first.max(reported);
        let end = (first + num_tokens).min(sequence.num_prompt() - 1);
        match start < end {
            true => Span32 { start, end },
            false => Span32::default(),
        }
    }

    /// Leading prompt positions of the request whose log-probabilities were reported.
    pub(super) fn num_reported(&self, index: SequenceIndex) -> u32 {
        let request = self.roster.sequences[index].request.id;
        let choices = self.roster.choices(request);
        choices.map_or(0, |choices| choices.num_reported)
    }
}

fn span(start: u32, end: usize) -> Span32 {
    Span32 {
        start,
        end: end as u32,
    }
}
