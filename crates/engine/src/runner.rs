//! `DecoderRunner`: executes plans with a real model; the `ModelRunner` of the engine thread.
//!
//! It makes no scheduling decision (A3). What it keeps per sequence is a cache: a pure function of what
//! `BatchPlan::started` says and of the tokens chosen since, rebuilt after preemption.

use std::collections::BTreeMap;
use std::sync::Arc;

use millpond_scheduler::{
    BatchPlan, ModelOutput, ModelRunner, OutputRow, PositionLogprobs, Request, Row, RowError,
    RowVerdict, RunnerError, SequenceId, Span32, StartedSequence,
};

use crate::config::ModelConfig;
use crate::forward_batch::BatchError;
use crate::kernels::cpu::CpuKernels;
use crate::kv_pool::KvPool;
use crate::model::{Decoder, MAX_HEAD_ROWS};
use crate::sampling::SamplingState;

mod forward_pass;
mod prompt_scores;
mod row_sampler;

use forward_pass::ForwardPass;
use prompt_scores::{ScoredPrompt, score};
use row_sampler::{Choice, RowSampler, SamplingJob};

/// One model, its KV pool and the sampling state of the sequences that run.
pub struct DecoderRunner {
    kernels: CpuKernels,
    pass: ForwardPass,
    sequences: BTreeMap<SequenceId, LiveSequence>,
    sampler: RowSampler,
    /// The rows to sample in this step, in order.
    sampled: Vec<SampledRow>,
}

struct LiveSequence {
    request: Arc<Request>,
    sampling: SamplingState,
}

/// A row whose next token is wanted.
#[derive(Clone, Copy)]
struct SampledRow {
    /// Index into the plan's rows.
    row: usize,
    sequence: SequenceId,
    /// The row's last token, as an index into the batch.
    last_token: u32,
    /// Absolute position of the token to choose.
    position: u32,
}

impl ModelRunner for DecoderRunner {
    fn execute(&mut self, plan: &BatchPlan, output: &mut ModelOutput) -> Result<(), RunnerError> {
        output.clear();
        self.follow_sequences(plan);
        self.forward(plan)?;
        self.open_rows(plan, output);
        self.score_prompts(plan, output);
        self.sample(plan, output);
        Ok(())
    }
}

impl DecoderRunner {
    /// A runner for steps of up to `max_batch_tokens` tokens over the blocks of `kv`, which must have been made
    /// for the decoder's config.
    pub fn new(kernels: CpuKernels, decoder: Decoder, kv: KvPool, max_batch_tokens: u32) -> Self {
        let sampler = RowSampler::new(kernels.num_threads(), decoder.config().vocab_size);
        DecoderRunner {
            pass: ForwardPass::new(decoder, kv, max_batch_tokens),
            kernels,
            sequences: BTreeMap::new(),
            sampler,
            sampled: Vec::new(),
        }
    }

    /// The model's configuration.
    pub fn config(&self) -> &ModelConfig {
        self.pass.config()
    }

    /// Copies and forward pass of `plan`, without sampling; `execute` begins with it. Then `logits` may be read.
    pub fn forward(&mut self, plan: &BatchPlan) -> Result<(), RunnerError> {
        let failed = |error: BatchError| RunnerError {
            step: plan.step,
            message: error.to_string(),
        };
        self.pass.run(&self.kernels, plan).map_err(failed)
    }

    /// Raw logits (tokens, vocab_size) after the given tokens of the last plan, at most `MAX_HEAD_ROWS` at once.
    /// Tokens count through the rows that were not refused.
    pub fn logits(&mut self, tokens: impl ExactSizeIterator<Item = u32>) -> &[f32] {
        self.pass.logits(&self.kernels, tokens)
    }

    /// Forgets ended sequences and sets up started ones.
    fn follow_sequences(&mut self, plan: &BatchPlan) {
        for id in &plan.ended {
            self.sequences.remove(id);
        }
        for started in &plan.started {
            self.sequences
                .insert(started.id, LiveSequence::new(started));
        }
    }

    /// One output row per plan row: computed, or failed with the reason.
    fn open_rows(&self, plan: &BatchPlan, output: &mut ModelOutput) {
        for (row, span) in plan.rows.iter().zip(self.pass.rows()) {
            let outcome = self.check_computed(row, span);
            output
                .rows
                .push(outcome.map_or_else(OutputRow::failed, computed_row));
        }
    }

    fn check_computed(
        &self,
        row: &Row,
        span: &Result<Span32, RowError>,
    ) -> Result<Span32, RowError> {
        let span = span.clone()?;
        find_sequence(&self.sequences, row.sequence)?;
        if !self.pass.is_finite(span) {
            return Err(RowError::NonFiniteLogits);
        }
        Ok(span)
    }

