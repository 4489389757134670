//! What is refused at the door, and why: typed, with the numbers that decided.
//!
//! Refusing changes nothing; waiting sequences are let in elsewhere.

use super::Scheduler;
use crate::request::{Request, RequestId};

/// `Scheduler::add` refused; nothing changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AddError {
    /// There is no token to start from.
    #[error("request {request:?}: the prompt is empty")]
    EmptyPrompt {
        /// The request.
        request: RequestId,
    },
    /// `num_choices` is zero.
    #[error("request {request:?}: num_choices must be at least 1")]
    NoChoices {
        /// The request.
        request: RequestId,
    },
    /// More choices than may ever wait at once.
    #[error(
        "request {request:?}: {num_choices} choices, but at most {max_waiting} sequences may wait"
    )]
    TooManyChoices {
        /// The request.
        request: RequestId,
        /// What it asked for.
        num_choices: u32,
        /// `SchedulerConfig::max_waiting`.
        max_waiting: u32,
    },
    /// `max_tokens` is zero.
    #[error("request {request:?}: max_tokens must be at least 1")]
    NoOutput {
        /// The request.
        request: RequestId,
    },
    /// The prompt leaves no room for one output token.
    #[error(
        "request {request:?}: a prompt of {num_prompt_tokens} tokens leaves no room in a context of {max_context}"
    )]
    PromptTooLong {
        /// The request.
        request: RequestId,
        /// Its prompt.
        num_prompt_tokens: u64,
        /// `SchedulerConfig::max_context`.
        max_context: u32,
    },
    /// Even alone it could run out of blocks.
    #[error(
        "request {request:?}: {num_tokens} tokens need {needed_blocks} blocks, but the pool has {num_blocks}"
    )]
    NeverFits {
        /// The request.
        request: RequestId,
        /// Prompt plus the most output it may produce.
        num_tokens: u32,
        /// Blocks for them.
        needed_blocks: u32,
        /// `SchedulerConfig::num_blocks`.
        num_blocks: u32,
    },
    /// Too many sequences wait already; later it may be taken.
    #[error(
        "request {request:?}: {num_waiting} sequences wait and {num_choices} more would exceed {max_waiting}"
    )]
    QueueFull {
        /// The request.
        request: RequestId,
        /// Sequences waiting now.
        num_waiting: u32,
        /// Sequences it would add.
        num_choices: u32,
        /// `SchedulerConfig::max_waiting`.
        max_waiting: u32,
    },
    /// A live request has the same id.
    #[error("request {request:?}: the id is in use")]
    DuplicateId {
        /// The request.
        request: RequestId,
    },
}

/// `Scheduler::fork` refused; nothing changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ForkError {
    /// No live request has this id.
    #[error("request {request:?} is unknown or has ended")]
    UnknownRequest {
        /// The request.
        request: RequestId,
    },
    /// Too many sequences wait already; later it may be taken.
    #[error("request {request:?}: {num_waiting} sequences wait, the limit is {max_waiting}")]
    QueueFull {
        /// The request.
        request: RequestId,
        /// Sequences waiting now.
        num_waiting: u32,
        /// `SchedulerConfig::max_waiting`.
        max_waiting: u32,
    },
}

impl Scheduler {
    /// The most tokens of prompt and output that `request` can reach, if it can be accepted at all.
    pub(super) fn admissible_len(&self, ask: &Request) -> Result<u32, AddError> {
        self.check_shape(ask)?;
        let config = &self.config;
        let max_len = (ask.prompt.len() as u32)
            .saturating_add(ask.stop.max_tokens)
            .min(config.max_context);
        // The last token is never fed back, so it needs no slot.
        let needed_blocks = self.kv.blocks_for(max_len - 1);
        if needed_blocks > config.num_blocks {
            return Err(AddError::NeverFits {
                request: ask.id,
                num_tokens: max_len,
                needed_blocks,
                num_blocks: config.num_blocks,
            });
        }
        let num_waiting = self.roster.queue.len();
        if num_waiting.saturating_add(ask.num_choices) > config.max_waiting {
            return Err(AddError::QueueFull {
                request: ask.id,
                num_waiting,
                num_choices: ask.num_choices,
                max_waiting: config.max_waiting,
            });
        }
        Ok(max_len)
    }

    /// Refuses what could not be accepted even by an idle scheduler with endless memory.
    fn check_shape(&self, ask: &Request) -> Result<(), AddError> {
        let request = ask.id;
        let (max_context, max_waiting) = (self.config.max_context, self.config.max_waiting);
        if ask.prompt.is_empty() {
            return Err(AddError::EmptyPrompt { request });
        }
        if ask.num_choices == 0 {
            return Err(AddError::NoChoices { request });
        }
        if ask.stop.max_tokens == 0 {
            return Err(AddError::NoOutput { request });
        }
        if ask.num_choices > max_waiting {
            return Err(AddError::TooManyChoices {
                request,
                num_choices: ask.num_choices,
                max_waiting,
            });
        }
        if ask.prompt.len() >= max_context as usize {
            return Err(AddError::PromptTooLong {
                request,
                num_prompt_tokens: ask.prompt.len() as u64,
                max_context,
            });
        }
        match self.roster.choices(request) {
            Some(_) => Err(AddError::DuplicateId { request }),
            None => Ok(()),
        }
    }
}
