//! What is refused at the door, and why: typed, with the numbers that decided.
//!
//! Refusing changes nothing; waiting sequences are let in elsewhere.

use super::Scheduler;
use crate::request::{Request, RequestId};
use crate::sequence::SequenceIndex;
use crate::transfer::{Arrival, TransferId};

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

/// `Scheduler::receive` refused; nothing changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReceiveError {
    /// The request itself would be refused here, or would have to wait where nobody more may wait.
    #[error(transparent)]
    Refused(#[from] AddError),
    /// The choice is here already.
    #[error("request {request:?}: choice {choice} is here already")]
    DuplicateChoice {
        /// The request.
        request: RequestId,
        /// The choice.
        choice: u32,
    },
    /// It has nothing left to generate.
    #[error("request {request:?}: choice {choice} has {num_tokens} tokens and is at its end")]
    AtItsEnd {
        /// The request.
        request: RequestId,
        /// The choice.
        choice: u32,
        /// Its tokens, prompt and output.
        num_tokens: u64,
    },
    /// Its source cannot be: it must have some of the tokens and lack the last.
    #[error(
        "request {request:?}: a source of {num_source_tokens} tokens for a sequence of {num_tokens}"
    )]
    BadSource {
        /// The request.
        request: RequestId,
        /// Tokens that the source claims to have.
        num_source_tokens: u32,
        /// Tokens of prompt and output.
        num_tokens: u32,
    },
    /// Another sequence expects this transfer.
    #[error("request {request:?}: {transfer:?} is another sequence's")]
    DuplicateTransfer {
        /// The request.
        request: RequestId,
        /// The transfer.
        transfer: TransferId,
    },
}

impl ReceiveError {
    /// May it be taken later, when less waits? Everything else is refused for good.
    pub fn is_busy(&self) -> bool {
        matches!(self, ReceiveError::Refused(AddError::QueueFull { .. }))
    }
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
        if self.roster.choices(ask.id).is_some() {
            return Err(AddError::DuplicateId { request: ask.id });
        }
        let max_len = self.fitting_len(ask, 0)?;
        self.check_queue(ask.id, ask.num_choices)?;
        Ok(max_len)
    }

    /// The same for one choice that another worker began.
    pub(super) fn receivable_len(&self, begun: &Arrival) -> Result<u32, ReceiveError> {
        let (ask, choice) = (&begun.request, begun.choice);
        let request = ask.id;
        self.check_shape(ask)?;
        self.check_place(begun)?;
        let num_output = begun.output.len() as u64;
        let num_tokens = ask.prompt.len() as u64 + num_output;
        let max_context = u64::from(self.config.max_context);
        if num_output >= u64::from(ask.stop.max_tokens) || num_tokens >= max_context {
            return Err(ReceiveError::AtItsEnd {
                request,
                choice,
                num_tokens,
            });
        }
        let num_source_tokens = begun.source.map_or(1, |source| source.num_tokens);
        if num_source_tokens == 0
            || begun.source.is_some() && u64::from(num_source_tokens) >= num_tokens
        {
            return Err(ReceiveError::BadSource {
                request,
                num_source_tokens,
                num_tokens: num_tokens as u32,
            });
        }
        let max_len = self.fitting_len(ask, num_output as u32)?;
        self.check_queue(request, 1)?;
        Ok(max_len)
    }

    /// Neither the choice nor its transfer is here.
    fn check_place(&self, begun: &Arrival) -> Result<(), ReceiveError> {
        let (request, choice) = (begun.request.id, begun.choice);
        let is_same = |index: &SequenceIndex| self.roster.sequences[*index].choice == choice;
        let choices = self.roster.choices(request);
        if choices.is_some_and(|choices| choices.live.iter().any(is_same)) {
            return Err(ReceiveError::DuplicateChoice { request, choice });
        }
        match begun.source.map(|source| source.ticket.transfer) {
            Some(transfer) if self.roster.expecting_any(transfer).is_some() => {
                Err(ReceiveError::DuplicateTransfer { request, transfer })
            }
            Some(_) | None => Ok(()),
        }
    }

    /// The most tokens that `ask` can reach, if the pool holds them when nobody else is there.
    fn fitting_len(&self, ask: &Request, num_output: u32) -> Result<u32, AddError> {
        let config = &self.config;
        let max_len = config.max_len(ask);
        let needed_blocks = config.needed_blocks(ask, num_output);
        if needed_blocks > config.num_blocks {
            return Err(AddError::NeverFits {
                request: ask.id,
                num_tokens: max_len,
                needed_blocks,
                num_blocks: config.num_blocks,
            });
        }
        Ok(max_len)
    }

    fn check_queue(&self, request: RequestId, num_choices: u32) -> Result<(), AddError> {
        let num_waiting = self.roster.queue.len();
        let max_waiting = self.config.max_waiting;
        if num_waiting.saturating_add(num_choices) > max_waiting {
            return Err(AddError::QueueFull {
                request,
                num_waiting,
                num_choices,
                max_waiting,
            });
        }
        Ok(())
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
        Ok(())
    }
}
