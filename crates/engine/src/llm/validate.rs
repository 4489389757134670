//! The one validator: options as asked become sampling parameters and stop conditions, or a refusal that
//! names the field.
//!
//! Ranges are those of the OpenAI API; fields it lacks have vLLM's.

use millpond_scheduler::{SamplingParams, StopConditions, TokenId};

use super::{GenerationOptions, Limits, RequestError};

/// What the model and the pool allow.
pub(super) struct Bounds<'a> {
    pub(super) limits: &'a Limits,
    pub(super) vocab_size: usize,
    pub(super) max_context: u32,
    pub(super) eos_tokens: &'a [TokenId],
}

/// A refusal of one field.
pub(super) fn invalid(param: &'static str, message: impl Into<String>) -> RequestError {
    RequestError::Invalid {
        param,
        message: message.into(),
    }
}

impl Bounds<'_> {
    /// Checks every field that does not depend on the prompt.
    pub(super) fn check(&self, options: &GenerationOptions) -> Result<(), RequestError> {
        check_ranges(options)?;
        self.check_counts(options)?;
        self.check_stop(options)?;
        self.check_tokens("stop_token_ids", &options.stop_token_ids)?;
        if let Some(allowed) = &options.allowed_token_ids {
            if allowed.is_empty() {
                return Err(invalid(
                    "allowed_token_ids",
                    "must hold at least one token id",
                ));
            }
            self.check_tokens("allowed_token_ids", allowed)?;
        }
        self.check_bias(options)
    }

    /// Prompt tokens must exist and leave room for an answer.
    pub(super) fn check_prompt(
        &self,
        param: &'static str,
        tokens: &[TokenId],
    ) -> Result<(), RequestError> {
        if tokens.is_empty() {
            return Err(invalid(param, "must hold at least one token"));
        }
        if let Some(bad) = tokens
            .iter()
            .find(|token| token.0 as usize >= self.vocab_size)
        {
            return Err(self.unknown_token(param, u64::from(bad.0)));
        }
        if tokens.len() >= self.max_context as usize {
            let message = format!(
                "the prompt has {} tokens; this model's maximum context length is {} tokens, prompt and output together",
                tokens.len(),
                self.max_context
            );
            return Err(RequestError::NeverFits { param, message });
        }
        Ok(())
    }

    /// When to stop, given the prompt's length in tokens.
    pub(super) fn stop_conditions(
        &self,
        options: &GenerationOptions,
        num_prompt: u32,
    ) -> Result<StopConditions, RequestError> {
        let room = self.max_context.saturating_sub(num_prompt);
        let max_tokens = match options.max_tokens {
            None => room,
            Some(asked) => u32::try_from(asked).ok().filter(|asked| *asked <= room).ok_or_else(|| {
                RequestError::NeverFits {
                    param: "max_tokens",
                    message: format!(
                        "{asked} tokens of output after a prompt of {num_prompt} exceed this model's maximum context length of {} tokens",
                        self.max_context
                    ),
                }
            })?,
        };
        let min_tokens = u32::try_from(options.min_tokens)
            .ok()
            .filter(|min| *min <= max_tokens)
            .ok_or_else(|| {
                invalid(
                    "min_tokens",
                    format!("must be at most max_tokens, which is {max_tokens}"),
                )
            })?;
        Ok(StopConditions {
            max_tokens,
            min_tokens,
            stop_token_ids: token_ids(&options.stop_token_ids),
            eos_token_ids: self.eos_tokens.to_vec(),
            ignore_eos: options.ignore_eos,
        })
    }

    fn check_counts(&self, options: &GenerationOptions) -> Result<(), RequestError> {
        let limits = self.limits;
        at_least("max_tokens", options.max_tokens.unwrap_or(1), 1)?;
        at_least("n", options.n, 1)?;
        at_most("n", options.n, limits.max_n)?;
        at_most(
            "logprobs",
            options.logprobs.unwrap_or(0),
            limits.max_top_logprobs,
        )?;
        at_most(
            "prompt_logprobs",
            options.prompt_logprobs.unwrap_or(0),
            limits.max_top_logprobs,
        )?;
        at_most(
            "cache_salt",
            options.cache_salt.len() as u64,
            limits.max_cache_salt_bytes as u64,
        )
    }

    fn check_stop(&self, options: &GenerationOptions) -> Result<(), RequestError> {
        at_most(
            "stop",
            options.stop.len() as u64,
            self.limits.max_stop as u64,
        )?;
        for stop in &options.stop {
            if stop.is_empty() {
                return Err(invalid("stop", "a stop string must not be empty"));
            }
            if stop.len() > self.limits.max_stop_bytes {
                let max = self.limits.max_stop_bytes;
                return Err(invalid(
                    "stop",
                    format!("a stop string may have at most {max} bytes"),
                ));
            }
        }
        Ok(())
    }

    fn check_tokens(&self, param: &'static str, tokens: &[u64]) -> Result<(), RequestError> {
        at_most(param, tokens.len() as u64, self.limits.max_token_ids as u64)?;
        match tokens
            .iter()
            .find(|token| **token >= self.vocab_size as u64)
        {
            Some(bad) => Err(self.unknown_token(param, *bad)),
            None => Ok(()),
        }
    }

    fn check_bias(&self, options: &GenerationOptions) -> Result<(), RequestError> {
        at_most(
            "logit_bias",
            options.logit_bias.len() as u64,
            self.limits.max_logit_bias as u64,
        )?;
        for (token, bias) in &options.logit_bias {
            if *token >= self.vocab_size as u64 {
                return Err(self.unknown_token("logit_bias", *token));
            }
            in_range("logit_bias", *bias, -100.0, 100.0)?;
        }
        Ok(())
    }

    fn unknown_token(&self, param: &'static str, token: u64) -> RequestError {
        let last = self.vocab_size.saturating_sub(1);
        invalid(
            param,
            format!("token id {token} is outside the vocabulary (0 to {last})"),
        )
    }
}

