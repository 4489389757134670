//! Byte products that are widened to 16 bits, then added up in 32: what every 64-bit Arm processor has.

use std::arch::aarch64::*;
use std::arch::is_aarch64_feature_detected;

use super::{ByteProducts, Quarter};

/// Proof that the processor has NEON; only [`Widening::detect`] makes it.
#[derive(Clone, Copy, Debug)]
pub(in crate::kernels::cpu) struct Widening(());

impl ByteProducts for Widening {
    fn detect() -> Option<Self> {
        is_aarch64_feature_detected!("neon").then_some(Widening(()))
    }

    #[inline(always)]
    fn add(self, sums: int32x4_t, weights: Quarter, row: int8x16_t) -> int32x4_t {
        let Widening(()) = self;
        // SAFETY: the token exists only after detection of the instructions.
        unsafe { add(sums, weights, row) }
    }
}

/// sums + Σ q·a over 16 k.
#[inline]
#[target_feature(enable = "neon")]
fn add(sums: int32x4_t, weights: Quarter, row: int8x16_t) -> int32x4_t {
    let words = vreinterpretq_s32_s8(row);
    let activations = [
        vreinterpret_s8_s32(vdup_laneq_s32::<0>(words)),
        vreinterpret_s8_s32(vdup_laneq_s32::<1>(words)),
        vreinterpret_s8_s32(vdup_laneq_s32::<2>(words)),
        vreinterpret_s8_s32(vdup_laneq_s32::<3>(words)),
    ];
    let zero = vdupq_n_s32(0);
    // Neighbouring lanes hold one output each pair.
    let (mut outputs_01, mut outputs_23) = (zero, zero);
    for pair in [0, 2] {
        let [w, x] = [weights[pair], weights[pair + 1]];
        let [a, b] = [activations[pair], activations[pair + 1]];
        // Two products fit 16 bits: 2 · 128 · 127 = 32512.
        let low = vmlal_s8(vmull_s8(vget_low_s8(w), a), vget_low_s8(x), b);
        let high = vmlal_s8(vmull_s8(vget_high_s8(w), a), vget_high_s8(x), b);
        outputs_01 = vpadalq_s16(outputs_01, low);
        outputs_23 = vpadalq_s16(outputs_23, high);
    }
    vaddq_s32(sums, vpaddq_s32(outputs_01, outputs_23))
}
