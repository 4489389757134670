//! `Workspace`: the activations of one step, allocated once for the largest step.

use millpond_scheduler::Span32;

use crate::config::ModelConfig;
use crate::kernels::cpu::MatmulInput;

/// Rows whose logits are computed at once. It bounds the logits' memory; at this height the product with
/// the head is limited by arithmetic, so a taller tile would gain nothing.
pub const MAX_HEAD_ROWS: usize = 64;

/// Activations (tokens, width) of every stage; a stage's content is valid until its next use.
pub struct Workspace {
    pub(crate) residual: RowBuffer,
    /// What a half layer adds to the residual.
    pub(crate) update: RowBuffer,
    pub(crate) input: MatmulInput,
    pub(crate) attention: AttentionBuffers,
    pub(crate) mlp: MlpBuffers,
    pub(crate) head: HeadBuffers,
}

pub(crate) struct AttentionBuffers {
    pub query: RowBuffer,
    pub key: RowBuffer,
    pub value: RowBuffer,
    pub context: RowBuffer,
}

pub(crate) struct MlpBuffers {
    pub gate: RowBuffer,
    pub up: RowBuffer,
}

pub(crate) struct HeadBuffers {
    pub residual: RowBuffer,
    pub logits: RowBuffer,
}

impl Workspace {
    /// Room for steps of up to `max_tokens` tokens.
    pub fn new(config: &ModelConfig, max_tokens: usize) -> Self {
        let hidden = |rows| RowBuffer::new(rows, config.hidden_size);
        let tokens = |width| RowBuffer::new(max_tokens, width);
        Workspace {
            residual: hidden(max_tokens),
            update: hidden(max_tokens),
            input: MatmulInput::default(),
            attention: AttentionBuffers {
                query: tokens(config.query_size()),
                key: tokens(config.kv_size()),
                value: tokens(config.kv_size()),
                context: tokens(config.query_size()),
            },
            mlp: MlpBuffers {
                gate: tokens(config.intermediate_size),
                up: tokens(config.intermediate_size),
            },
            head: HeadBuffers {
                residual: hidden(MAX_HEAD_ROWS),
                logits: RowBuffer::new(MAX_HEAD_ROWS, config.vocab_size),
            },
        }
    }

    /// Bytes that a workspace for `max_tokens` grows to, the prepared matmul input included.
    pub fn num_bytes(config: &ModelConfig, max_tokens: usize) -> u64 {
        let (query, kv) = (config.query_size(), config.kv_size());
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        let per_token = 2 * hidden + 2 * query + 2 * kv + 2 * inner;
        let per_head_row = hidden + config.vocab_size;
        let num_values = max_tokens * per_token + MAX_HEAD_ROWS * per_head_row;
        let widest_input = hidden.max(inner).max(query);
        let input = MatmulInput::num_bytes(max_tokens.max(MAX_HEAD_ROWS), widest_input);
        (num_values * size_of::<f32>() + input) as u64
    }

    /// Is every value of the residual vectors of these tokens finite?
    ///
    /// A NaN or an infinity that arose anywhere in a token's computation stays in its residual, so this finds
    /// damaged keys and values of prefill chunks too, whose logits nobody looks at.
    pub fn is_finite(&self, tokens: Span32) -> bool {
        let width = self.residual.width;
        let values =
            &self.residual.values[tokens.start as usize * width..tokens.end as usize * width];
        values.iter().all(|value| value.is_finite())
    }

    /// Copies the residual vectors of `tokens` to the head's rows.
    pub(crate) fn gather_residual(&mut self, tokens: impl ExactSizeIterator<Item = u32>) {
        let width = self.residual.width;
        let rows = self.head.residual.rows_mut(tokens.len());
        for (token, row) in tokens.zip(rows.chunks_exact_mut(width)) {
            let start = token as usize * width;
            row.copy_from_slice(&self.residual.values[start..start + width]);
        }
    }
}

/// A matrix of which a step uses the first rows.
pub(crate) struct RowBuffer {
    values: Vec<f32>,
    width: usize,
}

impl RowBuffer {
    fn new(max_rows: usize, width: usize) -> Self {
        RowBuffer {
            values: vec![0.0; max_rows * width],
            width,
        }
    }

    /// The first `num_rows` rows. Panics beyond the buffer's height, which `ForwardBatch::fill` rules out.
    pub fn rows(&self, num_rows: usize) -> &[f32] {
        &self.values[..num_rows * self.width]
    }

    /// The same, to be written.
    pub fn rows_mut(&mut self, num_rows: usize) -> &mut [f32] {
        &mut self.values[..num_rows * self.width]
    }
}
