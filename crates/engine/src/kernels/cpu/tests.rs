//! Tests of the kernels: against plain f64 arithmetic, against each other, and against files made elsewhere.

mod attention;
mod elementwise;
mod kv;
mod math;
mod matmul;
mod pool;
mod quants;

use super::{CpuKernels, Isa};

/// Numbers that look random and are the same in every run (SplitMix64).
pub(super) struct Noise(pub u64);

impl Noise {
    pub(super) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in [−1, 1).
    pub(super) fn uniform(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    pub(super) fn uniforms(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.uniform()).collect()
    }

    pub(super) fn below(&mut self, bound: usize) -> usize {
        (self.bits() % bound as u64) as usize
    }
}

/// Kernels of every instruction set of this processor with 1, 2 and 3 threads; the first is the reference.
pub(super) fn all_kernels() -> Vec<CpuKernels> {
    let mut kernels = Vec::new();
    for isa in Isa::ALL {
        for num_threads in 1..=3 {
            kernels.extend(CpuKernels::new(num_threads, Some(isa)));
        }
    }
    kernels
}

/// The bits of floats, so that comparisons see signs of zeros.
pub(super) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Runs `compute` with all kernels, checks that all give the same bits, and returns them.
pub(super) fn same_everywhere(compute: impl Fn(&CpuKernels) -> Vec<f32>) -> Vec<f32> {
    let all = all_kernels();
    let expected = compute(&all[0]);
    for kernels in &all[1..] {
        let actual = compute(kernels);
        assert_eq!(
            bits(&actual),
            bits(&expected),
            "{:?} with {} threads",
            kernels.isa(),
            kernels.num_threads()
        );
    }
    expected
}

/// Every value within `tolerance` of the expected one, relative to the largest expected magnitude.
pub(super) fn assert_close(actual: &[f32], expected: &[f64], tolerance: f64) {
    assert_eq!(actual.len(), expected.len());
    let scale = expected.iter().fold(0.0, |max: f64, x| max.max(x.abs()));
    for (i, (actual, expected)) in actual.iter().zip(expected).enumerate() {
        let error = (f64::from(*actual) - expected).abs();
        assert!(
            error <= tolerance * scale,
            "value {i}: {actual}, expected {expected}, scale {scale}"
        );
    }
}

#[test]
fn unavailable_instruction_sets_are_refused() {
    let is_available = |isa: &Isa| CpuKernels::new(1, Some(*isa)).is_ok();
    let best = CpuKernels::new(1, None).expect("no thread to start");
    assert!(is_available(&Isa::Portable));
    assert_eq!(Isa::ALL.into_iter().rfind(is_available), Some(best.isa()));
}
