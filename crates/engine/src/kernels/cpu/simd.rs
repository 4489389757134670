//! The 16 virtual lanes: what a kernel may ask of them, and the levels of processors that answer.
//!
//! A kernel is written once, generic over [`Simd`], and instantiated for every level by `instantiate!`.
//! The trait holds only operations with a single correct answer (IEEE 754 rounded results, exact integer
//! sums, reductions by one fixed tree), so that all levels give the same bits. No algorithm belongs here.

#[cfg(target_arch = "x86_64")]
pub(super) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(super) mod avx512;
#[cfg(target_arch = "aarch64")]
pub(super) mod neon;
pub(super) mod portable;

use half::{bf16, f16};

use super::panels::Plain;
use super::{Isa, KernelError, LANES};
#[cfg(target_arch = "x86_64")]
use avx2::{Avx2, Pairs, Vnni};
#[cfg(target_arch = "x86_64")]
use avx512::Avx512;
#[cfg(target_arch = "aarch64")]
use neon::{Dot, Neon, Widening};
use portable::Portable;

/// Bytes of one unit of packed integers: what one load of activations meets in a panel.
pub(super) const UNIT_BYTES: usize = 256;

/// Fifth bits of a unit of nibbles: word 2·g + h holds in bit 4·output + i that of k = 16·h + 4·g + i.
pub(super) type FifthBits = [u64; 8];

/// 16 floats of a panel or of a key block.
pub(super) type LaneArray<T> = [T; LANES];

/// The operations of one instruction set. Values prove by their existence that the processor has it.
pub(super) trait Simd: Copy {
    /// Rows that a product takes through the weights at once: as many as registers hold sums for.
    const MAX_ROWS: usize;

    /// 16 floats.
    type Floats: Copy;
    /// 16 signed 32-bit integers.
    type Ints: Copy;

