//! The fields of a JSON object, taken one by one by name.
//!
//! An object is split into borrowed, still unparsed values; each field is then parsed into the type that its
//! taker wants, within the taker's bounds. So every error names its field, a hostile value costs no more
//! memory than its text, and what nobody took is known to be unknown. Nothing here knows what a field means.

use std::borrow::Cow;
use std::fmt;

use serde::de::{self, DeserializeSeed, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

use super::errors::{ApiError, ApiResult, ErrorKind};
use crate::http::limits::{MAX_FIELDS, MAX_PRINTED_CHARS};

/// What is left of an object. A field whose value is `null` counts as absent.
#[derive(Debug)]
pub struct Fields<'a> {
    path: String,
    entries: Vec<(Cow<'a, str>, &'a RawValue)>,
    /// What nobody took of objects inside this one, with paths.
    unknown_inside: Vec<String>,
}

impl<'a> Fields<'a> {
    /// Splits a whole body: UTF-8, at most `max_depth` deep, one object.
    pub fn of_body(body: &'a [u8], max_depth: usize) -> ApiResult<Self> {
        let text = std::str::from_utf8(body).map_err(|error| {
            let message = format!("the body is not UTF-8: {error}");
            ApiError::new(ErrorKind::Invalid, message)
        })?;
        if nesting(text) > max_depth {
            let message = format!("the body is nested deeper than {max_depth} (max_json_depth)");
            return Err(ApiError::new(ErrorKind::Invalid, message));
        }
        Fields::split(text, String::new())
    }

    /// Splits a nested object; `path` is its own name in errors.
    pub fn of_value(value: &'a RawValue, path: impl Into<String>) -> ApiResult<Self> {
        Fields::split(value.get(), path.into())
    }

    fn split(text: &'a str, path: String) -> ApiResult<Self> {
        let mut current = None;
        let mut deserializer = serde_json::Deserializer::from_str(text);
        let split = ObjectSeed {
            current: &mut current,
        }
        .deserialize(&mut deserializer)
        .and_then(|entries| deserializer.end().map(|()| entries));
        match split {
            Ok(entries) => Ok(Fields {
                path,
                entries,
                unknown_inside: Vec::new(),
            }),
            Err(error) => Err(ApiError {
                kind: ErrorKind::Invalid,
                message: format!("not a JSON object: {error}"),
                param: current
                    .map(|name| join(&path, &printable(&name)))
                    .or_else(|| Some(path).filter(|path| !path.is_empty())),
            }),
        }
    }

    /// The full name of one of this object's fields, for errors.
    pub fn name_of(&self, name: &str) -> String {
        join(&self.path, name)
    }

