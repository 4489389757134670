//! Bounded reader of safetensors headers.
//!
//! It reads no tensor data. Stricter than the format's own library where that is lenient: a name may occur once,
//! the number of tensors and of dimensions is capped. Tensors must fill the data without hole, overlap or tail.

use std::collections::BTreeMap;
use std::fmt;
use std::io::Read;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::header::{HeaderError, StoredTensor, StoredType};
use super::tensor::TensorType;

/// Everything before the tensor data.
#[derive(Debug)]
pub(super) struct SafetensorsHeader {
    /// By offset; offsets count from the start of the file.
    pub tensors: Vec<StoredTensor>,
    /// Where the tensor data starts.
    pub data_start: u64,
}

/// The cap of the format's own library.
const MAX_HEADER_BYTES: u64 = 100_000_000;
const MAX_TENSORS: usize = 1 << 17;
const MAX_DIMENSIONS: usize = 8;
/// Bytes of the header's length in front of it.
const PREFIX_BYTES: u64 = 8;
/// The one entry of the header that is no tensor.
const METADATA_KEY: &str = "__metadata__";

/// Reads the header of a file of `file_len` bytes from its first byte on.
pub(super) fn read_header(
    source: &mut dyn Read,
    file_len: u64,
) -> Result<SafetensorsHeader, HeaderError> {
    let json = read_json(source, file_len)?;
    let Entries(entries) = serde_json::from_str(&json)
        .map_err(|error| HeaderError::new("header", error.to_string()))?;
    let data_start = PREFIX_BYTES + json.len() as u64;
    let mut tensors = entries
        .into_iter()
        .map(|(name, entry)| entry.into_tensor(name))
        .collect::<Result<Vec<_>, _>>()?;
    tensors.sort_by_key(|tensor| (tensor.offset, tensor.num_bytes));
    place_tensors(&mut tensors, data_start, file_len)?;
    Ok(SafetensorsHeader {
        tensors,
        data_start,
    })
}

fn read_json(source: &mut dyn Read, file_len: u64) -> Result<String, HeaderError> {
    let Some(max_len) = file_len.checked_sub(PREFIX_BYTES) else {
        let problem = format!("the file has {file_len} bytes, too few for a header");
        return Err(HeaderError::new("header length", problem));
    };
    let mut prefix = [0; PREFIX_BYTES as usize];
    source.read_exact(&mut prefix)?;
    let len = u64::from_le_bytes(prefix);
    if len > max_len.min(MAX_HEADER_BYTES) {
        let problem = format!("{len}, at most {MAX_HEADER_BYTES} and {max_len} left in the file");
        return Err(HeaderError::new("header length", problem));
    }
    let mut json = vec![0; len as usize];
    source.read_exact(&mut json)?;
    String::from_utf8(json).map_err(|_| HeaderError::new("header", "not UTF-8"))
}

/// The header's JSON object without its metadata.
struct Entries(BTreeMap<String, Entry>);

/// One tensor as the header states it. Unknown keys are ignored, as the format's library does.
#[derive(Deserialize)]
struct Entry {
    dtype: String,
    #[serde(deserialize_with = "bounded_shape")]
    shape: Vec<usize>,
    /// First byte and the byte after the last, from the start of the data.
    data_offsets: (u64, u64),
}

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(EntriesVisitor)
    }
}

struct EntriesVisitor;

impl<'de> Visitor<'de> for EntriesVisitor {
    type Value = Entries;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors by name")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries, A::Error> {
        let mut entries = BTreeMap::new();
        while let Some(name) = map.next_key::<String>()? {
            if name == METADATA_KEY {
                map.next_value::<TextMap>()?;
                continue;
            }
            if entries.len() == MAX_TENSORS {
                return Err(A::Error::custom(format!("more than {MAX_TENSORS} tensors")));
            }
            let entry = map.next_value::<Entry>()?;
            if entries.insert(name, entry).is_some() {
                return Err(A::Error::custom("a tensor occurs twice"));
            }
        }
        Ok(Entries(entries))
    }
}

/// An object whose values must be texts; nothing of it is kept.
struct TextMap;

impl<'de> Deserialize<'de> for TextMap {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(TextMapVisitor)
    }
}

struct TextMapVisitor;

impl<'de> Visitor<'de> for TextMapVisitor {
    type Value = TextMap;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of texts")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<TextMap, A::Error> {
        while map.next_entry::<IgnoredAny, String>()?.is_some() {}
        Ok(TextMap)
    }
}

