//! Whole models through `open` and `inspect`: the tiny fixtures, and small GGUF files made here.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use millpond_scheduler::TokenId;

use super::{Inspection, LoadError, ModelFiles, TensorType, inspect, open};
use crate::config::{Activation, LayerConfig, ModelConfig, NormPlacement, RopeScaling};

pub(super) mod gguf_files;

use gguf_files::{GgufFile, tiny_gemma3, tiny_llama};

fn tiny(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/fixtures/tiny")
        .join(name)
}

fn open_tiny(name: &str) -> ModelFiles {
    open(&tiny(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn tokens(ids: &[u32]) -> Vec<TokenId> {
    ids.iter().copied().map(TokenId).collect()
}

/// Layers as (window, rope).
fn layers(config: &ModelConfig) -> Vec<(Option<u32>, usize)> {
    let pairs = config.layers.iter().map(|layer| (layer.window, layer.rope));
    pairs.collect()
}

/// The f32 values of a tensor that is read as f32.
fn floats(model: &ModelFiles, name: &str) -> Vec<f32> {
    let tensor = model.weights.tensor(name).expect(name);
    assert_eq!(tensor.dtype, TensorType::F32, "{name}");
    let quads = tensor.bytes.as_chunks::<4>().0.iter().copied();
    quads.map(f32::from_le_bytes).collect()
}

#[test]
fn llama_fixture() {
    let model = open_tiny("llama");
    let config = &model.config;
    assert_eq!(config.architecture, "llama");
    assert_eq!((config.vocab_size, config.hidden_size), (512, 64));
    assert_eq!(config.intermediate_size, 128);
    assert_eq!(
        (config.num_heads, config.num_kv_heads, config.head_dim),
        (4, 2, 16)
    );
    assert_eq!(config.max_context, 2048);
    assert_eq!(config.norm_eps, 1e-5);
    assert_eq!((config.norms, config.qk_norm), (NormPlacement::Pre, false));
    assert_eq!(config.activation, Activation::Silu);
    assert!(!config.tied_embeddings && !config.qkv_bias);
    assert_eq!(config.attention_scale, 0.25);
    assert_eq!(config.embedding_scale, 1.0);
    assert_eq!(layers(config), [(None, 0); 3]);
    assert_eq!(config.ropes.len(), 1);
    assert_eq!(
        (config.ropes[0].theta, config.ropes[0].rotary_dim),
        (1e4, 16)
    );
    assert_eq!(config.ropes[0].scaling, RopeScaling::None);
    assert_eq!(config.bos_token, Some(TokenId(1)));
    assert_eq!(config.eos_tokens, tokens(&[2]));
    assert!(
        model
            .chat_template
            .expect("in tokenizer_config.json")
            .contains("[INST]")
    );
    assert_eq!(model.name, "llama");
    assert_eq!(model.fingerprint.len(), 16);
}

#[test]
fn llama3_rope_and_several_ends() {
    let config = open_tiny("llama_rope_llama3").config;
    let expected = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max: 64,
    };
    assert_eq!(config.ropes[0].scaling, expected);
    assert_eq!(config.ropes[0].theta, 5e5);
    assert_eq!(config.head_dim, 32);
    assert!(config.tied_embeddings);
    assert_eq!(config.eos_tokens, tokens(&[507, 510]));
}

#[test]
fn transformers_5_keys_and_biases() {
    let model = open_tiny("llama_unigram_v5cfg");
    assert_eq!(model.config.ropes[0].theta, 5e4);
    assert!(model.config.qkv_bias);
    for name in ["q", "k", "v", "o"] {
        let bias = model.weights.find(&format!("layers.1.{name}.bias"));
        assert!(bias.is_some(), "{name}");
    }
}

#[test]
fn mistral_slides_everywhere() {
    let config = open_tiny("mistral_sliding").config;
    assert_eq!(layers(&config), [(Some(16), 0); 2]);
}

#[test]
fn gemma3_slides_with_a_rope_of_its_own() {
    let model = open_tiny("gemma3_text");
    let config = &model.config;
    let (local, global) = ((Some(16), 1), (None, 0));
    assert_eq!(layers(config), [local, local, global, local]);
    assert_eq!((config.ropes[0].theta, config.ropes[1].theta), (1e6, 1e4));
    assert_eq!(
        (config.norms, config.qk_norm),
        (NormPlacement::Sandwich, true)
    );
    assert_eq!(config.activation, Activation::GeluTanh);
    assert_eq!(
        (config.embedding_scale, config.tied_embeddings),
        (8.0, true)
    );
    assert_eq!(config.attention_scale, 32_f32.sqrt().recip());
    assert_eq!(config.eos_tokens, tokens(&[1, 5]));
    // Norm weights are stored less one; these random ones lie around one.
    let norm = floats(&model, "layers.0.attn_norm.weight");
    let mean = norm.iter().sum::<f32>() / norm.len() as f32;
    assert!((0.5..1.5).contains(&mean), "{mean}");
    let info = model
        .weights
        .find("layers.0.attn_norm.weight")
        .expect("exists");
    assert_eq!((info.dtype, info.num_bytes), (TensorType::F32, 256));
}

#[test]
fn every_tensor_reads_as_announced() {
    for name in [
        "llama",
        "llama_unigram_v5cfg",
        "mistral_sliding",
        "gemma3_text",
    ] {
        let model = open_tiny(name);
        for info in model.weights.list() {
            let tensor = model.weights.tensor(&info.name).expect(name);
            assert_eq!(
                (tensor.dtype, &tensor.shape),
                (info.dtype, &info.shape),
                "{name}"
            );
            assert_eq!(
                tensor.bytes.len() as u64,
                info.num_bytes,
                "{name} {}",
                info.name
            );
            assert_eq!(
                info.dtype.num_bytes(&info.shape),
                Some(info.num_bytes),
                "{name}"
            );
        }
        assert!(model.weights.tensor("no.such.tensor").is_err());
    }
}

/// A copy of a tiny model's small files in which config.json differs.
fn with_config(name: &str, change: impl FnOnce(&mut serde_json::Map<String, Value>)) -> TinyCopy {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for file in [
        "model.safetensors",
        "generation_config.json",
        "tokenizer.json",
    ] {
        std::fs::copy(tiny(name).join(file), folder.path().join(file)).expect(file);
    }
    let config = std::fs::read(tiny(name).join("config.json")).expect("config.json");
    let mut config: Value = serde_json::from_slice(&config).expect("JSON");
    change(config.as_object_mut().expect("an object"));
    let text = serde_json::to_vec(&config).expect("JSON");
    std::fs::write(folder.path().join("config.json"), text).expect("a writable folder");
    TinyCopy { folder }
}

struct TinyCopy {
    folder: tempfile::TempDir,
}

impl TinyCopy {
    fn open(&self) -> Result<ModelFiles, LoadError> {
        open(self.folder.path())
    }

    fn error(&self) -> String {
        self.open().expect_err("must be refused").to_string()
    }
}

/// A tiny model with changes to its config.json is refused with an error that starts as expected.
fn check_refused(name: &str, changes: Value, expected: &str) {
    let copy = with_config(name, |config| {
        for (key, value) in changes.as_object().expect("an object") {
            match value {
                Value::String(text) if text == "(absent)" => config.remove(key),
                value => config.insert(key.clone(), value.clone()),
            };
        }
    });
    let error = copy.error();
    assert!(
        error.starts_with(expected),
        "{changes}: {error:?}, expected {expected:?}"
    );
    assert!(!error.contains('\n'), "{error}");
}

#[rustfmt::skip]
#[test]
fn wrong_sizes_are_refused_by_key() {
    let check = |changes, expected| check_refused("llama", changes, expected);
    check(json!({"hidden_size": 0}), "hidden_size: 0, must be a whole number from 1 to");
    check(json!({"hidden_size": -64}), "hidden_size: -64");
    check(json!({"hidden_size": 64.5}), "hidden_size: 64.5");
    check(json!({"hidden_size": "64"}), "hidden_size: \"64\" is not a number");
    check(json!({"hidden_size": "(absent)"}), "hidden_size: missing");
    check(json!({"num_attention_heads": 3}), "num_attention_heads: 3 does not divide a hidden size of 64");
    check(json!({"num_attention_heads": 8}), "head_dim: 8, must be a multiple of 16");
    check(json!({"num_key_value_heads": 3}), "num_key_value_heads: 3 does not divide 4 heads");
    check(json!({"num_hidden_layers": 4}), "tensor model.layers.3.input_layernorm.weight is missing");
    check(json!({"num_hidden_layers": 2}), "tensor model.layers.2.");
    check(json!({"num_hidden_layers": 1e300}), "num_hidden_layers: ");
    check(json!({"vocab_size": 511}), "tensor model.embed_tokens.weight: shape [512, 64], expected [511, 64]");
    check(json!({"vocab_size": 2}), "eos_token_id: no id of a vocabulary of 2");
    check(json!({"intermediate_size": 64}), "tensor model.layers.0.mlp.gate_proj.weight: shape");
    check(json!({"max_position_embeddings": 0}), "max_position_embeddings: 0");
}

#[rustfmt::skip]
#[test]
fn what_we_do_not_compute_is_refused_by_key() {
    let check = |changes, expected| check_refused("llama", changes, expected);
    check(json!({"model_type": "mamba"}), "architecture mamba is not supported yet (supported: gemma3, gemma3_text, llama, mistral)");
    check(json!({"model_type": "(absent)"}), "model_type: missing");
    check(json!({"hidden_act": "relu2"}), "hidden_act: \"relu2\" is not supported yet");
    check(json!({"mlp_bias": true}), "mlp_bias: MLP biases are not supported yet");
    check(json!({"quantization_config": {"bits": 4}}), "quantization_config: ");
    check(json!({"rms_norm_eps": 0}), "rms_norm_eps: 0, must be positive");
    check(json!({"rms_norm_eps": 2}), "rms_norm_eps: 2, must be below 1");
    check(json!({"rope_theta": -1}), "rope_theta: -1, must be positive");
    check(json!({"rope_scaling": {"rope_type": "yarn"}}), "rope_scaling.rope_type: \"yarn\" is not supported yet");
    check(json!({"rope_scaling": {"type": "linear"}}), "rope_scaling.factor: missing");
    check(json!({"rope_parameters": {"rope_type": 1}}), "rope_parameters.rope_type: must be a text");
    check(json!({"rope_parameters": {"partial_rotary_factor": 0.5}}), "rope_parameters.partial_rotary_factor: only whole heads");
}

#[rustfmt::skip]
#[test]
fn contradictions_are_refused_by_key() {
    let check = check_refused;
    check("llama", json!({"attention_bias": true}), "tensor model.layers.0.self_attn.q_proj.bias is missing");
    check("llama", json!({"attention_bias": 1}), "attention_bias: must be true or false");
    check("llama_unigram_v5cfg", json!({"attention_bias": false}), "tensor model.layers.0.self_attn.k_proj.bias does not belong");
    check("gemma3_text", json!({"layer_types": ["full_attention"]}), "layer_types: 1 entries for 4 layers");
    check("gemma3_text", json!({"layer_types": ["full_attention", 1, 1, 1]}), "layer_types: 1 is not supported yet");
    check("gemma3_text", json!({"sliding_window": null}), "sliding_window: missing");
}

#[test]
fn defaults_of_families_fill_gaps() {
    let copy = with_config("mistral_sliding", |config| {
        config.remove("sliding_window");
        config.remove("head_dim");
        config.insert("head_dim".into(), json!(32));
        config.remove("rope_theta");
    });
    let config = copy.open().expect("valid").config;
    assert_eq!(layers(&config), [(Some(4096), 0); 2]);
    assert_eq!(config.ropes[0].theta, 1e4);
    let copy = with_config("mistral_sliding", |config| {
        config.insert("sliding_window".into(), Value::Null);
    });
    assert_eq!(layers(&copy.open().expect("valid").config), [(None, 0); 2]);
    let copy = with_config("gemma3_text", |config| {
        config.remove("layer_types");
        config.insert("sliding_window_pattern".into(), json!(2));
    });
    let config = copy.open().expect("valid").config;
    let (local, global) = ((Some(16), 1), (None, 0));
    assert_eq!(layers(&config), [local, global, local, global]);
}

#[test]
fn rope_parameters_by_layer_type() {
    let copy = with_config("gemma3_text", |config| {
        for key in ["rope_theta", "rope_local_base_freq", "rope_scaling"] {
            config.remove(key);
        }
        let global = json!({"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5});
        let local = json!({"rope_type": "default", "rope_theta": 2e4});
        config.insert(
            "rope_parameters".into(),
            json!({"full_attention": global, "sliding_attention": local}),
        );
    });
    let ropes = copy.open().expect("valid").config.ropes;
    assert_eq!((ropes[0].theta, ropes[1].theta), (5e5, 2e4));
    assert_eq!(ropes[0].scaling, RopeScaling::Linear { factor: 8.0 });
    assert_eq!(ropes[1].scaling, RopeScaling::None);
}

#[test]
fn the_text_half_of_a_multimodal_config_counts() {
    let copy = with_config("gemma3_text", |config| {
        let text = std::mem::take(config);
        config.insert("model_type".into(), json!("gemma3"));
        config.insert("text_config".into(), Value::Object(text));
    });
    assert_eq!(copy.open().expect("valid").config.hidden_size, 64);
}

#[test]
fn shards_are_found_through_the_index() {
    let copy = with_config("llama", |_| {});
    let folder = copy.folder.path();
    let index = folder.join("model.safetensors.index.json");
    std::fs::rename(
        folder.join("model.safetensors"),
        folder.join("a.safetensors"),
    )
    .expect("rename");
    let write = |map: Value| std::fs::write(&index, json!({"weight_map": map}).to_string());
    write(json!({"lm_head.weight": "a.safetensors"})).expect("write");
    assert_eq!(copy.open().expect("valid").config.vocab_size, 512);
    let check = |map: Value, expected: &str| {
        write(map).expect("write");
        let error = copy.error();
        assert!(error.contains(expected), "{error}");
    };
    check(
        json!({"x.weight": "a.safetensors"}),
        "tensor x.weight is missing",
    );
    check(json!({"x.weight": "../a.safetensors"}), "no file name");
    check(json!({"x.weight": "b.safetensors"}), "b.safetensors");
    check(json!({}), "0 files");
}

/// Opens a GGUF file made in memory.
fn open_gguf(file: &GgufFile) -> Result<ModelFiles, LoadError> {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("model.gguf");
    std::fs::write(&path, file.bytes()).expect("a writable folder");
    open(&path)
}

fn inspect_gguf(file: &GgufFile) -> Inspection {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("model.gguf");
    std::fs::write(&path, file.bytes()).expect("a writable folder");
    inspect(&path).expect("a valid file")
}

#[test]
fn gguf_llama_rows_of_q_and_k_are_put_in_order() {
    let model = open_gguf(&tiny_llama()).expect("valid");
    // Row r of the stored q and k holds r in every column; a head has 16 rows.
    let first_column = |name: &str, columns: usize| -> Vec<f32> {
        floats(&model, name).into_iter().step_by(columns).collect()
    };
    let expected: Vec<f32> = (0..2)
        .flat_map(|head| {
            let evens = (0..16).step_by(2);
            let rows = evens.chain((1..16).step_by(2));
            rows.map(move |row| (head * 16 + row) as f32)
        })
        .collect();
    assert_eq!(first_column("layers.0.q.weight", 32), expected);
    assert_eq!(first_column("layers.0.k.weight", 32), expected[..16]);
    let plain: Vec<f32> = (0..16).map(|row| row as f32).collect();
    assert_eq!(first_column("layers.0.v.weight", 32), plain);
    assert!(model.config.tied_embeddings);
    assert_eq!(model.config.attention_scale, 0.25);
}

#[test]
fn gguf_rope_factors_become_scaling() {
    let factors: Vec<f32> = (1..=8).map(|factor| factor as f32).collect();
    let file = tiny_llama().tensor("rope_freqs.weight", &[8], &factors);
    let config = open_gguf(&file).expect("valid").config;
    assert_eq!(config.ropes[0].scaling, RopeScaling::Factors(factors));
    let file = tiny_llama().tensor("rope_freqs.weight", &[4], &[1.0; 4]);
    let error = open_gguf(&file).expect_err("wrong length").to_string();
    assert!(
        error.starts_with("tensor rope_freqs.weight: shape [4], expected [8]"),
        "{error}"
    );
}

#[test]
fn gguf_gemma3_layers_and_norms() {
    let model = open_gguf(&tiny_gemma3()).expect("valid");
    let local = LayerConfig {
        window: Some(512),
        rope: 1,
    };
    let global = LayerConfig {
        window: None,
        rope: 0,
    };
    let config = &model.config;
    assert_eq!(
        config.layers[..5],
        [const {
            LayerConfig {
                window: Some(512),
                rope: 1,
            }
        }; 5]
    );
    assert_eq!(config.layers[5..], [global, local]);
    assert_eq!((config.ropes[0].theta, config.ropes[1].theta), (1e6, 1e4));
    assert_eq!(config.embedding_scale, 32_f32.sqrt());
    assert_eq!(config.attention_scale, 0.25);
    // The converter has added the one already.
    assert_eq!(floats(&model, "layers.0.attn_norm.weight"), [2.0; 32]);
}

#[test]
fn gguf_ends_of_turn_are_found_by_name() {
    let config = open_gguf(&tiny_llama()).expect("valid").config;
    assert_eq!(config.bos_token, Some(TokenId(0)));
    assert_eq!(config.eos_tokens, tokens(&[1, 2]));
}

#[test]
fn errors_of_gguf_name_the_key() {
    let check = |file: GgufFile, expected: &str| {
        let error = open_gguf(&file).expect_err(expected).to_string();
        assert!(
            error.starts_with(expected),
            "{error:?}, expected {expected:?}"
        );
    };
    check(
        tiny_llama().text("general.architecture", "rwkv6"),
        "architecture rwkv6 is not supported yet",
    );
    check(
        tiny_llama().without("general.architecture"),
        "general.architecture: missing",
    );
    check(
        tiny_llama().without("llama.block_count"),
        "llama.block_count: missing",
    );
    check(
        tiny_llama().u32("llama.block_count", 0),
        "llama.block_count: 0, must be",
    );
    check(
        tiny_llama().u32("llama.attention.head_count_kv", 3),
        "llama.attention.head_count_kv: 3 does not divide",
    );
    check(
        tiny_llama().u32("llama.expert_count", 8),
        "llama.expert_count: mixtures of experts",
    );
    check(
        tiny_llama().text("llama.rope.scaling.type", "yarn"),
        "llama.rope.scaling.type: \"yarn\"",
    );
    check(
        tiny_llama().u32("llama.rope.dimension_count", 8),
        "llama.rope.dimension_count: 8, only whole heads",
    );
    check(
        tiny_llama().u32("llama.attention.value_length", 32),
        "llama.attention.value_length: differs",
    );
    check(
        tiny_llama().text("llama.context_length", "8"),
        "llama.context_length: a text is not a number",
    );
    check(
        tiny_llama().without("tokenizer.ggml.tokens"),
        "tokenizer.ggml.tokens: missing",
    );
    check(
        tiny_llama().tensor("blk.0.ffn_gate_inp.weight", &[1], &[0.0]),
        "tensor blk.0.ffn_gate_inp.weight does not belong",
    );
    check(
        tiny_llama().tensor_of_type("blk.0.ffn_up.weight", &[64, 32], 20, 64 * 18),
        "tensor blk.0.ffn_up.weight: type IQ4_NL is not supported here",
    );
}

#[test]
fn a_model_we_cannot_run_can_be_inspected() {
    let inspection = inspect_gguf(&tiny_llama().text("general.architecture", "rwkv6"));
    assert_eq!(inspection.architecture.as_deref(), Some("rwkv6"));
    let reason = inspection.model.expect_err("not supported");
    assert!(reason.starts_with("architecture rwkv6"), "{reason}");
}

#[test]
fn inspection_counts() {
    let inspection = inspect_gguf(&tiny_llama());
    assert_eq!(inspection.name, "tiny");
    assert_eq!(inspection.license.as_deref(), Some("mit"));
    assert_eq!(inspection.context_length, Some(128));
    let types = inspection.types();
    assert_eq!(types.keys().collect::<Vec<_>>(), [&"F32"]);
    assert_eq!(types["F32"].num_tensors as usize, inspection.tensors.len());
    assert_eq!(inspection.num_bytes(), inspection.num_parameters() * 4);
    let tokenizer = inspection.tokenizer.expect("in the file");
    assert_eq!((tokenizer.kind.as_str(), tokenizer.num_tokens), ("gpt2", 4));
    assert!(inspection.model.is_ok());
    let hub = inspect(&tiny("llama_unigram_v5cfg")).expect("valid");
    let tokenizer = hub.tokenizer.expect("in the folder");
    assert_eq!(tokenizer.kind, "Unigram");
    assert!(hub.has_chat_template);
}

#[test]
fn split_files_are_one_model() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let part = |number: u32| folder.path().join(format!("m-0000{number}-of-00002.gguf"));
    let (first, second) = tiny_llama().split(3);
    std::fs::write(
        part(1),
        first.u16("split.no", 0).u16("split.count", 2).bytes(),
    )
    .expect("write");
    std::fs::write(
        part(2),
        second.u16("split.no", 1).u16("split.count", 2).bytes(),
    )
    .expect("write");
    let whole = open_gguf(&tiny_llama()).expect("valid");
    let by_file = open(&part(1)).expect("valid");
    let by_folder = open(folder.path()).expect("valid");
    for model in [&by_file, &by_folder] {
        assert_eq!(model.config, whole.config);
        let name = "layers.0.down.weight";
        assert_eq!(
            model.weights.tensor(name).expect(name),
            whole.weights.tensor(name).expect(name)
        );
    }
    let error = open(&part(2)).expect_err("not the first").to_string();
    assert!(error.contains("not the first part"), "{error}");
    std::fs::remove_file(part(2)).expect("remove");
    let error = open(&part(1)).expect_err("incomplete").to_string();
    assert!(error.contains("m-00002-of-00002.gguf"), "{error}");
}

#[test]
fn fingerprints_tell_models_apart() {
    let fingerprint = |file: &GgufFile| open_gguf(file).expect("valid").fingerprint;
    assert_eq!(fingerprint(&tiny_llama()), fingerprint(&tiny_llama()));
    let changed = tiny_llama().f32("llama.rope.freq_base", 5.0);
    assert_ne!(fingerprint(&tiny_llama()), fingerprint(&changed));
}
