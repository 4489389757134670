//! Template values as Python's `json.dumps` writes them.

use std::fmt::Write as _;

use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind};

/// A template can make a value that contains itself.
const MAX_DEPTH: usize = 128;

/// The arguments of `json.dumps`.
#[derive(Debug)]
pub(crate) struct Style {
    /// Spaces per level; `None` keeps all on one line.
    pub indent: Option<usize>,
    pub item_separator: String,
    pub key_separator: String,
    pub sorts_keys: bool,
    pub escapes_non_ascii: bool,
}

impl Style {
    /// The defaults that belong to `indent`.
    pub fn new(indent: Option<usize>) -> Self {
        Style {
            indent,
            item_separator: if indent.is_some() { "," } else { ", " }.to_owned(),
            key_separator: ": ".to_owned(),
            sorts_keys: false,
            escapes_non_ascii: false,
        }
    }
}

/// Writes `value`.
///
/// # Errors
/// What JSON cannot express, such as an undefined value, and values nested too deeply.
pub(crate) fn write(value: &Value, style: &Style) -> Result<String, Error> {
    let mut writer = Writer {
        style,
        text: String::new(),
    };
    writer.value(value, 0)?;
    Ok(writer.text)
}

struct Writer<'a> {
    style: &'a Style,
    text: String,
}

impl Writer<'_> {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(error(
                "the value is nested too deeply to be written as JSON",
            ));
        }
        match value.kind() {
            ValueKind::None => self.text.push_str("null"),
            ValueKind::Bool => self
                .text
                .push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.number(value),
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => self.list(value, depth)?,
            ValueKind::Map => self.object(value, depth)?,
            kind => return Err(error(format!("{kind} cannot be written as JSON"))),
        }
        Ok(())
    }

    fn list(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        let items: Vec<Value> = value.try_iter()?.collect();
        self.text.push('[');
        for (index, item) in items.iter().enumerate() {
            self.begin_item(index, depth + 1);
            self.value(item, depth + 1)?;
        }
        self.end_items(items.len(), depth);
        self.text.push(']');
        Ok(())
    }

    fn object(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        let mut keys: Vec<Value> = value.try_iter()?.collect();
        if self.style.sorts_keys {
            keys.sort();
        }
        self.text.push('{');
        for (index, key) in keys.iter().enumerate() {
            self.begin_item(index, depth + 1);
            self.string(&key.to_string());
            self.text.push_str(&self.style.key_separator);
            self.value(&value.get_item(key)?, depth + 1)?;
        }
        self.end_items(keys.len(), depth);
        self.text.push('}');
        Ok(())
    }

    fn begin_item(&mut self, index: usize, depth: usize) {
        if index > 0 {
            self.text.push_str(&self.style.item_separator);
        }
        self.new_line(depth);
    }

    fn end_items(&mut self, num_items: usize, depth: usize) {
        if num_items > 0 {
            self.new_line(depth);
        }
    }

    fn new_line(&mut self, depth: usize) {
        if let Some(indent) = self.style.indent {
            self.text.push('\n');
            self.text.extend(std::iter::repeat_n(' ', indent * depth));
        }
    }

    fn string(&mut self, text: &str) {
        self.text.push('"');
        for character in text.chars() {
            match character {
                '"' => self.text.push_str("\\\""),
                '\\' => self.text.push_str("\\\\"),
                '\n' => self.text.push_str("\\n"),
                '\r' => self.text.push_str("\\r"),
                '\t' => self.text.push_str("\\t"),
                '\u{8}' => self.text.push_str("\\b"),
                '\u{c}' => self.text.push_str("\\f"),
                _ if character < ' ' => self.escape(character),
                _ if self.style.escapes_non_ascii && !character.is_ascii() => {
                    self.escape(character)
                }
                _ => self.text.push(character),
            }
        }
        self.text.push('"');
    }

    fn escape(&mut self, character: char) {
        for unit in character.encode_utf16(&mut [0; 2]) {
            write!(self.text, "\\u{unit:04x}").expect("a string takes any text");
        }
    }

    fn number(&mut self, value: &Value) {
        match f64::try_from(value.clone()) {
            Ok(number) if !value.is_integer() => self.text.push_str(&float(number)),
            Ok(_) | Err(_) => self.text.push_str(&value.to_string()),
        }
    }
}

/// Python's `repr` of a float: the shortest digits that read back the same, with an exponent when it is below -4 or above
/// 15.
fn float(number: f64) -> String {
    if number.is_nan() {
        return "NaN".to_owned();
    }
    if number.is_infinite() {
        return if number > 0.0 {
            "Infinity"
        } else {
            "-Infinity"
        }
        .to_owned();
    }
    let scientific = format!("{number:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        return format!("{number:?}");
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}

fn error(message: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_floats_as_python_does() {
        let cases = [
            (1.0, "1.0"),
            (-0.0, "-0.0"),
            (21.5, "21.5"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e300, "1.5e+300"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
        ];
        for (number, expected) in cases {
            assert_eq!(float(number), expected);
        }
    }

    #[test]
    fn writes_values_as_python_does() {
        let inner = Value::from_pairs([("b", Value::from(())), ("a", Value::from("é<\u{1}\"\n"))]);
        let value = Value::from(vec![
            Value::from(1),
            Value::from(true),
            inner,
            Value::from(Vec::<Value>::new()),
        ]);
        let plain = write(&value, &Style::new(None)).expect("JSON");
        assert_eq!(plain, r#"[1, true, {"b": null, "a": "é<\u0001\"\n"}, []]"#);
        let mut style = Style::new(Some(1));
        style.sorts_keys = true;
        style.escapes_non_ascii = true;
        let indented = write(&value, &style).expect("JSON");
        let expected =
            "[\n 1,\n true,\n {\n  \"a\": \"\\u00e9<\\u0001\\\"\\n\",\n  \"b\": null\n },\n []\n]";
        assert_eq!(indented, expected);
        assert!(write(&Value::UNDEFINED, &Style::new(None)).is_err());
    }
}
