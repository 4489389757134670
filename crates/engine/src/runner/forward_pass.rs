//! `ForwardPass`: the model half of a step, from a plan to logits. It chooses no token.

use millpond_scheduler::{BatchPlan, RowError, Span32};

use crate::config::ModelConfig;
use crate::forward_batch::{BatchError, BatchLimits, ForwardBatch};
use crate::kernels::cpu::CpuKernels;
use crate::kv_pool::KvPool;
use crate::model::{Decoder, Workspace};

/// The decoder with the tensors that it works on.
pub(super) struct ForwardPass {
    decoder: Decoder,
    kv: KvPool,
    work: Workspace,
    batch: ForwardBatch,
    limits: BatchLimits,
}

impl ForwardPass {
    /// Allocates the workspace.
    pub fn new(decoder: Decoder, kv: KvPool, max_batch_tokens: u32) -> Self {
        let max_tokens = max_batch_tokens as usize;
        let limits = BatchLimits {
            max_tokens,
            max_positions: decoder.max_positions(),
            vocab_size: decoder.config().vocab_size,
            num_blocks: kv.shape().num_blocks,
        };
        ForwardPass {
            work: Workspace::new(decoder.config(), max_tokens),
            batch: ForwardBatch::default(),
            decoder,
            kv,
            limits,
        }
    }

    pub fn config(&self) -> &ModelConfig {
        self.decoder.config()
    }

    /// Performs the plan's copies, then computes all tokens of its rows.
    pub fn run(&mut self, kernels: &CpuKernels, plan: &BatchPlan) -> Result<(), BatchError> {
        self.batch.fill(plan, &self.limits)?;
        self.kv.copy_blocks(kernels, &plan.copies);
        self.decoder
            .forward(kernels, &self.batch, &mut self.kv, &mut self.work);
        Ok(())
    }

    /// Parallel to the plan's rows: the row's tokens in the batch, or why it did not run.
    pub fn rows(&self) -> &[Result<Span32, RowError>] {
        self.batch.rows()
    }

    /// Did the computation of these tokens stay finite?
    pub fn is_finite(&self, tokens: Span32) -> bool {
        self.work.is_finite(tokens)
    }

    /// Logits (tokens, vocab_size) after these tokens of the batch, at most `MAX_HEAD_ROWS` of them.
    pub fn logits(
        &mut self,
        kernels: &CpuKernels,
        tokens: impl ExactSizeIterator<Item = u32>,
    ) -> &[f32] {
        self.decoder.logits(kernels, tokens, &mut self.work)
    }
}
