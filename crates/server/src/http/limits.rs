//! Every limit of the HTTP door in one table; each is named in the error it causes (A8).
//!
//! What a single request may ask for is the engine's table (`millpond_engine::llm::Limits`).

use std::time::Duration;

/// Limits of connections, bodies and streams.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "HTTP limits")]
pub struct HttpLimits {
    /// Bytes of one request body
    #[arg(long, env = "MILLPOND_MAX_BODY_BYTES", default_value_t = 8 << 20)]
    pub max_body_bytes: usize,

    /// Bytes of all request bodies that are being read or parsed
    #[arg(long, env = "MILLPOND_MAX_TOTAL_BODY_BYTES", default_value_t = 256 << 20)]
    pub max_total_body_bytes: usize,

    /// Nesting of a JSON body
    #[arg(long, env = "MILLPOND_MAX_JSON_DEPTH", default_value_t = 64)]
    pub max_json_depth: usize,

    /// Prompts of one completions request
    #[arg(long, env = "MILLPOND_MAX_PROMPTS", default_value_t = 32)]
    pub max_prompts: usize,

    /// Connections at once
    #[arg(long, env = "MILLPOND_MAX_CONNECTIONS", default_value_t = 4096)]
    pub max_connections: usize,

    /// Connections at once from one address
    #[arg(
        long,
        env = "MILLPOND_MAX_CONNECTIONS_PER_ADDRESS",
        default_value_t = 128
    )]
    pub max_connections_per_address: usize,

    /// Bytes of encoded output that may wait for a reader before its request is aborted
    #[arg(long, env = "MILLPOND_MAX_STREAM_BUFFER_BYTES", default_value_t = 256 << 10)]
    pub max_stream_buffer_bytes: usize,

    /// Seconds for the head of a request to arrive
    #[arg(long, env = "MILLPOND_HEADER_TIMEOUT", default_value = "10", value_parser = seconds)]
    pub header_timeout: Duration,

    /// Seconds a request body may make no progress
    #[arg(long, env = "MILLPOND_BODY_TIMEOUT", default_value = "30", value_parser = seconds)]
    pub body_timeout: Duration,

    /// Seconds a reader may accept nothing before its request is aborted
    #[arg(long, env = "MILLPOND_SLOW_READER_TIMEOUT", default_value = "30", value_parser = seconds)]
    pub slow_reader_timeout: Duration,

    /// Seconds a connection may stay open between requests
    #[arg(long, env = "MILLPOND_KEEP_ALIVE", default_value = "60", value_parser = seconds)]
    pub keep_alive: Duration,
}

/// Headers of one request.
pub const MAX_HEADERS: usize = 100;

/// Bytes of one request's head, and of output that hyper gathers before it writes.
pub const MAX_HEAD_BYTES: usize = 64 << 10;

/// Fields of one JSON object that we look into.
pub const MAX_FIELDS: usize = 256;

/// Token ids of one detokenize request.
pub const MAX_DETOKENIZED: usize = 1 << 18;

/// Parts of one message's content.
pub const MAX_CONTENT_PARTS: usize = 1024;

/// Tool calls of one message.
pub const MAX_TOOL_CALLS: usize = 128;

/// Bytes of JSON that is handed on as it is: arguments of a tool call, template variables, documents. Parsed
/// JSON takes a multiple of its text, so this stays well below the limit of a body.
pub const MAX_FREE_JSON_BYTES: usize = 256 << 10;

/// Warnings of one answer.
pub const MAX_WARNINGS: usize = 32;

/// Characters of a name or value that came from outside, where we print it.
pub const MAX_PRINTED_CHARS: usize = 64;

/// Reads a positive number of seconds.
pub fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    match Duration::try_from_secs_f64(seconds) {
        Ok(duration) if !duration.is_zero() => Ok(duration),
        Ok(_) | Err(_) => Err("must be a positive number of seconds".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_are_positive_and_finite() {
        for (text, expected) in [("10", Some(10_000)), ("0.5", Some(500))] {
            let millis = seconds(text).ok().map(|duration| duration.as_millis());
            assert_eq!(millis, expected);
        }
        for text in ["0", "-1", "NaN", "inf", "1e300", "", "ten"] {
            assert!(seconds(text).is_err(), "{text}");
        }
    }
}
