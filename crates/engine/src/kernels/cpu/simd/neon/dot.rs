//! Byte products that are added in fours to 32 bits: the dot product instructions of Armv8.4 (8.2 with an option).

use std::arch::aarch64::*;
use std::arch::asm;
use std::arch::is_aarch64_feature_detected;

use super::{ByteProducts, Quarter};

/// Proof that the processor has the dot product instructions; only [`Dot::detect`] makes it.
#[derive(Clone, Copy, Debug)]
pub(in crate::kernels::cpu) struct Dot(());

impl ByteProducts for Dot {
    fn detect() -> Option<Self> {
        let available =
            is_aarch64_feature_detected!("neon") && is_aarch64_feature_detected!("dotprod");
        available.then_some(Dot(()))
    }

    #[inline(always)]
    fn add(self, sums: int32x4_t, weights: Quarter, row: int8x16_t) -> int32x4_t {
        let Dot(()) = self;
        // SAFETY: the token exists only after detection of the instruction.
        unsafe {
            let sums = add_lane::<0>(sums, weights[0], row);
            let sums = add_lane::<1>(sums, weights[1], row);
            let sums = add_lane::<2>(sums, weights[2], row);
            add_lane::<3>(sums, weights[3], row)
        }
    }
}

/// sums + Σ q·a for the four activations 4·LANE and on. The standard library's name for the instruction,
/// `vdotq_laneq_s32`, is not stable.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn add_lane<const LANE: usize>(
    mut sums: int32x4_t,
    weights: int8x16_t,
    row: int8x16_t,
) -> int32x4_t {
    // SAFETY: the instruction exists where this function may be called, and touches registers alone.
    unsafe {
        asm!(
            "sdot {sums:v}.4s, {weights:v}.16b, {row:v}.4b[{lane}]",
            sums = inout(vreg) sums,
            weights = in(vreg) weights,
            row = in(vreg) row,
            lane = const LANE,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sums
}
