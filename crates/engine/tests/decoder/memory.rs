//! The memory plan and the cost of a token against what loading really takes.

use std::path::Path;

use crate::session::{fixture, smollm2};
use millpond_engine::kernels::cpu::{CpuKernels, PackedMatrix};
use millpond_engine::loader::{self, Weights};
use millpond_engine::model::{Decoder, MemoryNeeds, StepLimits, TokenCost};

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

/// A token reads all matrices, but the embedding only when it is the head.
fn check_cost(path: &Path) -> TokenCost {
    let files = loader::open(path).expect("the model opens");
    let cost = TokenCost::of(&files.config, &files.weights);
    let matrices = files.weights.list().filter(|tensor| {
        let is_read = files.config.tied_embeddings || tensor.name != "embed.weight";
        tensor.shape.len() == 2 && is_read
    });
    let (mut num_bytes, mut num_elements) = (0, 0);
    for matrix in matrices {
        let (rows, columns) = (matrix.shape[0], matrix.shape[1]);
        num_bytes += PackedMatrix::packed_bytes(matrix.dtype, rows, columns).expect("a known type");
        num_elements += (rows * columns) as u64;
    }
    assert_eq!(
        (cost.weight_bytes, cost.macs()),
        (num_bytes, num_elements),
        "{path:?}"
    );
    cost
}

#[test]
fn a_token_reads_and_multiplies_every_weight_once() {
    for model in ["llama", "mistral_sliding", "gemma3_text"] {
        assert!(!check_cost(&fixture("tiny").join(model)).is_quantised);
    }
    let cost = check_cost(&smollm2());
    let (width, inner, kv_width, vocabulary) = (576, 1536, 192, 49_152);
    let layer = 2 * width * (width + kv_width) + 3 * width * inner;
    assert_eq!(
        (cost.layer_macs, cost.head_macs),
        (30 * layer, width * vocabulary)
    );
    assert!(cost.is_quantised);
}
