//! Which tokens stay: `min_p`, then `top_k`, then `top_p`.
//!
//! The first two are floors on the logit. The third keeps the most likely tokens as long as those before
//! them hold less than `top_p` of the mass; among equal logits the lowest ids come first. Selection, no
//! sort of the vocabulary; nothing is drawn here. Top-k: Fan et al., arXiv 1805.04833; top-p: Holtzman et
//! al., arXiv 1904.09751; min-p: Nguyen et al., arXiv 2407.01082.

use std::cmp::Ordering;

use millpond_scheduler::{SamplingParams, TokenId};

use super::mass::Law;
use super::scan::{gather, kth_largest};

/// How far below the most likely token `top_p` looks for its nucleus, in nats, before it looks further: a
/// real model's nucleus is nearly always found within the first or second.
const REACHES: [f64; 4] = [3.0, 6.0, 12.0, f64::INFINITY];

/// A token that may still be chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Candidate {
    pub token: TokenId,
    pub logit: f32,
}

/// What the filters left.
#[derive(Debug)]
pub(super) enum Kept<'a> {
    /// Every token that is not masked.
    Unmasked,
    /// These, in no particular order; at least one.
    Candidates(&'a [Candidate]),
}

/// The filters with their scratch memory.
#[derive(Debug, Default)]
pub(super) struct Filter {
    pool: Vec<f32>,
    candidates: Vec<Candidate>,
}

impl Filter {
    /// Scratch for `vocab_size` logits.
    pub fn with_capacity(vocab_size: usize) -> Self {
        Filter {
            pool: Vec::new(),
            candidates: Vec::with_capacity(vocab_size),
        }
    }

    /// What `params` leave of `logits`, whose largest is `law.peak`.
    pub fn keep(&mut self, logits: &[f32], law: Law, params: &SamplingParams) -> Kept<'_> {
        let floor = self.floor(logits, law, params);
        if params.top_p < 1.0 {
            self.gather_nucleus(logits, law, floor, params.top_p);
        } else if floor > f32::MIN {
            gather(logits, floor, &mut self.candidates);
        } else {
            return Kept::Unmasked;
        }
        Kept::Candidates(&self.candidates)
    }

    /// The smallest logit that `min_p` and `top_k` keep. Both keep the most likely tokens, so of two floors
    /// the higher one is that of the filters in sequence.
    fn floor(&mut self, logits: &[f32], law: Law, params: &SamplingParams) -> f32 {
        let mut floor = f32::MIN;
        if params.min_p > 0.0 {
            floor = law.logit_at(libm::log(f64::from(params.min_p)));
        }
        let k = params.top_k as usize;
        if 0 < k && k < logits.len() {
            floor = floor.max(kth_largest(logits, k, &mut self.pool));
        }
        floor
    }

    /// Leaves the nucleus of the tokens at or above `floor` in `candidates`.
    fn gather_nucleus(&mut self, logits: &[f32], law: Law, floor: f32, top_p: f32) {
        let needed = |total: i64| f64::from(top_p) * total as f64;
        let needed = if floor > f32::MIN {
            gather(logits, floor, &mut self.candidates);
            needed(candidate_mass(law, &self.candidates))
        } else {
            let needed = needed(law.mass(logits, |logit| *logit));
            self.gather_mass(logits, law, needed);
            needed
        };
        let num_kept = nucleus_len(&mut self.candidates, law, needed);
        self.candidates.truncate(num_kept);
    }

    /// Gathers most likely tokens that together have at least the mass `needed`.
    fn gather_mass(&mut self, logits: &[f32], law: Law, needed: f64) {
        for reach in REACHES {
            gather(logits, law.logit_at(-reach), &mut self.candidates);
            if candidate_mass(law, &self.candidates) as f64 >= needed {
                return;
            }
        }
    }
}

/// Moves the nucleus to the front and returns its size: the smallest number of most likely tokens with at
/// least the mass `needed`, at least 1. Bisection over a quickselect: linear time.
fn nucleus_len(candidates: &mut [Candidate], law: Law, needed: f64) -> usize {
    // The size is in low + 1 ..= high; tokens before low are the most likely ones and have mass `before`.
    let (mut low, mut high) = (0, candidates.len());
    let mut before = 0;
    while high - low > 1 {
        let half = (high - low) / 2;
        let Some(open) = candidates.get_mut(low..high) else {
            break;
        };
        let (upper, _, _) = open.select_nth_unstable_by(half, by_likelihood);
        let through = before + candidate_mass(law, upper);
        if through as f64 >= needed {
            high = low + half;
        } else {
            low += half;
            before = through;
        }
    }
    high
}

fn candidate_mass(law: Law, candidates: &[Candidate]) -> i64 {
    law.mass(candidates, |candidate| candidate.logit)
}

/// Most likely first, ties by lower id.
pub(super) fn by_likelihood(a: &Candidate, b: &Candidate) -> Ordering {
    b.logit.total_cmp(&a.logit).then(a.token.cmp(&b.token))
}
