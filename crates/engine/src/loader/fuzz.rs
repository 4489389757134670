//! Hostile headers without end: whatever the bytes, the readers answer and do not panic.

use std::sync::LazyLock;

use proptest::prelude::*;

use super::tests::gguf_files::{tiny_gemma3, tiny_llama};
use super::{gguf, open, safetensors};
use crate::config::ModelConfig;

/// Values that break arithmetic, little-endian: ends of ranges, sign bits, plausible but wrong sizes.
const HOSTILE: [u64; 12] = [
    0,
    1,
    0x7f,
    0xff,
    0xffff,
    0x7fff_ffff,
    0xffff_ffff,
    1 << 32,
    1 << 58,
    1 << 60,
    i64::MAX as u64,
    u64::MAX,
];

fn read_gguf(bytes: &[u8]) {
    let _ = gguf::read_header(&mut &*bytes, bytes.len() as u64);
}

fn read_safetensors(bytes: &[u8]) {
    let _ = safetensors::read_header(&mut &*bytes, bytes.len() as u64);
}

/// The first bytes of a file whose header fits in them, and the length of the whole.
struct Head {
    bytes: Vec<u8>,
    file_len: u64,
}

const HEAD_BYTES: usize = 8192;

/// A header of seven layers. Built once: the tests below read it thousands of times.
static GEMMA3: LazyLock<Head> = LazyLock::new(|| {
    let mut bytes = tiny_gemma3().bytes();
    let file_len = bytes.len() as u64;
    bytes.truncate(HEAD_BYTES);
    Head { bytes, file_len }
});

#[test]
fn every_offset_of_a_gguf_header_with_every_hostile_value() {
    for offset in 0..2048 {
        for value in HOSTILE {
            let mut changed = GEMMA3.bytes.clone();
            changed[offset..offset + 8].copy_from_slice(&value.to_le_bytes());
            let _ = gguf::read_header(&mut &*changed, GEMMA3.file_len);
        }
    }
}

#[test]
fn every_truncation_of_a_header_is_refused() {
    let header = gguf::read_header(&mut &*GEMMA3.bytes, GEMMA3.file_len).expect("valid");
    for len in 0..header.data_start as usize - 32 {
        let cut = &GEMMA3.bytes[..len];
        assert!(gguf::read_header(&mut &*cut, len as u64).is_err(), "{len}");
        // A file that shrinks while it is read.
        assert!(
            gguf::read_header(&mut &*cut, GEMMA3.file_len).is_err(),
            "{len}"
        );
    }
}

const SAFETENSORS: &str = r#"{"__metadata__":{"format":"pt"},"a":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]},"b":{"dtype":"F32","shape":[1],"data_offsets":[12,16]}}"#;

fn safetensors_file() -> Vec<u8> {
    let mut file = (SAFETENSORS.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(SAFETENSORS.as_bytes());
    file.extend_from_slice(&[0; 16]);
    file
}

#[test]
fn the_unchanged_files_are_valid() {
    let file = safetensors_file();
    let header = safetensors::read_header(&mut &*file, file.len() as u64).expect("valid");
    assert_eq!(header.tensors.len(), 2);
    let header = gguf::read_header(&mut &*GEMMA3.bytes, GEMMA3.file_len).expect("valid");
    assert!(header.data_start <= HEAD_BYTES as u64);
}

fn flip(file: &mut [u8], flips: &[(usize, u8)]) {
    let len = file.len();
    for (position, bit) in flips {
        file[position % len] ^= 1 << (bit % 8);
    }
}

fn flips() -> impl Strategy<Value = Vec<(usize, u8)>> {
    prop::collection::vec((0_usize..8192, any::<u8>()), 1..8)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn flipped_bits_in_a_gguf_header(flips in flips()) {
        let mut head = GEMMA3.bytes.clone();
        flip(&mut head, &flips);
        let _ = gguf::read_header(&mut &*head, GEMMA3.file_len);
    }

    #[test]
    fn flipped_bits_in_the_smallest_valid_file(flips in flips()) {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/bad_models/gguf_ok.gguf");
        let mut file = std::fs::read(path).expect("the fixture exists");
        flip(&mut file, &flips);
        read_gguf(&file);
    }

    #[test]
    fn flipped_bits_in_a_safetensors_header(flips in flips()) {
        let mut file = safetensors_file();
        flip(&mut file, &flips);
        read_safetensors(&file);
    }

    #[test]
    fn any_bytes(bytes in prop::collection::vec(any::<u8>(), 0..512)) {
        read_gguf(&bytes);
        read_safetensors(&bytes);
        let mut with_magic = b"GGUF\x03\0\0\0".to_vec();
        with_magic.extend_from_slice(&bytes);
        read_gguf(&with_magic);
    }
}

/// What the decoder takes for granted.
fn check_config(config: &ModelConfig) {
    assert!(config.num_heads.is_multiple_of(config.num_kv_heads));
    assert!(config.head_dim > 0 && config.head_dim.is_multiple_of(16));
    assert!(config.norm_eps > 0.0 && config.attention_scale > 0.0);
    assert!(config.attention_scale.is_finite() && config.max_context > 0);
    for layer in &config.layers {
        assert!(layer.rope < config.ropes.len() && layer.window != Some(0));
    }
    for token in config.eos_tokens.iter().chain(&config.bos_token) {
        assert!((token.0 as usize) < config.vocab_size);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    /// Few flips, so that many files pass the reader and meet the checks of configuration and tensors.
    #[test]
    fn whole_models_with_flipped_bits(flips in prop::collection::vec((0_usize..2048, any::<u8>()), 1..3)) {
        let mut file = tiny_llama().bytes();
        flip(&mut file[..2048], &flips);
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("model.gguf");
        std::fs::write(&path, file).expect("a writable folder");
        if let Ok(model) = open(&path) {
            check_config(&model.config);
            for tensor in model.weights.list() {
                let read = model.weights.tensor(&tensor.name).expect("checked when opened");
                prop_assert_eq!(read.bytes.len() as u64, tensor.num_bytes);
            }
        }
    }
}
