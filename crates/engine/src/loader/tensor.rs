//! A tensor as it lies in a file: type, shape, bytes.

/// Element or block type of a stored tensor; numbering of GGML for the quantised ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the names are the documentation")]
pub enum TensorType {
    F32,
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2K,
    Q3K,
    Q4K,
    Q5K,
    Q6K,
    /// A type that GGML defines and our kernels do not compute; holds GGML's number.
    Other(u32),
}

/// A tensor under our own name, row-major, last dimension contiguous.
#[derive(Clone, Debug, PartialEq)]
pub struct RawTensor {
    /// Our name, for errors.
    pub name: String,
    /// Element or block type; blocks run along the last dimension.
    pub dtype: TensorType,
    /// For a weight matrix: (out_features, in_features).
    pub shape: Vec<usize>,
    /// Little-endian data.
    pub bytes: Vec<u8>,
}