    /// Takes a field unparsed.
    pub fn take_raw(&mut self, name: &str) -> Option<&'a RawValue> {
        let index = self.entries.iter().position(|(key, _)| key == name)?;
        let (_, value) = self.entries.swap_remove(index);
        Some(value).filter(|value| value.get() != "null")
    }

    /// Takes a field of type `T`.
    pub fn take<T: Deserialize<'a>>(&mut self, name: &str) -> ApiResult<Option<T>> {
        self.take_raw(name)
            .map(|value| self.parse(name, value))
            .transpose()
    }

    /// Takes a field that must be there.
    pub fn require<T: Deserialize<'a>>(&mut self, name: &str) -> ApiResult<T> {
        let value = self.take(name)?;
        value.ok_or_else(|| ApiError::invalid(self.name_of(name), "is required"))
    }

    /// Takes a number within the range of f64.
    pub fn take_number(&mut self, name: &str) -> ApiResult<Option<f64>> {
        match self.take::<f64>(name)? {
            Some(number) if !number.is_finite() => {
                Err(ApiError::invalid(self.name_of(name), "must be finite"))
            }
            number => Ok(number),
        }
    }

    /// Takes a list of at most `max` elements; a longer one is refused before its rest is parsed.
    pub fn take_list<T: Deserialize<'a>>(
        &mut self,
        name: &str,
        max: usize,
    ) -> ApiResult<Option<Vec<T>>> {
        self.take_raw(name)
            .map(|value| parse_list(value, &self.name_of(name), max))
            .transpose()
    }

    /// Takes a text of at most `max_bytes`.
    pub fn take_text(&mut self, name: &str, max_bytes: usize) -> ApiResult<Option<String>> {
        let text = self
            .take_raw(name)
            .map(|value| self.parse_text(name, value, max_bytes));
        text.transpose()
    }

    /// Takes one text or a list of at most `max` texts, each of at most `max_bytes`.
    pub fn take_texts(
        &mut self,
        name: &str,
        max: usize,
        max_bytes: usize,
    ) -> ApiResult<Option<Vec<String>>> {
        let Some(value) = self.take_raw(name) else {
            return Ok(None);
        };
        if value.get().starts_with('"') {
            let text = self.parse_text(name, value, max_bytes)?;
            return Ok(Some(vec![text]));
        }
        let texts: Vec<&RawValue> = parse_list(value, &self.name_of(name), max)?;
        let parse = |text| self.parse_text(name, text, max_bytes);
        texts
            .into_iter()
            .map(parse)
            .collect::<ApiResult<_>>()
            .map(Some)
    }

    /// A text that is too long even if it were all escapes is refused before it is copied.
    fn parse_text(&self, name: &str, value: &'a RawValue, max_bytes: usize) -> ApiResult<String> {
        const LONGEST_ESCAPE: usize = 6;
        let too_long = || {
            let message = format!("a text may have at most {max_bytes} bytes");
            ApiError::invalid(self.name_of(name), message)
        };
        if value.get().len() / LONGEST_ESCAPE > max_bytes {
            return Err(too_long());
        }
        let text: String = self.parse(name, value)?;
        if text.len() > max_bytes {
            Err(too_long())
        } else {
            Ok(text)
        }
    }

    /// Takes an object from token ids (as JSON texts) to numbers, at most `max` of them.
    pub fn take_token_map(&mut self, name: &str, max: usize) -> ApiResult<Vec<(u64, f64)>> {
        let Some(value) = self.take_raw(name) else {
            return Ok(Vec::new());
        };
        TokenMapSeed { max }
            .deserialize(&mut serde_json::Deserializer::from_str(value.get()))
            .map_err(|error| self.refuse(name, &error))
    }

    /// Takes a nested object.
    pub fn take_object(&mut self, name: &str) -> ApiResult<Option<Fields<'a>>> {
        let path = self.name_of(name);
        self.take_raw(name)
            .map(|value| Fields::of_value(value, path))
            .transpose()
    }

    /// Takes JSON to be handed on as it is: at most `max_bytes` of text.
    pub fn take_free<T: Deserialize<'a>>(
        &mut self,
        name: &str,
        max_bytes: usize,
    ) -> ApiResult<Option<T>> {
        match self.take_raw(name) {
            Some(value) if value.get().len() > max_bytes => {
                let message = format!("at most {max_bytes} bytes of JSON allowed");
                Err(ApiError::invalid(self.name_of(name), message))
            }
            Some(value) => self.parse(name, value).map(Some),
            None => Ok(None),
        }
    }

    /// Puts an object that `take_object` gave back: what is left of it is as unknown as what is left here.
    pub fn give_back(&mut self, inside: Fields<'_>) {
        self.unknown_inside.extend(inside.into_unknown());
    }

    /// The names of the fields that nobody took, with their paths, fit for printing.
    pub fn into_unknown(self) -> Vec<String> {
        let Fields {
            path,
            entries,
            unknown_inside,
        } = self;
        let own = entries
            .iter()
            .map(|(name, _)| join(&path, &printable(name)));
        own.chain(unknown_inside).collect()
    }

    fn parse<T: Deserialize<'a>>(&self, name: &str, value: &'a RawValue) -> ApiResult<T> {
        serde_json::from_str(value.get()).map_err(|error| self.refuse(name, &error))
    }

    fn refuse(&self, name: &str, error: &serde_json::Error) -> ApiError {
        ApiError::invalid(self.name_of(name), without_position(error))
    }
}

/// Parses a list of at most `max` elements; `name` is its own name in errors.
pub fn parse_list<'a, T: Deserialize<'a>>(
    value: &'a RawValue,
    name: &str,
    max: usize,
) -> ApiResult<Vec<T>> {
    let element = std::marker::PhantomData;
    ListSeed { max, element }
        .deserialize(&mut serde_json::Deserializer::from_str(value.get()))
        .map_err(|error| ApiError::invalid(name, without_position(&error)))
}

