//! `Llm`: text in, events out. What embedding programs use and what every door of the server calls.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use millpond_scheduler::{CacheSalt, Deadlines, Request, RequestId, Span, Timestamp, TokenId};

pub mod error;
pub mod generation;
pub mod limits;
pub mod options;

mod start;
mod validate;

pub use error::RequestError;
pub use generation::{
    ChoiceText, Completed, CompletedChoice, Generation, GenerationEvent, PromptInfo,
};
pub use limits::Limits;
pub use options::{
    ChatMessage, ChatRequest, CompletionRequest, GenerationOptions, Prompt, Role, ToolCall,
};

use crate::driver::{Submission, TextOptions};
use crate::handle::EngineHandle;
use crate::kernels::cpu::Isa;
use crate::text::TextError;
use crate::text::chat_template::ChatTemplate;
use crate::text::tokenizer::{SpecialTokens, Tokenizer};
use validate::{Bounds, invalid, sampling_params};

/// A loaded model with its engine thread. Cheap to clone; the thread ends with the last clone.
#[derive(Clone)]
pub struct Llm {
    inner: Arc<Inner>,
}

/// What all clones share.
struct Inner {
    handle: EngineHandle,
    tokenizer: Tokenizer,
    template: Option<ChatTemplate>,
    info: ModelInfo,
    limits: Limits,
    eos_tokens: Vec<TokenId>,
}

/// How to run a model. `None` means: chosen from the machine and the model.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// Worker threads.
    pub num_threads: Option<usize>,
    /// Forced instruction set.
    pub isa: Option<Isa>,
    /// Tokens that the KV pool holds.
    pub kv_tokens: Option<u64>,
    /// Longest sequence; the model's own limit otherwise, lowered to the KV pool.
    pub max_context: Option<u32>,
    /// Tokens computed in one step.
    pub max_batch_tokens: u32,
    /// Sequences running at once.
    pub max_sequences: u32,
    /// Sequences waiting at once.
    pub max_waiting: u32,
    /// Reuse equal prefixes.
    pub prefix_cache: bool,
    /// Limits of a single request.
    pub limits: Limits,
}

impl Default for EngineOptions {
    fn default() -> Self {
        EngineOptions {
            num_threads: None,
            isa: None,
            kv_tokens: None,
            max_context: None,
            max_batch_tokens: 128,
            max_sequences: 64,
            max_waiting: 1024,
            prefix_cache: true,
            limits: Limits::default(),
        }
    }
}

/// What is loaded.
#[derive(Clone, Debug)]
pub struct ModelInfo {
    /// File or card name, the default of the API's `model`.
    pub name: String,
    /// Family, as its file names it.
    pub architecture: String,
    /// Prompt and output tokens of one sequence.
    pub max_context: u32,
    /// Width of the logits.
    pub vocab_size: usize,
    /// Names file, numerics and version; equal fingerprints give equal bytes.
    pub fingerprint: String,
    /// Has a chat template.
    pub can_chat: bool,
    /// What memory is used for.
    pub memory: MemoryPlan,
    /// Instruction set of the kernels.
    pub isa: String,
    /// Worker threads.
    pub num_threads: usize,
}

/// What memory is used for; made before allocation and kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryPlan {
    /// Packed weights.
    pub weight_bytes: u64,
    /// Key and value blocks.
    pub kv_bytes: u64,
    /// Activations of the largest step.
    pub workspace_bytes: u64,
    /// Key and value bytes of one token.
    pub kv_bytes_per_token: u64,
    /// Blocks in the pool.
    pub num_blocks: u32,
    /// Tokens per block.
    pub block_size: u32,
}

/// Counters and gauges of the engine thread, read without stopping it.
#[derive(Clone, Debug, Default)]
pub struct EngineStats {
    /// False once the engine thread has ended.
    pub alive: bool,
    /// New requests are refused.
    pub draining: bool,
    /// Sequences running.
    pub num_running: u64,
    /// Sequences waiting, those in the inbox included.
    pub num_waiting: u64,
    /// Blocks held by sequences, cached ones that could be evicted not counted.
    pub num_used_blocks: u64,
    /// Blocks in the pool.
    pub num_blocks: u64,
    /// Steps executed.
    pub num_steps: u64,
    /// How long the current step or the wait for one has lasted while there was work.
    pub stalled_for: Duration,
    /// Age of the oldest request that waits.
    pub oldest_waiting: Duration,
    /// Prompt tokens looked up in the prefix cache.
    pub prefix_query_tokens: u64,
    /// Prompt tokens found there.
    pub prefix_hit_tokens: u64,
    /// Sequences preempted.
    pub num_preemptions: u64,
    /// Prompt tokens of admitted requests.
    pub num_prompt_tokens: u64,
    /// Tokens generated.
    pub num_generated_tokens: u64,
    /// Steps by the number of tokens computed in them: (upper edge, steps up to it), then the sum.
    pub iteration_tokens: IterationTokens,
}

