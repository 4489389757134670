//! Bounded reader of GGUF headers: metadata and tensor table, versions 2 and 3, little-endian.
//!
//! It reads no tensor data. Every count, length and offset is checked against the bytes that are left and
//! against a cap before memory is taken for it; a file is refused with the name of the field at fault.
//! Format: the GGUF document of the GGML project; the rules are those its own reader enforces.

use std::collections::BTreeSet;
use std::io::Read;

use super::header::{HeaderError, StoredTensor, StoredType};
use super::metadata::{Metadata, MetadataValue};
use super::tensor::TensorType;

/// Everything before the tensor data.
#[derive(Debug)]
pub(super) struct GgufHeader {
    pub metadata: Metadata,
    /// In file order; offsets count from the start of the file.
    pub tensors: Vec<StoredTensor>,
    /// Where the tensor data starts.
    pub data_start: u64,
}

/// Longest header; that of a 262,144-token vocabulary with scores and merges takes 20 MB.
const MAX_HEADER_BYTES: u64 = 128 << 20;
/// Elements of all arrays together; a 262,144-token vocabulary has 1.3 million. A text costs up to 56 bytes in
/// memory, so that this bounds a hostile header to 180 MB.
const MAX_ARRAY_ELEMENTS: u64 = 3 << 20;
const MAX_METADATA_ENTRIES: u64 = 1 << 16;
const MAX_TENSORS: u64 = 1 << 16;
const MAX_KEY_BYTES: u64 = u16::MAX as u64;
/// GGML keeps names in 64 bytes with a terminator.
const MAX_TENSOR_NAME_BYTES: u64 = 63;
const MAX_DIMENSIONS: u32 = 4;
const MAX_ALIGNMENT: u64 = 1 << 16;
const DEFAULT_ALIGNMENT: u64 = 32;
const ALIGNMENT_KEY: &str = "general.alignment";

/// Fewest bytes of one metadata entry: key length, one byte of key, type, one byte of value.
const MIN_ENTRY_BYTES: u64 = 8 + 1 + 4 + 1;
/// Fewest bytes of one line of the tensor table: name length, dimension count, one dimension, type, offset.
const MIN_TENSOR_BYTES: u64 = 8 + 4 + 8 + 4 + 8;

/// Reads the header of a file of `file_len` bytes from its first byte on.
pub(super) fn read_header(source: &mut dyn Read, file_len: u64) -> Result<GgufHeader, HeaderError> {
    let mut reader = HeaderReader::new(source, file_len);
    check_magic_and_version(&mut reader)?;
    let num_tensors = reader.count("tensor count", MAX_TENSORS, MIN_TENSOR_BYTES)?;
    let num_entries = reader.count("metadata count", MAX_METADATA_ENTRIES, MIN_ENTRY_BYTES)?;
    let metadata = read_metadata(&mut reader, num_entries)?;
    check_vocabulary(&metadata)?;
    let alignment = alignment(&metadata)?;
    let mut tensors = read_tensor_table(&mut reader, num_tensors)?;
    let data_start = reader.position.next_multiple_of(alignment);
    place_tensors(&mut tensors, data_start, alignment, file_len)?;
    check_unique_names(&tensors)?;
    Ok(GgufHeader {
        metadata,
        tensors,
        data_start,
    })
}

/// A reader that knows how much it may still read.
struct HeaderReader<'a> {
    source: &'a mut dyn Read,
    position: u64,
    file_len: u64,
    array_elements_left: u64,
}

impl<'a> HeaderReader<'a> {
    fn new(source: &'a mut dyn Read, file_len: u64) -> Self {
        HeaderReader {
            source,
            position: 0,
            file_len,
            array_elements_left: MAX_ARRAY_ELEMENTS,
        }
    }

    fn remaining(&self) -> u64 {
        self.file_len
            .min(MAX_HEADER_BYTES)
            .saturating_sub(self.position)
    }

