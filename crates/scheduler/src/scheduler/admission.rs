//! Admission: which waiting sequences come in, with which blocks, and what they need not compute.
//!
//! A sequence is admitted with blocks for every token it has, so that a prefill, once begun, never waits
//! for blocks; only decoding can run out of them.

use std::sync::Arc;

use super::{Scheduler, Scratch};
use crate::config::Role;
use crate::plan::{BatchPlan, BlockCopy, BlockId, Event, StartedSequence};
use crate::sequence::{Residence, SequenceIndex};
use crate::time::Timestamp;

/// Where the keys and values came from that an admitted sequence need not compute.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Origin {
    /// It may not use any, or the cache is off.
    Nothing,
    /// The cache, however little it had.
    Cache,
    /// Another choice of the same request.
    Sibling,
}

impl Scheduler {
    /// Lets waiting sequences in, by turn, while budget, places and blocks last. Nobody overtakes the
    /// first in the queue.
    ///
    /// One whose blocks are to be filled from another worker gets all it needs but its row.
    pub(super) fn admit(
        &mut self,
        budget: &mut u32,
        now: Timestamp,
        plan: &mut BatchPlan,
        events: &mut Vec<Event>,
    ) {
        while *budget > 0 && self.num_placed() < self.config.max_sequences as usize {
            let Some(index) = self.roster.queue.first() else {
                break;
            };
            let origin = self.find_start(index);
            let source = self.lacking(index);
            if source.is_none() && origin == Origin::Cache && self.is_prefix_coming(index) {
                break;
            }
            let Some((home, copy)) = self.claim_home(index) else {
                break;
            };
            if let Some(source) = source {
                self.reserve(index, home, source, now, events);
                continue;
            }
            self.count_hits(index, origin, home.num_computed);
            self.spare_source(index, events);
            self.roster.start(index, home, now);
            plan.copies.extend(copy);
            self.plan_chunk(index, budget, plan);
            self.settle_siblings(index);
        }
    }

    /// The choices that wait for the prompt of one that has just been let in wait no longer if it had
    /// nothing of it to compute.
    fn settle_siblings(&mut self, index: SequenceIndex) {
        let sequence = &self.roster.sequences[index];
        if sequence.running().num_computed >= sequence.num_prompt() {
            self.roster.settle(sequence.request.id);
        }
    }

    /// Sequences that have a place: those that run, and those that will once their blocks are filled.
    fn num_placed(&self) -> usize {
        self.roster.running.len() + self.roster.receiving.len()
    }

    /// Finds what the sequence need not compute: the prefix in the cache, or the prompt of a sibling if
    /// that saves more. At least its last token is left, because the next one follows from it.
    fn find_start(&mut self, index: SequenceIndex) -> Origin {
        let mut origin = Origin::Nothing;
        let sequence = &self.roster.sequences[index];
        let may_match = self.kv.publishes() && self.may_match(index);
        let Scratch { tokens, start } = &mut self.scratch;
        start.clear();
        if may_match {
            tokens.clear();
            sequence.copy_tokens(0..sequence.num_tokens() - 1, tokens);
            self.kv.find(&sequence.request.salt, tokens, start);
            origin = Origin::Cache;
        }
        let num_shareable = sequence.num_prompt().min(sequence.num_tokens() - 1);
        let last = num_shareable / self.config.block_size;
        let is_there = |sibling: &SequenceIndex| {
            let table = self.roster.sequences[*sibling].blocks();
            let is_coming = |block: &BlockId| self.kv.is_copy_target(*block);
            !table.get(last as usize).is_some_and(is_coming)
        };
        if start.num_tokens(self.config.block_size) < num_shareable
            && let Some(sibling) = self.roster.siblings_with_prompt(index).find(is_there)
        {
            let table = self.roster.sequences[sibling].blocks();
            self.kv.share(table, num_shareable, start);
            origin = Origin::Sibling;
        }
        origin
    }

    /// Does a row of this plan compute a prefix that spares the sequence half of its work, if it waits for
    /// the next step? Its tokens and its start have just been found.
    fn is_prefix_coming(&self, index: SequenceIndex) -> bool {
        let sequence = &self.roster.sequences[index];
        let block_size = self.config.block_size;
        let num_found = self.scratch.start.num_tokens(block_size);
        let spares_half = |other: &SequenceIndex| {
            let other = &self.roster.sequences[*other];
            let home = other.running();
            if home.is_decoding() || other.request.salt != sequence.request.salt {
                return false;
            }
            let num_common = other
                .num_common(&self.scratch.tokens)
                .min(home.num_scheduled);
            let num_coming = num_common / block_size * block_size;
            num_coming.saturating_sub(num_found) * 2 > sequence.num_tokens() - num_found
        };
        self.flight.rows.iter().any(spares_half)
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
        let num_blocks = self.kv.blocks_for(sequence.num_tokens());
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
            prefill_end: sequence.num_tokens(),
            is_started: false,
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
    ///
    /// On a prefill worker nobody grows.
    fn headroom(&self, index: SequenceIndex) -> u32 {
        let num_placed = self.num_placed();
        if num_placed == 0 || self.config.role == Role::Prefill {
            return 0;
        }
        let placed = self.roster.running.iter().chain(&self.roster.receiving);
        let everyone = placed.copied().chain([index]);
        let expected = |index| self.growth(index).0;
        let worst = |index| self.growth(index).1;
        match self.roster.sequences[index].progress.num_preemptions {
            0 => num_placed as u32 + 1,
            1 => everyone.map(expected).sum(),
            2 => everyone.map(expected).sum::<u32>().saturating_mul(2),
            _ => everyone.map(worst).fold(0, u32::saturating_add),
        }
    }

    /// Blocks that a sequence is expected to take still, and those it takes at the worst.
    fn growth(&self, index: SequenceIndex) -> (u32, u32) {
        let sequence = &self.roster.sequences[index];
        let num_blocks = self.kv.blocks_for(sequence.num_tokens());
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

    pub(super) fn started(&self, index: SequenceIndex) -> StartedSequence {
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
    pub(super) fn set_memory_aside(&self, plan: &mut BatchPlan) {
        let longest = |index: &SequenceIndex| {
            let sequence = &self.roster.sequences[*index];
            self.kv.blocks_for(sequence.max_len) as usize
        };
        let num_blocks: usize = self.roster.running.iter().map(longest).sum();
        plan.blocks
            .reserve(num_blocks.saturating_sub(plan.blocks.len()));
    }
}
