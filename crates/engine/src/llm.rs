//! `Llm`: text in, events out. What embedding programs use and what every door of the server calls.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use millpond_scheduler::{RequestId, TokenId};

pub mod error;
pub mod generation;
pub mod limits;
pub mod options;

pub use error::RequestError;
pub use generation::{
    ChoiceText, Completed, CompletedChoice, Generation, GenerationEvent, PromptInfo,
};
pub use limits::Limits;
pub use options::{
    ChatMessage, ChatRequest, CompletionRequest, GenerationOptions, Prompt, Role, ToolCall,
};

use crate::kernels::cpu::Isa;

/// A loaded model with its engine thread. Cheap to clone; the thread ends with the last clone.
#[derive(Clone)]
pub struct Llm {
    _inner: Arc<()>,
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
            max_batch_tokens: 512,
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
        let _ = (path, options, progress);
        unimplemented!()
    }

    /// The mock model: byte tokens, next token (previous + 1) mod vocabulary unless told otherwise; needs no file.
    pub fn mock(options: EngineOptions) -> Result<Self, LoadFailure> {
        let _ = options;
        unimplemented!()
    }

    /// What is loaded.
    pub fn info(&self) -> &ModelInfo {
        unimplemented!()
    }

    /// Limits of a single request.
    pub fn limits(&self) -> &Limits {
        unimplemented!()
    }

    /// Validates, renders, tokenizes and submits a conversation. Blocks for the time that takes (no IO, no waiting
    /// for the engine).
    pub fn chat(&self, request: ChatRequest) -> Result<Generation, RequestError> {
        let _ = request;
        unimplemented!()
    }

    /// The same for a raw prompt.
    pub fn complete(&self, request: CompletionRequest) -> Result<Generation, RequestError> {
        let _ = request;
        unimplemented!()
    }

    /// The prompt of a conversation, without generation.
    pub fn render_chat(&self, request: &ChatRequest) -> Result<PromptInfo, RequestError> {
        let _ = request;
        unimplemented!()
    }

    /// The tokens of a raw prompt, without generation.
    pub fn render_prompt(&self, prompt: &Prompt) -> Result<PromptInfo, RequestError> {
        let _ = prompt;
        unimplemented!()
    }

    /// Encodes text, special tokens in it parsed; adds the tokenizer's own (BOS …) when asked.
    pub fn tokenize(
        &self,
        text: &str,
        add_special_tokens: bool,
    ) -> Result<Vec<TokenId>, RequestError> {
        let _ = (text, add_special_tokens);
        unimplemented!()
    }

    /// Decodes tokens, special ones spelled out; an id outside the vocabulary is an error.
    pub fn detokenize(&self, tokens: &[u64]) -> Result<String, RequestError> {
        let _ = tokens;
        unimplemented!()
    }

    /// The bytes that a token stands for; a special token's are its spelling. Empty for ids without a token.
    pub fn token_bytes(&self, token: TokenId) -> Vec<u8> {
        let _ = token;
        unimplemented!()
    }

    /// Ends a request; unknown and finished ones are ignored.
    pub fn abort(&self, id: RequestId) {
        let _ = id;
        unimplemented!()
    }

    /// Counters and gauges.
    pub fn stats(&self) -> EngineStats {
        unimplemented!()
    }

    /// Refuses new requests from now on; running ones go on.
    pub fn drain(&self) {
        unimplemented!()
    }
}
