use half::f16;
use millpond_scheduler::{BlockId, Span32};

use super::super::{AttentionBatch, CpuKernels, KvData, KvLayer, KvShape, TokenPath};
use super::kv::{empty_layer, f16_data, f32_data};
use super::{Noise, assert_close, bits, same_everywhere};

/// One sequence with its keys and values in plain rows, and in a pool in scattered blocks.
struct World {
    shape: KvShape,
    num_heads: usize,
    dtype: fn(usize) -> KvData,
    /// (positions, heads, head_dim)
    queries: Vec<f32>,
    /// (positions, kv_heads, head_dim)
    keys: Vec<f32>,
    values: Vec<f32>,
    settings: Settings,
}

#[derive(Clone, Copy)]
struct Settings {
    softcap: Option<f32>,
    window: Option<u32>,
}

const PLAIN: Settings = Settings {
    softcap: None,
    window: None,
};

/// How a sequence is cut for one call: which positions are asked for, and where its blocks lie.
struct Layout {
    layer: KvLayer,
    table: Vec<BlockId>,
}

impl World {
    fn new(num_heads: usize, num_kv_heads: usize, head_dim: usize, num_positions: usize) -> Self {
        let mut noise = Noise((num_heads * head_dim) as u64);
        World {
            shape: KvShape {
                num_blocks: 2 * num_positions.div_ceil(16) + 3,
                num_kv_heads,
                head_dim,
            },
            num_heads,
            dtype: f32_data,
            queries: noise.uniforms(num_positions * num_heads * head_dim),
            keys: noise.uniforms(num_positions * num_kv_heads * head_dim),
            values: noise.uniforms(num_positions * num_kv_heads * head_dim),
            settings: PLAIN,
        }
    }

    fn num_positions(&self) -> usize {
        self.keys.len() / (self.shape.num_kv_heads * self.shape.head_dim)
    }

    /// Writes the sequence to blocks chosen by `seed`; all other slots hold NaN, which no one may read.
    fn lay_out(&self, seed: u64) -> Layout {
        let num_blocks = self.num_positions().div_ceil(16);
        let mut free: Vec<u32> = (0..self.shape.num_blocks as u32).collect();
        let mut noise = Noise(seed);
        let table: Vec<BlockId> = (0..num_blocks)
            .map(|_| BlockId(free.swap_remove(noise.below(free.len()))))
            .collect();
        let mut layer = empty_layer(self.shape, self.dtype);
        poison(&mut layer.keys);
        poison(&mut layer.values);
        let slots: Vec<u32> = (0..self.num_positions())
            .map(|position| table[position / 16].0 * 16 + position as u32 % 16)
            .collect();
        let kernels = CpuKernels::new(1, None).expect("no thread to start");
        kernels.write_kv(self.shape, &mut layer, &self.keys, &self.values, &slots);
        Layout { layer, table }
    }

    fn query_rows(&self, positions: &[usize]) -> Vec<f32> {
        let row = self.num_heads * self.shape.head_dim;
        let rows = positions
            .iter()
            .map(|p| &self.queries[p * row..(p + 1) * row]);
        rows.flatten().copied().collect()
    }

    /// Attention at `positions`, in one call.
    fn attend(&self, kernels: &CpuKernels, layout: &Layout, positions: &[usize]) -> Vec<f32> {
        let table = Span32 {
            start: 0,
            end: layout.table.len() as u32,
        };
        let paths: Vec<TokenPath> = positions
            .iter()
            .map(|&position| TokenPath {
                position: position as u32,
                table,
                tail: Span32::default(),
            })
            .collect();
        let queries = self.query_rows(positions);
        self.run(kernels, layout, &queries, (&paths, &[]))
    }

    fn run(
        &self,
        kernels: &CpuKernels,
        layout: &Layout,
        queries: &[f32],
        (paths, tail_slots): (&[TokenPath], &[u32]),
    ) -> Vec<f32> {
        let batch = AttentionBatch {
            queries,
            paths,
            blocks: &layout.table,
            tail_slots,
            num_heads: self.num_heads,
            scale: self.scale(),
            softcap: self.settings.softcap,
            window: self.settings.window,
        };
        let mut out = vec![f32::NAN; queries.len()];
        kernels.attention(self.shape, &layout.layer, &batch, &mut out);
        out
    }

