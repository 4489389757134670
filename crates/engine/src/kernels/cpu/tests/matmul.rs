use half::{bf16, f16};

use super::super::{CpuKernels, InputRows, KernelError, MatmulInput, MatmulOutput, PackedMatrix};
use super::{Noise, assert_close, bits, same_everywhere};
use crate::config::Activation;
use crate::loader::{RawTensor, TensorType};

/// Every type that we compute, with values and bytes of its blocks.
pub(super) const TYPES: [(TensorType, usize, usize); 13] = [
    (TensorType::F32, 1, 4),
    (TensorType::F16, 1, 2),
    (TensorType::BF16, 1, 2),
    (TensorType::Q4_0, 32, 18),
    (TensorType::Q4_1, 32, 20),
    (TensorType::Q5_0, 32, 22),
    (TensorType::Q5_1, 32, 24),
    (TensorType::Q8_0, 32, 34),
    (TensorType::Q2K, 256, 84),
    (TensorType::Q3K, 256, 110),
    (TensorType::Q4K, 256, 144),
    (TensorType::Q5K, 256, 176),
    (TensorType::Q6K, 256, 210),
];

/// Byte offsets of the half floats in a block.
fn half_offsets(dtype: TensorType) -> &'static [usize] {
    match dtype {
        TensorType::Q4_0 | TensorType::Q5_0 | TensorType::Q8_0 => &[0],
        TensorType::Q4_1 | TensorType::Q5_1 | TensorType::Q4K | TensorType::Q5K => &[0, 2],
        TensorType::Q2K => &[80, 82],
        TensorType::Q3K => &[108],
        TensorType::Q6K => &[208],
        TensorType::F32 | TensorType::F16 | TensorType::BF16 | TensorType::Other(_) => &[],
    }
}

/// A matrix of random blocks with sane scales.
fn random_tensor(dtype: TensorType, shape: [usize; 2], noise: &mut Noise) -> RawTensor {
    let (_, values, block_bytes) = *TYPES
        .iter()
        .find(|(other, _, _)| *other == dtype)
        .expect("a type of the table");
    let num_blocks = shape[0] * shape[1] / values;
    let mut bytes = Vec::new();
    for _ in 0..num_blocks {
        bytes.extend(match dtype {
            TensorType::F32 => noise.uniform().to_le_bytes().to_vec(),
            TensorType::F16 => f16::from_f32(noise.uniform()).to_le_bytes().to_vec(),
            TensorType::BF16 => bf16::from_f32(noise.uniform()).to_le_bytes().to_vec(),
            _ => random_block(dtype, block_bytes, noise),
        });
    }
    RawTensor {
        name: format!("{dtype:?}"),
        dtype,
        shape: shape.to_vec(),
        bytes,
    }
}

fn random_block(dtype: TensorType, block_bytes: usize, noise: &mut Noise) -> Vec<u8> {
    let mut block: Vec<u8> = (0..block_bytes).map(|_| noise.bits() as u8).collect();
    for &at in half_offsets(dtype) {
        block[at..at + 2].copy_from_slice(&f16::from_f32(noise.uniform() * 0.1).to_le_bytes());
    }
    block
}

fn pack(kernels: &CpuKernels, tensor: &RawTensor) -> PackedMatrix {
    PackedMatrix::pack(kernels, tensor).expect("a type and shape that we compute")
}

/// x · weightᵀ + bias by the kernels.
fn product(kernels: &CpuKernels, tensor: &RawTensor, x: &[f32], bias: Option<&[f32]>) -> Vec<f32> {
    let weight = pack(kernels, tensor);
    let rows = x.len() / weight.in_features();
    let mut input = MatmulInput::default();
    kernels.load_input(
        x,
        rows,
        weight.in_features(),
        weight.is_quantised(),
        &mut input,
    );
    let mut out = vec![f32::NAN; rows * weight.out_features()];
    let output = MatmulOutput {
        weight: &weight,
        bias,
        add: false,
        out: &mut out,
    };
    kernels.matmul(&input, &mut [output]);
    out
}

/// x · weightᵀ in f64 with the activations rounded as the kernels round them.
fn reference(kernels: &CpuKernels, tensor: &RawTensor, x: &[f32]) -> Vec<f64> {
    let weight = pack(kernels, tensor);
    let cols = weight.in_features();
    let x: Vec<f64> = if weight.is_quantised() {
        x.chunks(32).flat_map(rounded_to_int8).collect()
    } else {
        x.iter().map(|x| f64::from(*x)).collect()
    };
    let mut row = vec![0.0; cols];
    let mut out = vec![0.0; x.len() / cols * weight.out_features()];
    for output in 0..weight.out_features() {
        weight.row(output, &mut row);
        for (i, x) in x.chunks(cols).enumerate() {
            let products = x.iter().zip(&row).map(|(x, w)| x * f64::from(*w));
            out[i * weight.out_features() + output] = products.sum();
        }
    }
    out
}

fn rounded_to_int8(block: &[f32]) -> Vec<f64> {
    let max = block.iter().fold(0f32, |max, x| max.max(x.abs()));
    let round = |x: &f32| f64::from((x * (127.0 / max)).round_ties_even() * (max / 127.0));
    block.iter().map(round).collect()
}

