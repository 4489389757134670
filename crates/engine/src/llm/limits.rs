//! Limits of one request: one table, used by every door.

/// What a single request may ask for. Each limit is named in the error it causes.
#[derive(Clone, Debug, PartialEq)]
pub struct Limits {
    /// Messages of a conversation.
    pub max_messages: usize,
    /// Choices.
    pub max_n: u64,
    /// Stop strings.
    pub max_stop: usize,
    /// Bytes of one stop string.
    pub max_stop_bytes: usize,
    /// Alternatives per position.
    pub max_top_logprobs: u64,
    /// Entries of the bias map.
    pub max_logit_bias: usize,
    /// Stop token ids, and allowed token ids.
    pub max_token_ids: usize,
    /// Tools.
    pub max_tools: usize,
    /// Bytes of the cache salt.
    pub max_cache_salt_bytes: usize,
    /// Seconds a request may wait before it is first scheduled.
    pub queue_timeout_secs: f64,
    /// Seconds until the first token.
    pub first_token_timeout_secs: f64,
    /// Seconds until the end.
    pub total_timeout_secs: f64,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            max_messages: 2_048,
            max_n: 8,
            max_stop: 16,
            max_stop_bytes: 256,
            max_top_logprobs: 20,
            max_logit_bias: 300,
            max_token_ids: 1_024,
            max_tools: 128,
            max_cache_salt_bytes: 128,
            queue_timeout_secs: 30.0,
            first_token_timeout_secs: 120.0,
            total_timeout_secs: 900.0,
        }
    }
}