    /// Fails unless `num_bytes` more bytes of header can exist.
    fn expect_bytes(&self, field: &str, num_bytes: u64) -> Result<(), HeaderError> {
        if num_bytes <= self.remaining() {
            return Ok(());
        }
        let problem = format!(
            "{num_bytes} bytes announced at offset {}, {} left (file {} bytes, header at most {MAX_HEADER_BYTES})",
            self.position,
            self.remaining(),
            self.file_len,
        );
        Err(HeaderError::new(field, problem))
    }

    fn array<const N: usize>(&mut self, field: &str) -> Result<[u8; N], HeaderError> {
        self.expect_bytes(field, N as u64)?;
        let mut bytes = [0; N];
        self.source.read_exact(&mut bytes)?;
        self.position += N as u64;
        Ok(bytes)
    }

    /// `num_bytes` bytes, checked before the buffer is made.
    fn bytes(&mut self, field: &str, num_bytes: u64) -> Result<Vec<u8>, HeaderError> {
        self.expect_bytes(field, num_bytes)?;
        let mut bytes = vec![0; num_bytes as usize];
        self.source.read_exact(&mut bytes)?;
        self.position += num_bytes;
        Ok(bytes)
    }

    fn u32(&mut self, field: &str) -> Result<u32, HeaderError> {
        self.array(field).map(u32::from_le_bytes)
    }

    fn u64(&mut self, field: &str) -> Result<u64, HeaderError> {
        self.array(field).map(u64::from_le_bytes)
    }

    /// A number of items that each take at least `min_bytes` of the header.
    fn count(&mut self, field: &str, max: u64, min_bytes: u64) -> Result<u64, HeaderError> {
        let count = self.u64(field)?;
        if count > max {
            return Err(HeaderError::new(field, format!("{count}, at most {max}")));
        }
        self.expect_bytes(field, count.saturating_mul(min_bytes))?;
        Ok(count)
    }

    fn text(&mut self, field: &str, max_bytes: u64) -> Result<String, HeaderError> {
        let num_bytes = self.u64(field)?;
        if num_bytes > max_bytes {
            let problem = format!("text of {num_bytes} bytes, at most {max_bytes}");
            return Err(HeaderError::new(field, problem));
        }
        let bytes = self.bytes(field, num_bytes)?;
        String::from_utf8(bytes).map_err(|_| HeaderError::new(field, "text is not UTF-8"))
    }
}

fn check_magic_and_version(reader: &mut HeaderReader<'_>) -> Result<(), HeaderError> {
    let magic: [u8; 4] = reader.array("magic")?;
    if &magic != b"GGUF" {
        return Err(HeaderError::new("magic", "not a GGUF file"));
    }
    match reader.u32("version")? {
        2 | 3 => Ok(()),
        version if matches!(version.swap_bytes(), 1..=3) => Err(HeaderError::new(
            "version",
            "big-endian GGUF is not supported",
        )),
        version => {
            let problem = format!("{version}, supported are 2 and 3");
            Err(HeaderError::new("version", problem))
        }
    }
}

fn read_metadata(reader: &mut HeaderReader<'_>, num_entries: u64) -> Result<Metadata, HeaderError> {
    let mut metadata = Metadata::default();
    for index in 0..num_entries {
        let key = reader.text(&format!("metadata key {index}"), MAX_KEY_BYTES)?;
        if key.is_empty() {
            return Err(HeaderError::new(format!("metadata key {index}"), "empty"));
        }
        let kind = ValueKind::read(reader, &key)?;
        let value = match kind {
            ValueKind::Scalar(scalar) => scalar.read(reader, &key)?,
            ValueKind::Array => read_array(reader, &key)?,
        };
        if metadata.0.contains_key(&key) {
            return Err(HeaderError::new(key, "key occurs twice"));
        }
        metadata.0.insert(key, value);
    }
    Ok(metadata)
}

