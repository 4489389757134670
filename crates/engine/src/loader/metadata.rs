//! The key-value metadata of a GGUF file, already parsed and bounded.

use std::collections::BTreeMap;

/// All metadata of one file, by key.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Metadata(pub BTreeMap<String, MetadataValue>);

/// One metadata value. Integers are widened, arrays keep one element type.
#[derive(Clone, Debug, PartialEq)]
pub enum MetadataValue {
    /// u8, u16, u32 or u64.
    Unsigned(u64),
    /// i8, i16, i32 or i64.
    Signed(i64),
    /// f32 or f64.
    Float(f64),
    /// bool.
    Bool(bool),
    /// UTF-8 text.
    Text(String),
    /// Array of u8 to u64.
    Unsigneds(Vec<u64>),
    /// Array of i8 to i64.
    Signeds(Vec<i64>),
    /// Array of f32 or f64.
    Floats(Vec<f64>),
    /// Array of bool.
    Bools(Vec<bool>),
    /// Array of texts.
    Texts(Vec<String>),
}

impl MetadataValue {
    /// What it is, for errors: arrays can be millions long, so values are not shown.
    pub fn kind(&self) -> &'static str {
        match self {
            MetadataValue::Unsigned(_) | MetadataValue::Signed(_) => "an integer",
            MetadataValue::Float(_) => "a number",
            MetadataValue::Bool(_) => "a truth value",
            MetadataValue::Text(_) => "a text",
            MetadataValue::Unsigneds(_)
            | MetadataValue::Signeds(_)
            | MetadataValue::Floats(_)
            | MetadataValue::Bools(_)
            | MetadataValue::Texts(_) => "an array",
        }
    }

    /// Elements of an array, 1 for anything else.
    pub fn num_values(&self) -> usize {
        match self {
            MetadataValue::Unsigned(_)
            | MetadataValue::Signed(_)
            | MetadataValue::Float(_)
            | MetadataValue::Bool(_)
            | MetadataValue::Text(_) => 1,
            MetadataValue::Unsigneds(values) => values.len(),
            MetadataValue::Signeds(values) => values.len(),
            MetadataValue::Floats(values) => values.len(),
            MetadataValue::Bools(values) => values.len(),
            MetadataValue::Texts(values) => values.len(),
        }
    }
}

impl Metadata {
    /// The value under `key`, if any.
    pub fn get(&self, key: &str) -> Option<&MetadataValue> {
        self.0.get(key)
    }

    /// A non-negative integer, whatever its stored width and sign.
    pub fn unsigned(&self, key: &str) -> Option<u64> {
        match self.get(key)? {
            MetadataValue::Unsigned(value) => Some(*value),
            MetadataValue::Signed(value) => u64::try_from(*value).ok(),
            _ => None,
        }
    }

    /// A number.
    pub fn float(&self, key: &str) -> Option<f64> {
        match self.get(key)? {
            MetadataValue::Float(value) => Some(*value),
            MetadataValue::Unsigned(value) => Some(*value as f64),
            MetadataValue::Signed(value) => Some(*value as f64),
            _ => None,
        }
    }

    /// A truth value.
    pub fn bool(&self, key: &str) -> Option<bool> {
        match self.get(key)? {
            MetadataValue::Bool(value) => Some(*value),
            _ => None,
        }
    }

    /// A text.
    pub fn text(&self, key: &str) -> Option<&str> {
        match self.get(key)? {
            MetadataValue::Text(value) => Some(value),
            _ => None,
        }
    }

    /// An array of texts.
    pub fn texts(&self, key: &str) -> Option<&[String]> {
        match self.get(key)? {
            MetadataValue::Texts(values) => Some(values),
            _ => None,
        }
    }

    /// An array of truth values.
    pub fn bools(&self, key: &str) -> Option<&[bool]> {
        match self.get(key)? {
            MetadataValue::Bools(values) => Some(values),
            _ => None,
        }
    }

    /// An array of numbers.
    pub fn floats(&self, key: &str) -> Option<&[f64]> {
        match self.get(key)? {
            MetadataValue::Floats(values) => Some(values),
            _ => None,
        }
    }

    /// An array of non-negative integers, whatever their stored width and sign.
    pub fn unsigneds(&self, key: &str) -> Option<Vec<u64>> {
        match self.get(key)? {
            MetadataValue::Unsigneds(values) => Some(values.clone()),
            MetadataValue::Signeds(values) => values
                .iter()
                .map(|value| u64::try_from(*value).ok())
                .collect(),
            _ => None,
        }
    }
}