/// Sampling parameters of checked options.
pub(super) fn sampling_params(options: &GenerationOptions, seed: u64) -> SamplingParams {
    let small = |value: Option<u64>| value.and_then(|value| u32::try_from(value).ok());
    SamplingParams {
        seed,
        temperature: options.temperature as f32,
        top_k: u32::try_from(options.top_k.max(0)).unwrap_or(u32::MAX),
        top_p: options.top_p as f32,
        min_p: options.min_p as f32,
        repetition_penalty: options.repetition_penalty as f32,
        frequency_penalty: options.frequency_penalty as f32,
        presence_penalty: options.presence_penalty as f32,
        logit_bias: options
            .logit_bias
            .iter()
            .filter_map(|(token, bias)| Some((TokenId(u32::try_from(*token).ok()?), *bias as f32)))
            .collect(),
        allowed_token_ids: options.allowed_token_ids.as_deref().map(token_ids),
        logprobs: small(options.logprobs),
        prompt_logprobs: small(options.prompt_logprobs),
    }
}

/// Checked ids; none is dropped because all lie in the vocabulary.
fn token_ids(ids: &[u64]) -> Vec<TokenId> {
    ids.iter()
        .filter_map(|id| u32::try_from(*id).ok())
        .map(TokenId)
        .collect()
}

fn check_ranges(options: &GenerationOptions) -> Result<(), RequestError> {
    in_range("temperature", options.temperature, 0.0, 2.0)?;
    in_range("top_p", options.top_p, 0.0, 1.0)?;
    above_zero("top_p", options.top_p)?;
    in_range("min_p", options.min_p, 0.0, 1.0)?;
    in_range("frequency_penalty", options.frequency_penalty, -2.0, 2.0)?;
    in_range("presence_penalty", options.presence_penalty, -2.0, 2.0)?;
    in_range("repetition_penalty", options.repetition_penalty, 0.0, 2.0)?;
    above_zero("repetition_penalty", options.repetition_penalty)?;
    if options.top_k < -1 || options.top_k > i64::from(u32::MAX) {
        return Err(invalid(
            "top_k",
            "must be −1 or 0 (off) or a positive 32-bit number",
        ));
    }
    match options.timeout_secs {
        Some(timeout) if !(timeout > 0.0 && timeout.is_finite()) => {
            Err(invalid("timeout", "must be a positive number of seconds"))
        }
        Some(_) | None => Ok(()),
    }
}

/// NaN is in no range.
fn in_range(param: &'static str, value: f64, min: f64, max: f64) -> Result<(), RequestError> {
    if value >= min && value <= max {
        return Ok(());
    }
    Err(invalid(
        param,
        format!("must be between {min} and {max}, got {value}"),
    ))
}

/// Rounding to f32 must not turn a positive number into zero either.
fn above_zero(param: &'static str, value: f64) -> Result<(), RequestError> {
    if value as f32 > 0.0 {
        Ok(())
    } else {
        Err(invalid(param, "must be above 0"))
    }
}

