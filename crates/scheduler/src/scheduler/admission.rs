//! Who may come in: refusal of what can never run, and admission of waiting sequences.
//!
//! A sequence is admitted with blocks for every token it has, so that a prefill, once begun, never waits
//! for blocks; only decoding can run out of them.

use std::sync::Arc;

use super::{AddError, Scheduler};
use crate::plan::{BatchPlan, BlockCopy, StartedSequence};
use crate::request::Request;
use crate::sequence::{Residence, SequenceIndex};
use crate::time::Timestamp;

/// Where the keys and values came from that an admitted sequence need not compute.
#[derive(Clone, Copy)]
enum Origin {
    /// It may not use any, or the cache is off.
    Nothing,
    /// The cache, however little it had.
    Cache,
    /// Another choice of the same request.
    Sibling,
}

impl Scheduler {
    /// The most tokens of prompt and output that `request` can reach, if it can be accepted at all.
    pub(super) fn admissible_len(&self, ask: &Request) -> Result<u32, AddError> {
        self.check_shape(ask)?;
        let config = &self.config;
        let max_len = (ask.prompt.len() as u32)
            .saturating_add(ask.stop.max_tokens)
            .min(config.max_context);
        // The last token is never fed back, so it needs no slot.
        let needed_blocks = self.kv.blocks_for(max_len - 1);
        if needed_blocks > config.num_blocks {
            return Err(AddError::NeverFits {
                request: ask.id,
                num_tokens: max_len,
                needed_blocks,
                num_blocks: config.num_blocks,
            });
        }
        let num_waiting = self.roster.queue.len();
        if num_waiting.saturating_add(ask.num_choices) > config.max_waiting {
            return Err(AddError::QueueFull {
                request: ask.id,
                num_waiting,
                num_choices: ask.num_choices,
                max_waiting: config.max_waiting,
            });
        }
        Ok(max_len)
    }

    /// Refuses what could not be accepted even by an idle scheduler with endless memory.
    fn check_shape(&self, ask: &Request) -> Result<(), AddError> {
        let request = ask.id;
        let (max_context, max_waiting) = (self.config.max_context, self.config.max_waiting);
        if ask.prompt.is_empty() {
            return Err(AddError::EmptyPrompt { request });
        }
        if ask.num_choices == 0 {
            return Err(AddError::NoChoices { request });
        }
        if ask.stop.max_tokens == 0 {
            return Err(AddError::NoOutput { request });
        }
        if ask.num_choices > max_waiting {
            return Err(AddError::TooManyChoices {
                request,
                num_choices: ask.num_choices,
                max_waiting,
            });
        }
        if ask.prompt.len() >= max_context as usize {
            return Err(AddError::PromptTooLong {
                request,
                num_prompt_tokens: ask.prompt.len() as u64,
                max_context,
            });
        }
        match self.roster.choices(request) {
            Some(_) => Err(AddError::DuplicateId { request }),
            None => Ok(()),
        }
    }

    /// Lets waiting sequences in, by turn, while budget, places and blocks last. Nobody overtakes the
    /// first in the queue.
    pub(super) fn admit(&mut self, budget: &mut u32, now: Timestamp, plan: &mut BatchPlan) {
        while *budget > 0 && self.roster.running.len() < self.config.max_sequences as usize {
            let Some(index) = self.roster.queue.first() else {
                break;
            };
            let origin = self.find_start(index);
            let Some((home, copy)) = self.claim_home(index) else {
                break;
            };
            self.count_hits(index, origin, home.num_computed);
            self.roster.start(index, home, now);
            plan.copies.extend(copy);
            plan.started.push(self.started(index));
            self.plan_chunk(index, budget, plan);
        }
        if !plan.started.is_empty() {
            self.set_memory_aside(plan);
        }
    }

    /// Finds what the sequence need not compute: the prefix in the cache, or the prompt of a sibling if
    /// that saves more. At least its last token is left, because the next one follows from it.
    fn find_start(&mut self, index: SequenceIndex) -> Origin {
        let sequence = &self.roster.sequences[index];
        let start = &mut self.scratch.start;
        let mut origin = Origin::Nothing;
        start.clear();
        if self.kv.publishes() && self.may_match(index) {
            let tokens = &mut self.scratch.tokens;
            tokens.clear();
            sequence.copy_tokens(0..sequence.len() - 1, tokens);
            let start = &mut self.scratch.start;
            self.kv.find(&sequence.request.salt, tokens, start);
            origin = Origin::Cache;
        }
        let num_shareable = sequence.num_prompt() - 1;
        let start = &mut self.scratch.start;
        if start.num_tokens(self.config.block_size) < num_shareable
            && let Some(sibling) = self.roster.sibling_with_prompt(index)
        {
            let table = self.roster.sequences[sibling].blocks();
            self.kv.share(table, num_shareable, start);
            origin = Origin::Sibling;
        }
        origin
    }

