//! End-to-end tests: the built binary serves the mock model, and clients of all manners talk to it.
//!
//! Ids such as A-T01 name the scenarios that a test stands for.

mod bench;
mod bodies;
mod chat;
mod command_line;
mod completions;
mod connections;
mod lifecycle;
mod metrics;
mod numbers;
mod paths;
mod prompts;
mod server;
mod stream;