fn at_most(param: &'static str, value: u64, max: u64) -> Result<(), RequestError> {
    if value <= max {
        Ok(())
    } else {
        Err(invalid(
            param,
            format!("at most {max} allowed, got {value}"),
        ))
    }
}

fn at_least(param: &'static str, value: u64, min: u64) -> Result<(), RequestError> {
    if value >= min {
        Ok(())
    } else {
        Err(invalid(
            param,
            format!("at least {min} required, got {value}"),
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(change: impl FnOnce(&mut GenerationOptions)) -> Option<String> {
        let limits = Limits::default();
        let bounds = Bounds {
            limits: &limits,
            vocab_size: 100,
            max_context: 64,
            eos_tokens: &[],
        };
        let mut options = GenerationOptions::default();
        change(&mut options);
        let result = bounds
            .check(&options)
            .and_then(|()| bounds.stop_conditions(&options, 10).map(drop));
        match result {
            Ok(()) => None,
            Err(RequestError::Invalid { param, .. } | RequestError::NeverFits { param, .. }) => {
                Some(param.to_owned())
            }
            Err(other) => Some(other.to_string()),
        }
    }

    #[test]
    fn every_field_outside_its_range_is_named() {
        type Change = fn(&mut GenerationOptions);
        let cases: [(&str, Change); 29] = [
            ("temperature", |o| o.temperature = -0.1),
            ("temperature", |o| o.temperature = 2.01),
            ("temperature", |o| o.temperature = f64::NAN),
            ("temperature", |o| o.temperature = f64::INFINITY),
            ("top_p", |o| o.top_p = 0.0),
            ("top_p", |o| o.top_p = 1e-60),
            ("top_p", |o| o.top_p = 1.1),
            ("min_p", |o| o.min_p = -0.1),
            ("min_p", |o| o.min_p = 1.1),
            ("frequency_penalty", |o| o.frequency_penalty = 2.1),
            ("presence_penalty", |o| o.presence_penalty = -2.1),
            ("repetition_penalty", |o| o.repetition_penalty = 0.0),
            ("repetition_penalty", |o| o.repetition_penalty = 1e308),
            ("top_k", |o| o.top_k = -2),
            ("top_k", |o| o.top_k = i64::MAX),
            ("n", |o| o.n = 0),
            ("n", |o| o.n = 9),
            ("max_tokens", |o| o.max_tokens = Some(0)),
            ("max_tokens", |o| o.max_tokens = Some(55)),
            ("max_tokens", |o| o.max_tokens = Some(u64::MAX)),
            ("min_tokens", |o| o.min_tokens = 55),
            ("logprobs", |o| o.logprobs = Some(21)),
            ("prompt_logprobs", |o| o.prompt_logprobs = Some(21)),
            ("stop", |o| o.stop = vec![String::new()]),
            ("stop", |o| o.stop = vec!["x".repeat(257)]),
            ("stop", |o| o.stop = vec!["x".to_owned(); 17]),
            ("stop_token_ids", |o| o.stop_token_ids = vec![100]),
            ("allowed_token_ids", |o| {
                o.allowed_token_ids = Some(Vec::new())
            }),
            ("timeout", |o| o.timeout_secs = Some(0.0)),
        ];
        for (param, change) in cases {
            assert_eq!(check(change).as_deref(), Some(param));
        }
    }

    #[test]
    fn edges_of_every_range_are_accepted() {
        type Change = fn(&mut GenerationOptions);
        let cases: [Change; 9] = [
            |o| o.temperature = 0.0,
            |o| o.temperature = 2.0,
            |o| o.top_k = -1,
            |o| o.n = 8,
            |o| o.max_tokens = Some(54),
            |o| o.stop = vec!["x".repeat(256); 16],
            |o| o.stop_token_ids = vec![99],
            |o| o.logit_bias = vec![(99, -100.0)],
            |o| o.logprobs = Some(20),
        ];
        for change in cases {
            assert_eq!(check(change), None);
        }
    }

    #[test]
    fn a_bias_outside_range_or_vocabulary_is_refused() {
        assert_eq!(
            check(|o| o.logit_bias = vec![(1, 100.5)]).as_deref(),
            Some("logit_bias")
        );
        assert_eq!(
            check(|o| o.logit_bias = vec![(100, 1.0)]).as_deref(),
            Some("logit_bias")
        );
        assert_eq!(
            check(|o| o.logit_bias = vec![(1, 1.0); 301]).as_deref(),
            Some("logit_bias")
        );
    }
}
