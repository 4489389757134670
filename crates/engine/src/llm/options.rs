//! What a caller may ask for, in the engine's own terms. Wire formats are converted into these by hand.

use millpond_scheduler::TokenId;
use serde_json::{Map, Value};

/// A conversation to continue.
#[derive(Clone, Debug, Default)]
pub struct ChatRequest {
    /// The conversation so far; not empty.
    pub messages: Vec<ChatMessage>,
    /// Tool descriptions handed to the template as they are.
    pub tools: Vec<Value>,
    /// Documents handed to the template as they are.
    pub documents: Vec<Value>,
    /// Extra variables of the template (`enable_thinking`, …).
    pub template_kwargs: Map<String, Value>,
    /// End the prompt with the opening of an assistant message; the default.
    pub add_generation_prompt: Option<bool>,
    /// Continue the last message instead of opening a new one.
    pub continue_final_message: bool,
    /// How to generate.
    pub options: GenerationOptions,
}

/// Who speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Instructions of the operator.
    System,
    /// Instructions of the operator, by the newer name.
    Developer,
    /// The person asking.
    User,
    /// The model.
    Assistant,
    /// The result of a tool call.
    Tool,
}

impl Role {
    /// The name that chat templates compare with.
    pub fn as_str(self) -> &'static str {
        match self {
            Role::System => "system",
            Role::Developer => "developer",
            Role::User => "user",
            Role::Assistant => "assistant",
            Role::Tool => "tool",
        }
    }
}

/// One message of a conversation.
#[derive(Clone, Debug)]
pub struct ChatMessage {
    /// Who speaks.
    pub role: Role,
    /// Text; `None` for an assistant message that only calls tools.
    pub content: Option<String>,
    /// The model's reasoning, apart from its content.
    pub reasoning_content: Option<String>,
    /// Name of the participant.
    pub name: Option<String>,
    /// Calls the assistant made.
    pub tool_calls: Vec<ToolCall>,
    /// The call that a tool message answers.
    pub tool_call_id: Option<String>,
}

impl ChatMessage {
    /// A message of plain text.
    pub fn text(role: Role, content: impl Into<String>) -> Self {
        ChatMessage {
            role,
            content: Some(content.into()),
            reasoning_content: None,
            name: None,
            tool_calls: Vec::new(),
            tool_call_id: None,
        }
    }
}

/// A call of a function by the assistant.
#[derive(Clone, Debug)]
pub struct ToolCall {
    /// Names the call.
    pub id: String,
    /// The function.
    pub name: String,
    /// Its arguments, parsed.
    pub arguments: Value,
}

/// A text to continue.
#[derive(Clone, Debug)]
pub struct CompletionRequest {
    /// The text or its tokens.
    pub prompt: Prompt,
    /// Return the prompt's text before the first choice's text.
    pub echo: bool,
    /// How to generate.
    pub options: GenerationOptions,
}

/// A raw prompt.
#[derive(Clone, Debug)]
pub enum Prompt {
    /// Encoded with special tokens parsed; a beginning-of-sequence token is added when the tokenizer says so.
    Text(String),
    /// Used as it is.
    Tokens(Vec<TokenId>),
}

/// How to generate; every field has the meaning that vLLM's OpenAI server gives it.
#[derive(Clone, Debug)]
pub struct GenerationOptions {
    /// At most this many tokens; `None`: what the context leaves.
    pub max_tokens: Option<u64>,
    /// No stop token, stop string or end of sequence before this many tokens.
    pub min_tokens: u64,
    /// 0 to 2; 0 is greedy.
    pub temperature: f64,
    /// Above 0, up to 1.
    pub top_p: f64,
    /// 0 or −1: off.
    pub top_k: i64,
    /// 0 to 1.
    pub min_p: f64,
    /// Above 0, up to 2.
    pub repetition_penalty: f64,
    /// −2 to 2.
    pub frequency_penalty: f64,
    /// −2 to 2.
    pub presence_penalty: f64,
    /// Token to bias, −100 to 100.
    pub logit_bias: Vec<(u64, f64)>,
    /// If given, nothing else may be chosen.
    pub allowed_token_ids: Option<Vec<u64>>,
    /// Key of the noise; `None`: one is minted and returned.
    pub seed: Option<u64>,
    /// Number of choices.
    pub n: u64,
    /// Texts that end the output.
    pub stop: Vec<String>,
    /// Tokens that end the output.
    pub stop_token_ids: Vec<u64>,
    /// Keep the stop string in the text.
    pub include_stop_str_in_output: bool,
    /// Let end-of-sequence tokens pass.
    pub ignore_eos: bool,
    /// Leave special tokens out of the text; the default.
    pub skip_special_tokens: bool,
    /// Report the chosen token's log-probability and this many alternatives.
    pub logprobs: Option<u64>,
    /// The same for prompt tokens.
    pub prompt_logprobs: Option<u64>,
    /// Smaller runs earlier, as in vLLM.
    pub priority: i32,
    /// Shares cached prefixes only with equal salts.
    pub cache_salt: String,
    /// Seconds until the request is given up; `None`: the server's limit.
    pub timeout_secs: Option<f64>,
}

impl Default for GenerationOptions {
    fn default() -> Self {
        GenerationOptions {
            max_tokens: None,
            min_tokens: 0,
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            logit_bias: Vec::new(),
            allowed_token_ids: None,
            seed: None,
            n: 1,
            stop: Vec::new(),
            stop_token_ids: Vec::new(),
            include_stop_str_in_output: false,
            ignore_eos: false,
            skip_special_tokens: true,
            logprobs: None,
            prompt_logprobs: None,
            priority: 0,
            cache_salt: String::new(),
            timeout_secs: None,
        }
    }
}