/// A list of dimensions that cannot grow beyond `MAX_DIMENSIONS`.
fn bounded_shape<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<usize>, D::Error> {
    struct ShapeVisitor;

    impl<'de> Visitor<'de> for ShapeVisitor {
        type Value = Vec<usize>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a list of dimensions")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Vec<usize>, A::Error> {
            let mut shape = Vec::new();
            while let Some(dim) = seq.next_element()? {
                if shape.len() == MAX_DIMENSIONS {
                    let problem = format!("more than {MAX_DIMENSIONS} dimensions");
                    return Err(A::Error::custom(problem));
                }
                shape.push(dim);
            }
            Ok(shape)
        }
    }

    deserializer.deserialize_seq(ShapeVisitor)
}

impl Entry {
    /// The tensor with an offset that still counts from the start of the data.
    fn into_tensor(self, name: String) -> Result<StoredTensor, HeaderError> {
        let Some((dtype, bits)) = element_type(&self.dtype) else {
            let problem = format!("type {:?} does not exist", self.dtype);
            return Err(HeaderError::new(name, problem));
        };
        let (start, end) = self.data_offsets;
        let num_bytes = end.checked_sub(start);
        if num_bytes.is_none() || num_bytes != num_bytes_of(&self.shape, bits) {
            let problem = format!(
                "data offsets {start} to {end} do not fit shape {:?} of {}",
                self.shape, self.dtype
            );
            return Err(HeaderError::new(name, problem));
        }
        Ok(StoredTensor {
            name,
            dtype,
            shape: self.shape,
            part: 0,
            offset: start,
            num_bytes: end - start,
        })
    }
}

/// Types of the format with the bits of one element.
fn element_type(name: &str) -> Option<(StoredType, u64)> {
    let plain = |dtype: TensorType, bits| (StoredType::Ggml(dtype), bits);
    Some(match name {
        "F32" => plain(TensorType::F32, 32),
        "F16" => plain(TensorType::F16, 16),
        "BF16" => plain(TensorType::BF16, 16),
        other => *OTHER_TYPES
            .iter()
            .find(|(dtype, _)| dtype.name() == other)?,
    })
}

/// Types that we can list but not compute with.
const OTHER_TYPES: [(StoredType, u64); 19] = [
    (StoredType::Safetensors("BOOL"), 8),
    (StoredType::Safetensors("F4"), 4),
    (StoredType::Safetensors("F6_E2M3"), 6),
    (StoredType::Safetensors("F6_E3M2"), 6),
    (StoredType::Safetensors("U8"), 8),
    (StoredType::Safetensors("I8"), 8),
    (StoredType::Safetensors("F8_E5M2"), 8),
    (StoredType::Safetensors("F8_E4M3"), 8),
    (StoredType::Safetensors("F8_E8M0"), 8),
    (StoredType::Safetensors("F8_E4M3FNUZ"), 8),
    (StoredType::Safetensors("F8_E5M2FNUZ"), 8),
    (StoredType::Safetensors("I16"), 16),
    (StoredType::Safetensors("U16"), 16),
    (StoredType::Safetensors("I32"), 32),
    (StoredType::Safetensors("U32"), 32),
    (StoredType::Safetensors("C64"), 64),
    (StoredType::Safetensors("F64"), 64),
    (StoredType::Safetensors("I64"), 64),
    (StoredType::Safetensors("U64"), 64),
];

/// Bytes of the elements, none when that overflows or is no whole number.
fn num_bytes_of(shape: &[usize], bits: u64) -> Option<u64> {
    let num_bits = shape
        .iter()
        .try_fold(bits, |product, dim| product.checked_mul(*dim as u64))?;
    num_bits.is_multiple_of(8).then_some(num_bits / 8)
}

/// Turns offsets, which arrive sorted, into positions in the file, and checks that the tensors fill the data.
fn place_tensors(
    tensors: &mut [StoredTensor],
    data_start: u64,
    file_len: u64,
) -> Result<(), HeaderError> {
    let mut expected = data_start;
    for tensor in tensors {
        let start = data_start.checked_add(tensor.offset);
        if start != Some(expected) {
            let problem = format!(
                "data starts at {}, expected {}: a hole or an overlap",
                tensor.offset,
                expected - data_start
            );
            return Err(HeaderError::new(&tensor.name, problem));
        }
        tensor.offset = expected;
        expected = expected.saturating_add(tensor.num_bytes);
        if expected > file_len {
            let problem = format!("data ends at byte {expected} of a file of {file_len}");
            return Err(HeaderError::new(&tensor.name, problem));
        }
    }
    if expected != file_len {
        let problem = format!("{} bytes belong to no tensor", file_len - expected);
        return Err(HeaderError::new("data", problem));
    }
    Ok(())
}
