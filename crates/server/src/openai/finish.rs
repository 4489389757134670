//! How a choice ended, in the wire's words.

use millpond_scheduler::{FinishReason, StopCause, TokenId};
use serde::Serialize;

/// vLLM's `stop_reason`: the stop string or stop token that ended a choice.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub enum StopReason {
    /// The stop string.
    Text(String),
    /// The stop token.
    Token(TokenId),
}

impl StopReason {
    /// `None` when the model ended by itself or a limit was met.
    pub fn of(reason: &FinishReason, matched_stop: Option<String>) -> Option<Self> {
        match reason {
            FinishReason::Stop(StopCause::StopString) => matched_stop.map(StopReason::Text),
            FinishReason::Stop(StopCause::Token(token)) => Some(StopReason::Token(*token)),
            FinishReason::Stop(StopCause::EndOfSequence(_))
            | FinishReason::Length
            | FinishReason::Cancelled
            | FinishReason::Timeout(_)
            | FinishReason::Error(_) => None,
        }
    }
}

/// OpenAI's `finish_reason` of a choice that came to its own end; the other reasons end the answer with an
/// error instead.
pub fn finish_reason(reason: &FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop(_) => "stop",
        FinishReason::Length => "length",
        FinishReason::Cancelled | FinishReason::Timeout(_) => "abort",
        FinishReason::Error(_) => "error",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(reason: FinishReason, finish: &str, stop: &str) {
        let stop_reason = StopReason::of(&reason, Some("END".to_owned()));
        let json = serde_json::to_string(&stop_reason).expect("plain data");
        assert_eq!((finish_reason(&reason), json.as_str()), (finish, stop));
    }

    #[test]
    fn what_stopped_a_choice_is_told() {
        check(FinishReason::Length, "length", "null");
        check(FinishReason::Stop(StopCause::StopString), "stop", "\"END\"");
        check(
            FinishReason::Stop(StopCause::Token(TokenId(7))),
            "stop",
            "7",
        );
        check(
            FinishReason::Stop(StopCause::EndOfSequence(TokenId(2))),
            "stop",
            "null",
        );
    }
}
