//! Keys and values of one layer in blocks of 16 positions: how they lie, writing and copying them.
//!
//! It neither knows which block belongs to whom nor what a key means.

use half::f16;
use millpond_scheduler::BlockCopy;

use super::simd::{Element, LaneArray, Simd, instantiate};
use super::{CpuKernels, KvData, KvLayer, KvShape, LANES, disjoint::Disjoint};

impl KvShape {
    /// Values of one head in one block.
    pub(super) fn tile(self) -> usize {
        self.head_dim * LANES
    }

    /// Where the tile of a head in a block starts.
    pub(super) fn tile_start(self, block: usize, kv_head: usize) -> usize {
        (block * self.num_kv_heads + kv_head) * self.tile()
    }

    /// Values in all blocks.
    pub(super) fn len(self) -> usize {
        self.num_blocks * self.num_kv_heads * self.tile()
    }
}

/// Writes keys and values (tokens, kv_heads, head_dim) to slots, rounded to the pool's type.
pub(super) fn write(
    kernels: &CpuKernels,
    shape: KvShape,
    layer: &mut KvLayer,
    (keys, values): (&[f32], &[f32]),
    slots: &[u32],
) {
    let writer = Writer {
        kernels,
        shape,
        slots,
    };
    match &mut layer.keys {
        KvData::F32(pool) => writer.write_keys(pool, keys),
        KvData::F16(pool) => writer.write_keys(pool, keys),
    }
    match &mut layer.values {
        KvData::F32(pool) => writer.write_values(pool, values),
        KvData::F16(pool) => writer.write_values(pool, values),
    }
}

struct Writer<'a> {
    kernels: &'a CpuKernels,
    shape: KvShape,
    slots: &'a [u32],
}

impl Writer<'_> {
    /// Keys turn: positions are the lanes.
    fn write_keys<T: Element>(&self, pool: &mut [T], keys: &[f32]) {
        let level = self.kernels.level;
        self.write_pieces(pool, keys, |pool, start, (dim, offset), values| {
            // SAFETY: 16 dimensions of a head belong to one index, in whatever block.
            let tile = unsafe { pool.part(start + dim * LANES..start + (dim + LANES) * LANES) };
            let (columns, _) = tile.as_chunks_mut::<LANES>();
            for (column, value) in columns.iter_mut().zip(round_lanes(level, values)) {
                column[offset] = value;
            }
        });
    }

    /// Values stay rows.
    fn write_values<T: Element>(&self, pool: &mut [T], values: &[f32]) {
        let (head_dim, level) = (self.shape.head_dim, self.kernels.level);
        self.write_pieces(pool, values, |pool, start, (dim, offset), values| {
            let at = start + offset * head_dim + dim;
            // SAFETY: 16 dimensions of a head belong to one index, in whatever block.
            let row = unsafe { pool.part(at..at + LANES) };
            row.copy_from_slice(&round_lanes(level, values));
        });
    }

    /// Calls `write(pool, tile start, (first dimension, offset in the block), 16 values)` for all pieces of 16
    /// dimensions. Parallel over heads and dimensions, not tokens, so that equal slots can't race.
    fn write_pieces<T: Element>(
        &self,
        pool: &mut [T],
        from: &[f32],
        write: impl Fn(&Disjoint<'_, T>, usize, (usize, usize), &LaneArray<f32>) + Sync,
    ) {
        let shape = self.shape;
        assert_eq!(pool.len(), shape.len(), "the pool has the shape");
        assert!(shape.head_dim.is_multiple_of(LANES), "head_dim in lanes");
        let pieces_per_token = shape.num_kv_heads * shape.head_dim / LANES;
        assert_eq!(
            from.len(),
            self.slots.len() * pieces_per_token * LANES,
            "one row a slot"
        );
        let (rows, _) = from.as_chunks::<LANES>();
        let pool = Disjoint::new(pool);
        let slots = self.slots;
        self.kernels
            .over(pieces_per_token, slots.len() * LANES, &|pieces| {
                for piece in pieces {
                    let dim = piece * LANES % shape.head_dim;
                    let kv_head = piece * LANES / shape.head_dim;
                    for (token, &slot) in slots.iter().enumerate() {
                        let (block, offset) = (slot as usize / LANES, slot as usize % LANES);
                        let start = shape.tile_start(block, kv_head);
                        let values = &rows[token * pieces_per_token + piece];
                        write(&pool, start, (dim, offset), values);
                    }
                }
            });
    }
}

instantiate! {
    /// 16 values as the pool stores them.
    fn round_lanes<T: Element>(values: &LaneArray<f32>) -> LaneArray<T> = round_lanes_body
}

#[inline(always)]
fn round_lanes_body<S: Simd, T: Element>(s: S, values: &LaneArray<f32>) -> LaneArray<T> {
    let mut rounded = [T::from_f32(0.0); LANES];
    T::store(s, s.load(values), &mut rounded);
    rounded
}

/// Copies whole blocks, one after the other.
pub(super) fn copy_blocks(shape: KvShape, layer: &mut KvLayer, copies: &[BlockCopy]) {
    for copy in copies {
        copy_block(shape, &mut layer.keys, copy);
        copy_block(shape, &mut layer.values, copy);
    }
}

fn copy_block(shape: KvShape, data: &mut KvData, copy: &BlockCopy) {
    let len = shape.num_kv_heads * shape.tile();
    let (from, to) = (copy.from.0 as usize * len, copy.to.0 as usize * len);
    match data {
        KvData::F32(pool) => pool.copy_within(from..from + len, to),
        KvData::F16(pool) => pool.copy_within(from..from + len, to),
    }
}

/// Keys and values of one layer as slices of one type.
#[derive(Clone, Copy)]
pub(super) struct KvSlices<'a, T> {
    /// (num_blocks, kv_heads, head_dim, 16)
    pub keys: &'a [T],
    /// (num_blocks, kv_heads, 16, head_dim)
    pub values: &'a [T],
}

/// A layer by the type it is stored in.
pub(super) enum TypedLayer<'a> {
    F32(KvSlices<'a, f32>),
    F16(KvSlices<'a, f16>),
}

impl KvLayer {
    /// Both halves as slices; they have one type.
    pub(super) fn typed(&self) -> TypedLayer<'_> {
        match (&self.keys, &self.values) {
            (KvData::F32(keys), KvData::F32(values)) => TypedLayer::F32(KvSlices { keys, values }),
            (KvData::F16(keys), KvData::F16(values)) => TypedLayer::F16(KvSlices { keys, values }),
            (KvData::F32(_), KvData::F16(_)) | (KvData::F16(_), KvData::F32(_)) => {
                panic!("keys and values of a layer have one type")
            }
        }
    }
}
