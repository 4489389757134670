//! The loops with NEON.
//!
//! Each register loop runs independent chains, enough to hide the latency of its instruction: every result is an
//! operand of the next one of its chain, so that the compiler can neither leave a product out nor move it out of
//! the loop.

use std::arch::aarch64::*;
use std::arch::asm;
use std::hint::black_box;

const ITERATIONS: usize = 1 << 12;

/// Chains that leave room for the operands in 32 registers.
const CHAINS: usize = 16;

/// Two products to a 16-bit lane, then to 32 bits, as in the kernels.
#[target_feature(enable = "neon")]
pub(super) fn multiply_bytes_neon() -> u64 {
    let weights = vdup_n_s8(black_box(3));
    let mut sums = [vdupq_n_s32(black_box(5)); CHAINS];
    for _ in 0..ITERATIONS {
        for sum in &mut sums {
            let activations = vget_low_s8(vreinterpretq_s8_s32(*sum));
            let products = vmlal_s8(vmull_s8(weights, activations), weights, activations);
            *sum = vpadalq_s16(*sum, products);
        }
    }
    black_box(sums);
    (ITERATIONS * CHAINS * 16) as u64
}

#[target_feature(enable = "neon,dotprod")]
pub(super) fn multiply_bytes_neon_dot() -> u64 {
    let weights = vdupq_n_s8(black_box(3));
    let activations = vdupq_n_s8(black_box(5));
    let mut sums = [vdupq_n_s32(black_box(0)); CHAINS];
    for _ in 0..ITERATIONS {
        for sum in &mut sums {
            // SAFETY: the instruction exists where this function may be called, and touches registers alone.
            unsafe {
                asm!(
                    "sdot {sum:v}.4s, {weights:v}.16b, {activations:v}.16b",
                    sum = inout(vreg) *sum,
                    weights = in(vreg) weights,
                    activations = in(vreg) activations,
                    options(pure, nomem, nostack, preserves_flags),
                );
            }
        }
    }
    black_box(sums);
    (ITERATIONS * CHAINS * 16) as u64
}

#[target_feature(enable = "neon")]
pub(super) fn multiply_floats_neon() -> u64 {
    let factor = vdupq_n_f32(black_box(0.99));
    let term = vdupq_n_f32(black_box(0.01));
    let mut values = [vdupq_n_f32(black_box(1.5)); CHAINS];
    for _ in 0..ITERATIONS {
        for value in &mut values {
            *value = vfmaq_f32(term, *value, factor);
        }
    }
    black_box(values);
    (ITERATIONS * CHAINS * 4) as u64
}
