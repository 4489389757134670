//! The memory plan against what loading really takes.

use std::path::Path;

use crate::session::{fixture, smollm2};
use millpond_engine::kernels::cpu::CpuKernels;
use millpond_engine::loader::{self, Weights};
use millpond_engine::model::{Decoder, MemoryNeeds, StepLimits};

fn check(path: &Path) {
    let files = loader::open(path).expect("the model opens");
    let limits = StepLimits {
        max_batch_tokens: 64,
        max_context: 256,
    };
    let needs = MemoryNeeds::of(&files.config, &files.weights, limits);
    let kernels = CpuKernels::new(2, None).expect("the kernels start");
    let mut read = 0;
    let mut progress = |bytes| read = bytes;
    let decoder = Decoder::load(&kernels, files.config, &files.weights, 256, &mut progress);
    let decoder = decoder.expect("the weights load");
    let matrices = needs.weight_bytes - vector_bytes(&files.weights);
    assert_eq!(matrices, decoder.num_bytes() as u64, "{path:?}");
    let kv_bytes = decoder.kv_type().bytes_per_token(decoder.config());
    assert_eq!(needs.kv_bytes_per_token, kv_bytes, "{path:?}");
    assert_eq!(needs.plan(10).kv_bytes, 160 * kv_bytes, "{path:?}");
    assert_eq!(read, files.weights.num_bytes(), "{path:?}");
}

/// Norm weights and biases, in f32.
fn vector_bytes(weights: &Weights) -> u64 {
    let vectors = weights.list().filter(|tensor| tensor.shape.len() == 1);
    vectors.map(|tensor| tensor.shape[0] as u64 * 4).sum()
}

#[test]
fn loading_takes_what_the_plan_says() {
    for model in ["llama", "llama_unigram_v5cfg", "gemma3_text"] {
        check(&fixture("tiny").join(model));
    }
    check(&smollm2());
}