/// Histogram of tokens per step.
#[derive(Clone, Debug, Default)]
pub struct IterationTokens {
    /// Upper edges and the number of steps with at most that many tokens (cumulative).
    pub buckets: Vec<(f64, u64)>,
    /// Steps.
    pub count: u64,
    /// Tokens in all steps.
    pub sum: u64,
}

/// Why a model could not be loaded: one line for people.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct LoadFailure(pub String);

impl Llm {
    /// Loads a GGUF file or a folder with config.json and safetensors. `progress` gets (bytes done, bytes in all).
    pub fn load(
        path: &Path,
        options: EngineOptions,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self, LoadFailure> {
        start::load(path, options, progress)
    }

    /// The mock model: byte tokens, next token (previous + 1) mod vocabulary; needs no file.
    pub fn mock(options: EngineOptions) -> Result<Self, LoadFailure> {
        start::mock(options)
    }

    /// What is loaded.
    pub fn info(&self) -> &ModelInfo {
        &self.inner.info
    }

    /// Limits of a single request.
    pub fn limits(&self) -> &Limits {
        &self.inner.limits
    }

    /// Validates, renders, tokenizes and submits a conversation. Takes the time of that (no IO, no waiting
    /// for the engine).
    pub fn chat(&self, request: ChatRequest) -> Result<Generation, RequestError> {
        self.bounds().check(&request.options)?;
        let prompt = self.render_chat(&request)?;
        self.submit("messages", prompt, &request.options)
    }

    /// The same for a raw prompt.
    pub fn complete(&self, request: CompletionRequest) -> Result<Generation, RequestError> {
        self.bounds().check(&request.options)?;
        let prompt = self.render_prompt(&request.prompt)?;
        self.submit("prompt", prompt, &request.options)
    }

    /// The prompt of a conversation, without generation.
    pub fn render_chat(&self, request: &ChatRequest) -> Result<PromptInfo, RequestError> {
        self.check_conversation(request)?;
        let Some(template) = &self.inner.template else {
            return Err(invalid(
                "model",
                "this model has no chat template; use completions",
            ));
        };
        let refuse = |error: TextError| invalid("messages", error.to_string());
        let rendered = template.render(request).map_err(refuse)?;
        let text = rendered.text();
        self.check_length("messages", &text)?;
        let tokens = rendered.encode(&self.inner.tokenizer).map_err(refuse)?;
        self.bounds().check_prompt("messages", &tokens)?;
        Ok(PromptInfo {
            text: text.into(),
            tokens: tokens.into(),
        })
    }

    /// The tokens of a raw prompt, without generation.
    pub fn render_prompt(&self, prompt: &Prompt) -> Result<PromptInfo, RequestError> {
        let refuse = |error: TextError| invalid("prompt", error.to_string());
        let (text, tokens) = match prompt {
            Prompt::Text(text) => {
                self.check_length("prompt", text)?;
                (
                    text.clone(),
                    self.inner.tokenizer.encode_prompt(text).map_err(refuse)?,
                )
            }
            Prompt::Tokens(tokens) => {
                self.bounds().check_prompt("prompt", tokens)?;
                (
                    self.inner.tokenizer.decode(tokens, false).map_err(refuse)?,
                    tokens.clone(),
                )
            }
        };
        self.bounds().check_prompt("prompt", &tokens)?;
        Ok(PromptInfo {
            text: text.into(),
            tokens: tokens.into(),
        })
    }

    /// Encodes text, special tokens in it parsed; adds the tokenizer's own (BOS …) when asked.
    pub fn tokenize(
        &self,
        text: &str,
        add_special_tokens: bool,
    ) -> Result<Vec<TokenId>, RequestError> {
        let tokenizer = &self.inner.tokenizer;
        let tokens = match add_special_tokens {
            true => tokenizer.encode_prompt(text),
            false => tokenizer.encode(text, SpecialTokens::Parse),
        };
        tokens.map_err(|error| invalid("prompt", error.to_string()))
    }

    /// Decodes tokens, special ones spelled out; an id outside the vocabulary is an error.
    pub fn detokenize(&self, tokens: &[u64]) -> Result<String, RequestError> {
        let known = |id: u64| {
            let token = u32::try_from(id).ok().map(TokenId);
            token
                .filter(|token| self.inner.tokenizer.token_bytes(*token).is_some())
                .ok_or_else(|| invalid("tokens", format!("token id {id} is not in the vocabulary")))
        };
        let tokens: Vec<TokenId> = tokens
            .iter()
            .map(|id| known(*id))
            .collect::<Result<_, _>>()?;
        let text = self.inner.tokenizer.decode(&tokens, false);
        text.map_err(|error| invalid("tokens", error.to_string()))
    }

    /// The bytes that a token stands for; a special token's are its spelling. Empty for ids without a token.
    pub fn token_bytes(&self, token: TokenId) -> Vec<u8> {
        self.inner
            .tokenizer
            .token_bytes(token)
            .map(<[u8]>::to_vec)
            .unwrap_or_default()
    }

    /// Ends a request; unknown and finished ones are ignored.
    pub fn abort(&self, id: RequestId) {
        self.inner.handle.abort(id);
    }

    /// Counters and gauges.
    pub fn stats(&self) -> EngineStats {
        self.inner.handle.gauges().snapshot()
    }

    /// Refuses new requests from now on; running ones go on.
    pub fn drain(&self) {
        self.inner.handle.gauges().set_draining();
    }

    fn bounds(&self) -> Bounds<'_> {
        Bounds {
            limits: &self.inner.limits,
            vocab_size: self.inner.info.vocab_size,
            max_context: self.inner.info.max_context,
            eos_tokens: &self.inner.eos_tokens,
        }
    }

