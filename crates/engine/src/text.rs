//! Between text and tokens: tokenizer, chat template, incremental detokenizer, stop strings.

pub mod chat_template;
pub mod detokenizer;
pub mod stop_strings;
pub mod tokenizer;
