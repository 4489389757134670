//! The loops with AVX2 and AVX-512.
//!
//! Each register loop runs independent chains, enough to hide the latency of its instruction: every result is an
//! operand of the next one of its chain, so that the compiler can neither leave a product out nor move it out of
//! the loop.

use std::arch::x86_64::*;
use std::hint::black_box;

use super::PIECE_WORDS;

const ITERATIONS: usize = 1 << 12;

/// Chains that leave room for the operands in 16 registers.
const CHAINS: usize = 12;

/// Chains of the wider loops, which have 32 registers.
const WIDE_CHAINS: usize = 16;

/// Streams of loads that are added up apart.
const SUMS: usize = 8;

#[target_feature(enable = "avx2")]
pub(super) fn sum_words_avx2(piece: &[u64; PIECE_WORDS]) -> u64 {
    let mut sums = [_mm256_setzero_si256(); SUMS];
    for words in piece.as_chunks::<{ 4 * SUMS }>().0 {
        for (sum, four) in sums.iter_mut().zip(words.as_chunks::<4>().0) {
            // SAFETY: four words are 32 bytes.
            let four = unsafe { _mm256_loadu_si256(four.as_ptr().cast()) };
            *sum = _mm256_add_epi64(*sum, four);
        }
    }
    let sum = sums.into_iter().fold(_mm256_setzero_si256(), |all, sum| {
        _mm256_add_epi64(all, sum)
    });
    let mut lanes = [0_u64; 4];
    // SAFETY: four words are 32 bytes.
    unsafe { _mm256_storeu_si256(lanes.as_mut_ptr().cast(), sum) };
    lanes.into_iter().fold(0, u64::wrapping_add)
}

#[target_feature(enable = "avx512f")]
pub(super) fn sum_words_avx512(piece: &[u64; PIECE_WORDS]) -> u64 {
    let mut sums = [_mm512_setzero_si512(); SUMS];
    for words in piece.as_chunks::<{ 8 * SUMS }>().0 {
        for (sum, eight) in sums.iter_mut().zip(words.as_chunks::<8>().0) {
            // SAFETY: eight words are 64 bytes.
            let eight = unsafe { _mm512_loadu_si512(eight.as_ptr().cast()) };
            *sum = _mm512_add_epi64(*sum, eight);
        }
    }
    let sum = sums.into_iter().fold(_mm512_setzero_si512(), |all, sum| {
        _mm512_add_epi64(all, sum)
    });
    _mm512_reduce_add_epi64(sum) as u64
}

/// Sums stay in 16 bits, as in the kernels, which widen them once in many products; overflow changes no time.
#[target_feature(enable = "avx2")]
pub(super) fn multiply_bytes_avx2() -> u64 {
    let weights = _mm256_set1_epi8(black_box(3));
    let mut sums = [_mm256_set1_epi8(black_box(5)); CHAINS];
    for _ in 0..ITERATIONS {
        for sum in &mut sums {
            *sum = _mm256_add_epi16(*sum, _mm256_maddubs_epi16(weights, *sum));
        }
    }
    black_box(sums);
    (ITERATIONS * CHAINS * 32) as u64
}

#[target_feature(enable = "avx2,avxvnni")]
pub(super) fn multiply_bytes_avx2_vnni() -> u64 {
    let weights = _mm256_set1_epi8(black_box(3));
    let activations = _mm256_set1_epi8(black_box(5));
    let mut sums = [_mm256_set1_epi32(black_box(0)); CHAINS];
    for _ in 0..ITERATIONS {
        for sum in &mut sums {
            *sum = _mm256_dpbusd_avx_epi32(*sum, weights, activations);
        }
    }
    black_box(sums);
    (ITERATIONS * CHAINS * 32) as u64
}

#[target_feature(enable = "avx512f,avx512vnni")]
pub(super) fn multiply_bytes_avx512() -> u64 {
    let weights = _mm512_set1_epi8(black_box(3));
    let activations = _mm512_set1_epi8(black_box(5));
    let mut sums = [_mm512_set1_epi32(black_box(0)); WIDE_CHAINS];
    for _ in 0..ITERATIONS {
        for sum in &mut sums {
            *sum = _mm512_dpbusd_epi32(*sum, weights, activations);
        }
    }
    black_box(sums);
    (ITERATIONS * WIDE_CHAINS * 64) as u64
}

#[target_feature(enable = "avx2,fma")]
pub(super) fn multiply_floats_avx2() -> u64 {
    let factor = _mm256_set1_ps(black_box(0.99));
    let term = _mm256_set1_ps(black_box(0.01));
    let mut values = [_mm256_set1_ps(black_box(1.5)); CHAINS];
    for _ in 0..ITERATIONS {
        for value in &mut values {
            *value = _mm256_fmadd_ps(*value, factor, term);
        }
    }
    black_box(values);
    (ITERATIONS * CHAINS * 8) as u64
}

#[target_feature(enable = "avx512f")]
pub(super) fn multiply_floats_avx512() -> u64 {
    let factor = _mm512_set1_ps(black_box(0.99));
    let term = _mm512_set1_ps(black_box(0.01));
    let mut values = [_mm512_set1_ps(black_box(1.5)); WIDE_CHAINS];
    for _ in 0..ITERATIONS {
        for value in &mut values {
            *value = _mm512_fmadd_ps(*value, factor, term);
        }
    }
    black_box(values);
    (ITERATIONS * WIDE_CHAINS * 16) as u64
}
