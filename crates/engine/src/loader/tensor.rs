//! A tensor as it lies in a file: type, shape, bytes.
//!
//! It knows how many bytes a type takes; what the bytes mean is the kernels' business.

use std::fmt;

/// Element or block type of a stored tensor; numbering of GGML for the quantised ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "the names are the documentation")]
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

/// What GGML says of one type number.
struct GgmlType {
    number: u32,
    name: &'static str,
    block_elements: usize,
    block_bytes: usize,
}

const fn ggml(
    number: u32,
    name: &'static str,
    block_elements: usize,
    block_bytes: usize,
) -> GgmlType {
    GgmlType {
        number,
        name,
        block_elements,
        block_bytes,
    }
}

/// Every type that GGML defines today. Numbers left out (4, 5, 31 to 33, 36 to 38) were removed from the format.
const GGML_TYPES: &[GgmlType] = &[
    ggml(0, "F32", 1, 4),
    ggml(1, "F16", 1, 2),
    ggml(2, "Q4_0", 32, 18),
    ggml(3, "Q4_1", 32, 20),
    ggml(6, "Q5_0", 32, 22),
    ggml(7, "Q5_1", 32, 24),
    ggml(8, "Q8_0", 32, 34),
    ggml(9, "Q8_1", 32, 36),
    ggml(10, "Q2_K", 256, 84),
    ggml(11, "Q3_K", 256, 110),
    ggml(12, "Q4_K", 256, 144),
    ggml(13, "Q5_K", 256, 176),
    ggml(14, "Q6_K", 256, 210),
    ggml(15, "Q8_K", 256, 292),
    ggml(16, "IQ2_XXS", 256, 66),
    ggml(17, "IQ2_XS", 256, 74),
    ggml(18, "IQ3_XXS", 256, 98),
    ggml(19, "IQ1_S", 256, 50),
    ggml(20, "IQ4_NL", 32, 18),
    ggml(21, "IQ3_S", 256, 110),
    ggml(22, "IQ2_S", 256, 82),
    ggml(23, "IQ4_XS", 256, 136),
    ggml(24, "I8", 1, 1),
    ggml(25, "I16", 1, 2),
    ggml(26, "I32", 1, 4),
    ggml(27, "I64", 1, 8),
    ggml(28, "F64", 1, 8),
    ggml(29, "IQ1_M", 256, 56),
    ggml(30, "BF16", 1, 2),
    ggml(34, "TQ1_0", 256, 54),
    ggml(35, "TQ2_0", 256, 66),
    ggml(39, "MXFP4", 32, 17),
    ggml(40, "NVFP4", 64, 36),
    ggml(41, "Q1_0", 128, 18),
];

/// Stands for a number that GGML does not define; holds nothing, so that no size can be derived from it.
const UNDEFINED: GgmlType = ggml(u32::MAX, "undefined", 0, 0);

impl TensorType {
    /// The type with GGML's `number`; none when GGML never defined or has removed it.
    pub fn from_ggml(number: u32) -> Option<Self> {
        let known = GGML_TYPES.iter().any(|entry| entry.number == number);
        known.then(|| {
            TensorType::COMPUTED
                .into_iter()
                .find(|dtype| dtype.ggml_number() == number)
                .unwrap_or(TensorType::Other(number))
        })
    }

    /// The types that our kernels compute.
    pub const COMPUTED: [TensorType; 13] = [
        TensorType::F32,
        TensorType::F16,
        TensorType::BF16,
        TensorType::Q4_0,
        TensorType::Q4_1,
        TensorType::Q5_0,
        TensorType::Q5_1,
        TensorType::Q8_0,
        TensorType::Q2K,
        TensorType::Q3K,
        TensorType::Q4K,
        TensorType::Q5K,
        TensorType::Q6K,
    ];

    /// GGML's number.
    pub fn ggml_number(self) -> u32 {
        match self {
            TensorType::F32 => 0,
            TensorType::F16 => 1,
            TensorType::BF16 => 30,
            TensorType::Q4_0 => 2,
            TensorType::Q4_1 => 3,
            TensorType::Q5_0 => 6,
            TensorType::Q5_1 => 7,
            TensorType::Q8_0 => 8,
            TensorType::Q2K => 10,
            TensorType::Q3K => 11,
            TensorType::Q4K => 12,
            TensorType::Q5K => 13,
            TensorType::Q6K => 14,
            TensorType::Other(number) => number,
        }
    }

    /// GGML's name: `Q4_1`, `BF16`.
    pub fn name(self) -> &'static str {
        self.entry().name
    }

    /// Elements in one block; 1 for plain types.
    pub fn block_elements(self) -> usize {
        self.entry().block_elements
    }

    /// Bytes of one block.
    pub fn block_bytes(self) -> usize {
        self.entry().block_bytes
    }

    /// Stored in blocks with shared scales, not as plain numbers.
    pub fn is_quantised(self) -> bool {
        self.block_elements() > 1
    }

    /// Our kernels compute products with it.
    pub fn is_computed(self) -> bool {
        !matches!(self, TensorType::Other(_))
    }

    /// Bytes of a row-major tensor of this shape; none when its rows are no whole blocks or the size overflows.
    pub fn num_bytes(self, shape: &[usize]) -> Option<u64> {
        let entry = self.entry();
        let row = shape.last().copied().unwrap_or(1);
        if row.checked_rem(entry.block_elements)? != 0 {
            return None;
        }
        let blocks_per_row = u64::try_from(row / entry.block_elements).ok()?;
        let leading = shape.iter().rev().skip(1);
        let num_blocks = leading
            .map(|dim| *dim as u64)
            .try_fold(blocks_per_row, |blocks: u64, dim| blocks.checked_mul(dim))?;
        num_blocks.checked_mul(entry.block_bytes as u64)
    }

    fn entry(self) -> &'static GgmlType {
        let number = self.ggml_number();
        GGML_TYPES
            .iter()
            .find(|entry| entry.number == number)
            .unwrap_or(&UNDEFINED)
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_types_are_one_to_one() {
        for dtype in TensorType::COMPUTED {
            assert_eq!(TensorType::from_ggml(dtype.ggml_number()), Some(dtype));
        }
        for number in 0..1000 {
            if let Some(dtype) = TensorType::from_ggml(number) {
                assert_eq!(dtype.ggml_number(), number);
                assert_ne!(dtype.name(), UNDEFINED.name);
            }
        }
    }

    #[test]
    fn removed_and_undefined_numbers_are_no_types() {
        for number in [4, 5, 31, 32, 33, 36, 37, 38, 42, 1 << 31, u32::MAX] {
            assert_eq!(TensorType::from_ggml(number), None, "{number}");
        }
        assert_eq!(TensorType::Other(4).num_bytes(&[32]), None);
    }

    #[test]
    fn sizes_follow_blocks() {
        let check = |dtype: TensorType, shape: &[usize], expected: Option<u64>| {
            assert_eq!(dtype.num_bytes(shape), expected, "{dtype} {shape:?}");
        };
        check(TensorType::F32, &[3, 5], Some(60));
        check(TensorType::F32, &[], Some(4));
        check(TensorType::Q4_1, &[3, 64], Some(120));
        check(TensorType::Q6K, &[2, 512], Some(840));
        check(TensorType::Q4_0, &[3, 33], None);
        check(TensorType::F32, &[usize::MAX, 2], None);
        check(TensorType::Q4_0, &[usize::MAX, 32], None);
        check(TensorType::Other(39), &[1, 32], Some(17));
    }
}
