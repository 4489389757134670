//! `RowSampler`: chooses the tokens of several rows at once, on the kernels' threads.
//!
//! A choice depends on its own row alone, so neither the number of threads nor their order changes a result.

use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use millpond_scheduler::{PositionLogprobs, RowError, TokenId};

use crate::kernels::cpu::CpuKernels;
use crate::model::MAX_HEAD_ROWS;
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

/// Samplers of all threads, and what they chose for the rows of one tile.
pub(super) struct RowSampler {
    /// By thread, so that no lock is ever contended.
    samplers: Vec<Mutex<Sampler>>,
    choices: Vec<OnceLock<Result<Choice, RowError>>>,
}

impl RowSampler {
    /// For tiles of up to `MAX_HEAD_ROWS` rows.
    pub fn new(num_threads: usize, vocab_size: usize) -> Self {
        let sampler = |_| Mutex::new(Sampler::new(vocab_size));
        RowSampler {
            samplers: (0..num_threads).map(sampler).collect(),
            choices: (0..MAX_HEAD_ROWS).map(|_| OnceLock::new()).collect(),
        }
    }

    /// Chooses for every index below `num_rows`; `drain` gives the choices in order.
    pub fn run<'a>(
        &mut self,
        kernels: &CpuKernels,
        num_rows: usize,
        job: &(dyn Fn(usize) -> Result<SamplingJob<'a>, RowError> + Sync),
    ) {
        // A step that panicked may have left choices behind.
        self.choices
            .iter_mut()
            .for_each(|choice| *choice = OnceLock::new());
        kernels.for_each_worker(num_rows, &|thread, index| {
            let mut sampler = lock(&self.samplers[thread]);
            let choice = job(index).and_then(|job| choose(&mut sampler, &job));
            self.choices[index].get_or_init(|| choice);
        });
    }

    /// Takes the choices of the last run, in the order of its rows.
    pub fn drain(&mut self) -> impl Iterator<Item = Result<Choice, RowError>> + '_ {
        self.choices.iter_mut().map_while(OnceLock::take)
    }
}

fn choose(sampler: &mut Sampler, job: &SamplingJob<'_>) -> Result<Choice, RowError> {
    let token = sampler.sample(job.logits, job.state, job.position)?;
    let logprobs = job
        .num_top
        .map(|num_top| position_logprobs(job.logits, token, num_top));
    Ok(Choice { token, logprobs })
}

/// A sampler whose step panicked is usable: it keeps scratch memory only.
fn lock(sampler: &Mutex<Sampler>) -> MutexGuard<'_, Sampler> {
    sampler.lock().unwrap_or_else(PoisonError::into_inner)
}
