//! Tiny random models through the whole engine: greedy continuations of another implementation, and the
//! same bytes whatever shares the batch.

use std::path::PathBuf;

use millpond_engine::llm::{CompletionRequest, EngineOptions, GenerationOptions, Llm, Prompt};
use millpond_scheduler::TokenId;
use serde_json::Value;

const MODELS: [&str; 5] = [
    "llama",
    "llama_rope_llama3",
    "llama_unigram_v5cfg",
    "mistral_sliding",
    "gemma3_text",
];

fn folder(model: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/fixtures/tiny")
        .join(model)
}

fn load(model: &str, options: EngineOptions) -> Llm {
    Llm::load(&folder(model), options, &mut |_, _| {}).expect("the fixture loads")
}

fn expected(model: &str) -> Value {
    let text =
        std::fs::read_to_string(folder(model).join("expected.json")).expect("the fixture is there");
    serde_json::from_str(&text).expect("the fixture is JSON")
}

fn ids(value: &Value) -> Vec<TokenId> {
    let ids = value.as_array().expect("a list of ids");
    ids.iter()
        .map(|id| TokenId(id.as_u64().expect("an id") as u32))
        .collect()
}

fn greedy(prompt: Vec<TokenId>, num_tokens: usize) -> CompletionRequest {
    CompletionRequest {
        prompt: Prompt::Tokens(prompt),
        echo: false,
        options: GenerationOptions {
            max_tokens: Some(num_tokens as u64),
            temperature: 0.0,
            ignore_eos: true,
            ..GenerationOptions::default()
        },
    }
}

/// Prompts and greedy continuations of a fixture.
fn cases(model: &str) -> Vec<(Vec<TokenId>, Vec<TokenId>)> {
    let expected = expected(model);
    let prompts = expected["prompts"].as_array().expect("prompts");
    prompts
        .iter()
        .map(|case| (ids(&case["input_ids"]), ids(&case["greedy_ids"])))
        .collect()
}

#[test]
fn greedy_continuations_equal_the_reference() {
    for model in MODELS {
        let llm = load(model, EngineOptions::default());
        for (prompt, continuation) in cases(model) {
            let length = prompt.len();
            let done = llm
                .complete(greedy(prompt, continuation.len()))
                .expect("accepted")
                .blocking_collect();
            assert_eq!(
                done.choices[0].output.tokens, continuation,
                "{model}, prompt of {length}"
            );
        }
    }
}

#[test]
fn all_prompts_at_once_in_a_small_pool_give_the_same_tokens() {
    for model in MODELS {
        let options = EngineOptions {
            kv_tokens: Some(320),
            max_batch_tokens: 48,
            max_sequences: 8,
            ..EngineOptions::default()
        };
        let llm = load(model, options);
        let cases: Vec<_> = (0..4).flat_map(|_| cases(model)).collect();
        let running: Vec<_> = cases
            .iter()
            .map(|(prompt, expected)| {
                llm.complete(greedy(prompt.clone(), expected.len()))
                    .expect("accepted")
            })
            .collect();
        for (generation, (prompt, expected)) in running.into_iter().zip(&cases) {
            let done = generation.blocking_collect();
            assert_eq!(
                &done.choices[0].output.tokens,
                expected,
                "{model}, prompt of {}",
                prompt.len()
            );
        }
        assert_eq!(
            llm.stats().num_used_blocks,
            0,
            "{model}: every block came back"
        );
    }
}
