//! Placement: which worker gets a sequence, by what its cache is likely to have and by its load.
//!
//! Among the workers whose load is within a slack of the least loaded one's, the one that was given the
//! longest prefix before. So a shared prefix stays where it is cached until its worker has more than a
//! slack's worth of extra work, and then spreads: the balance of exploiting and exploring of Preble
//! (arXiv 2407.00023), with a threshold as in SGLang's cache-aware router; Mooncake (arXiv 2407.00079)
//! weighs the same two against an estimate of time instead.
//!
//! It only guesses what is cached: it is told what was sent where, never what was evicted. A wrong guess
//! costs time and nothing else, because a worker compares tokens before it reuses anything.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::request::{CacheSalt, TokenId};
use crate::transfer::WorkerId;

/// Limits of the guess, and how much it may cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlacementConfig {
    /// Tokens of load that a known prefix may outweigh.
    pub load_slack: u64,
    /// Tokens that one link of a prefix's chain stands for.
    pub tokens_per_link: u32,
    /// Leading links of a prefix that are looked at.
    pub max_links: u32,
    /// Links remembered, over all workers; beyond, those used longest ago are forgotten.
    pub max_entries: u32,
}

impl Default for PlacementConfig {
    fn default() -> Self {
        PlacementConfig {
            // What a worker computes in a second or so.
            load_slack: 4096,
            tokens_per_link: 16,
            max_links: 256,
            max_entries: 65_536,
        }
    }
}

/// Hashes of ever longer prefixes: link i stands for the salt and the first (i + 1) × `tokens_per_link` tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrefixChain(Vec<u64>);

/// Work that a worker has been given and not yet done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Sequences.
    pub num_sequences: u32,
    /// Their tokens: on a prefill worker those of the prompts to compute, elsewhere those of the keys and
    /// values that every step reads.
    pub num_tokens: u64,
}

/// Loads and guesses of all workers.
#[derive(Debug)]
pub struct Placement {
    config: PlacementConfig,
    loads: BTreeMap<WorkerId, Load>,
    prefixes: PrefixIndex,
}

impl Placement {
    /// Nothing is known of any worker.
    pub fn new(config: PlacementConfig) -> Self {
        Placement {
            config,
            loads: BTreeMap::new(),
            prefixes: PrefixIndex::default(),
        }
    }

    /// The chain of the whole links of `tokens`, as far as they are looked at.
    pub fn chain(&self, salt: &CacheSalt, tokens: &[TokenId]) -> PrefixChain {
        let mut hash = fnv(FNV_OFFSET, &salt.0);
        let link = |tokens: &[TokenId]| {
            for token in tokens {
                hash = fnv(hash, &token.0.to_le_bytes());
            }
            hash
        };
        let links = tokens.chunks_exact(self.config.tokens_per_link.max(1) as usize);
        PrefixChain(
            links
                .take(self.config.max_links as usize)
                .map(link)
                .collect(),
        )
    }

    /// The worker to give a sequence with this prefix to; `None` without candidates. Ties go to the lower
    /// load, then to the lower id.
    pub fn choose(
        &self,
        candidates: impl Iterator<Item = WorkerId> + Clone,
        chain: &PrefixChain,
    ) -> Option<WorkerId> {
        let load = |worker: WorkerId| self.load(worker);
        let least = candidates.clone().map(|w| load(w).num_tokens).min()?;
        let most = least.saturating_add(self.config.load_slack);
        let eligible = candidates.filter(|worker| load(*worker).num_tokens <= most);
        eligible.min_by_key(|&worker| {
            let num_known = self.prefixes.num_known(worker, chain);
            let Load {
                num_sequences,
                num_tokens,
            } = load(worker);
            (
                std::cmp::Reverse(num_known),
                num_tokens,
                num_sequences,
                worker,
            )
        })
    }

    /// `worker` was given a sequence with this prefix, and will have it cached.
    pub fn note(&mut self, worker: WorkerId, chain: &PrefixChain) {
        self.prefixes.note(worker, chain);
        self.prefixes.trim(self.config.max_entries as usize);
    }

    /// One more sequence of so many tokens is `worker`'s.
    pub fn charge(&mut self, worker: WorkerId, num_tokens: u64) {
        let load = self.loads.entry(worker).or_default();
        load.num_sequences += 1;
        load.num_tokens += num_tokens;
    }

    /// It is `worker`'s no longer.
    pub fn discharge(&mut self, worker: WorkerId, num_tokens: u64) {
        if let Some(load) = self.loads.get_mut(&worker) {
            load.num_sequences = load.num_sequences.saturating_sub(1);
            load.num_tokens = load.num_tokens.saturating_sub(num_tokens);
        }
    }

    /// What `worker` has to do.
    pub fn load(&self, worker: WorkerId) -> Load {
        self.loads.get(&worker).copied().unwrap_or_default()
    }

    /// `worker`'s cache is gone.
    pub fn forget(&mut self, worker: WorkerId) {
        self.prefixes.forget(worker);
    }

    /// Links remembered.
    pub fn num_entries(&self) -> usize {
        self.prefixes.ticks.len()
    }
}

