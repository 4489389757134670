//! The engine of Millpond: executes what the scheduler planned.
//!
//! It owns the weights, the KV tensors, the kernels, the sampler and the translation between text and
//! tokens. It makes no scheduling decision (A3) and knows no wire protocol (A5). Programs embed it
//! through [`Llm`].

pub mod config;
pub(crate) mod driver;
pub mod fetch;
pub mod forward_batch;
pub mod handle;
pub mod kernels;
pub mod kv_pool;
pub mod llm;
pub mod loader;
pub mod model;
pub mod runner;
pub mod sampling;
pub mod text;

mod digest;