/// Type of a metadata value.
enum ValueKind {
    Scalar(ScalarKind),
    Array,
}

/// Type of a metadata value that is no array, and of the elements of one.
#[derive(Clone, Copy)]
enum ScalarKind {
    /// Bytes of one value: 1, 2, 4 or 8.
    Unsigned(u64),
    Signed(u64),
    /// Bytes of one value: 4 or 8.
    Float(u64),
    Bool,
    Text,
}

impl ValueKind {
    fn read(reader: &mut HeaderReader<'_>, key: &str) -> Result<Self, HeaderError> {
        let number = reader.u32(key)?;
        Ok(match number {
            0 => ValueKind::Scalar(ScalarKind::Unsigned(1)),
            1 => ValueKind::Scalar(ScalarKind::Signed(1)),
            2 => ValueKind::Scalar(ScalarKind::Unsigned(2)),
            3 => ValueKind::Scalar(ScalarKind::Signed(2)),
            4 => ValueKind::Scalar(ScalarKind::Unsigned(4)),
            5 => ValueKind::Scalar(ScalarKind::Signed(4)),
            6 => ValueKind::Scalar(ScalarKind::Float(4)),
            7 => ValueKind::Scalar(ScalarKind::Bool),
            8 => ValueKind::Scalar(ScalarKind::Text),
            9 => ValueKind::Array,
            10 => ValueKind::Scalar(ScalarKind::Unsigned(8)),
            11 => ValueKind::Scalar(ScalarKind::Signed(8)),
            12 => ValueKind::Scalar(ScalarKind::Float(8)),
            _ => {
                let problem = format!("value type {number} does not exist");
                return Err(HeaderError::new(key, problem));
            }
        })
    }
}

impl ScalarKind {
    /// Fewest bytes of one value.
    fn min_bytes(self) -> u64 {
        match self {
            ScalarKind::Unsigned(width) | ScalarKind::Signed(width) | ScalarKind::Float(width) => {
                width
            }
            ScalarKind::Bool => 1,
            ScalarKind::Text => 8,
        }
    }

    fn read(self, reader: &mut HeaderReader<'_>, key: &str) -> Result<MetadataValue, HeaderError> {
        if let ScalarKind::Text = self {
            return reader.text(key, MAX_HEADER_BYTES).map(MetadataValue::Text);
        }
        let bytes = reader.bytes(key, self.min_bytes())?;
        Ok(match self {
            ScalarKind::Unsigned(_) => MetadataValue::Unsigned(unsigned(&bytes)),
            ScalarKind::Signed(_) => MetadataValue::Signed(signed(&bytes)),
            ScalarKind::Float(_) => MetadataValue::Float(float(&bytes)),
            ScalarKind::Bool | ScalarKind::Text => MetadataValue::Bool(truth(key, &bytes)?),
        })
    }
}

fn read_array(reader: &mut HeaderReader<'_>, key: &str) -> Result<MetadataValue, HeaderError> {
    let ValueKind::Scalar(kind) = ValueKind::read(reader, key)? else {
        return Err(HeaderError::new(key, "arrays of arrays are not supported"));
    };
    let max_len = reader.array_elements_left;
    let len = reader.count(key, max_len, kind.min_bytes())?;
    reader.array_elements_left = max_len - len;
    if let ScalarKind::Text = kind {
        let texts = (0..len).map(|_| reader.text(key, MAX_HEADER_BYTES));
        return texts.collect::<Result<_, _>>().map(MetadataValue::Texts);
    }
    let bytes = reader.bytes(key, len * kind.min_bytes())?;
    let elements = bytes.chunks_exact(kind.min_bytes() as usize);
    Ok(match kind {
        ScalarKind::Unsigned(_) => MetadataValue::Unsigneds(elements.map(unsigned).collect()),
        ScalarKind::Signed(_) => MetadataValue::Signeds(elements.map(signed).collect()),
        ScalarKind::Float(_) => MetadataValue::Floats(elements.map(float).collect()),
        ScalarKind::Bool | ScalarKind::Text => {
            let truths = elements.map(|element| truth(key, element));
            MetadataValue::Bools(truths.collect::<Result<_, _>>()?)
        }
    })
}