/// Rows around every step size, outputs around a panel, and several tiles.
const SHAPES: [(usize, usize, usize); 8] = [
    (1, 1, 256),
    (1, 100, 512),
    (2, 16, 256),
    (3, 17, 256),
    (5, 33, 512),
    (7, 48, 256),
    (66, 31, 256),
    (13, 600, 256),
];

#[test]
fn products_match_f64_arithmetic_with_all_kernels() {
    for (dtype, _, _) in TYPES {
        for (rows, out_features, in_features) in SHAPES {
            let mut noise = Noise(rows as u64);
            let tensor = random_tensor(dtype, [out_features, in_features], &mut noise);
            let x = noise.uniforms(rows * in_features);
            let actual = same_everywhere(|kernels| product(kernels, &tensor, &x, None));
            let kernels = CpuKernels::new(1, None).expect("no thread to start");
            assert_close(&actual, &reference(&kernels, &tensor, &x), 3e-6);
        }
    }
}

#[test]
fn narrow_float_matrices_of_any_width_work() {
    for in_features in [1, 2, 15, 33] {
        let mut noise = Noise(9);
        let tensor = random_tensor(TensorType::F32, [5, in_features], &mut noise);
        let x = noise.uniforms(3 * in_features);
        let actual = same_everywhere(|kernels| product(kernels, &tensor, &x, None));
        let kernels = CpuKernels::new(1, None).expect("no thread to start");
        assert_close(&actual, &reference(&kernels, &tensor, &x), 1e-6);
    }
}

#[test]
fn a_row_has_the_same_bits_whatever_shares_the_batch() {
    let kernels = CpuKernels::new(2, None).expect("one thread can be started");
    for (dtype, _, _) in TYPES {
        let mut noise = Noise(10);
        let tensor = random_tensor(dtype, [70, 512], &mut noise);
        let x = noise.uniforms(64 * 512);
        let bias = noise.uniforms(70);
        let all = product(&kernels, &tensor, &x, Some(&bias));
        for rows in 1..64 {
            // The last rows, so that a row meets every place in a step.
            let from = 64 - rows;
            let some = product(&kernels, &tensor, &x[from * 512..], Some(&bias));
            assert_eq!(
                bits(&some),
                bits(&all[from * 70..]),
                "{dtype:?}, {rows} rows"
            );
        }
    }
}

#[test]
fn products_of_one_input_are_those_of_single_calls() {
    let mut noise = Noise(11);
    let tensors = [64, 32, 48].map(|out| random_tensor(TensorType::Q4_1, [out, 576], &mut noise));
    let (x, bias) = (noise.uniforms(5 * 576), noise.uniforms(32));
    same_everywhere(|kernels| {
        let weights = [0, 1, 2].map(|i| pack(kernels, &tensors[i]));
        let mut outs = [64, 32, 48].map(|out| vec![0.0; 5 * out]);
        let mut input = MatmulInput::default();
        kernels.load_input(&x, 5, 576, true, &mut input);
        let mut outputs: Vec<MatmulOutput<'_>> = weights
            .iter()
            .zip(&mut outs)
            .map(|(weight, out)| MatmulOutput {
                weight,
                bias: (weight.out_features() == 32).then_some(&bias[..]),
                add: false,
                out,
            })
            .collect();
        kernels.matmul(&input, &mut outputs);
        for (tensor, out) in tensors.iter().zip(&outs) {
            let bias = (tensor.shape[0] == 32).then_some(&bias[..]);
            assert_eq!(bits(out), bits(&product(kernels, tensor, &x, bias)));
        }
        outs.concat()
    });
}

#[test]
fn rows_that_are_computed_on_the_way_equal_rows_that_were_computed_before() {
    let mut noise = Noise(14);
    let tensor = random_tensor(TensorType::Q4_1, [33, 64], &mut noise);
    let (gate, up) = (noise.uniforms(19 * 64), noise.uniforms(19 * 64));
    let weight = noise.uniforms(64);
    let sources = [
        InputRows::Normed {
            x: &gate,
            weight: &weight,
            eps: 1e-5,
        },
        InputRows::Gated {
            activation: Activation::Silu,
            gate: &gate,
            up: &up,
        },
    ];
    for source in sources {
        same_everywhere(|kernels| {
            let mut input = MatmulInput::default();
            kernels.load_input(source, 19, 64, false, &mut input);
            let rows: Vec<f32> = (0..19)
                .flat_map(|row| input.float_row(row))
                .copied()
                .collect();
            let expected = product(kernels, &tensor, &rows, None);
            let matrix = pack(kernels, &tensor);
            kernels.load_input(source, 19, 64, true, &mut input);
            let mut out = vec![f32::NAN; 19 * 33];
            let output = MatmulOutput {
                weight: &matrix,
                bias: None,
                add: false,
                out: &mut out,
            };
            kernels.matmul(&input, &mut [output]);
            assert_eq!(bits(&out), bits(&expected));
            out
        });
    }
}

