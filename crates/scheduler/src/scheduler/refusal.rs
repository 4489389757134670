//! Why a request or a choice was not taken in: typed, with the numbers that decided.

use crate::request::RequestId;

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