    /// The same value in all lanes.
    fn splat(self, value: f32) -> Self::Floats;
    /// Lanes from memory.
    fn load(self, from: &LaneArray<f32>) -> Self::Floats;
    /// Lanes from memory, widened exactly.
    fn load_f16(self, from: &LaneArray<f16>) -> Self::Floats;
    /// Lanes from memory, widened exactly.
    fn load_bf16(self, from: &LaneArray<bf16>) -> Self::Floats;
    /// Lanes to memory.
    fn store(self, lanes: Self::Floats, to: &mut LaneArray<f32>);
    /// a + b
    fn add(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// a − b
    fn sub(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// a · b
    fn mul(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// a / b
    fn div(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// a · b + c, rounded once.
    fn mul_add(self, a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats;
    /// −a
    fn neg(self, a: Self::Floats) -> Self::Floats;
    /// a > b ? a : b, so that a NaN in b survives and one in a does not.
    fn max(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// a < b ? a : b, so that a NaN in b survives and one in a does not.
    fn min(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// `compared.0` < `compared.1` ? then : otherwise; otherwise when either is NaN.
    fn select_less(
        self,
        compared: (Self::Floats, Self::Floats),
        then: Self::Floats,
        otherwise: Self::Floats,
    ) -> Self::Floats;
    /// The nearest integer, halves to even.
    fn round(self, a: Self::Floats) -> Self::Floats;
    /// a · 2^n for integral n in −127..=128, rounded once; anything for other n.
    fn scale(self, a: Self::Floats, n: Self::Floats) -> Self::Floats;
    /// (m, e) with a = m · 2^e and m in [√½, √2), for finite normal a > 0; anything for others.
    fn split_exponent(self, a: Self::Floats) -> (Self::Floats, Self::Floats);
    /// Sum of the lanes: 8 apart, then 4, 2 and 1.
    fn sum(self, a: Self::Floats) -> f32;
    /// Largest lane by `max` over the same tree.
    fn max_lane(self, a: Self::Floats) -> f32;

    /// Largest magnitude of all lanes of both; NaN or infinity when there is one.
    fn max_magnitude(self, a: Self::Floats, b: Self::Floats) -> f32;

    /// a + b
    fn add_ints(self, a: Self::Ints, b: Self::Ints) -> Self::Ints;
    /// a − b with the same b in all lanes.
    fn sub_int(self, a: Self::Ints, b: i32) -> Self::Ints;
    /// Converted, rounded to nearest even (exact below 2^24).
    fn to_floats(self, a: Self::Ints) -> Self::Floats;
    /// Lanes as int8, halves to even; the values must lie in −128..=127.
    fn store_i8(self, a: Self::Floats, to: &mut LaneArray<i8>);

    /// Sum of 16 bytes.
    fn sum_i8(self, from: &LaneArray<i8>) -> i32;
    /// Lanes to memory as half floats, rounded to nearest even.
    fn store_f16(self, lanes: Self::Floats, to: &mut LaneArray<f16>);

    /// Σ q·a over 32 k for 16 outputs, q in 0..=15.
    ///
    /// Byte 64·g + 4·output + i of `weights` holds k = 4·g + i in its low and k = 16 + 4·g + i in its high
    /// nibble.
    fn dot_u4<const R: usize>(
        self,
        weights: &[u8; UNIT_BYTES],
        rows: [&[i8; 32]; R],
    ) -> [Self::Ints; R];
    /// The same for q in 0..=31, with the upper bit of each in `fifth_bits`.
    fn dot_u5<const R: usize>(
        self,
        weights: &[u8; UNIT_BYTES],
        fifth_bits: &FifthBits,
        rows: [&[i8; 32]; R],
    ) -> [Self::Ints; R];
    /// Σ q·a over 16 k for 16 outputs, q in −32..=32, a in −127..=127; `totals` are Σ a by row.
    ///
    /// Byte 64·g + 4·output + i of `weights` holds k = 4·g + i.
    fn dot_i6<const R: usize>(
        self,
        weights: &[u8; UNIT_BYTES],
        rows: [&[i8; 16]; R],
        totals: [i32; R],
    ) -> [Self::Ints; R];
    /// The same for q in −128..=127.
    fn dot_i8<const R: usize>(
        self,
        weights: &[u8; UNIT_BYTES],
        rows: [&[i8; 16]; R],
        totals: [i32; R],
    ) -> [Self::Ints; R];
}

/// The instruction set that kernels run with.
#[derive(Clone, Copy, Debug)]
pub(super) enum Level {
    /// Plain Rust.
    Portable(Portable),
    /// NEON.
    #[cfg(target_arch = "aarch64")]
    Neon(Neon<Widening>),
    /// The same with dot products.
    #[cfg(target_arch = "aarch64")]
    NeonDot(Neon<Dot>),
    /// AVX2, FMA and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2<Pairs>),
    /// The same with VNNI for AVX2 registers.
    #[cfg(target_arch = "x86_64")]
    Avx2Vnni(Avx2<Vnni>),
    /// AVX-512 with VNNI.
    #[cfg(target_arch = "x86_64")]
    Avx512(Avx512),
}

impl Level {
    /// The best level of this processor.
    pub(super) fn detect() -> Self {
        let mut best_first = Isa::ALL.iter().rev();
        best_first
            .find_map(|isa| Level::of(*isa).ok())
            .unwrap_or(Level::Portable(Portable))
    }

    /// The level of `isa`, when this processor has it.
    pub(super) fn of(isa: Isa) -> Result<Self, KernelError> {
        match isa {
            Isa::Portable => Ok(Level::Portable(Portable)),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => Neon::detect()
                .map(Level::Neon)
                .ok_or(KernelError::IsaUnavailable(isa)),
            #[cfg(target_arch = "aarch64")]
            Isa::NeonDot => Neon::detect()
                .map(Level::NeonDot)
                .ok_or(KernelError::IsaUnavailable(isa)),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => Avx2::detect()
                .map(Level::Avx2)
                .ok_or(KernelError::IsaUnavailable(isa)),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2Vnni => Avx2::detect()
                .map(Level::Avx2Vnni)
                .ok_or(KernelError::IsaUnavailable(isa)),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => Avx512::detect()
                .map(Level::Avx512)
                .ok_or(KernelError::IsaUnavailable(isa)),
            #[cfg(not(target_arch = "aarch64"))]
            Isa::Neon | Isa::NeonDot => Err(KernelError::IsaUnavailable(isa)),
            #[cfg(not(target_arch = "x86_64"))]
            Isa::Avx2 | Isa::Avx2Vnni | Isa::Avx512 => Err(KernelError::IsaUnavailable(isa)),
        }
    }

    /// Its public name.
    pub(super) fn isa(self) -> Isa {
        match self {
            Level::Portable(_) => Isa::Portable,
            #[cfg(target_arch = "aarch64")]
            Level::Neon(_) => Isa::Neon,
            #[cfg(target_arch = "aarch64")]
            Level::NeonDot(_) => Isa::NeonDot,
            #[cfg(target_arch = "x86_64")]
            Level::Avx2(_) => Isa::Avx2,
            #[cfg(target_arch = "x86_64")]
            Level::Avx2Vnni(_) => Isa::Avx2Vnni,
            #[cfg(target_arch = "x86_64")]
            Level::Avx512(_) => Isa::Avx512,
        }
    }
}

/// Declares a function that runs a body, generic over [`Simd`], with the instructions of a level.
///
/// The body and all it calls on the way to the lanes must be `#[inline(always)]` and free of closures: only
/// what is inlined here is compiled with the level's instructions.
macro_rules! instantiate {
    (
        $(#[$meta:meta])*
        $vis:vis fn $name:ident $(<$generic:ident: $bound:path>)? ($($arg:ident: $kind:ty),* $(,)?) $(-> $out:ty)? = $body:path
    ) => {
        $(#[$meta])*
        $vis fn $name $(<$generic: $bound>)? (
            level: $crate::kernels::cpu::simd::Level,
            $($arg: $kind),*
        ) $(-> $out)? {
            #[cfg(target_arch = "aarch64")]
            #[target_feature(enable = "neon,dotprod")]
            fn neon_dot $(<$generic: $bound>)? (
                simd: $crate::kernels::cpu::simd::neon::Neon<$crate::kernels::cpu::simd::neon::Dot>,
                $($arg: $kind),*
            ) $(-> $out)? {
                $body(simd, $($arg),*)
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            fn avx2 $(<$generic: $bound>)? (
                simd: $crate::kernels::cpu::simd::avx2::Avx2<$crate::kernels::cpu::simd::avx2::Pairs>,
                $($arg: $kind),*
            ) $(-> $out)? {
                $body(simd, $($arg),*)
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avxvnni,avx2,fma,f16c")]
            fn avx2_vnni $(<$generic: $bound>)? (
                simd: $crate::kernels::cpu::simd::avx2::Avx2<$crate::kernels::cpu::simd::avx2::Vnni>,
                $($arg: $kind),*
            ) $(-> $out)? {
                $body(simd, $($arg),*)
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
            fn avx512 $(<$generic: $bound>)? (
                simd: $crate::kernels::cpu::simd::avx512::Avx512,
                $($arg: $kind),*
            ) $(-> $out)? {
                $body(simd, $($arg),*)
            }
            match level {
                $crate::kernels::cpu::simd::Level::Portable(simd) => $body(simd, $($arg),*),
                #[cfg(target_arch = "aarch64")]
                $crate::kernels::cpu::simd::Level::Neon(simd) => $body(simd, $($arg),*),
                #[cfg(target_arch = "aarch64")]
                $crate::kernels::cpu::simd::Level::NeonDot(simd) => {
                    // SAFETY: a value of `Neon<Dot>` exists only where the processor has these instructions.
                    unsafe { neon_dot $(::<$generic>)? (simd, $($arg),*) }
                }
                #[cfg(target_arch = "x86_64")]
                $crate::kernels::cpu::simd::Level::Avx2(simd) => {
                    // SAFETY: a value of `Avx2` exists only where the processor has these instructions.
                    unsafe { avx2 $(::<$generic>)? (simd, $($arg),*) }
                }
                #[cfg(target_arch = "x86_64")]
                $crate::kernels::cpu::simd::Level::Avx2Vnni(simd) => {
                    // SAFETY: a value of `Avx2<Vnni>` exists only where the processor has these instructions.
                    unsafe { avx2_vnni $(::<$generic>)? (simd, $($arg),*) }
                }
                #[cfg(target_arch = "x86_64")]
                $crate::kernels::cpu::simd::Level::Avx512(simd) => {
                    // SAFETY: a value of `Avx512` exists only where the processor has these instructions.
                    unsafe { avx512 $(::<$generic>)? (simd, $($arg),*) }
                }
            }
        }
    };
}
pub(super) use instantiate;

/// What weights, keys and values are stored as.
pub(super) trait Element: Plain {
    /// Widened exactly.
    fn load<S: Simd>(simd: S, from: &LaneArray<Self>) -> S::Floats;
    /// Widened exactly.
    fn to_f32(self) -> f32;
    /// Rounded to nearest even.
    fn from_f32(value: f32) -> Self;
    /// Lanes to memory, rounded to nearest even.
    fn store<S: Simd>(simd: S, lanes: S::Floats, to: &mut LaneArray<Self>);
}

impl Element for f32 {
    #[inline(always)]
    fn load<S: Simd>(simd: S, from: &LaneArray<f32>) -> S::Floats {
        simd.load(from)
    }

    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }

    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        value
    }

    #[inline(always)]
    fn store<S: Simd>(simd: S, lanes: S::Floats, to: &mut LaneArray<f32>) {
        simd.store(lanes, to);
    }
}

impl Element for f16 {
    #[inline(always)]
    fn load<S: Simd>(simd: S, from: &LaneArray<f16>) -> S::Floats {
        simd.load_f16(from)
    }

    #[inline(always)]
    fn to_f32(self) -> f32 {
        f16::to_f32(self)
    }

    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        f16::from_f32(value)
    }

    #[inline(always)]
    fn store<S: Simd>(simd: S, lanes: S::Floats, to: &mut LaneArray<f16>) {
        simd.store_f16(lanes, to);
    }
}

impl Element for bf16 {
    #[inline(always)]
    fn load<S: Simd>(simd: S, from: &LaneArray<bf16>) -> S::Floats {
        simd.load_bf16(from)
    }

    #[inline(always)]
    fn to_f32(self) -> f32 {
        bf16::to_f32(self)
    }

    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        bf16::from_f32(value)
    }

    #[inline(always)]
    fn store<S: Simd>(simd: S, lanes: S::Floats, to: &mut LaneArray<bf16>) {
        let mut wide = [0.0; LANES];
        simd.store(lanes, &mut wide);
        *to = wide.map(bf16::from_f32);
    }
}

/// Lanes from a slice of at most 16 values; the rest is zero.
#[inline(always)]
pub(super) fn load_partial<S: Simd>(simd: S, from: &[f32]) -> S::Floats {
    let mut padded = [0.0; LANES];
    padded[..from.len()].copy_from_slice(from);
    simd.load(&padded)
}

/// The leading lanes to a slice of at most 16 values.
#[inline(always)]
pub(super) fn store_partial<S: Simd>(simd: S, lanes: S::Floats, to: &mut [f32]) {
    let mut padded = [0.0; LANES];
    simd.store(lanes, &mut padded);
    let len = to.len();
    to.copy_from_slice(&padded[..len]);
}

/// Asks for what lies `distance` elements behind the first of `memory`, which is read soon if it is there:
/// panels follow each other. Changes nothing but time.
#[inline(always)]
pub(super) fn prefetch_behind<T>(memory: &[T], distance: usize) {
    #[cfg(target_arch = "x86_64")]
    for line in (0..size_of::<T>()).step_by(64) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        let start = memory.as_ptr().wrapping_add(distance).cast::<i8>();
        // SAFETY: a prefetch reads nothing, whatever the address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(start.wrapping_add(line)) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (memory, distance);
}

/// Asks for memory that is read soon. Changes nothing but time.
#[inline(always)]
pub(super) fn prefetch<T>(memory: &[T]) {
    #[cfg(target_arch = "x86_64")]
    for line in (0..size_of_val(memory)).step_by(64) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: the address lies inside the slice, and a prefetch reads nothing.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(memory.as_ptr().cast::<i8>().add(line)) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = memory;
}