/// A little-endian number of at most 8 bytes.
fn unsigned(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .rev()
        .fold(0, |value, byte| value << 8 | u64::from(*byte))
}

fn signed(bytes: &[u8]) -> i64 {
    let unused_bits = 64 - 8 * bytes.len().min(8) as u32;
    let shifted = unsigned(bytes).checked_shl(unused_bits).unwrap_or(0);
    (shifted as i64).checked_shr(unused_bits).unwrap_or(0)
}

fn float(bytes: &[u8]) -> f64 {
    let bits = unsigned(bytes);
    if bytes.len() == 4 {
        f64::from(f32::from_bits(bits as u32))
    } else {
        f64::from_bits(bits)
    }
}

fn truth(key: &str, bytes: &[u8]) -> Result<bool, HeaderError> {
    match bytes {
        [0] => Ok(false),
        [1] => Ok(true),
        _ => Err(HeaderError::new(key, "a bool is neither 0 nor 1")),
    }
}

fn alignment(metadata: &Metadata) -> Result<u64, HeaderError> {
    let alignment = match metadata.get(ALIGNMENT_KEY) {
        None => return Ok(DEFAULT_ALIGNMENT),
        Some(MetadataValue::Unsigned(value)) => *value,
        Some(_) => return Err(HeaderError::new(ALIGNMENT_KEY, "not an unsigned integer")),
    };
    if alignment.is_power_of_two() && alignment <= MAX_ALIGNMENT {
        return Ok(alignment);
    }
    let problem = format!("{alignment}, must be a power of two of at most {MAX_ALIGNMENT}");
    Err(HeaderError::new(ALIGNMENT_KEY, problem))
}

fn read_tensor_table(
    reader: &mut HeaderReader<'_>,
    num_tensors: u64,
) -> Result<Vec<StoredTensor>, HeaderError> {
    (0..num_tensors)
        .map(|index| read_tensor(reader, index))
        .collect()
}

/// One line of the tensor table; its offset still counts from the start of the data.
fn read_tensor(reader: &mut HeaderReader<'_>, index: u64) -> Result<StoredTensor, HeaderError> {
    let name = reader.text(&format!("name of tensor {index}"), MAX_TENSOR_NAME_BYTES)?;
    let shape = read_shape(reader, &name)?;
    let number = reader.u32(&name)?;
    let dtype = TensorType::from_ggml(number).ok_or_else(|| {
        let problem = format!("type {number} does not exist or was removed from the format");
        HeaderError::new(&name, problem)
    })?;
    let offset = reader.u64(&name)?;
    let num_bytes = dtype.num_bytes(&shape).ok_or_else(|| {
        let problem = format!("shape {shape:?} is too large or no whole number of {dtype} blocks");
        HeaderError::new(&name, problem)
    })?;
    Ok(StoredTensor {
        name,
        dtype: StoredType::Ggml(dtype),
        shape,
        part: 0,
        offset,
        num_bytes,
    })
}

