//! The decoder and its runner on whole models: right answers, equal bits, rows that stand for themselves.
//!
//! One binary, because all of it drives models through `session::Session`.

mod bit_identity;
mod memory;
mod oracles_real;
mod oracles_tiny;
mod rows;
mod scheduled;
mod session;
