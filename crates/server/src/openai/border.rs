//! What happens to fields that are not simply taken: unknown ones, known ones that we cannot honour, and
//! known ones without bearing on the answer (A9: nothing is silent).

use serde_json::Value;
use serde_json::value::RawValue;

use super::errors::{ApiError, ApiResult, ErrorKind};
use super::fields::Fields;
use crate::http::limits::MAX_WARNINGS;

/// What to do with fields that we do not know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnknownFields {
    /// Accept the request and list them.
    Warn,
    /// Refuse the request (`--strict`).
    Refuse,
}

/// Collects the warnings of one request.
#[derive(Debug)]
pub struct Notes {
    unknown_fields: UnknownFields,
    warnings: Vec<String>,
}

impl Notes {
    /// No warnings yet.
    pub fn new(unknown_fields: UnknownFields) -> Self {
        Notes {
            unknown_fields,
            warnings: Vec::new(),
        }
    }

    /// Deals with whatever nobody took of an object.
    pub fn finish(&mut self, fields: Fields) -> ApiResult<()> {
        for name in fields.into_unknown() {
            match self.unknown_fields {
                UnknownFields::Warn => self.warn(format!("unknown field {name} was ignored")),
                UnknownFields::Refuse => {
                    let message = "unknown field (the server runs with --strict)";
                    return Err(ApiError::of_field(ErrorKind::UnknownField, name, message));
                }
            }
        }
        Ok(())
    }

    /// Adds one warning, up to the limit.
    pub fn warn(&mut self, warning: String) {
        if self.warnings.len() < MAX_WARNINGS {
            self.warnings.push(warning);
        }
    }

    /// The warnings, in the order of the fields.
    pub fn into_warnings(self) -> Vec<String> {
        self.warnings
    }
}

/// A field that bears on the answer and that we cannot honour, with the values that ask for nothing.
struct Unsupported {
    name: &'static str,
    neutral: &'static [&'static str],
}

