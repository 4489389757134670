//! The pure scheduling core of Millpond.
//!
//! It decides which tokens of which sequences run next and where their keys and values live. It takes
//! facts and time as arguments and returns plain data: no thread, no async, no IO, no clock, no
//! environment, no tensor, no unseeded randomness (promise A1 of `docs/ARCHITECTURE.md`).
//!
//! One request from `add` to its end, with the mock model as runner:
//!
//! ```
//! use std::num::NonZeroU32;
//! use std::sync::Arc;
//!
//! use millpond_scheduler::mock::MockModel;
//! use millpond_scheduler::{
//!     BatchPlan, CacheSalt, Deadlines, Event, ModelOutput, ModelRunner, Request, RequestId,
//!     SamplingParams, Scheduler, SchedulerConfig, StopConditions, Timestamp, TokenId,
//! };
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mut scheduler = Scheduler::new(SchedulerConfig::default())?;
//! let mut runner = MockModel::scripted(NonZeroU32::new(100).ok_or("no tokens")?);
//! let now = Timestamp(0);
//! scheduler.add(
//!     Arc::new(Request {
//!         id: RequestId(1),
//!         prompt: vec![TokenId(5), TokenId(6)].into(),
//!         sampling: SamplingParams::default(),
//!         stop: StopConditions {
//!             max_tokens: 3,
//!             min_tokens: 0,
//!             stop_token_ids: Vec::new(),
//!             eos_token_ids: Vec::new(),
//!             ignore_eos: false,
//!         },
//!         num_choices: 1,
//!         priority: 0,
//!         salt: CacheSalt::default(),
//!         arrival: now,
//!         deadlines: Deadlines::default(),
//!     }),
//!     now,
//! )?;
//!
//! let (mut plan, mut output, mut events) = (BatchPlan::default(), ModelOutput::default(), Vec::new());
//! let mut tokens = Vec::new();
//! while scheduler.has_work() {
//!     scheduler.schedule(now, &mut plan, &mut events);
//!     runner.execute(&plan, &mut output)?;
//!     scheduler.commit(&plan, &output, now, &mut events);
//!     tokens.extend_from_slice(&output.tokens);
//! }
//! assert_eq!(tokens, [TokenId(7), TokenId(8), TokenId(9)]);
//! assert!(matches!(events.last(), Some(Event::Finished { .. })));
//! # Ok(())
//! # }
//! ```

pub mod block_pool;
pub mod config;
pub mod disagg;
pub mod kv_manager;
pub mod mock;
pub mod placement;
pub mod plan;
pub mod ports;
pub mod radix_cache;
pub mod request;
pub mod roster;
pub mod scheduler;
pub mod sequence;
pub mod sim;
pub mod stats;
pub mod time;
pub mod transfer;
pub mod waiting_queue;

pub use config::{ConfigError, Role, SchedulerConfig};
pub use disagg::{Command, Coordinator, CoordinatorConfig, Refusal, SubmitError};
pub use plan::{
    BatchPlan, BlockCopy, BlockId, Event, ModelOutput, OutputRow, PositionLogprobs, Row,
    RowVerdict, Span32, StartedSequence, Summary, TokenLogprob,
};
pub use ports::{KvTransfer, ModelRunner, RunnerError};
pub use request::{
    CacheSalt, DeadlineKind, Deadlines, FinishReason, Request, RequestId, RowError, SamplingParams,
    SequenceId, StopCause, StopConditions, TokenId,
};
pub use scheduler::{AddError, ForkError, ReceiveError, Scheduler};
pub use sequence::Progress;
pub use stats::{BlockCounts, Counters, SchedulerStats};
pub use time::{Span, Timestamp};
pub use transfer::{
    Arrival, OfferedBlocks, Peer, Piece, Source, Ticket, TransferId, TransferOrder,
    TransferOutcome, WorkerId,
};