    fn scale(&self) -> f32 {
        // Steep enough that the softmax is not flat.
        4.0 / (self.shape.head_dim as f32).sqrt()
    }

    /// The definition, in f64.
    fn reference(&self, positions: &[usize]) -> Vec<f64> {
        let mut out = Vec::new();
        for &position in positions {
            for head in 0..self.num_heads {
                out.extend(self.reference_head(position, head));
            }
        }
        out
    }

    fn reference_head(&self, position: usize, head: usize) -> Vec<f64> {
        let (kv_heads, dim) = (self.shape.num_kv_heads, self.shape.head_dim);
        let kv_head = head / (self.num_heads / kv_heads);
        let row = |rows: &[f32], position: usize, heads: usize, head: usize| -> Vec<f64> {
            let at = (position * heads + head) * dim;
            rows[at..at + dim].iter().map(|x| f64::from(*x)).collect()
        };
        let query = row(&self.queries, position, self.num_heads, head);
        let first = self
            .settings
            .window
            .map_or(0, |window| (position + 1).saturating_sub(window as usize));
        let scores: Vec<f64> = (first..=position)
            .map(|j| {
                let key = row(&self.keys, j, kv_heads, kv_head);
                let dot: f64 = query.iter().zip(&key).map(|(q, k)| q * k).sum();
                let score = dot * f64::from(self.scale());
                let capped = |cap: f32| f64::from(cap) * (score / f64::from(cap)).tanh();
                self.settings.softcap.map_or(score, capped)
            })
            .collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = scores.iter().map(|score| (score - max).exp()).sum();
        let mut out = vec![0.0; dim];
        for (j, score) in (first..=position).zip(&scores) {
            let weight = (score - max).exp() / sum;
            for (out, value) in out.iter_mut().zip(row(&self.values, j, kv_heads, kv_head)) {
                *out += weight * value;
            }
        }
        out
    }
}

fn poison(data: &mut KvData) {
    match data {
        KvData::F32(values) => values.fill(f32::NAN),
        KvData::F16(values) => values.fill(f16::NAN),
    }
}

/// Shapes of tiny models, of SmolLM2 and of Gemma 3; positions around blocks, splits and several splits.
fn worlds() -> Vec<World> {
    let settings = |softcap, window| Settings { softcap, window };
    let mut worlds = Vec::new();
    for (num_heads, num_kv_heads, head_dim, num_positions) in [
        (4, 2, 16, 70),
        (4, 4, 32, 300),
        (9, 3, 64, 530),
        (4, 1, 256, 270),
        (20, 1, 16, 40),
    ] {
        for settings in [
            PLAIN,
            settings(Some(5.0), None),
            settings(None, Some(1)),
            settings(None, Some(17)),
            settings(Some(20.0), Some(256)),
        ] {
            let mut world = World::new(num_heads, num_kv_heads, head_dim, num_positions);
            world.settings = settings;
            worlds.push(world);
        }
    }
    worlds
}

/// Positions at which something begins or ends.
fn interesting(num_positions: usize) -> Vec<usize> {
    let edges = [
        0, 1, 15, 16, 17, 31, 32, 63, 64, 255, 256, 257, 300, 511, 512,
    ];
    let mut positions: Vec<usize> = edges.into_iter().filter(|p| *p < num_positions).collect();
    positions.push(num_positions - 1);
    positions.dedup();
    positions
}

#[test]
fn attention_matches_f64_arithmetic_with_all_kernels() {
    for world in worlds() {
        let layout = world.lay_out(1);
        let positions = interesting(world.num_positions());
        let actual = same_everywhere(|kernels| world.attend(kernels, &layout, &positions));
        assert_close(&actual, &world.reference(&positions), 3e-6);
    }
}

#[test]
fn half_keys_and_values_are_rounded_once_and_read_exactly() {
    for mut world in worlds() {
        world.dtype = f16_data;
        let layout = world.lay_out(2);
        let positions = interesting(world.num_positions());
        let actual = same_everywhere(|kernels| world.attend(kernels, &layout, &positions));
        let round = |x: &mut f32| *x = f16::from_f32(*x).to_f32();
        world.keys.iter_mut().for_each(round);
        world.values.iter_mut().for_each(round);
        assert_close(&actual, &world.reference(&positions), 3e-6);
        // A pool of f32 that holds the rounded numbers gives the same bits.
        world.dtype = f32_data;
        let kernels = CpuKernels::new(1, None).expect("no thread to start");
        let wide = world.attend(&kernels, &world.lay_out(3), &positions);
        assert_eq!(bits(&actual), bits(&wide));
    }
}