/// The shape, outermost dimension first (GGUF lists the contiguous one first).
fn read_shape(reader: &mut HeaderReader<'_>, name: &str) -> Result<Vec<usize>, HeaderError> {
    let num_dims = reader.u32(name)?;
    if num_dims == 0 || num_dims > MAX_DIMENSIONS {
        let problem = format!("{num_dims} dimensions, must be 1 to {MAX_DIMENSIONS}");
        return Err(HeaderError::new(name, problem));
    }
    let mut shape = Vec::new();
    for _ in 0..num_dims {
        shape.push(reader.u64(name)?);
    }
    shape.reverse();
    // The product of four plausible dimensions still fits; anything above is an attack on the arithmetic.
    let dims = shape.iter().map(|dim| i64::try_from(*dim).ok());
    let product = dims
        .clone()
        .try_fold(1_i64, |product, dim| product.checked_mul(dim?));
    if product.is_none_or(|product| product == 0) {
        let problem = format!("shape {shape:?} is empty or overflows");
        return Err(HeaderError::new(name, problem));
    }
    let shape = shape.into_iter().map(|dim| usize::try_from(dim).ok());
    shape
        .collect::<Option<_>>()
        .ok_or_else(|| HeaderError::new(name, "a dimension does not fit this machine"))
}

/// Turns offsets into positions in the file. The format wants tensors in table order, each at the first aligned
/// offset after the one before: so they neither overlap nor leave holes in which other data could hide.
fn place_tensors(
    tensors: &mut [StoredTensor],
    data_start: u64,
    alignment: u64,
    file_len: u64,
) -> Result<(), HeaderError> {
    let mut expected = 0_u64;
    for tensor in tensors {
        if tensor.offset != expected {
            let problem = format!("data offset {}, expected {expected}", tensor.offset);
            return Err(HeaderError::new(&tensor.name, problem));
        }
        let end = data_start
            .checked_add(tensor.offset)
            .and_then(|start| start.checked_add(tensor.num_bytes));
        match end {
            Some(end) if end <= file_len => {}
            Some(_) | None => {
                let problem = format!(
                    "{} bytes of data at offset {}, but the file has {file_len} bytes",
                    tensor.num_bytes, tensor.offset
                );
                return Err(HeaderError::new(&tensor.name, problem));
            }
        }
        expected = (expected + tensor.num_bytes).next_multiple_of(alignment);
        tensor.offset += data_start;
    }
    Ok(())
}

fn check_unique_names(tensors: &[StoredTensor]) -> Result<(), HeaderError> {
    let mut seen = BTreeSet::new();
    for tensor in tensors {
        if !seen.insert(tensor.name.as_str()) {
            return Err(HeaderError::new(&tensor.name, "tensor occurs twice"));
        }
    }
    Ok(())
}

/// Arrays that run parallel to the vocabulary.
const PER_TOKEN_KEYS: [&str; 2] = ["tokenizer.ggml.scores", "tokenizer.ggml.token_type"];

/// Ids that we use. Others (padding, separator, mask) are wrong in files that people do run, and nobody reads them.
const TOKEN_ID_KEYS: [&str; 5] = [
    "tokenizer.ggml.bos_token_id",
    "tokenizer.ggml.eos_token_id",
    "tokenizer.ggml.eot_token_id",
    "tokenizer.ggml.eom_token_id",
    "tokenizer.ggml.unknown_token_id",
];

/// Everything that indexes the vocabulary must fit it: later code indexes with these.
fn check_vocabulary(metadata: &Metadata) -> Result<(), HeaderError> {
    let Some(tokens) = metadata.texts("tokenizer.ggml.tokens") else {
        return Ok(());
    };
    for key in PER_TOKEN_KEYS {
        match metadata.get(key).map(MetadataValue::num_values) {
            Some(len) if len != tokens.len() => {
                let problem = format!("{len} entries for {} tokens", tokens.len());
                return Err(HeaderError::new(key, problem));
            }
            Some(_) | None => {}
        }
    }
    for key in TOKEN_ID_KEYS {
        let Some(value) = metadata.get(key) else {
            continue;
        };
        let id = metadata.unsigned(key);
        if id.is_none_or(|id| id >= tokens.len() as u64) {
            let shown = id.map_or(value.kind().to_owned(), |id| id.to_string());
            let problem = format!("{shown} is no id of a vocabulary of {}", tokens.len());
            return Err(HeaderError::new(key, problem));
        }
    }
    Ok(())
}
