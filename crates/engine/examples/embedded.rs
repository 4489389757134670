//! Millpond inside a program: load a model, stream one answer, print what it cost.
//!
//! `cargo run --release -p millpond-engine --example embedded -- "Why is the sky blue?"`

use std::io::Write;

use millpond_engine::fetch;
use millpond_engine::llm::{
    ChatMessage, ChatRequest, EngineOptions, GenerationEvent, GenerationOptions, Llm, Role,
};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let question = std::env::args()
        .nth(1)
        .unwrap_or_else(|| "What is a mill pond?".to_owned());
    let file = fetch::resolve("default", &mut |_| {})?;
    let llm = Llm::load(&file, EngineOptions::default(), &mut |_, _| {})?;

    let mut answer = llm.chat(ChatRequest {
        messages: vec![ChatMessage::text(Role::User, question)],
        options: GenerationOptions {
            max_tokens: Some(128),
            temperature: 0.7,
            seed: Some(7),
            ..GenerationOptions::default()
        },
        ..ChatRequest::default()
    })?;
    while let Some(event) = answer.blocking_next() {
        match event {
            GenerationEvent::PromptLogprobs(_) => {}
            GenerationEvent::Delta(delta) => {
                print!("{}", delta.text);
                std::io::stdout().flush()?;
            }
            GenerationEvent::Finished {
                last,
                reason,
                summary,
                ..
            } => println!(
                "{}\n[{reason:?}: {} prompt tokens, {} cached, {} generated]",
                last.text,
                summary.num_prompt_tokens,
                summary.num_cached_tokens,
                summary.num_output_tokens
            ),
        }
    }
    Ok(())
}
