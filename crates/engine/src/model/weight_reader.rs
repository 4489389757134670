//! `WeightReader`: takes tensors from a model file, checks their shape and packs or widens them.

use half::{bf16, f16};

use crate::kernels::cpu::{CpuKernels, KernelError, PackedMatrix};
use crate::loader::{LoadError, RawTensor, TensorType, Weights};

/// Why the weights of a model could not be used.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The file has not what the configuration promises.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// No kernel computes this tensor.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// A tensor has another shape than the configuration says.
    #[error("tensor {name}: shape {shape:?}, expected {expected:?}")]
    Shape {
        /// Our name of the tensor.
        name: String,
        /// What it has.
        shape: Vec<usize>,
        /// What the configuration says.
        expected: Vec<usize>,
    },
    /// A norm weight or bias is stored in a type that is meant for matrices.
    #[error("tensor {name}: a vector of type {dtype:?}; expected F32, F16 or BF16")]
    VectorType {
        /// Our name of the tensor.
        name: String,
        /// Its type.
        dtype: TensorType,
    },
}

/// Reads tensors one at a time, so that a file is never in memory twice.
pub struct WeightReader<'a> {
    kernels: &'a CpuKernels,
    weights: &'a Weights,
    bytes_read: u64,
    progress: &'a mut dyn FnMut(u64),
}

impl<'a> WeightReader<'a> {
    /// `progress` gets the bytes read so far after every tensor.
    pub fn new(
        kernels: &'a CpuKernels,
        weights: &'a Weights,
        progress: &'a mut dyn FnMut(u64),
    ) -> Self {
        WeightReader {
            kernels,
            weights,
            bytes_read: 0,
            progress,
        }
    }

    /// A packed matrix of shape (out_features, in_features).
    pub fn matrix(
        &mut self,
        name: &str,
        out_features: usize,
        in_features: usize,
    ) -> Result<PackedMatrix, ModelError> {
        let tensor = self.read(name, &[out_features, in_features])?;
        Ok(PackedMatrix::pack(self.kernels, &tensor)?)
    }

    /// A vector of `len` values, widened to f32.
    pub fn vector(&mut self, name: &str, len: usize) -> Result<Vec<f32>, ModelError> {
        let tensor = self.read(name, &[len])?;
        widen(&tensor)
    }

    /// The same if the file has it.
    pub fn optional_vector(
        &mut self,
        name: &str,
        len: usize,
    ) -> Result<Option<Vec<f32>>, ModelError> {
        match self.weights.find(name) {
            Some(_) => self.vector(name, len).map(Some),
            None => Ok(None),
        }
    }

    fn read(&mut self, name: &str, expected: &[usize]) -> Result<RawTensor, ModelError> {
        let tensor = self.weights.tensor(name)?;
        if tensor.shape != expected {
            return Err(ModelError::Shape {
                name: tensor.name,
                shape: tensor.shape,
                expected: expected.to_vec(),
            });
        }
        self.bytes_read += tensor.bytes.len() as u64;
        (self.progress)(self.bytes_read);
        Ok(tensor)
    }
}

/// Widening is exact for all three types.
fn widen(tensor: &RawTensor) -> Result<Vec<f32>, ModelError> {
    let bytes = &tensor.bytes;
    let halves = || bytes.as_chunks::<2>().0.iter();
    match tensor.dtype {
        TensorType::F32 => {
            let words = bytes.as_chunks::<4>().0.iter();
            Ok(words.map(|word| f32::from_le_bytes(*word)).collect())
        }
        TensorType::F16 => Ok(halves()
            .map(|half| f16::from_le_bytes(*half).to_f32())
            .collect()),
        TensorType::BF16 => Ok(halves()
            .map(|half| bf16::from_le_bytes(*half).to_f32())
            .collect()),
        dtype => Err(ModelError::VectorType {
            name: tensor.name.clone(),
            dtype,
        }),
    }
}
