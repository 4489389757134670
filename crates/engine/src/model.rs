//! `Decoder`: one decoder-only transformer, driven by `ModelConfig`; families differ in data alone.
//!
//! It turns a `ForwardBatch` into residual vectors and those into logits. It keeps no state of any
//! sequence: keys and values live in `KvPool`, activations in `Workspace`. It knows no file format.

use crate::config::ModelConfig;
use crate::forward_batch::ForwardBatch;
use crate::kernels::cpu::{CpuKernels, MatmulOutput, PackedMatrix, RopeTable};
use crate::kv_pool::{KvPool, KvType};
use crate::loader::Weights;

pub mod attention;
pub mod linear;
pub mod memory;
pub mod mlp;
pub mod norm;
pub mod token_cost;
pub mod weight_reader;
pub mod workspace;

use attention::Attention;
use linear::{Linear, project};
use mlp::Mlp;
use norm::Norm;
use weight_reader::WeightReader;

pub use memory::{MemoryNeeds, StepLimits};
pub use token_cost::TokenCost;
pub use weight_reader::ModelError;
pub use workspace::{MAX_HEAD_ROWS, Workspace};

/// The weights of one model, packed for the kernels, and what to do with them.
pub struct Decoder {
    config: ModelConfig,
    embedding: PackedMatrix,
    ropes: Vec<RopeTable>,
    max_positions: usize,
    layers: Vec<Layer>,
    final_norm: Norm,
    /// `None`: the embedding matrix serves as head.
    head: Option<Linear>,
}

struct Layer {
    attention: Attention,
    mlp: Mlp,
}

/// What every layer of one step reads.
#[derive(Clone, Copy)]
pub(crate) struct Step<'a> {
    pub kernels: &'a CpuKernels,
    pub config: &'a ModelConfig,
    pub ropes: &'a [RopeTable],
    pub batch: &'a ForwardBatch,
}

impl Decoder {
    /// Reads and packs every weight, one tensor at a time.
    ///
    /// `max_positions` is the length of the rotary tables. `progress` gets the bytes read so far.
    pub fn load(
        kernels: &CpuKernels,
        config: ModelConfig,
        weights: &Weights,
        max_positions: usize,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Self, ModelError> {
        let mut reader = WeightReader::new(kernels, weights, progress);
        let (vocab_size, hidden_size) = (config.vocab_size, config.hidden_size);
        let embedding = reader.matrix("embed.weight", vocab_size, hidden_size)?;
        let layers = (0..config.layers.len())
            .map(|index| Layer::load(&mut reader, &config, index))
            .collect::<Result<_, _>>()?;
        let final_norm = Norm::load(&mut reader, "final_norm", hidden_size, config.norm_eps)?;
        let head = Self::load_head(&mut reader, &config)?;
        let table = |rope| RopeTable::new(rope, max_positions);
        Ok(Decoder {
            ropes: config.ropes.iter().map(table).collect(),
            max_positions,
            config,
            embedding,
            layers,
            final_norm,
            head,
        })
    }

    fn load_head(
        reader: &mut WeightReader<'_>,
        config: &ModelConfig,
    ) -> Result<Option<Linear>, ModelError> {
        if config.tied_embeddings {
            return Ok(None);
        }
        Linear::load(reader, "lm_head", config.vocab_size, config.hidden_size).map(Some)
    }

    /// What the model looks like.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Positions that the rotary tables cover.
    pub fn max_positions(&self) -> usize {
        self.max_positions
    }

    /// The type of keys and values that suits the weights.
    pub fn kv_type(&self) -> KvType {
        let quantised = |layer: &Layer| layer.attention.is_quantised() || layer.mlp.is_quantised();
        KvType::for_weights(self.layers.iter().any(quantised))
    }

    /// Bytes of packed matrices.
    pub fn num_bytes(&self) -> usize {
        let in_layer = |layer: &Layer| layer.attention.num_bytes() + layer.mlp.num_bytes();
        let in_layers: usize = self.layers.iter().map(in_layer).sum();
        let head = self.head.as_ref().map_or(0, Linear::num_bytes);
        self.embedding.num_bytes() + in_layers + head
    }

    /// Computes every token of `batch`: writes its keys and values to `kv` and leaves its residual vector,
    /// after the last layer, in `work`.
    ///
    /// The result for a token depends on the tokens of its own sequence alone, bit for bit (A6).
    pub fn forward(
        &self,
        kernels: &CpuKernels,
        batch: &ForwardBatch,
        kv: &mut KvPool,
        work: &mut Workspace,
    ) {
        if batch.num_tokens() == 0 {
            return;
        }
        self.embed(batch, work);
        let step = Step {
            kernels,
            config: &self.config,
            ropes: &self.ropes,
            batch,
        };
        let shape = kv.shape();
        for (layer, layer_kv) in self.layers.iter().zip(kv.layers_mut()) {
            layer.attention.forward(&step, shape, layer_kv, work);
            layer.mlp.forward(&step, work);
        }
    }

    /// Logits (tokens, vocab_size) after the given tokens of the batch that `forward` computed last.
    ///
    /// At most `MAX_HEAD_ROWS` tokens at once: callers go through longer lists in tiles.
    pub fn logits<'w>(
        &self,
        kernels: &CpuKernels,
        tokens: impl ExactSizeIterator<Item = u32>,
        work: &'w mut Workspace,
    ) -> &'w [f32] {
        let num_rows = tokens.len();
        assert!(
            num_rows <= MAX_HEAD_ROWS,
            "{num_rows} rows do not fit the head's tile"
        );
        work.gather_residual(tokens);
        let normed = self.final_norm.of(work.head.residual.rows(num_rows));
        let logits = work.head.logits.rows_mut(num_rows);
        let product = self.head_product(&mut *logits);
        project(kernels, &mut work.input, normed, [product]);
        if let Some(cap) = self.config.logit_softcap {
            kernels.softcap(logits, cap);
        }
        logits
    }

    /// The product with the head, to be written to `logits` (rows, vocab_size).
    fn head_product<'a>(&'a self, logits: &'a mut [f32]) -> MatmulOutput<'a> {
        match &self.head {
            Some(head) => head.product(logits),
            None => MatmulOutput {
                weight: &self.embedding,
                bias: None,
                add: false,
                out: logits,
            },
        }
    }

    /// residual (tokens, hidden_size) = embedding rows · embedding_scale
    fn embed(&self, batch: &ForwardBatch, work: &mut Workspace) {
        let (width, scale) = (self.config.hidden_size, self.config.embedding_scale);
        let residual = work.residual.rows_mut(batch.num_tokens());
        let rows = residual.chunks_exact_mut(width);
        for (token, row) in batch.tokens().iter().zip(rows) {
            self.embedding.row(token.0 as usize, row);
            row.iter_mut().for_each(|x| *x *= scale);
        }
    }
}

impl Layer {
    fn load(
        reader: &mut WeightReader<'_>,
        config: &ModelConfig,
        index: usize,
    ) -> Result<Self, ModelError> {
        Ok(Layer {
            attention: Attention::load(reader, config, index)?,
            mlp: Mlp::load(reader, config, index)?,
        })
    }
}