/// A name from outside, short and without control characters.
pub fn printable(name: &str) -> String {
    let mut printed: String = name
        .chars()
        .take(MAX_PRINTED_CHARS)
        .flat_map(char::escape_debug)
        .collect();
    if name.chars().nth(MAX_PRINTED_CHARS).is_some() {
        printed.push('…');
    }
    printed
}

/// The message of a JSON error; positions inside a single value would confuse.
pub fn without_position(error: &serde_json::Error) -> String {
    let message = error.to_string();
    match message.rfind(" at line ") {
        Some(end) => message[..end].to_owned(),
        None => message,
    }
}

/// The deepest nesting of arrays and objects, without regard to whether the text is JSON.
fn nesting(text: &str) -> usize {
    let (mut depth, mut deepest) = (0_usize, 0);
    let mut in_string = false;
    let mut escaped = false;
    for byte in text.bytes() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            b'[' | b'{' if !in_string => {
                depth += 1;
                deepest = deepest.max(depth);
            }
            b']' | b'}' if !in_string => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    deepest
}

fn join(path: &str, name: &str) -> String {
    if path.is_empty() {
        name.to_owned()
    } else {
        format!("{path}.{name}")
    }
}

/// Splits an object; `current` tells afterwards in which field an error lay. Of equal keys the last wins.
struct ObjectSeed<'c> {
    current: &'c mut Option<String>,
}

impl<'de> DeserializeSeed<'de> for ObjectSeed<'_> {
    type Value = Vec<(Cow<'de, str>, &'de RawValue)>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for ObjectSeed<'_> {
    type Value = Vec<(Cow<'de, str>, &'de RawValue)>;

    fn expecting(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        formatter.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut entries: Self::Value = Vec::new();
        while let Some(Key(key)) = map.next_key()? {
            *self.current = Some(key.clone().into_owned());
            let value = map.next_value()?;
            *self.current = None;
            match entries.iter().position(|(known, _)| *known == key) {
                Some(index) => entries[index].1 = value,
                None if entries.len() == MAX_FIELDS => {
                    return Err(de::Error::custom(format!(
                        "at most {MAX_FIELDS} fields allowed"
                    )));
                }
                None => entries.push((key, value)),
            }
        }
        Ok(entries)
    }
}

/// A key, borrowed where it has no escapes.
#[derive(Deserialize)]
#[serde(transparent)]
struct Key<'a>(#[serde(borrow)] Cow<'a, str>);

struct ListSeed<T> {
    max: usize,
    element: std::marker::PhantomData<T>,
}

