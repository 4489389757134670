//! `Linear`: a weight matrix with its optional bias, and products that share one input.

use super::weight_reader::{ModelError, WeightReader};
use crate::kernels::cpu::{CpuKernels, InputRows, MatmulInput, MatmulOutput, PackedMatrix};

/// y = x · weightᵀ + bias
pub struct Linear {
    weight: PackedMatrix,
    bias: Option<Vec<f32>>,
}

impl Linear {
    /// Reads `{name}.weight` (out_features, in_features) and, if the file has one, `{name}.bias`.
    ///
    /// Which biases a family must and must not have is the loader's check.
    pub fn load(
        reader: &mut WeightReader<'_>,
        name: &str,
        out_features: usize,
        in_features: usize,
    ) -> Result<Self, ModelError> {
        Ok(Linear {
            weight: reader.matrix(&format!("{name}.weight"), out_features, in_features)?,
            bias: reader.optional_vector(&format!("{name}.bias"), out_features)?,
        })
    }

    /// Bytes of the matrix.
    pub fn num_bytes(&self) -> usize {
        self.weight.num_bytes()
    }

    /// True when products quantise their input.
    pub fn is_quantised(&self) -> bool {
        self.weight.is_quantised()
    }

    /// The product with this matrix, to be written to `out` (rows, out_features).
    pub fn product<'a>(&'a self, out: &'a mut [f32]) -> MatmulOutput<'a> {
        MatmulOutput {
            weight: &self.weight,
            bias: self.bias.as_deref(),
            add: false,
            out,
        }
    }

    /// The product with this matrix, to be added to `out` (rows, out_features).
    pub fn sum<'a>(&'a self, out: &'a mut [f32]) -> MatmulOutput<'a> {
        MatmulOutput {
            add: true,
            ..self.product(out)
        }
    }
}

/// Multiplies the rows `x` (rows, in_features) with several matrices; the input is prepared once.
///
/// Quantised and float matrices may be mixed: each kind sees its own form of the input, so that a product
/// does not depend on what it is grouped with.
pub fn project<const N: usize>(
    kernels: &CpuKernels,
    input: &mut MatmulInput,
    x: InputRows<'_>,
    mut outputs: [MatmulOutput<'_>; N],
) {
    outputs.sort_unstable_by_key(|output| output.weight.is_quantised());
    let num_float = outputs.partition_point(|output| !output.weight.is_quantised());
    let (float, int8) = outputs.split_at_mut(num_float);
    for group in [float, int8] {
        let Some(first) = group.first() else { continue };
        let cols = first.weight.in_features();
        let quantised = first.weight.is_quantised();
        kernels.load_input(x, x.len() / cols, cols, quantised, input);
        kernels.matmul(input, group);
    }
}
