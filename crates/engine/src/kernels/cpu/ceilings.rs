//! What this machine can do at best, measured: bytes read from memory, byte products and float
//! multiply-adds per second.
//!
//! Kernels are judged by the share that they reach. The loops use the widest instructions that kernels exist
//! for on this processor, whatever set the kernels were told to use, and as many threads as those have.
//! Nothing here computes anything of use; medians over rounds are the caller's.

#[cfg(target_arch = "aarch64")]
mod aarch64;
mod portable;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use super::panels::Panels;
use super::simd::Level;
use super::{CpuKernels, Isa, KernelError};

/// Words that are added up at a time: 256 KiB, so that what is done once per piece costs nothing.
const PIECE_WORDS: usize = 1 << 15;

/// Scans per round: one alone is over in a few milliseconds, which a neighbour on the machine can spoil.
const NUM_SCANS: usize = 8;

/// Register loops per round, so many that threads end at nearly the same time.
const NUM_LOOPS: usize = 256;

/// Part of the memory that is scanned.
type Piece = [u64; PIECE_WORDS];

/// Memory to be read, held like packed weights are.
pub struct ScanMemory {
    pieces: Panels<Piece>,
}

impl ScanMemory {
    /// Takes `num_bytes`, rounded up to 256 KiB, and writes all of it, so that every page is there.
    pub fn new(num_bytes: usize) -> Result<Self, KernelError> {
        let mut pieces = Panels::<Piece>::zeros(num_bytes.div_ceil(size_of::<Piece>()).max(1))?;
        let words = pieces.as_mut_slice().as_flattened_mut();
        for (word, index) in words.iter_mut().zip(0..) {
            *word = index;
        }
        Ok(ScanMemory { pieces })
    }

    /// Bytes of one scan.
    pub fn num_bytes(&self) -> usize {
        self.pieces.num_bytes()
    }
}

/// What the loops are made of, for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Instructions {
    /// Of `int8_peak`.
    pub int8: &'static str,
    /// Of `f32_peak`.
    pub f32: &'static str,
}

/// The widest instructions that kernels exist for on this processor.
pub fn instructions() -> Instructions {
    match Level::detect().isa() {
        Isa::Portable => Instructions {
            int8: "portable multiply and add",
            f32: "portable multiply and add",
        },
        Isa::Neon => Instructions {
            int8: "NEON smull + sadalp",
            f32: "NEON fmla",
        },
        Isa::NeonDot => Instructions {
            int8: "NEON sdot",
            f32: "NEON fmla",
        },
        Isa::Avx2 => Instructions {
            int8: "AVX2 vpmaddubsw + vpaddw",
            f32: "AVX2 vfmadd",
        },
        Isa::Avx2Vnni => Instructions {
            int8: "AVX2 vpdpbusd",
            f32: "AVX2 vfmadd",
        },
        Isa::Avx512 => Instructions {
            int8: "AVX-512 vpdpbusd",
            f32: "AVX-512 vfmadd",
        },
    }
}

/// Bytes per second that the threads read together, each its own part of `memory`, several times over.
pub fn read_bandwidth(kernels: &CpuKernels, memory: &ScanMemory) -> f64 {
    let level = Level::detect();
    let pieces = memory.pieces.as_slice();
    let parts: Vec<&[Piece]> = pieces
        .chunks(pieces.len().div_ceil(kernels.num_threads()))
        .collect();
    rate(kernels, parts.len(), &|index| {
        for _ in 0..NUM_SCANS {
            for piece in parts[index] {
                black_box(sum_words(level, piece));
            }
        }
        (NUM_SCANS * size_of_val(parts[index])) as u64
    })
}

/// Products of bytes, added up, per second: all threads, operands in registers.
pub fn int8_peak(kernels: &CpuKernels) -> f64 {
    let level = Level::detect();
    rate(kernels, NUM_LOOPS, &|_| multiply_bytes(level))
}

/// Float multiply-adds per second: all threads, operands in registers.
pub fn f32_peak(kernels: &CpuKernels) -> f64 {
    let level = Level::detect();
    rate(kernels, NUM_LOOPS, &|_| multiply_floats(level))
}

/// What `work` says it did, in all its calls together, per second.
fn rate(kernels: &CpuKernels, num_calls: usize, work: &(dyn Fn(usize) -> u64 + Sync)) -> f64 {
    let done = AtomicU64::new(0);
    let start = Instant::now();
    kernels.for_each(num_calls, &|index| {
        done.fetch_add(work(index), Ordering::Relaxed);
    });
    done.into_inner() as f64 / start.elapsed().as_secs_f64()
}

