//! Flags become what the working objects are made of.

use millpond_engine::kernels::cpu::Isa;
use millpond_engine::llm::{EngineOptions, GenerationOptions, Limits};

use crate::cli::{EngineArgs, RequestLimitArgs, SamplingArgs};

/// Reads the name of an instruction set.
pub fn parse_isa(name: &str) -> Result<Isa, String> {
    let found = Isa::ALL.into_iter().find(|isa| isa.name() == name);
    found.ok_or_else(|| format!("must be one of {}", Isa::ALL.map(Isa::name).join(", ")))
}

impl EngineArgs {
    /// The engine's options, with `limits` for each request.
    pub fn options(&self, limits: Limits) -> EngineOptions {
        EngineOptions {
            num_threads: self.threads,
            isa: self.isa,
            kv_tokens: self.kv_tokens,
            max_context: self.max_context,
            max_batch_tokens: self.max_batch_tokens,
            max_sequences: self.max_sequences,
            max_waiting: self.max_waiting,
            prefix_cache: !self.no_prefix_cache,
            limits,
        }
    }
}

impl RequestLimitArgs {
    /// The engine's table of limits.
    pub fn limits(&self) -> Limits {
        Limits {
            max_messages: self.max_messages,
            max_n: self.max_n,
            max_stop: self.max_stop,
            max_stop_bytes: self.max_stop_bytes,
            max_top_logprobs: self.max_top_logprobs,
            max_logit_bias: self.max_logit_bias,
            max_token_ids: self.max_token_ids,
            max_cache_salt_bytes: self.max_cache_salt_bytes,
            queue_timeout_secs: self.queue_timeout.as_secs_f64(),
            first_token_timeout_secs: self.first_token_timeout.as_secs_f64(),
            total_timeout_secs: self.total_timeout.as_secs_f64(),
            ..Limits::default()
        }
    }
}

impl SamplingArgs {
    /// The engine's options for one generation.
    pub fn options(&self) -> GenerationOptions {
        GenerationOptions {
            max_tokens: self.max_tokens,
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: self.top_k,
            repetition_penalty: self.repetition_penalty,
            seed: self.seed,
            stop: self.stop.clone(),
            ..GenerationOptions::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instruction_sets_have_names() {
        assert_eq!(parse_isa("avx2"), Ok(Isa::Avx2));
        assert_eq!(
            parse_isa("AVX9"),
            Err("must be one of portable, neon, neon-dot, avx2, avx2-vnni, avx512".to_owned())
        );
    }
}