#[test]
fn a_product_that_is_added_has_the_bits_of_a_sum() {
    let mut noise = Noise(15);
    for dtype in [TensorType::F32, TensorType::Q8_0] {
        let tensor = random_tensor(dtype, [37, 64], &mut noise);
        let (x, before) = (noise.uniforms(9 * 64), noise.uniforms(9 * 37));
        let bias = noise.uniforms(37);
        same_everywhere(|kernels| {
            let mut expected = before.clone();
            kernels.add(&mut expected, &product(kernels, &tensor, &x, Some(&bias)));
            let weight = pack(kernels, &tensor);
            let mut input = MatmulInput::default();
            kernels.load_input(&x, 9, 64, weight.is_quantised(), &mut input);
            let mut out = before.clone();
            let output = MatmulOutput {
                weight: &weight,
                bias: Some(&bias),
                add: true,
                out: &mut out,
            };
            kernels.matmul(&input, &mut [output]);
            assert_eq!(bits(&out), bits(&expected));
            out
        });
    }
}

#[test]
fn extreme_integers_do_not_overflow() {
    // Largest magnitudes of weights and activations, all of one sign or alternating.
    for (dtype, values, block_bytes) in TYPES.into_iter().filter(|(_, values, _)| *values > 1) {
        for byte in [0x00, 0x7f, 0x80, 0x0f, 0xf0, 0xff] {
            let mut block = vec![byte; block_bytes];
            for &at in half_offsets(dtype) {
                block[at..at + 2].copy_from_slice(&f16::ONE.to_le_bytes());
            }
            let tensor = RawTensor {
                name: format!("{dtype:?}"),
                dtype,
                shape: vec![1, values],
                bytes: block,
            };
            let x: Vec<f32> = (0..4 * values)
                .map(|i| {
                    if i / values < 2 || i % 2 == 0 {
                        1.0
                    } else {
                        -1.0
                    }
                })
                .map(|x| if x > 0.0 { 127.0 } else { -127.0 })
                .collect();
            let actual = same_everywhere(|kernels| product(kernels, &tensor, &x, None));
            let kernels = CpuKernels::new(1, None).expect("no thread to start");
            let expected = reference(&kernels, &tensor, &x);
            assert_close(&actual, &expected, 1e-6);
        }
    }
}

#[test]
fn non_finite_activations_spoil_their_row_and_no_other() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for (dtype, _, _) in TYPES {
            let mut noise = Noise(12);
            let tensor = random_tensor(dtype, [40, 256], &mut noise);
            let clean = noise.uniforms(5 * 256);
            let mut x = clean.clone();
            x[2 * 256 + 77] = bad;
            let kernels = CpuKernels::new(1, None).expect("no thread to start");
            let spoilt = product(&kernels, &tensor, &x, None);
            let expected = product(&kernels, &tensor, &clean, None);
            assert!(spoilt[80..120].iter().all(|x| !x.is_finite()), "{dtype:?}");
            assert_eq!(bits(&spoilt[..80]), bits(&expected[..80]));
            assert_eq!(bits(&spoilt[120..]), bits(&expected[120..]));
        }
    }
}

#[test]
fn tiny_and_zero_activations_give_zero() {
    let tensor = random_tensor(TensorType::Q4_1, [3, 64], &mut Noise(13));
    for tiny in [0.0, 1e-40, -1e-38, 1e-31] {
        let out = same_everywhere(|kernels| product(kernels, &tensor, &[tiny; 64], None));
        assert_eq!(out, [0.0; 3]);
    }
}

#[test]
fn what_cannot_be_packed_is_a_typed_error() {
    let kernels = CpuKernels::new(1, None).expect("no thread to start");
    let tensor = |dtype, shape: &[usize], len| RawTensor {
        name: "blk.0.attn_q".into(),
        dtype,
        shape: shape.to_vec(),
        bytes: vec![0; len],
    };
    let unsupported = tensor(TensorType::Other(20), &[1, 32], 18);
    let error = PackedMatrix::pack(&kernels, &unsupported).err();
    let error = error.expect("refused");
    assert!(matches!(error, KernelError::UnsupportedType { .. }));
    assert!(error.to_string().contains("blk.0.attn_q"), "{error}");
    let misshapen = [
        tensor(TensorType::F32, &[4], 16),
        tensor(TensorType::F32, &[2, 2, 2], 32),
        tensor(TensorType::F32, &[2, 2], 15),
        tensor(TensorType::F32, &[2, 0], 0),
        tensor(TensorType::F32, &[usize::MAX, usize::MAX], 16),
        tensor(TensorType::Q4_0, &[1, 33], 18),
        tensor(TensorType::Q4_0, &[2, 32], 18),
        tensor(TensorType::Q4K, &[1, 576], 144),
        tensor(TensorType::Q6K, &[1, usize::MAX / 2 + 1], 210),
    ];
    for tensor in misshapen {
        let error = PackedMatrix::pack(&kernels, &tensor).err();
        assert!(
            matches!(error, Some(KernelError::Shape { .. })),
            "{tensor:?}"
        );
    }
}
