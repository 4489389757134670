//! The loops in plain Rust.

use std::array::from_fn;
use std::hint::black_box;

use super::PIECE_WORDS;

const ITERATIONS: usize = 1 << 9;
const WIDTH: usize = 256;

/// The sum of all words.
pub(super) fn sum_words(piece: &[u64; PIECE_WORDS]) -> u64 {
    piece.iter().fold(0, |sum, word| sum.wrapping_add(*word))
}

/// Products of two vectors of bytes that stay in the first-level cache.
pub(super) fn multiply_bytes() -> u64 {
    let (weights, activations) = ([3_u8; WIDTH], [5_i8; WIDTH]);
    let mut sum = 0_i32;
    for _ in 0..ITERATIONS {
        let pairs = black_box(&weights).iter().zip(black_box(&activations));
        let products =
            pairs.map(|(weight, activation)| i32::from(*weight) * i32::from(*activation));
        sum = sum.wrapping_add(products.sum());
    }
    black_box(sum);
    (ITERATIONS * WIDTH) as u64
}

/// x · a + b on many independent x.
pub(super) fn multiply_floats() -> u64 {
    let (factor, term) = (black_box(0.99_f32), black_box(0.01_f32));
    let mut values: [f32; WIDTH] = from_fn(|index| index as f32);
    for _ in 0..ITERATIONS {
        values = values.map(|value| value * factor + term);
    }
    black_box(values);
    (ITERATIONS * WIDTH) as u64
}