/// Which worker was given which prefix, with the time of the last use.
#[derive(Debug, Default)]
struct PrefixIndex {
    ticks: BTreeMap<(WorkerId, u64), u64>,
    by_tick: BTreeMap<u64, (WorkerId, u64)>,
    now: u64,
}

impl PrefixIndex {
    /// Leading links of `chain` that `worker` was given.
    fn num_known(&self, worker: WorkerId, chain: &PrefixChain) -> usize {
        let links = chain.0.iter();
        links
            .take_while(|link| self.ticks.contains_key(&(worker, **link)))
            .count()
    }

    /// The last link counts as used first, so that a chain is forgotten from its end.
    fn note(&mut self, worker: WorkerId, chain: &PrefixChain) {
        for &link in chain.0.iter().rev() {
            self.now += 1;
            if let Some(before) = self.ticks.insert((worker, link), self.now) {
                self.by_tick.remove(&before);
            }
            self.by_tick.insert(self.now, (worker, link));
        }
    }

    fn trim(&mut self, max_entries: usize) {
        while self.ticks.len() > max_entries {
            if let Some((_, key)) = self.by_tick.pop_first() {
                self.ticks.remove(&key);
            }
        }
    }

    fn forget(&mut self, worker: WorkerId) {
        let of_worker = self.ticks.range((worker, 0)..=(worker, u64::MAX));
        let gone: BTreeSet<(u64, u64)> = of_worker.map(|(key, tick)| (*tick, key.1)).collect();
        for (tick, link) in gone {
            self.by_tick.remove(&tick);
            self.ticks.remove(&(worker, link));
        }
    }
}

const FNV_OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
const FNV_PRIME: u64 = 0x0000_0100_0000_01b3;

/// FNV-1a (Fowler, Noll and Vo), continued over `bytes`. Good enough to guess with; nothing is reused because of it.
fn fnv(hash: u64, bytes: &[u8]) -> u64 {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(FNV_PRIME);
    bytes.iter().fold(hash, step)
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: WorkerId = WorkerId(1);
    const B: WorkerId = WorkerId(2);
    const C: WorkerId = WorkerId(3);

    fn placement(max_entries: u32) -> Placement {
        Placement::new(PlacementConfig {
            load_slack: 100,
            tokens_per_link: 4,
            max_links: 4,
            max_entries,
        })
    }

    fn chain(placement: &Placement, tokens: impl IntoIterator<Item = u32>) -> PrefixChain {
        let tokens: Vec<TokenId> = tokens.into_iter().map(TokenId).collect();
        placement.chain(&CacheSalt::default(), &tokens)
    }

    fn choose(placement: &Placement, chain: &PrefixChain) -> Option<WorkerId> {
        placement.choose([B, A, C].into_iter(), chain)
    }

    #[test]
    fn a_known_prefix_wins_within_the_slack_and_load_beyond_it() {
        let mut placement = placement(100);
        let long = chain(&placement, 0..12);
        let short = chain(&placement, (0..8).chain(50..54));
        assert_eq!(choose(&placement, &long), Some(A), "the lower id");
        placement.charge(A, 10);
        assert_eq!(choose(&placement, &long), Some(B), "the lower load");
        placement.note(C, &long);
        placement.charge(C, 100);
        assert_eq!(choose(&placement, &long), Some(C));
        assert_eq!(choose(&placement, &short), Some(C), "two of three links");
        placement.note(A, &short);
        assert_eq!(choose(&placement, &short), Some(A), "all three");
        placement.charge(C, 1);
        assert_eq!(choose(&placement, &long), Some(A), "two of three links");
        placement.discharge(C, 1);
        assert_eq!(choose(&placement, &long), Some(C));
        placement.forget(C);
        assert_eq!(choose(&placement, &long), Some(A));
        assert_eq!(placement.num_entries(), 3);
        assert_eq!(placement.choose([].into_iter(), &long), None);
    }

    #[test]
    fn chains_stop_at_their_limit_and_are_separate_per_salt() {
        let placement = placement(100);
        assert_eq!(chain(&placement, 0..3).0.len(), 0);
        assert_eq!(chain(&placement, 0..99).0.len(), 4);
        let tokens: Vec<TokenId> = (0..8).map(TokenId).collect();
        let salted = placement.chain(&CacheSalt([7].as_slice().into()), &tokens);
        assert_ne!(salted.0[0], chain(&placement, 0..8).0[0]);
        assert_ne!(chain(&placement, 1..5).0[0], chain(&placement, 0..4).0[0]);
    }

    #[test]
    fn what_was_used_longest_ago_is_forgotten_from_its_end() {
        let mut placement = placement(5);
        let (first, second) = (chain(&placement, 0..12), chain(&placement, 100..112));
        placement.note(A, &first);
        placement.note(B, &second);
        assert_eq!(placement.num_entries(), 5);
        assert_eq!(placement.prefixes.num_known(A, &first), 2);
        assert_eq!(placement.prefixes.num_known(B, &second), 3);
        placement.note(A, &first);
        assert_eq!(placement.prefixes.num_known(A, &first), 3);
        assert_eq!(placement.prefixes.num_known(B, &second), 2);
    }
}
