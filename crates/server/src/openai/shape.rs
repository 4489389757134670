//! How an answer is to look: streamed or whole, with which extras. Chats and completions share these fields.

use super::errors::{ApiError, ApiResult};
use super::fields::Fields;

/// The shape of one answer.
#[derive(Clone, Debug, PartialEq)]
pub struct AnswerShape {
    /// Whole or streamed.
    pub delivery: Delivery,
    /// Token ids of prompt and output are wanted (`return_token_ids`).
    pub token_ids: bool,
    /// Log-probabilities with this many alternatives are wanted.
    pub logprobs: Option<u64>,
    /// What to tell the caller about fields that did nothing.
    pub warnings: Vec<String>,
}

/// Whole or streamed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// One JSON body.
    Whole,
    /// Server-sent events.
    Stream(StreamUsage),
}

/// When a stream tells its usage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamUsage {
    /// Never.
    Never,
    /// In a chunk of its own before the end; `null` in the others.
    AtEnd,
    /// In every chunk.
    Continuous,
}

/// Takes the fields that shape an answer. Log-probabilities differ between endpoints and are set by them.
pub fn take_shape(fields: &mut Fields) -> ApiResult<AnswerShape> {
    let stream = fields.take("stream")?.unwrap_or(false);
    let usage = take_stream_usage(fields)?;
    let delivery = match (stream, usage) {
        (true, usage) => Delivery::Stream(usage.unwrap_or(StreamUsage::Never)),
        (false, None) => Delivery::Whole,
        (false, Some(_)) => {
            let message = "is only allowed when stream is true";
            return Err(ApiError::invalid("stream_options", message));
        }
    };
    Ok(AnswerShape {
        delivery,
        token_ids: fields.take("return_token_ids")?.unwrap_or(false),
        logprobs: None,
        warnings: Vec::new(),
    })
}

/// Reads `stream_options`.
fn take_stream_usage(fields: &mut Fields) -> ApiResult<Option<StreamUsage>> {
    let Some(mut options) = fields.take_object("stream_options")? else {
        return Ok(None);
    };
    let include: bool = options.take("include_usage")?.unwrap_or(false);
    let continuous: bool = options.take("continuous_usage_stats")?.unwrap_or(false);
    fields.give_back(options);
    Ok(Some(match (include, continuous) {
        (true, true) => StreamUsage::Continuous,
        (true, false) => StreamUsage::AtEnd,
        (false, _) => StreamUsage::Never,
    }))
}

/// Prompt log-probabilities come whole or not at all, as in vLLM.
pub fn refuse_streamed_prompt_logprobs(
    shape: &AnswerShape,
    prompt_logprobs: Option<u64>,
) -> ApiResult<()> {
    if prompt_logprobs.is_some() && shape.delivery != Delivery::Whole {
        let message = "is not available when stream is true";
        return Err(ApiError::invalid("prompt_logprobs", message));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(body: &str, expected: Result<Delivery, &str>) {
        let mut fields = Fields::of_body(body.as_bytes(), 64).expect("valid JSON");
        let delivery = take_shape(&mut fields).map(|shape| shape.delivery);
        let delivery = delivery.map_err(|error| error.param.expect("names a field"));
        assert_eq!(delivery, expected.map_err(str::to_owned), "{body}");
    }

    #[test]
    fn streams_and_their_usage() {
        check("{}", Ok(Delivery::Whole));
        check(
            r#"{"stream":true}"#,
            Ok(Delivery::Stream(StreamUsage::Never)),
        );
        check(
            r#"{"stream":true,"stream_options":{"include_usage":true}}"#,
            Ok(Delivery::Stream(StreamUsage::AtEnd)),
        );
        check(
            r#"{"stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":true}}"#,
            Ok(Delivery::Stream(StreamUsage::Continuous)),
        );
        check(r#"{"stream_options":{}}"#, Err("stream_options"));
        check(r#"{"stream":1}"#, Err("stream"));
        check(
            r#"{"stream":true,"stream_options":{"include_usage":1}}"#,
            Err("stream_options.include_usage"),
        );
    }
}
