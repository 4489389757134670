//! `Norm`: root mean square normalisation with a learned weight.
//!
//! Paper: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019). Families that store weight − 1
//! were normalised by the loader.

use super::weight_reader::{ModelError, WeightReader};
use crate::config::{ModelConfig, NormPlacement};
use crate::kernels::cpu::{CpuKernels, InputRows};

/// y = x / rms(x) · weight, row by row.
pub struct Norm {
    weight: Vec<f32>,
    eps: f32,
}

impl Norm {
    /// Reads `{name}.weight`, `width` values.
    pub fn load(
        reader: &mut WeightReader<'_>,
        name: &str,
        width: usize,
        eps: f32,
    ) -> Result<Self, ModelError> {
        let weight = reader.vector(&format!("{name}.weight"), width)?;
        Ok(Norm { weight, eps })
    }

    /// The norm behind half a layer, where the family has one.
    pub fn load_behind(
        reader: &mut WeightReader<'_>,
        name: &str,
        config: &ModelConfig,
    ) -> Result<Option<Self>, ModelError> {
        match config.norms {
            NormPlacement::Pre => Ok(None),
            NormPlacement::Sandwich => {
                Norm::load(reader, name, config.hidden_size, config.norm_eps).map(Some)
            }
        }
    }

    /// norm(x), (rows, width), as the input of products.
    pub fn of<'a>(&'a self, x: &'a [f32]) -> InputRows<'a> {
        InputRows::Normed {
            x,
            weight: &self.weight,
            eps: self.eps,
        }
    }

    /// x = norm(x); (rows, width).
    pub fn apply_in_place(&self, kernels: &CpuKernels, x: &mut [f32]) {
        kernels.rms_norm_in_place(x, &self.weight, self.eps);
    }
}
