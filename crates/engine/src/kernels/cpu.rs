//! CPU kernels: one definition of every float operation, several instruction sets, the same bits (A6).
//!
//! Float operations work on 16 virtual lanes with fused multiply-add and a fixed order; integer dot
//! products are exact. So neither the instruction set, nor the number of rows or threads, nor the place
//! of a row in a batch changes a bit of its result.

mod attention;
pub mod ceilings;
mod disjoint;
mod elementwise;
mod input;
mod kv;
pub mod math;
mod matmul;
mod pack;
mod panels;
mod pool;
mod rope;
mod simd;
#[cfg(test)]
mod tests;

use std::cell::RefCell;
use std::fmt;
use std::ops::Range;

use half::f16;
use millpond_scheduler::{BlockCopy, BlockId, Span32};

use crate::loader::TensorType;
use pool::Pool;
use simd::Level;

pub use input::{InputRows, MatmulInput};
pub use pack::PackedMatrix;
pub use rope::RopeTable;

/// Width of the virtual vector: outputs per weight panel, positions per KV block.
pub const LANES: usize = 16;

/// The instruction sets that kernels exist for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// Plain Rust, runs everywhere.
    Portable,
    /// NEON, on any 64-bit Arm processor.
    Neon,
    /// NEON with dot products of bytes (`sdot`).
    NeonDot,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX2 with VNNI (AVX-VNNI), FMA and F16C.
    Avx2Vnni,
    /// AVX-512 (F, BW, VL, DQ) with VNNI.
    Avx512,
}

impl Isa {
    /// All of them; those of one processor from the slowest to the fastest.
    pub const ALL: [Isa; 6] = [
        Isa::Portable,
        Isa::Neon,
        Isa::NeonDot,
        Isa::Avx2,
        Isa::Avx2Vnni,
        Isa::Avx512,
    ];

    /// What people and metrics call it.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Portable => "portable",
            Isa::Neon => "neon",
            Isa::NeonDot => "neon-dot",
            Isa::Avx2 => "avx2",
            Isa::Avx2Vnni => "avx2-vnni",
            Isa::Avx512 => "avx512",
        }
    }

    /// This processor has it.
    pub fn is_available(self) -> bool {
        Level::of(self).is_ok()
    }

    /// What kernels use unless they are told otherwise.
    pub fn best() -> Self {
        Level::detect().isa()
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Why kernels could not be set up or a tensor not be packed.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// The forced instruction set does not exist on this processor.
    #[error("instruction set {0} is not available on this processor")]
    IsaUnavailable(Isa),
    /// The operating system refused a worker thread.
    #[error("cannot start kernel threads: {0}")]
    Threads(#[from] std::io::Error),
    /// The system has no memory for packed weights.
    #[error("no memory for {0} bytes of packed weights")]
    OutOfMemory(usize),
    /// No kernel computes this type.
    #[error("tensor {name}: no kernel computes type {dtype:?}")]
    UnsupportedType {
        /// The tensor.
        name: String,
        /// Its type.
        dtype: TensorType,
    },
    /// The shape is not that of the operation.
    #[error("tensor {name}: shape {shape:?}, expected {expected}")]
    Shape {
        /// The tensor.
        name: String,
        /// What it has.
        shape: Vec<usize>,
        /// What was needed, in words.
        expected: String,
    },
}

/// The kernels with their worker threads. One per runner; methods block until the result is complete.
pub struct CpuKernels {
    level: Level,
    pool: Pool,
    attention_memory: RefCell<attention::Memory>,
}

/// Elements of an elementwise operation below which waking another thread costs more than it saves.
const MIN_PARALLEL: usize = 16_384;

/// Elements that a thread takes at a time.
const GRAIN: usize = 4_096;

/// One product of a shared input: out (rows, out_features) = input · weightᵀ + bias (+ out).
pub struct MatmulOutput<'a> {
    /// Right side.
    pub weight: &'a PackedMatrix,
    /// out_features values.
    pub bias: Option<&'a [f32]>,
    /// Add the product to what `out` holds instead of overwriting it.
    pub add: bool,
    /// (rows, out_features)
    pub out: &'a mut [f32],
}

/// Shape of the keys and values of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    /// Blocks of 16 positions.
    pub num_blocks: usize,
    /// Key and value heads.
    pub num_kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
}

/// Keys or values of one layer, all blocks.
pub enum KvData {
    /// Float models.
    F32(Vec<f32>),
    /// Quantised models.
    F16(Vec<f16>),
}

/// Keys and values of one layer.
pub struct KvLayer {
    /// (num_blocks, kv_heads, head_dim, 16): positions are the lanes.
    pub keys: KvData,
    /// (num_blocks, kv_heads, 16, head_dim)
    pub values: KvData,
}

/// The path of one query token through the KV blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenPath {
    /// Absolute position; it attends to positions up to and including this one.
    pub position: u32,
    /// Range of `AttentionBatch::blocks`: its sequence's block table.
    pub table: Span32,
    /// Range of `AttentionBatch::tail_slots`: slots of the last positions of the path (the last one is its
    /// own), read instead of the table's; empty except in draft trees.
    pub tail: Span32,
}

