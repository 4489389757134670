//! Speed of the CPU kernels on the shapes of SmolLM2-135M: matrix products and attention.
//!
//! It measures, it checks nothing. `cargo bench -p millpond-engine --bench kernels`

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use half::f16;
use millpond_engine::kernels::cpu::{
    AttentionBatch, CpuKernels, KvData, KvLayer, KvShape, MatmulInput, MatmulOutput, PackedMatrix,
    TokenPath,
};
use millpond_engine::loader::{RawTensor, TensorType};
use millpond_scheduler::{BlockId, Span32};

const HIDDEN: usize = 576;
const INTERMEDIATE: usize = 1536;
const NUM_HEADS: usize = 9;
const NUM_KV_HEADS: usize = 3;
const HEAD_DIM: usize = 64;
const DEPTH: usize = 1024;

/// More matrices or layers than the last-level cache holds, taken in turn: decode reads each weight once.
const NUM_COPIES: usize = 32;

fn kernels() -> CpuKernels {
    let num_threads = std::thread::available_parallelism().map_or(1, |threads| threads.get());
    CpuKernels::new(num_threads, None).expect("threads can be started")
}

/// Q4_1 blocks with all scales and mins 2^-10 and a pattern of integers.
fn q4_1_tensor() -> RawTensor {
    let half = f16::from_f32(1.0 / 1024.0).to_le_bytes();
    let mut block: Vec<u8> = [half, half].concat();
    block.extend((0..16u8).map(|i| i * 17));
    RawTensor {
        name: "up".into(),
        dtype: TensorType::Q4_1,
        shape: vec![INTERMEDIATE, HIDDEN],
        bytes: block.repeat(INTERMEDIATE * HIDDEN / 32),
    }
}

fn matmul(criterion: &mut Criterion) {
    let kernels = kernels();
    let tensor = q4_1_tensor();
    let pack = |_| PackedMatrix::pack(&kernels, &tensor).expect("a type that is computed");
    let weights: Vec<PackedMatrix> = (0..NUM_COPIES).map(pack).collect();
    let mut group = criterion.benchmark_group("q4_1 1536x576");
    for rows in [1, 8, 32, 512] {
        let x: Vec<f32> = (0..rows * HIDDEN).map(|i| (i % 17) as f32 - 8.0).collect();
        let mut input = MatmulInput::default();
        let mut out = vec![0.0; rows * INTERMEDIATE];
        let mut next = 0;
        // Multiply-adds.
        group.throughput(Throughput::Elements((rows * HIDDEN * INTERMEDIATE) as u64));
        group.bench_function(BenchmarkId::new("rows", rows), |bencher| {
            bencher.iter(|| {
                next = (next + 1) % NUM_COPIES;
                kernels.load_input(&x, rows, HIDDEN, true, &mut input);
                let output = MatmulOutput {
                    weight: &weights[next],
                    bias: None,
                    add: false,
                    out: &mut out,
                };
                kernels.matmul(&input, &mut [output]);
                black_box(&out);
            });
        });
    }
    group.finish();
}

fn layer(shape: KvShape) -> KvLayer {
    let len = shape.num_blocks * shape.num_kv_heads * shape.head_dim * 16;
    let data = |period: usize| {
        let value = |i| f16::from_f32((i % period) as f32 / period as f32);
        KvData::F16((0..len).map(value).collect())
    };
    KvLayer {
        keys: data(17),
        values: data(13),
    }
}

/// One decode token for each of `batch` sequences at depth 1,024.
fn decode_attention(criterion: &mut Criterion) {
    let kernels = kernels();
    let mut group = criterion.benchmark_group("attention at depth 1024");
    for batch in [1, 8] {
        let blocks_each = DEPTH / 16;
        let shape = KvShape {
            num_blocks: batch * blocks_each,
            num_kv_heads: NUM_KV_HEADS,
            head_dim: HEAD_DIM,
        };
        let layers: Vec<KvLayer> = (0..NUM_COPIES).map(|_| layer(shape)).collect();
        let blocks: Vec<BlockId> = (0..shape.num_blocks as u32).map(BlockId).collect();
        let path = |sequence: usize| TokenPath {
            position: DEPTH as u32 - 1,
            table: Span32 {
                start: (sequence * blocks_each) as u32,
                end: ((sequence + 1) * blocks_each) as u32,
            },
            tail: Span32::default(),
        };
        let paths: Vec<TokenPath> = (0..batch).map(path).collect();
        let queries = vec![0.1; batch * NUM_HEADS * HEAD_DIM];
        let attention = AttentionBatch {
            queries: &queries,
            paths: &paths,
            blocks: &blocks,
            tail_slots: &[],
            num_heads: NUM_HEADS,
            scale: 0.125,
            softcap: None,
            window: None,
        };
        let mut out = vec![0.0; queries.len()];
        let mut next = 0;
        group.throughput(Throughput::Elements((batch * DEPTH) as u64));
        group.bench_function(BenchmarkId::new("batch", batch), |bencher| {
            bencher.iter(|| {
                next = (next + 1) % NUM_COPIES;
                kernels.attention(shape, &layers[next], &attention, &mut out);
                black_box(&out);
            });
        });
    }
    group.finish();
}

criterion_group!(benches, matmul, decode_attention);
criterion_main!(benches);
