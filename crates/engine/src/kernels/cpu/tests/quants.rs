//! Weights written by the GGUF project's own tools: `tests/fixtures/gguf_quants`.

use std::collections::HashMap;
use std::path::PathBuf;

use candle_core::{Device, Tensor, safetensors};

use super::super::{CpuKernels, MatmulInput, MatmulOutput, PackedMatrix};
use crate::loader::{RawTensor, TensorType};

/// Names in the fixture and bytes of a row of 512.
const TYPES: [(&str, TensorType, usize); 13] = [
    ("F32", TensorType::F32, 2048),
    ("F16", TensorType::F16, 1024),
    ("BF16", TensorType::BF16, 1024),
    ("Q4_0", TensorType::Q4_0, 288),
    ("Q4_1", TensorType::Q4_1, 320),
    ("Q5_0", TensorType::Q5_0, 352),
    ("Q5_1", TensorType::Q5_1, 384),
    ("Q8_0", TensorType::Q8_0, 544),
    ("Q2_K", TensorType::Q2K, 168),
    ("Q3_K", TensorType::Q3K, 220),
    ("Q4_K", TensorType::Q4K, 288),
    ("Q5_K", TensorType::Q5K, 352),
    ("Q6_K", TensorType::Q6K, 420),
];

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/fixtures/gguf_quants")
        .join(name)
}

/// Where each tensor's data starts, from a GGUF file without metadata.
fn tensor_offsets(file: &[u8]) -> HashMap<String, usize> {
    let u32_at = |at: usize| u32::from_le_bytes(file[at..at + 4].try_into().expect("4 bytes"));
    let u64_at = |at: usize| {
        usize::try_from(u64::from_le_bytes(
            file[at..at + 8].try_into().expect("8 bytes"),
        ))
        .expect("a small file")
    };
    let mut at = 24 + general_metadata_len(file);
    let mut offsets = Vec::new();
    for _ in 0..u64_at(8) {
        let name_len = u64_at(at);
        let name = String::from_utf8(file[at + 8..at + 8 + name_len].to_vec()).expect("a name");
        at += 8 + name_len;
        let num_dims = u32_at(at) as usize;
        at += 4 + 8 * num_dims + 4;
        offsets.push((name, u64_at(at)));
        at += 8;
    }
    let data = at.next_multiple_of(32);
    offsets
        .into_iter()
        .map(|(name, offset)| (name, data + offset))
        .collect()
}

/// Bytes of the one text entry that the file has: key, type, value.
fn general_metadata_len(file: &[u8]) -> usize {
    let len_at =
        |at: usize| u64::from_le_bytes(file[at..at + 8].try_into().expect("8 bytes")) as usize;
    let key = len_at(24);
    let value = len_at(24 + 8 + key + 4);
    8 + key + 4 + 8 + value
}

fn floats(tensors: &HashMap<String, Tensor>, name: &str) -> Vec<f32> {
    let tensor = tensors.get(name).expect("a tensor of the fixture");
    let flat = tensor.flatten_all().expect("any shape");
    flat.to_vec1().expect("f32")
}

#[test]
fn weights_and_products_equal_those_of_gguf_py() {
    let file = std::fs::read(fixture("quants.gguf")).expect("the fixture");
    let offsets = tensor_offsets(&file);
    let expected =
        safetensors::load(fixture("expected.safetensors"), &Device::Cpu).expect("the fixture");
    let activations = floats(&expected, "activations");
    let kernels = CpuKernels::new(2, None).expect("one thread can be started");
    for (name, dtype, row_bytes) in TYPES {
        let start = *offsets
            .get(&format!("t.{name}"))
            .expect("a tensor of the fixture");
        let tensor = RawTensor {
            name: name.into(),
            dtype,
            shape: vec![3, 512],
            bytes: file[start..start + 3 * row_bytes].to_vec(),
        };
        let weight = PackedMatrix::pack(&kernels, &tensor).expect("a type we compute");
        check_rows(&weight, &floats(&expected, &format!("t.{name}")));
        check_products(
            &kernels,
            &weight,
            &activations,
            &floats(&expected, &format!("matmul.{name}")),
        );
    }
}

fn check_rows(weight: &PackedMatrix, expected: &[f32]) {
    let mut row = vec![0.0; 512];
    for (index, expected) in expected.chunks(512).enumerate() {
        weight.row(index, &mut row);
        for (actual, expected) in row.iter().zip(expected) {
            let error = (actual - expected).abs();
            assert!(
                error <= 1e-6 * expected.abs(),
                "{actual}, expected {expected}"
            );
        }
    }
}

/// Float weights to rounding errors; int8 activations (an error of up to 1 / 254 of the largest each) to 2 % of the largest product.
fn check_products(
    kernels: &CpuKernels,
    weight: &PackedMatrix,
    activations: &[f32],
    expected: &[f32],
) {
    let mut input = MatmulInput::default();
    kernels.load_input(activations, 4, 512, weight.is_quantised(), &mut input);
    let mut out = vec![0.0; 12];
    let output = MatmulOutput {
        weight,
        bias: None,
        add: false,
        out: &mut out,
    };
    kernels.matmul(&input, &mut [output]);
    let tolerance = if weight.is_quantised() { 2e-2 } else { 1e-5 };
    let scale = expected.iter().fold(0f32, |max, x| max.max(x.abs()));
    for (actual, expected) in out.iter().zip(expected) {
        let error = (actual - expected).abs();
        assert!(
            error <= tolerance * scale,
            "{actual}, expected {expected}, scale {scale}"
        );
    }
}
