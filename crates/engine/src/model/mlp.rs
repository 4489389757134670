//! `Mlp`: the gated feed-forward half of a layer, from residual to residual.
//!
//! Paper: Shazeer, "GLU Variants Improve Transformer" (2020).

use super::Step;
use super::linear::{Linear, project};
use super::norm::Norm;
use super::weight_reader::{ModelError, WeightReader};
use super::workspace::Workspace;
use crate::config::ModelConfig;
use crate::kernels::cpu::InputRows;

/// Weights of one layer's MLP.
pub struct Mlp {
    norm: Norm,
    gate: Linear,
    up: Linear,
    down: Linear,
    /// Gemma normalises the output before it is added.
    post_norm: Option<Norm>,
}

impl Mlp {
    /// Reads the tensors of layer `index`.
    pub fn load(
        reader: &mut WeightReader<'_>,
        config: &ModelConfig,
        index: usize,
    ) -> Result<Self, ModelError> {
        let (hidden, inner, eps) = (
            config.hidden_size,
            config.intermediate_size,
            config.norm_eps,
        );
        let prefix = format!("layers.{index}");
        Ok(Mlp {
            norm: Norm::load(reader, &format!("{prefix}.mlp_norm"), hidden, eps)?,
            gate: Linear::load(reader, &format!("{prefix}.gate"), inner, hidden)?,
            up: Linear::load(reader, &format!("{prefix}.up"), inner, hidden)?,
            down: Linear::load(reader, &format!("{prefix}.down"), hidden, inner)?,
            post_norm: Norm::load_behind(reader, &format!("{prefix}.post_mlp_norm"), config)?,
        })
    }

    /// Bytes of the matrices.
    pub fn num_bytes(&self) -> usize {
        self.all().map(Linear::num_bytes).sum()
    }

    /// True when a matrix is quantised.
    pub fn is_quantised(&self) -> bool {
        self.all().any(Linear::is_quantised)
    }

    /// residual += post_norm(down(activation(gate(x)) · up(x))), x = norm(residual)
    pub(crate) fn forward(&self, step: &Step<'_>, work: &mut Workspace) {
        let (kernels, num_tokens) = (step.kernels, step.batch.num_tokens());
        let residual = work.residual.rows_mut(num_tokens);
        let gate = work.mlp.gate.rows_mut(num_tokens); // (tokens, intermediate_size)
        let up = work.mlp.up.rows_mut(num_tokens);
        let products = [self.gate.product(&mut *gate), self.up.product(&mut *up)];
        project(kernels, &mut work.input, self.norm.of(residual), products);
        let gated = InputRows::Gated {
            activation: step.config.activation,
            gate,
            up,
        };
        match &self.post_norm {
            None => project(kernels, &mut work.input, gated, [self.down.sum(residual)]),
            Some(norm) => {
                let update = work.update.rows_mut(num_tokens);
                let product = self.down.product(&mut *update);
                project(kernels, &mut work.input, gated, [product]);
                norm.apply_in_place(kernels, update);
                kernels.add(residual, update);
            }
        }
    }

    fn all(&self) -> impl Iterator<Item = &Linear> {
        [&self.gate, &self.up, &self.down].into_iter()
    }
}
