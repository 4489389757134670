use half::f16;
use millpond_scheduler::{BlockCopy, BlockId};

use super::super::{CpuKernels, KvData, KvLayer, KvShape};
use super::Noise;

const SHAPE: KvShape = KvShape {
    num_blocks: 6,
    num_kv_heads: 3,
    head_dim: 32,
};

pub(super) fn empty_layer(shape: KvShape, dtype: fn(usize) -> KvData) -> KvLayer {
    let len = shape.num_blocks * shape.num_kv_heads * 16 * shape.head_dim;
    KvLayer {
        keys: dtype(len),
        values: dtype(len),
    }
}

pub(super) fn f32_data(len: usize) -> KvData {
    KvData::F32(vec![0.0; len])
}

pub(super) fn f16_data(len: usize) -> KvData {
    KvData::F16(vec![f16::ZERO; len])
}

fn as_f32(data: &KvData) -> Vec<f32> {
    match data {
        KvData::F32(values) => values.clone(),
        KvData::F16(values) => values.iter().map(|value| value.to_f32()).collect(),
    }
}

#[test]
fn keys_and_values_lie_where_the_layout_says() {
    for (dtype, round) in [
        (f32_data as fn(usize) -> KvData, (|x| x) as fn(f32) -> f32),
        (f16_data, |x| f16::from_f32(x).to_f32()),
    ] {
        // Many tokens, so that the work is spread over threads; 60 of the 96 slots, in no order.
        let slots: Vec<u32> = (0..60).map(|i| i * 37 % 96).collect();
        let row = SHAPE.num_kv_heads * SHAPE.head_dim;
        let mut noise = Noise(1);
        let (keys, values) = (noise.uniforms(60 * row), noise.uniforms(60 * row));
        for num_threads in [1, 3] {
            let kernels = CpuKernels::new(num_threads, None).expect("threads can be started");
            let mut layer = empty_layer(SHAPE, dtype);
            kernels.write_kv(SHAPE, &mut layer, &keys, &values, &slots);
            let (pool_keys, pool_values) = (as_f32(&layer.keys), as_f32(&layer.values));
            let mut num_written = 0;
            for (token, slot) in slots.iter().enumerate() {
                let (block, offset) = (*slot as usize / 16, *slot as usize % 16);
                for head in 0..3 {
                    for dim in 0..32 {
                        let from = token * row + head * 32 + dim;
                        let key = pool_keys[((block * 3 + head) * 32 + dim) * 16 + offset];
                        let value = pool_values[((block * 3 + head) * 16 + offset) * 32 + dim];
                        assert_eq!((key, value), (round(keys[from]), round(values[from])));
                        num_written += 1;
                    }
                }
            }
            let touched = pool_keys.iter().filter(|key| **key != 0.0).count();
            assert!(touched <= num_written);
        }
    }
}

#[test]
fn copies_take_whole_blocks_in_order() {
    let kernels = CpuKernels::new(1, None).expect("no thread to start");
    let mut layer = empty_layer(SHAPE, f16_data);
    let slots: Vec<u32> = (0..96).collect();
    let mut noise = Noise(2);
    let (keys, values) = (noise.uniforms(96 * 96), noise.uniforms(96 * 96));
    kernels.write_kv(SHAPE, &mut layer, &keys, &values, &slots);
    let before = (as_f32(&layer.keys), as_f32(&layer.values));
    let copy = |from, to| BlockCopy {
        from: BlockId(from),
        to: BlockId(to),
        num_tokens: 16,
    };
    // The second reads what the first wrote.
    kernels.copy_blocks(SHAPE, &mut layer, &[copy(1, 4), copy(4, 5), copy(0, 1)]);
    let after = (as_f32(&layer.keys), as_f32(&layer.values));
    let block = |data: &[f32], index: usize| data[index * 1536..(index + 1) * 1536].to_vec();
    for (to, from) in [(0, 0), (1, 0), (2, 2), (3, 3), (4, 1), (5, 1)] {
        assert_eq!(
            block(&after.0, to),
            block(&before.0, from),
            "keys of block {to}"
        );
        assert_eq!(
            block(&after.1, to),
            block(&before.1, from),
            "values of block {to}"
        );
    }
}