#[test]
fn chunk_borders_and_block_ids_change_no_bit() {
    let kernels = CpuKernels::new(2, None).expect("one thread can be started");
    for world in worlds() {
        let all: Vec<usize> = (0..world.num_positions()).collect();
        let whole = world.attend(&kernels, &world.lay_out(4), &all);
        let row = world.num_heads * world.shape.head_dim;
        let layout = world.lay_out(5);
        for chunk in [1, 3, 16, 64, 255] {
            for positions in all.chunks(chunk) {
                let some = world.attend(&kernels, &layout, positions);
                let expected = &whole[positions[0] * row..(positions[0] + positions.len()) * row];
                assert_eq!(
                    bits(&some),
                    bits(expected),
                    "chunks of {chunk} at {}",
                    positions[0]
                );
            }
        }
    }
}

#[test]
fn batch_neighbours_change_no_bit() {
    let kernels = CpuKernels::new(2, None).expect("one thread can be started");
    for world in worlds() {
        let layout = world.lay_out(6);
        let num_positions = world.num_positions();
        let mut noise = Noise(7);
        let mixed: Vec<usize> = (0..40).map(|_| noise.below(num_positions)).collect();
        let together = world.attend(&kernels, &layout, &mixed);
        let row = world.num_heads * world.shape.head_dim;
        for (i, position) in mixed.iter().enumerate() {
            let alone = world.attend(&kernels, &layout, &[*position]);
            assert_eq!(bits(&alone), bits(&together[i * row..(i + 1) * row]));
        }
    }
}

#[test]
fn tails_read_from_scattered_slots_change_no_bit() {
    for dtype in [f32_data as fn(usize) -> KvData, f16_data] {
        for mut world in worlds() {
            world.dtype = dtype;
            for len in [1, 2, 5, 16, 33] {
                if len <= world.num_positions() {
                    check_tail(&world, len);
                }
            }
        }
    }
}

/// The last `len` positions move to slots of free blocks, in reverse order, and their table entries to nowhere.
fn check_tail(world: &World, len: usize) {
    let kernels = CpuKernels::new(2, None).expect("one thread can be started");
    let last = world.num_positions() - 1;
    let mut layout = world.lay_out(8);
    let expected = world.attend(&kernels, &layout, &[last]);
    let first_of_tail = last + 1 - len;
    let is_free = |block: &u32| layout.table.iter().all(|used| used.0 != *block);
    let free: Vec<u32> = (0..world.shape.num_blocks as u32).filter(is_free).collect();
    let slots: Vec<u32> = (0..len)
        .rev()
        .map(|i| free[i / 16] * 16 + i as u32 % 16)
        .collect();
    let row = world.shape.num_kv_heads * world.shape.head_dim;
    let tail = first_of_tail * row..(last + 1) * row;
    kernels.write_kv(
        world.shape,
        &mut layout.layer,
        &world.keys[tail.clone()],
        &world.values[tail],
        &slots,
    );
    layout.table.truncate(first_of_tail.div_ceil(16));
    let path = TokenPath {
        position: last as u32,
        table: Span32 {
            start: 0,
            end: layout.table.len() as u32,
        },
        tail: Span32 {
            start: 0,
            end: len as u32,
        },
    };
    let queries = world.query_rows(&[last]);
    let actual = world.run(&kernels, &layout, &queries, (&[path], &slots));
    assert_eq!(bits(&actual), bits(&expected), "tail of {len}");
}

#[test]
fn a_nan_in_reach_spoils_the_output() {
    let kernels = CpuKernels::new(1, None).expect("no thread to start");
    for position in [3, 290] {
        for (in_keys, in_values) in [(f32::NAN, 1.0), (1.0, f32::NAN)] {
            let mut world = World::new(2, 1, 16, 300);
            world.keys[position * 16] *= in_keys;
            world.values[position * 16..(position + 1) * 16]
                .iter_mut()
                .for_each(|value| *value *= in_values);
            let layout = world.lay_out(9);
            let out = world.attend(&kernels, &layout, &[position - 1, 299]);
            assert!(out[..32].iter().all(|x| x.is_finite()));
            assert!(out[32..].iter().all(|x| x.is_nan()));
        }
    }
}