const fn unsupported(name: &'static str, neutral: &'static [&'static str]) -> Unsupported {
    Unsupported { name, neutral }
}

/// Known fields that are refused unless their value is neutral.
const UNSUPPORTED: &[Unsupported] = &[
    // Tools and structured output.
    unsupported("tools", &["[]"]),
    unsupported("tool_choice", &["\"none\"", "\"auto\""]),
    unsupported("functions", &["[]"]),
    unsupported("function_call", &["\"none\"", "\"auto\""]),
    unsupported("response_format", &[r#"{"type":"text"}"#]),
    unsupported("structured_outputs", &[]),
    unsupported("regex", &[]),
    unsupported("choice", &[]),
    unsupported("grammar", &["\"\""]),
    unsupported("json_schema", &[]),
    unsupported("guided_json", &[]),
    unsupported("guided_regex", &[]),
    unsupported("guided_choice", &[]),
    unsupported("guided_grammar", &[]),
    unsupported("guided_decoding_backend", &[]),
    unsupported("structural_tag", &[]),
    unsupported("reasoning_effort", &["\"none\""]),
    unsupported("thinking_token_budget", &[]),
    unsupported("verbosity", &["\"medium\""]),
    unsupported("web_search_options", &[]),
    // Other media.
    unsupported("modalities", &[r#"["text"]"#]),
    unsupported("audio", &[]),
    unsupported("prompt_embeds", &[]),
    unsupported("mm_processor_kwargs", &["{}"]),
    // Sampling.
    unsupported("best_of", &["1"]),
    unsupported("use_beam_search", &["false"]),
    unsupported("length_penalty", &["1", "1.0"]),
    unsupported("early_stopping", &["false"]),
    unsupported("typical_p", &["1", "1.0"]),
    unsupported("top_a", &["0", "0.0"]),
    unsupported("tfs_z", &["1", "1.0"]),
    unsupported("top_n_sigma", &["-1", "-1.0", "0"]),
    unsupported("xtc_probability", &["0", "0.0"]),
    unsupported("xtc_threshold", &[]),
    unsupported("dry_multiplier", &["0", "0.0"]),
    unsupported("dry_base", &[]),
    unsupported("dry_allowed_length", &[]),
    unsupported("dry_penalty_last_n", &[]),
    unsupported("dry_sequence_breakers", &["[]"]),
    unsupported("mirostat", &["0"]),
    unsupported("mirostat_tau", &[]),
    unsupported("mirostat_eta", &[]),
    unsupported("dynatemp_range", &["0", "0.0"]),
    unsupported("dynatemp_exponent", &[]),
    unsupported("repeat_penalty", &["1", "1.0"]),
    unsupported("repeat_last_n", &[]),
    unsupported("bad_words", &["[]"]),
    unsupported("logits_processors", &["[]"]),
    unsupported("logit_processors", &["[]"]),
    unsupported("vllm_xargs", &["{}"]),
    // Text in and out.
    unsupported("suffix", &["\"\""]),
    unsupported("chat_template", &[]),
    unsupported("truncate_prompt_tokens", &[]),
    unsupported("spaces_between_special_tokens", &["true"]),
    unsupported("return_tokens_as_token_ids", &["false"]),
    unsupported("lora_path", &[]),
];

/// Known fields that have no bearing on the answer.
const ACCEPTED: &[&str] = &[
    "user",
    "metadata",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "parallel_tool_calls",
    "prediction",
    "request_id",
];

/// Fields of which we say that we did nothing with them, with the reason.
const IGNORED: &[(&str, &str, &[&str])] = &[
    ("store", "answers are not stored", &["false"]),
    (
        "kv_transfer_params",
        "keys and values are never taken from or handed to a client",
        &["{}"],
    ),
];

/// Bytes above which a value is not neutral, whatever it says.
const MAX_NEUTRAL_BYTES: usize = 256;

/// Refuses known fields that we cannot honour, and takes those that change nothing.
pub fn settle_known(fields: &mut Fields, notes: &mut Notes) -> ApiResult<()> {
    for row in UNSUPPORTED {
        let value = fields.take_raw(row.name);
        if value.is_some_and(|value| !is_one_of(value, row.neutral)) {
            return Err(ApiError::of_field(
                ErrorKind::Unsupported,
                row.name,
                "is not supported",
            ));
        }
    }
    for (name, reason, neutral) in IGNORED {
        let value = fields.take_raw(name);
        if value.is_some_and(|value| !is_one_of(value, neutral)) {
            notes.warn(format!("{name} was ignored: {reason}"));
        }
    }
    for name in ACCEPTED {
        fields.take_raw(name);
    }
    Ok(())
}

fn is_one_of(value: &RawValue, neutral: &[&str]) -> bool {
    let parse = |text| serde_json::from_str::<Value>(text).ok();
    value.get().len() <= MAX_NEUTRAL_BYTES
        && neutral.iter().any(|text| parse(text) == parse(value.get()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settle(body: &str) -> ApiResult<Vec<String>> {
        let mut fields = Fields::of_body(body.as_bytes(), 64)?;
        let mut notes = Notes::new(UnknownFields::Warn);
        settle_known(&mut fields, &mut notes)?;
        notes.finish(fields)?;
        Ok(notes.into_warnings())
    }

    #[test]
    fn a_field_we_cannot_honour_is_refused_by_name() {
        for row in UNSUPPORTED {
            let error = settle(&format!("{{\"{}\":[{{}}]}}", row.name)).expect_err(row.name);
            assert_eq!(
                (error.kind, error.param.as_deref()),
                (ErrorKind::Unsupported, Some(row.name))
            );
            for neutral in row.neutral {
                assert_eq!(
                    settle(&format!("{{\"{}\": {neutral} }}", row.name)),
                    Ok(Vec::new()),
                    "{}",
                    row.name
                );
            }
        }
    }

    #[test]
    fn formatting_of_a_neutral_value_does_not_matter() {
        assert_eq!(
            settle(r#"{"response_format": { "type" : "text" }}"#),
            Ok(Vec::new())
        );
    }

    #[test]
    fn unknown_fields_are_listed_or_refused() {
        let body = br#"{"user":"me","store":true,"zeta":1}"#;
        let warnings = settle(std::str::from_utf8(body).expect("UTF-8")).expect("accepted");
        assert_eq!(
            warnings,
            [
                "store was ignored: answers are not stored",
                "unknown field zeta was ignored"
            ]
        );
        let fields = Fields::of_body(br#"{"zeta":1}"#, 64).expect("valid JSON");
        let error = Notes::new(UnknownFields::Refuse)
            .finish(fields)
            .expect_err("strict");
        assert_eq!(
            (error.kind, error.param.as_deref()),
            (ErrorKind::UnknownField, Some("zeta"))
        );
    }
}
