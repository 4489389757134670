//! Jinja as transformers sets it up for chat templates.

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Value};
use minijinja::{Environment, Error, ErrorKind};
use minijinja_contrib::pycompat;

use super::python_json;

/// The template called `raise_exception` with this message.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Refusal(pub String);

/// An environment without templates, with limits on work and recursion.
pub(crate) fn new(max_fuel: u64, max_recursion: usize) -> Environment<'static> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder()
        .trim_blocks(true)
        .lstrip_blocks(true)
        .build()
        .expect("the default delimiters are valid");
    environment.set_syntax(syntax);
    environment.set_fuel(Some(max_fuel));
    environment.set_recursion_limit(max_recursion);
    environment.set_unknown_method_callback(pycompat::unknown_method_callback);
    environment.add_filter("tojson", tojson);
    environment.add_test("iterable", is_iterable);
    environment.add_function("raise_exception", raise_exception);
    environment
}

/// transformers marks the assistant's part with `{% generation %}`, for training; here the tags do nothing, but the
/// white space around them is trimmed as around any other.
pub(crate) fn without_generation_tags(source: &str) -> String {
    let mut rewritten = String::with_capacity(source.len());
    let mut rest = source;
    while let Some((before, tag)) = rest.split_once("{%") {
        let Some((body, after)) = tag.split_once("%}") else {
            break;
        };
        rewritten.push_str(before);
        rewritten.push_str("{%");
        match body.trim_matches(['-', '+', ' ']) {
            "generation" => rewritten.push_str(&body.replace("generation", "if true")),
            "endgeneration" => rewritten.push_str(&body.replace("endgeneration", "endif")),
            _ => rewritten.push_str(body),
        }
        rewritten.push_str("%}");
        rest = after;
    }
    rewritten.push_str(rest);
    rewritten
}

/// As in Jinja, undefined values count and `none` does not: templates ask before they take the length of `tools`.
fn is_iterable(value: &Value) -> bool {
    !value.is_none() && value.try_iter().is_ok()
}

fn raise_exception(message: String) -> Result<Value, Error> {
    let error = Error::new(ErrorKind::InvalidOperation, message.clone());
    Err(error.with_source(Refusal(message)))
}

/// Python's `json.dumps`: nothing is escaped for HTML, and separators have spaces.
fn tojson(value: &Value, options: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    let sorts_keys: Option<bool> = options.get("sort_keys")?;
    let escapes: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    let mut style = python_json::Style::new(indent);
    if let Some([item, key]) = separators.as_deref() {
        style.item_separator.clone_from(item);
        style.key_separator.clone_from(key);
    }
    style.sorts_keys = sorts_keys.unwrap_or(false);
    style.escapes_non_ascii = escapes.unwrap_or(false);
    python_json::write(value, &style)
}
