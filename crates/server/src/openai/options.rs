//! The generation fields that chats and completions share: from the wire to `GenerationOptions`.
//!
//! Types are checked here; ranges are the engine's to check, so that every door has the same ones.

use millpond_engine::llm::{GenerationOptions, Limits, RequestError};

use super::errors::{ApiError, ApiResult};
use super::fields::Fields;

/// Takes every shared field; `limits` bounds the lists while they are read.
pub fn take_options(fields: &mut Fields, limits: &Limits) -> ApiResult<GenerationOptions> {
    let default = GenerationOptions::default();
    let max_ids = limits.max_token_ids;
    Ok(GenerationOptions {
        max_tokens: fields.take("max_tokens")?,
        min_tokens: fields.take("min_tokens")?.unwrap_or(0),
        temperature: fields
            .take_number("temperature")?
            .unwrap_or(default.temperature),
        top_p: fields.take_number("top_p")?.unwrap_or(default.top_p),
        top_k: fields.take("top_k")?.unwrap_or(default.top_k),
        min_p: fields.take_number("min_p")?.unwrap_or(default.min_p),
        repetition_penalty: fields
            .take_number("repetition_penalty")?
            .unwrap_or(default.repetition_penalty),
        frequency_penalty: fields.take_number("frequency_penalty")?.unwrap_or(0.0),
        presence_penalty: fields.take_number("presence_penalty")?.unwrap_or(0.0),
        logit_bias: fields.take_token_map("logit_bias", limits.max_logit_bias)?,
        allowed_token_ids: fields.take_list("allowed_token_ids", max_ids)?,
        seed: fields.take("seed")?.map(seed_from_wire),
        n: fields.take("n")?.unwrap_or(1),
        stop: fields
            .take_texts("stop", limits.max_stop, limits.max_stop_bytes)?
            .unwrap_or_default(),
        stop_token_ids: fields
            .take_list("stop_token_ids", max_ids)?
            .unwrap_or_default(),
        include_stop_str_in_output: fields.take("include_stop_str_in_output")?.unwrap_or(false),
        ignore_eos: fields.take("ignore_eos")?.unwrap_or(false),
        skip_special_tokens: fields.take("skip_special_tokens")?.unwrap_or(true),
        logprobs: None,
        prompt_logprobs: fields.take("prompt_logprobs")?,
        priority: fields.take("priority")?.unwrap_or(0),
        cache_salt: fields
            .take_text("cache_salt", limits.max_cache_salt_bytes)?
            .unwrap_or_default(),
        timeout_secs: fields.take_number("timeout")?,
    })
}

/// Seeds are signed on the wire, as OpenAI's are; the bits are kept.
fn seed_from_wire(seed: i64) -> u64 {
    seed.cast_unsigned()
}

/// The wire's spelling of a seed; sent back it gives the same seed.
pub fn seed_to_wire(seed: u64) -> i64 {
    seed.cast_signed()
}

/// Names that a request used for fields that the engine calls otherwise: (engine's, request's).
pub type Renames = Vec<(&'static str, &'static str)>;

/// A refusal by the engine, with the field named as the request named it.
pub fn refuse(error: RequestError, renames: &Renames) -> ApiError {
    let renamed = |param: &'static str| {
        let rename = renames.iter().find(|(engines, _)| *engines == param);
        rename.map_or(param, |(_, requests)| *requests)
    };
    ApiError::from(match error {
        RequestError::Invalid { param, message } => RequestError::Invalid {
            param: renamed(param),
            message,
        },
        RequestError::NeverFits { param, message } => RequestError::NeverFits {
            param: renamed(param),
            message,
        },
        RequestError::Overloaded { .. } | RequestError::ShuttingDown => error,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(body: &str) -> ApiResult<GenerationOptions> {
        let mut fields = Fields::of_body(body.as_bytes(), 64)?;
        take_options(&mut fields, &Limits::default())
    }

    #[test]
    fn fields_arrive_where_they_belong() {
        let parsed = options(
            r#"{"max_tokens":5,"temperature":0,"top_p":0.5,"top_k":-1,"seed":-1,"stop":"x","logit_bias":{"7":-1},
                "stop_token_ids":[1,2],"ignore_eos":true,"timeout":2,"n":3}"#,
        )
        .expect("valid");
        assert_eq!(
            (parsed.max_tokens, parsed.temperature, parsed.top_p),
            (Some(5), 0.0, 0.5)
        );
        assert_eq!(
            (parsed.top_k, parsed.seed, parsed.n),
            (-1, Some(u64::MAX), 3)
        );
        assert_eq!(
            (parsed.stop, parsed.stop_token_ids),
            (vec!["x".to_owned()], vec![1, 2])
        );
        assert_eq!(
            (parsed.logit_bias, parsed.timeout_secs),
            (vec![(7, -1.0)], Some(2.0))
        );
        assert!(parsed.ignore_eos && parsed.skip_special_tokens);
    }

    #[test]
    fn a_seed_survives_the_round_trip() {
        for seed in [0, 1, 1 << 52, u64::MAX, 1 << 63] {
            assert_eq!(seed_from_wire(seed_to_wire(seed)), seed);
        }
    }

    #[test]
    fn wrong_types_name_their_field() {
        for name in [
            "max_tokens",
            "min_tokens",
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "repetition_penalty",
            "frequency_penalty",
            "presence_penalty",
            "logit_bias",
            "allowed_token_ids",
            "seed",
            "n",
            "stop_token_ids",
            "prompt_logprobs",
            "priority",
            "timeout",
            "ignore_eos",
        ] {
            let error = options(&format!("{{\"{name}\":\"1\"}}")).expect_err(name);
            assert_eq!(error.param.as_deref(), Some(name));
        }
    }

    #[test]
    fn the_engines_names_become_the_requests() {
        let error = RequestError::Invalid {
            param: "max_tokens",
            message: String::new(),
        };
        let renames = vec![("max_tokens", "max_completion_tokens")];
        assert_eq!(
            refuse(error, &renames).param.as_deref(),
            Some("max_completion_tokens")
        );
    }
}
