//! What every answer and every chunk carries around its choices.

use std::sync::Arc;

use millpond_scheduler::TokenId;
use serde::Serialize;

use super::logprobs::PromptLogprobs;
use super::shape::{AnswerShape, Delivery, StreamUsage};
use super::tally::{Tally, Timings, Usage};

/// Fields that are the same in all chunks of an answer.
#[derive(Clone, Debug)]
pub struct Stamp {
    /// Names the answer.
    pub id: Arc<str>,
    /// Unix seconds.
    pub created: u64,
    /// The model's served name.
    pub model: Arc<str>,
    /// Names model file, numerics and version.
    pub fingerprint: Arc<str>,
}

/// An answer or a chunk of one, with choices of type `C`.
#[derive(Debug, Serialize)]
pub struct Envelope<'a, C> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    system_fingerprint: &'a str,
    choices: &'a [C],
    #[serde(flatten)]
    extras: Extras<'a>,
}

/// What only some chunks carry. The default is nothing.
#[derive(Debug, Default, Serialize)]
pub struct Extras<'a> {
    /// `Some(None)` is spelled `null`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Option<Usage>>,
    /// The seed in use.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seed: Option<i64>,
    /// Where the time went.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timings: Option<Timings>,
    /// Tokens of a conversation's prompt.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<&'a [TokenId]>,
    /// Log-probabilities of a conversation's prompt.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs: Option<&'a PromptLogprobs>,
    /// Fields that did nothing.
    #[serde(skip_serializing_if = "<[String]>::is_empty")]
    pub warnings: &'a [String],
}

impl Stamp {
    /// Puts choices and extras into an envelope.
    pub fn envelope<'a, C>(
        &'a self,
        object: &'static str,
        choices: &'a [C],
        extras: Extras<'a>,
    ) -> Envelope<'a, C> {
        Envelope {
            id: &self.id,
            object,
            created: self.created,
            model: &self.model,
            system_fingerprint: &self.fingerprint,
            choices,
            extras,
        }
    }
}

/// The `usage` of a chunk with choices: absent, `null` or the counts so far.
pub fn chunk_usage(shape: &AnswerShape, tally: &Tally) -> Option<Option<Usage>> {
    match shape.delivery {
        Delivery::Whole | Delivery::Stream(StreamUsage::Never) => None,
        Delivery::Stream(StreamUsage::AtEnd) => Some(None),
        Delivery::Stream(StreamUsage::Continuous) => Some(Some(tally.usage())),
    }
}

/// What the last chunk carries; `None` when there is none.
pub fn closing_extras(shape: &AnswerShape, tally: &Tally) -> Option<Extras<'static>> {
    match shape.delivery {
        Delivery::Whole | Delivery::Stream(StreamUsage::Never) => None,
        Delivery::Stream(StreamUsage::AtEnd | StreamUsage::Continuous) => Some(Extras {
            usage: Some(Some(tally.usage())),
            timings: tally.timings(),
            ..Extras::default()
        }),
    }
}