/// Queries of one layer with the paths they attend along.
pub struct AttentionBatch<'a> {
    /// (tokens, heads, head_dim), rotated.
    pub queries: &'a [f32],
    /// One per token.
    pub paths: &'a [TokenPath],
    /// Block tables.
    pub blocks: &'a [BlockId],
    /// Slots (block × 16 + offset) of tails.
    pub tail_slots: &'a [u32],
    /// Query heads.
    pub num_heads: usize,
    /// Multiplies the dot products.
    pub scale: f32,
    /// x → c·tanh(x/c) on the scaled dot products.
    pub softcap: Option<f32>,
    /// A token sees itself and window − 1 positions before it.
    pub window: Option<u32>,
}

impl CpuKernels {
    /// Starts `num_threads − 1` workers (the caller is the first). `isa` forces an instruction set.
    pub fn new(num_threads: usize, isa: Option<Isa>) -> Result<Self, KernelError> {
        let level = match isa {
            Some(isa) => Level::of(isa)?,
            None => Level::detect(),
        };
        let pool = Pool::new(num_threads)?;
        let memory = attention::Memory::new(pool.num_threads());
        Ok(CpuKernels {
            level,
            pool,
            attention_memory: RefCell::new(memory),
        })
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.level.isa()
    }

    /// Worker threads, the caller included.
    pub fn num_threads(&self) -> usize {
        self.pool.num_threads()
    }

    /// Makes rows (rows, cols) the left side of products; quantises to int8 per 32 when `int8` is set, which
    /// needs cols in multiples of 32. The memory of `input` is reused.
    pub fn load_input<'x>(
        &self,
        x: impl Into<InputRows<'x>>,
        rows: usize,
        cols: usize,
        int8: bool,
        input: &mut MatmulInput,
    ) {
        input.load(self, x.into(), (rows, cols), int8);
    }

    /// All products of one input in one parallel region. The input must be int8 exactly for quantised weights.
    pub fn matmul(&self, input: &MatmulInput, outputs: &mut [MatmulOutput<'_>]) {
        matmul::multiply(self, input, outputs);
    }

    /// x = x / rms(x) · weight for each row of `weight.len()` values.
    pub fn rms_norm_in_place(&self, x: &mut [f32], weight: &[f32], eps: f32) {
        elementwise::rms_norm_in_place(self, x, weight, eps);
    }

    /// x += y
    pub fn add(&self, x: &mut [f32], y: &[f32]) {
        elementwise::add(self, x, y);
    }

    /// x = c · tanh(x / c)
    pub fn softcap(&self, x: &mut [f32], cap: f32) {
        elementwise::softcap(self, x, cap);
    }

    /// Rotates every head of x (tokens, heads, head_dim) by its token's position, which lies in the table.
    pub fn rope(
        &self,
        x: &mut [f32],
        num_heads: usize,
        head_dim: usize,
        positions: &[u32],
        table: &RopeTable,
    ) {
        rope::rotate(self, x, (num_heads, head_dim), positions, table);
    }

    /// Writes keys and values (tokens, kv_heads, head_dim) to `slots` (block × 16 + offset), rounded to the pool's type.
    pub fn write_kv(
        &self,
        shape: KvShape,
        layer: &mut KvLayer,
        keys: &[f32],
        values: &[f32],
        slots: &[u32],
    ) {
        kv::write(self, shape, layer, (keys, values), slots);
    }

    /// Copies whole blocks, one after the other.
    pub fn copy_blocks(&self, shape: KvShape, layer: &mut KvLayer, copies: &[BlockCopy]) {
        kv::copy_blocks(shape, layer, copies);
    }

    /// Causal attention of each token along its own path; out (tokens, heads, head_dim). head_dim must be a
    /// multiple of 16.
    pub fn attention(
        &self,
        shape: KvShape,
        layer: &KvLayer,
        batch: &AttentionBatch<'_>,
        out: &mut [f32],
    ) {
        attention::attend(self, shape, layer, batch, out);
    }

    /// Calls `work(index)` for every index below `count`, spread over the threads.
    pub fn for_each(&self, count: usize, work: &(dyn Fn(usize) + Sync)) {
        self.pool.run(count, &|_, index| work(index));
    }

    /// The same with the number of the thread, from 0, the caller.
    pub(crate) fn for_each_worker(&self, count: usize, work: &(dyn Fn(usize, usize) + Sync)) {
        self.pool.run(count, work);
    }

    /// Cuts `0..count` into ranges, for elements that cost `cost` simple operations each, and calls `work` for
    /// all of them; in this thread alone when they are few.
    fn over(&self, count: usize, cost: usize, work: &(dyn Fn(Range<usize>) + Sync)) {
        if count * cost < MIN_PARALLEL || self.num_threads() == 1 {
            return work(0..count);
        }
        let size = GRAIN.div_ceil(cost.max(1));
        self.for_each(count.div_ceil(size), &|index| {
            work(index * size..count.min((index + 1) * size));
        });
    }
}
