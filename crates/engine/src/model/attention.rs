//! `Attention`: the attention half of a layer, from residual to residual.
//!
//! Grouped queries, rotary positions, optional norms of query and key heads, optional sliding window and
//! softcap: all from the config. Which positions a token sees is the batch's `TokenPath`, never decided here.

use super::Step;
use super::linear::{Linear, project};
use super::norm::Norm;
use super::weight_reader::{ModelError, WeightReader};
use super::workspace::Workspace;
use crate::config::{LayerConfig, ModelConfig};
use crate::kernels::cpu::{AttentionBatch, KvLayer, KvShape};

/// Weights of one layer's attention.
pub struct Attention {
    norm: Norm,
    projections: Projections,
    head_norms: Option<HeadNorms>,
    /// Gemma normalises the output before it is added.
    post_norm: Option<Norm>,
    layer: LayerConfig,
}

struct Projections {
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
}

struct HeadNorms {
    query: Norm,
    key: Norm,
}

impl Attention {
    /// Reads the tensors of layer `index`, which must exist in `config`.
    pub fn load(
        reader: &mut WeightReader<'_>,
        config: &ModelConfig,
        index: usize,
    ) -> Result<Self, ModelError> {
        let prefix = format!("layers.{index}");
        let (norm, post_norm) = (
            format!("{prefix}.attn_norm"),
            format!("{prefix}.post_attn_norm"),
        );
        Ok(Attention {
            norm: Norm::load(reader, &norm, config.hidden_size, config.norm_eps)?,
            projections: Projections::load(reader, config, &prefix)?,
            head_norms: HeadNorms::load(reader, config, &prefix)?,
            post_norm: Norm::load_behind(reader, &post_norm, config)?,
            layer: config.layers[index].clone(),
        })
    }

    /// Bytes of the matrices.
    pub fn num_bytes(&self) -> usize {
        self.projections.all().map(Linear::num_bytes).sum()
    }

    /// True when a matrix is quantised.
    pub fn is_quantised(&self) -> bool {
        self.projections.all().any(Linear::is_quantised)
    }

    /// residual += attention(norm(residual)); the batch's keys and values are stored first, so that they are
    /// read as the pool rounds them.
    pub(crate) fn forward(
        &self,
        step: &Step<'_>,
        shape: KvShape,
        kv: &mut KvLayer,
        work: &mut Workspace,
    ) {
        self.project(step, work);
        self.rotate(step, work);
        let num_tokens = step.batch.num_tokens();
        let keys = work.attention.key.rows(num_tokens);
        let values = work.attention.value.rows(num_tokens);
        step.kernels
            .write_kv(shape, kv, keys, values, step.batch.slots());
        self.attend(step, shape, kv, work);
        self.add_output(step, work);
    }

    /// query (tokens, heads, head_dim), key and value (tokens, kv_heads, head_dim) from one shared input.
    fn project(&self, step: &Step<'_>, work: &mut Workspace) {
        let num_tokens = step.batch.num_tokens();
        let normed = self.norm.of(work.residual.rows(num_tokens));
        let Projections {
            query,
            key,
            value,
            output: _,
        } = &self.projections;
        let buffers = &mut work.attention;
        let products = [
            query.product(buffers.query.rows_mut(num_tokens)),
            key.product(buffers.key.rows_mut(num_tokens)),
            value.product(buffers.value.rows_mut(num_tokens)),
        ];
        project(step.kernels, &mut work.input, normed, products);
    }

    /// Normalises the heads if the family does, then turns them by their positions.
    fn rotate(&self, step: &Step<'_>, work: &mut Workspace) {
        let num_tokens = step.batch.num_tokens();
        let query = work.attention.query.rows_mut(num_tokens);
        let key = work.attention.key.rows_mut(num_tokens);
        if let Some(norms) = &self.head_norms {
            norms.query.apply_in_place(step.kernels, query);
            norms.key.apply_in_place(step.kernels, key);
        }
        let ModelConfig {
            num_heads,
            num_kv_heads,
            head_dim,
            ..
        } = *step.config;
        let (positions, table) = (step.batch.positions(), &step.ropes[self.layer.rope]);
        let kernels = step.kernels;
        kernels.rope(query, num_heads, head_dim, positions, table);
        kernels.rope(key, num_kv_heads, head_dim, positions, table);
    }

    /// context (tokens, heads, head_dim) = softmax(query · keysᵀ · scale) · values, along each token's path.
    fn attend(&self, step: &Step<'_>, shape: KvShape, kv: &KvLayer, work: &mut Workspace) {
        let num_tokens = step.batch.num_tokens();
        let batch = AttentionBatch {
            queries: work.attention.query.rows(num_tokens),
            paths: step.batch.paths(),
            blocks: step.batch.blocks(),
            tail_slots: &[],
            num_heads: step.config.num_heads,
            scale: step.config.attention_scale,
            softcap: step.config.attention_softcap,
            window: self.layer.window,
        };
        let context = work.attention.context.rows_mut(num_tokens);
        step.kernels.attention(shape, kv, &batch, context);
    }

    /// residual += post_norm(context · outputᵀ)
    fn add_output(&self, step: &Step<'_>, work: &mut Workspace) {
        let num_tokens = step.batch.num_tokens();
        let context = work.attention.context.rows(num_tokens);
        let residual = work.residual.rows_mut(num_tokens);
        let (kernels, output) = (step.kernels, &self.projections.output);
        match &self.post_norm {
            None => project(
                kernels,
                &mut work.input,
                context.into(),
                [output.sum(residual)],
            ),
            Some(norm) => {
                let update = work.update.rows_mut(num_tokens);
                let product = output.product(&mut *update);
                project(kernels, &mut work.input, context.into(), [product]);
                norm.apply_in_place(kernels, update);
                kernels.add(residual, update);
            }
        }
    }
}

impl Projections {
    fn load(
        reader: &mut WeightReader<'_>,
        config: &ModelConfig,
        prefix: &str,
    ) -> Result<Self, ModelError> {
        let hidden = config.hidden_size;
        let (q_size, kv_size) = (config.query_size(), config.kv_size());
        Ok(Projections {
            query: Linear::load(reader, &format!("{prefix}.q"), q_size, hidden)?,
            key: Linear::load(reader, &format!("{prefix}.k"), kv_size, hidden)?,
            value: Linear::load(reader, &format!("{prefix}.v"), kv_size, hidden)?,
            output: Linear::load(reader, &format!("{prefix}.o"), hidden, q_size)?,
        })
    }

    fn all(&self) -> impl Iterator<Item = &Linear> {
        [&self.query, &self.key, &self.value, &self.output].into_iter()
    }
}

impl HeadNorms {
    /// None for families that do not normalise heads.
    fn load(
        reader: &mut WeightReader<'_>,
        config: &ModelConfig,
        prefix: &str,
    ) -> Result<Option<Self>, ModelError> {
        if !config.qk_norm {
            return Ok(None);
        }
        let (width, eps) = (config.head_dim, config.norm_eps);
        Ok(Some(HeadNorms {
            query: Norm::load(reader, &format!("{prefix}.q_norm"), width, eps)?,
            key: Norm::load(reader, &format!("{prefix}.k_norm"), width, eps)?,
        }))
    }
}