/// The sum of all words, modulo 2^64.
fn sum_words(level: Level, piece: &Piece) -> u64 {
    match level {
        Level::Portable(_) => portable::sum_words(piece),
        // NEON is part of the target: the compiler uses it for the plain loop.
        #[cfg(target_arch = "aarch64")]
        Level::Neon(_) | Level::NeonDot(_) => portable::sum_words(piece),
        // SAFETY: a value of `Avx2` exists only where the processor has these instructions.
        #[cfg(target_arch = "x86_64")]
        Level::Avx2(_) => unsafe { x86::sum_words_avx2(piece) },
        // SAFETY: the same for `Avx2<Vnni>`.
        #[cfg(target_arch = "x86_64")]
        Level::Avx2Vnni(_) => unsafe { x86::sum_words_avx2(piece) },
        // SAFETY: the same for `Avx512`.
        #[cfg(target_arch = "x86_64")]
        Level::Avx512(_) => unsafe { x86::sum_words_avx512(piece) },
    }
}

/// Runs a loop of byte products; how many there were.
fn multiply_bytes(level: Level) -> u64 {
    match level {
        Level::Portable(_) => portable::multiply_bytes(),
        // SAFETY: a value of `Neon` exists only where the processor has these instructions.
        #[cfg(target_arch = "aarch64")]
        Level::Neon(_) => unsafe { aarch64::multiply_bytes_neon() },
        // SAFETY: the same for `Neon<Dot>`.
        #[cfg(target_arch = "aarch64")]
        Level::NeonDot(_) => unsafe { aarch64::multiply_bytes_neon_dot() },
        // SAFETY: a value of `Avx2` exists only where the processor has these instructions.
        #[cfg(target_arch = "x86_64")]
        Level::Avx2(_) => unsafe { x86::multiply_bytes_avx2() },
        // SAFETY: the same for `Avx2<Vnni>`.
        #[cfg(target_arch = "x86_64")]
        Level::Avx2Vnni(_) => unsafe { x86::multiply_bytes_avx2_vnni() },
        // SAFETY: the same for `Avx512`.
        #[cfg(target_arch = "x86_64")]
        Level::Avx512(_) => unsafe { x86::multiply_bytes_avx512() },
    }
}

/// Runs a loop of float multiply-adds; how many there were.
fn multiply_floats(level: Level) -> u64 {
    match level {
        Level::Portable(_) => portable::multiply_floats(),
        // SAFETY: a value of `Neon` exists only where the processor has these instructions.
        #[cfg(target_arch = "aarch64")]
        Level::Neon(_) | Level::NeonDot(_) => unsafe { aarch64::multiply_floats_neon() },
        // SAFETY: a value of `Avx2` exists only where the processor has these instructions.
        #[cfg(target_arch = "x86_64")]
        Level::Avx2(_) => unsafe { x86::multiply_floats_avx2() },
        // SAFETY: the same for `Avx2<Vnni>`.
        #[cfg(target_arch = "x86_64")]
        Level::Avx2Vnni(_) => unsafe { x86::multiply_floats_avx2() },
        // SAFETY: the same for `Avx512`.
        #[cfg(target_arch = "x86_64")]
        Level::Avx512(_) => unsafe { x86::multiply_floats_avx512() },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn levels() -> impl Iterator<Item = Level> {
        Isa::ALL.into_iter().filter_map(|isa| Level::of(isa).ok())
    }

    #[test]
    fn a_scan_reads_every_word() {
        let memory = ScanMemory::new(3 * size_of::<Piece>() - 1).expect("memory");
        assert_eq!(memory.num_bytes(), 3 * size_of::<Piece>());
        let words = PIECE_WORDS as u64;
        for level in levels() {
            let sums: Vec<u64> = memory
                .pieces
                .as_slice()
                .iter()
                .map(|piece| sum_words(level, piece))
                .collect();
            let of_first = words * (words - 1) / 2;
            let expected = [0, 1, 2].map(|piece| of_first + piece * words * words);
            assert_eq!(sums, expected, "{level:?}");
        }
    }

    #[test]
    fn every_loop_of_every_level_does_what_it_says() {
        for level in levels() {
            assert!(multiply_bytes(level) > 0 && multiply_floats(level) > 0);
        }
    }

    #[test]
    fn rates_are_positive_with_any_number_of_threads() {
        let memory = ScanMemory::new(1 << 20).expect("memory");
        for num_threads in [1, 2] {
            let kernels = CpuKernels::new(num_threads, None).expect("threads");
            let rates = [
                read_bandwidth(&kernels, &memory),
                int8_peak(&kernels),
                f32_peak(&kernels),
            ];
            // A machine that is slower than this measures something else.
            assert!(
                rates.iter().all(|rate| rate.is_finite() && *rate > 1e6),
                "{rates:?}"
            );
        }
    }
}
