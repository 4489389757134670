//! `RowSampler`: chooses the tokens of several rows at once, on the kernels' threads.
//!
//! A choice depends on its own row alone, so the number of threads changes no result.

use std::sync::{Mutex, MutexGuard, PoisonError};

use millpond_scheduler::{PositionLogprobs, RowError, TokenId};

use crate::kernels::cpu::CpuKernels;
use crate::sampling::logprobs::position_logprobs;
use crate::sampling::{Sampler, SamplingState};

/// What one choice depends on.
pub(super) struct SamplingJob<'a> {
    /// Raw logits, vocab_size of them.
    pub logits: &'a [f32],
    pub state: &'a SamplingState,
    /// Absolute position of the token to choose.
    pub position: u32,
    /// Report the choice's log-probability and this many alternatives.
    pub num_top: Option<u32>,
}

/// A chosen token.
pub(super) struct Choice {
    pub token: TokenId,
    pub logprobs: Option<PositionLogprobs>,
}

/// One lane per thread; each takes a contiguous share of the rows.
pub(super) struct RowSampler {
    /// Every lane is touched by one thread at a time, so its lock is never contended.
    lanes: Vec<Mutex<Lane>>,
}

struct Lane {
    sampler: Sampler,
    choices: Vec<Result<Choice, RowError>>,
}

impl RowSampler {
    pub fn new(num_threads: usize, vocab_size: usize) -> Self {
        let lane = |_| {
            Mutex::new(Lane {
                sampler: Sampler::new(vocab_size),
                choices: Vec::new(),
            })
        };
        RowSampler {
            lanes: (0..num_threads).map(lane).collect(),
        }
    }

    /// Runs `job` and chooses for every index below `num_rows`; `drain` gives the choices in order.
    pub fn run<'a>(
        &mut self,
        kernels: &CpuKernels,
        num_rows: usize,
        job: &(dyn Fn(usize) -> Result<SamplingJob<'a>, RowError> + Sync),
    ) {
        self.clear();
        let share = num_rows.div_ceil(self.lanes.len()).max(1);
        let num_lanes = num_rows.div_ceil(share);
        kernels.for_each(num_lanes, &|index| {
            let mut lane = lock(&self.lanes[index]);
            let rows = index * share..num_rows.min((index + 1) * share);
            lane.choose(rows.map(job));
        });
    }

    /// A step that panicked may have left choices behind.
    fn clear(&mut self) {
        for lane in &mut self.lanes {
            get_mut(lane).choices.clear();
        }
    }

    /// Takes the choices of the last run, in the order of its rows.
    pub fn drain(&mut self) -> impl Iterator<Item = Result<Choice, RowError>> + '_ {
        let lanes = self.lanes.iter_mut();
        lanes.flat_map(|lane| get_mut(lane).choices.drain(..))
    }
}

impl Lane {
    fn choose<'a>(&mut self, jobs: impl Iterator<Item = Result<SamplingJob<'a>, RowError>>) {
        for job in jobs {
            let choice = job.and_then(|job| choose(&mut self.sampler, &job));
            self.choices.push(choice);
        }
    }
}

fn choose(sampler: &mut Sampler, job: &SamplingJob<'_>) -> Result<Choice, RowError> {
    let token = sampler.sample(job.logits, job.state, job.position)?;
    let logprobs = job
        .num_top
        .map(|num_top| position_logprobs(job.logits, token, num_top));
    Ok(Choice { token, logprobs })
}

// A lock poisoned by a panic of an earlier step is usable: every run clears the choices first.

fn lock(lane: &Mutex<Lane>) -> MutexGuard<'_, Lane> {
    lane.lock().unwrap_or_else(PoisonError::into_inner)
}

fn get_mut(lane: &mut Mutex<Lane>) -> &mut Lane {
    lane.get_mut().unwrap_or_else(PoisonError::into_inner)
}
