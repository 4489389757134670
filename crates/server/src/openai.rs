//! OpenAI's API: wire types, one file per endpoint, and the errors.
//!
//! Wire types are converted by hand into the engine's own at this border and go no further (A5). No sampling,
//! scheduling or text rule lives here.

pub mod answer;
pub mod border;
pub mod chat;
pub mod completions;
pub mod envelope;
pub mod errors;
pub mod fields;
pub mod finish;
pub mod logprobs;
pub mod messages;
pub mod models;
pub mod options;
pub mod prompt;
pub mod render;
pub mod shape;
pub mod submit;
pub mod tally;
pub mod tokenize;