    /// May it skip prompt positions? Not while log-probabilities of theirs are still to be reported.
    fn may_match(&self, index: SequenceIndex) -> bool {
        let sequence = &self.roster.sequences[index];
        sequence.request.sampling.prompt_logprobs.is_none()
            || self.num_reported(index) + 1 >= sequence.num_prompt()
    }

    /// Takes blocks for every token of a waiting sequence, beginning with the start found for it.
    fn claim_home(&mut self, index: SequenceIndex) -> Option<(Residence, Option<BlockCopy>)> {
        let sequence = &self.roster.sequences[index];
        let num_blocks = self.kv.blocks_for(sequence.len());
        let headroom = self.headroom(index);
        let fits = |left: Option<u32>| left.is_some_and(|left| left >= headroom);
        let start = &mut self.scratch.start;
        if !fits(self.kv.left_after(start, num_blocks)) {
            // The source of a copy takes a block of its own until the step is done.
            start.copy = None;
            if !fits(self.kv.left_after(start, num_blocks)) {
                return None;
            }
        }
        let mut table = Vec::with_capacity(self.kv.blocks_for(sequence.max_len) as usize);
        let copy = self.kv.claim(start, num_blocks, &mut table);
        let num_computed = start.num_tokens(self.config.block_size);
        let home = Residence {
            table,
            num_published: match self.kv.publishes() {
                true => start.shared.len() as u32,
                false => 0,
            },
            num_computed,
            num_scheduled: num_computed,
            prefill_end: sequence.len(),
        };
        Some((home, copy))
    }

    /// Blocks that must stay available beyond those of the sequence that wants in, so that letting it in
    /// does not push it or another out again.
    ///
    /// A fresh one needs a block of growth for everyone. One that was pushed out needs more each time:
    /// first as much as all have grown so far (whoever wrote n tokens is likely to write n more), then
    /// twice that, then all they can ever need, after which only a higher priority can push it out. So it
    /// is preempted at most three times among its equals (S06).
    fn headroom(&self, index: SequenceIndex) -> u32 {
        let running = &self.roster.running;
        if running.is_empty() {
            return 0;
        }
        let everyone = running.iter().copied().chain([index]);
        let expected = |index| self.growth(index).0;
        let worst = |index| self.growth(index).1;
        match self.roster.sequences[index].progress.num_preemptions {
            0 => running.len() as u32 + 1,
            1 => everyone.map(expected).sum(),
            2 => everyone.map(expected).sum::<u32>().saturating_mul(2),
            _ => everyone.map(worst).fold(0, u32::saturating_add),
        }
    }

    /// Blocks that a sequence is expected to take still, and those it takes at the worst.
    fn growth(&self, index: SequenceIndex) -> (u32, u32) {
        let sequence = &self.roster.sequences[index];
        let num_blocks = self.kv.blocks_for(sequence.len());
        let worst = self
            .kv
            .blocks_for(sequence.max_len - 1)
            .saturating_sub(num_blocks);
        let grown = self.kv.blocks_for(sequence.output.len() as u32) + 1;
        (grown.min(worst), worst)
    }

    /// Counts what the cache saved, once per sequence.
    fn count_hits(&mut self, index: SequenceIndex, origin: Origin, num_computed: u32) {
        let sequence = &mut self.roster.sequences[index];
        if sequence.progress.first_scheduled.is_some() {
            return;
        }
        match origin {
            Origin::Nothing | Origin::Sibling => {}
            Origin::Cache => {
                sequence.progress.num_cached_tokens = num_computed;
                self.counters.prefix_query_tokens += u64::from(sequence.num_prompt());
                self.counters.prefix_hit_tokens += u64::from(num_computed);
            }
        }
    }

    fn started(&self, index: SequenceIndex) -> StartedSequence {
        let sequence = &self.roster.sequences[index];
        StartedSequence {
            id: sequence.id,
            request: Arc::clone(&sequence.request),
            choice: sequence.choice,
            output: sequence.output.clone(),
        }
    }

    /// Makes room in `plan` for the longest tables the running sequences can get, so that decoding steps
    /// allocate nothing.
    fn set_memory_aside(&self, plan: &mut BatchPlan) {
        let longest = |index: &SequenceIndex| {
            let sequence = &self.roster.sequences[*index];
            self.kv.blocks_for(sequence.max_len) as usize
        };
        let num_blocks: usize = self.roster.running.iter().map(longest).sum();
        plan.blocks
            .reserve(num_blocks.saturating_sub(plan.blocks.len()));
    }
}