impl<'de, T: Deserialize<'de>> DeserializeSeed<'de> for ListSeed<T> {
    type Value = Vec<T>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Vec<T>, D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de, T: Deserialize<'de>> Visitor<'de> for ListSeed<T> {
    type Value = Vec<T>;

    fn expecting(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        write!(formatter, "a list of at most {}", self.max)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Vec<T>, A::Error> {
        let mut list = Vec::new();
        while let Some(element) = seq.next_element()? {
            if list.len() == self.max {
                return Err(de::Error::custom(format!("at most {} allowed", self.max)));
            }
            list.push(element);
        }
        Ok(list)
    }
}

struct TokenMapSeed {
    max: usize,
}

impl<'de> DeserializeSeed<'de> for TokenMapSeed {
    type Value = Vec<(u64, f64)>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for TokenMapSeed {
    type Value = Vec<(u64, f64)>;

    fn expecting(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        formatter.write_str("an object from token ids to numbers")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut list = Vec::new();
        while let Some(Key(key)) = map.next_key()? {
            if list.len() == self.max {
                return Err(de::Error::custom(format!("at most {} allowed", self.max)));
            }
            let token = key.parse().map_err(|_| {
                de::Error::custom(format!("\"{}\" is not a token id", printable(&key)))
            })?;
            list.push((token, map.next_value()?));
        }
        Ok(list)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn param_of(body: &str) -> Option<String> {
        let fields = Fields::of_body(body.as_bytes(), 64);
        fields.expect_err("the body is broken").param
    }

    #[test]
    fn a_syntax_error_names_the_field_it_lies_in() {
        for (body, param) in [
            (r#"{"n":1,"temperature":NaN}"#, Some("temperature")),
            (r#"{"temperature":Infinity}"#, Some("temperature")),
            (r#"{"a":{"b":[1,}}"#, Some("a")),
            (r#"{"a":1,}"#, None),
            ("[1]", None),
            ("", None),
            (r#"{"a":1} {"#, None),
        ] {
            assert_eq!(param_of(body).as_deref(), param, "{body}");
        }
    }

    #[test]
    fn values_of_the_wrong_type_or_size_name_their_field() {
        let body = r#"{"a":"x","b":-1,"c":18446744073709551616,"d":1e999,"e":[1,2,3],"f":1.5,"g":{"x":1}}"#;
        let mut fields = Fields::of_body(body.as_bytes(), 64).expect("valid JSON");
        let params = [
            fields.take::<u64>("a").err(),
            fields.take::<u64>("b").err(),
            fields.take::<u64>("c").err(),
            fields.take_number("d").err(),
            fields.take_list::<u64>("e", 2).err(),
            fields.take::<i64>("f").err(),
            fields.take_token_map("g", 5).err(),
        ];
        let params: Vec<_> = params
            .into_iter()
            .map(|error| error.and_then(|error| error.param))
            .collect();
        let expected: Vec<_> = ["a", "b", "c", "d", "e", "f", "g"]
            .map(|name| Some(name.to_owned()))
            .into();
        assert_eq!(params, expected);
    }

    #[test]
    fn null_is_absent_and_the_last_of_equal_keys_wins() {
        let mut fields = Fields::of_body(br#"{"a":null,"b":1,"b":2}"#, 64).expect("valid JSON");
        assert_eq!(fields.take::<u64>("a"), Ok(None));
        assert_eq!(fields.take::<u64>("b"), Ok(Some(2)));
        assert!(fields.into_unknown().is_empty());
    }

    #[test]
    fn what_nobody_took_is_unknown_and_printable() {
        let fields = Fields::of_body(br#"{"a\u001bb":1}"#, 64).expect("valid JSON");
        assert_eq!(fields.into_unknown(), ["a\\u{1b}b"]);
    }

    #[test]
    fn depth_is_bounded_before_parsing() {
        let deep = |depth: usize| format!("{{\"a\":{}{}}}", "[".repeat(depth), "]".repeat(depth));
        assert!(Fields::of_body(deep(63).as_bytes(), 64).is_ok());
        assert!(Fields::of_body(deep(64).as_bytes(), 64).is_err());
        assert!(Fields::of_body("[".repeat(100_000).as_bytes(), 64).is_err());
        let text = format!("{{\"a\":\"{}\"}}", "[\\\"".repeat(100));
        assert!(Fields::of_body(text.as_bytes(), 64).is_ok());
    }

    #[test]
    fn too_many_fields_are_refused() {
        let fields: Vec<String> = (0..300).map(|index| format!("\"f{index}\":1")).collect();
        let body = format!("{{{}}}", fields.join(","));
        assert!(Fields::of_body(body.as_bytes(), 64).is_err());
    }

    #[test]
    fn one_text_or_a_bounded_list_of_bounded_texts() {
        let texts = |json: &str| {
            let body = format!("{{\"a\":{json}}}");
            let mut fields = Fields::of_body(body.as_bytes(), 64).expect("valid JSON");
            fields.take_texts("a", 2, 3).map(Option::unwrap_or_default)
        };
        assert_eq!(texts(r#""xyz""#), Ok(vec!["xyz".to_owned()]));
        assert_eq!(
            texts(r#"["\u0041BC","y"]"#),
            Ok(vec!["ABC".to_owned(), "y".to_owned()])
        );
        for refused in [
            r#""wxyz""#,
            r#"["x","y","z"]"#,
            "[1]",
            "1",
            r#"["x","wxyz"]"#,
        ] {
            let error = texts(refused).expect_err(refused);
            assert_eq!(error.param.as_deref(), Some("a"), "{refused}");
        }
        assert!(texts(&format!("\"{}\"", "x".repeat(1 << 20))).is_err());
    }
}