    /// Log-probabilities of prompt tokens, for the rows that ask.
    fn score_prompts(&mut self, plan: &BatchPlan, output: &mut ModelOutput) {
        let ModelOutput {
            rows,
            prompt_logprobs,
            ..
        } = output;
        for (index, (row, out)) in plan.rows.iter().zip(rows).enumerate() {
            if row.prompt_logprobs.is_empty() || has_failed(out) {
                continue;
            }
            let start = prompt_logprobs.len();
            let scored = self.score_row(index, row, prompt_logprobs);
            match scored {
                Ok(()) => out.prompt_logprobs = span_of(start, prompt_logprobs.len()),
                Err(error) => {
                    prompt_logprobs.truncate(start);
                    *out = OutputRow::failed(error);
                }
            }
        }
    }

    /// Appends the scores of one row; on failure some may have been appended.
    fn score_row(
        &mut self,
        index: usize,
        row: &Row,
        scores: &mut Vec<PositionLogprobs>,
    ) -> Result<(), RowError> {
        let span = self.pass.rows()[index].clone()?;
        let sequence = find_sequence(&self.sequences, row.sequence)?;
        let prompt = ScoredPrompt::new(row, span, &sequence.request)?;
        score(&mut self.pass, &self.kernels, &prompt, scores)
    }

    /// Chooses the next token of every row that asks for one, a tile of rows at a time.
    fn sample(&mut self, plan: &BatchPlan, output: &mut ModelOutput) {
        let mut sampled = std::mem::take(&mut self.sampled);
        self.list_sampled(plan, output, &mut sampled);
        for tile in sampled.chunks(MAX_HEAD_ROWS) {
            self.choose(tile);
            self.deliver(tile, output);
        }
        self.sampled = sampled;
    }

    fn list_sampled(&self, plan: &BatchPlan, output: &ModelOutput, sampled: &mut Vec<SampledRow>) {
        sampled.clear();
        let rows = plan.rows.iter().zip(self.pass.rows()).zip(&output.rows);
        for (index, ((row, span), out)) in rows.enumerate() {
            let Ok(span) = span else { continue };
            if row.sample && !has_failed(out) {
                sampled.push(SampledRow {
                    row: index,
                    sequence: row.sequence,
                    last_token: span.end - 1,
                    position: row.first_position + span.len(),
                });
            }
        }
    }

    /// Leaves one choice per row of `tile` in the sampler.
    fn choose(&mut self, tile: &[SampledRow]) {
        let vocab_size = self.pass.config().vocab_size;
        let tokens = tile.iter().map(|row| row.last_token);
        let logits = self.pass.logits(&self.kernels, tokens);
        let sequences = &self.sequences;
        let job = |index: usize| {
            let row = &tile[index];
            let sequence = find_sequence(sequences, row.sequence)?;
            Ok(SamplingJob {
                logits: &logits[index * vocab_size..][..vocab_size],
                state: &sequence.sampling,
                position: row.position,
                num_top: sequence.request.sampling.logprobs,
            })
        };
        self.sampler.run(&self.kernels, tile.len(), &job);
    }

    /// Hands the choices out and lets the sequences' sampling states follow.
    fn deliver(&mut self, tile: &[SampledRow], output: &mut ModelOutput) {
        for (row, choice) in tile.iter().zip(self.sampler.drain()) {
            match choice {
                Ok(choice) => {
                    if let Some(sequence) = self.sequences.get_mut(&row.sequence) {
                        sequence.sampling.accept(choice.token);
                    }
                    push_choice(output, row.row, choice);
                }
                Err(error) => output.rows[row.row] = OutputRow::failed(error),
            }
        }
    }
}

impl LiveSequence {
    fn new(started: &StartedSequence) -> Self {
        LiveSequence {
            request: Arc::clone(&started.request),
            sampling: SamplingState::new(&started.request, started.choice, &started.output),
        }
    }
}

fn find_sequence(
    sequences: &BTreeMap<SequenceId, LiveSequence>,
    id: SequenceId,
) -> Result<&LiveSequence, RowError> {
    let unknown = || RowError::Inconsistent(format!("sequence {} was never started", id.0));
    sequences.get(&id).ok_or_else(unknown)
}

fn computed_row(span: Span32) -> OutputRow {
    OutputRow {
        tokens: Span32::default(),
        num_computed: span.len(),
        logprobs: Span32::default(),
        prompt_logprobs: Span32::default(),
        verdict: RowVerdict::Continue,
    }
}

fn has_failed(row: &OutputRow) -> bool {
    matches!(row.verdict, RowVerdict::Failed(_))
}

fn push_choice(output: &mut ModelOutput, row: usize, choice: Choice) {
    let (num_tokens, num_logprobs) = (output.tokens.len(), output.logprobs.len());
    output.tokens.push(choice.token);
    output.logprobs.extend(choice.logprobs);
    let out = &mut output.rows[row];
    out.tokens = span_of(num_tokens, output.tokens.len());
    out.logprobs = span_of(num_logprobs, output.logprobs.len());
}

fn span_of(start: usize, end: usize) -> Span32 {
    Span32 {
        start: start as u32,
        end: end as u32,
    }
}
