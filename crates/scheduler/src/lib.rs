//! The pure scheduling core of Millpond.
//!
//! It decides which tokens of which sequences run next and where their keys and values live. It takes
//! facts and time as arguments and returns plain data: no thread, no async, no IO, no clock, no
//! environment, no tensor, no unseeded randomness (promise A1 of `docs/ARCHITECTURE.md`).

pub mod block_pool;
pub mod config;
pub mod kv_manager;
pub mod mock;
pub mod plan;
pub mod ports;
pub mod radix_cache;
pub mod request;
pub mod roster;
pub mod scheduler;
pub mod sequence;
pub mod stats;
pub mod time;
pub mod waiting_queue;

pub use config::{ConfigError, SchedulerConfig};
pub use plan::{
    BatchPlan, BlockCopy, BlockId, Event, ModelOutput, OutputRow, PositionLogprobs, Row,
    RowVerdict, Span32, StartedSequence, Summary, TokenLogprob,
};
pub use ports::{ModelRunner, RunnerError};
pub use request::{
    CacheSalt, DeadlineKind, Deadlines, FinishReason, Request, RequestId, RowError, SamplingParams,
    SequenceId, StopCause, StopConditions, TokenId,
};
pub use scheduler::{AddError, ForkError, Scheduler};
pub use stats::{BlockCounts, Counters, SchedulerStats};
pub use time::{Span, Timestamp};