    fn check_conversation(&self, request: &ChatRequest) -> Result<(), RequestError> {
        let limits = &self.inner.limits;
        match () {
            () if request.messages.is_empty() => {
                Err(invalid("messages", "at least one message required"))
            }
            () if request.messages.len() > limits.max_messages => Err(invalid(
                "messages",
                format!("at most {} messages allowed", limits.max_messages),
            )),
            () if request.tools.len() > limits.max_tools => Err(invalid(
                "tools",
                format!("at most {} tools allowed", limits.max_tools),
            )),
            () => Ok(()),
        }
    }

    /// A text that cannot fit even if every token were the longest one is refused before it is tokenized.
    fn check_length(&self, param: &'static str, text: &str) -> Result<(), RequestError> {
        let max_context = self.inner.info.max_context;
        let longest = self.inner.tokenizer.max_token_bytes();
        if text.len() <= longest.saturating_mul(max_context as usize) {
            return Ok(());
        }
        let message = format!(
            "the prompt has {} bytes, which can never fit this model's maximum context length of {max_context} tokens",
            text.len()
        );
        Err(RequestError::NeverFits { param, message })
    }

    fn submit(
        &self,
        param: &'static str,
        prompt: PromptInfo,
        options: &GenerationOptions,
    ) -> Result<Generation, RequestError> {
        let bounds = self.bounds();
        bounds.check_prompt(param, &prompt.tokens)?;
        let stop = bounds.stop_conditions(options, prompt.tokens.len() as u32)?;
        let seed = options.seed.unwrap_or_else(start::mint_seed);
        let now = self.inner.handle.now();
        let num_choices = options.n as u32;
        let request = Request {
            id: self.inner.handle.mint_id(),
            prompt: Arc::clone(&prompt.tokens),
            sampling: sampling_params(options, seed),
            stop,
            num_choices,
            // vLLM runs smaller numbers earlier, the scheduler larger ones.
            priority: options.priority.saturating_neg(),
            salt: CacheSalt(options.cache_salt.as_bytes().into()),
            arrival: now,
            deadlines: self.deadlines(options, now),
        };
        let id = request.id;
        let text = TextOptions {
            stop: options.stop.clone().into(),
            include_stop: options.include_stop_str_in_output,
            skip_special: options.skip_special_tokens,
        };
        let (submission, events) = Submission::new(Arc::new(request), text);
        let guard = self.inner.handle.submit(submission)?;
        Ok(Generation {
            id,
            seed,
            prompt,
            num_choices,
            events,
            guard,
        })
    }

    fn deadlines(&self, options: &GenerationOptions, now: Timestamp) -> Deadlines {
        let limits = &self.inner.limits;
        let after = |secs: f64| Some(now + Span((secs * 1e9) as u64));
        let total = options
            .timeout_secs
            .unwrap_or(f64::INFINITY)
            .min(limits.total_timeout_secs);
        Deadlines {
            queue: after(limits.queue_timeout_secs),
            first_token: after(limits.first_token_timeout_secs),
            total: after(total),
        }
    }
}
