//! `millpond bench kernel`: matrix products and attention alone, on the shapes of the default model.
//!
//! Weights, keys and values are taken in turn from more of them than caches hold, as decode does. The time of a
//! product includes the quantisation of its input.

use std::time::{Duration, Instant};

use anyhow::Context;
use half::f16;
use millpond_engine::kernels::cpu::{
    AttentionBatch, CpuKernels, KvData, KvLayer, KvShape, LANES, MatmulInput, MatmulOutput,
    PackedMatrix, TokenPath,
};
use millpond_engine::loader::{RawTensor, TensorType};
use millpond_scheduler::{BlockId, Span32};
use serde::Serialize;

use super::ceilings::{Ceilings, Setup, threads};
use super::samples::{Samples, Spread};
use super::{Output, Report, Setting, percent};
use crate::cli::{KernelArgs, Shape};
use crate::commands::machine::{Machine, num_processors};

/// Attention of the default model.
const NUM_HEADS: usize = 9;
const NUM_KV_HEADS: usize = 3;
const HEAD_DIM: usize = 64;

/// (tokens, position of the last one): two of decode, one of prefill.
const ATTENTION: [(usize, usize); 3] = [(1, 128), (1, 1152), (512, 512)];

/// A round lasts about so long.
const ROUND: Duration = Duration::from_millis(20);

#[derive(Clone, Debug, Serialize)]
struct KernelResult {
    kernel: &'static str,
    /// Type and shape of the weights, or the depth.
    case: String,
    rows: usize,
    seconds: Spread,
    macs_per_s: f64,
    /// Of int8 products for quantised weights, else of float ones.
    share_of_peak: f64,
    bytes_per_s: f64,
    share_of_bandwidth: f64,
}

/// What one call does.
struct Work {
    kernel: &'static str,
    case: String,
    rows: usize,
    macs: usize,
    num_bytes: usize,
    is_quantised: bool,
}

/// Runs the command.
pub fn run(args: &KernelArgs) -> anyhow::Result<()> {
    let num_threads = args.threads.unwrap_or_else(num_processors);
    let kernels = CpuKernels::new(num_threads, args.isa)?;
    let output = Output::new(args.measure.json);
    let working_set = args.measure.working_set_bytes(None);
    let ceilings = Ceilings::measure(Setup {
        num_threads,
        working_set_bytes: working_set,
        num_rounds: args.measure.rounds,
    })?;
    let isa = kernels.isa();
    output.line(&ceilings)?;
    output.line(format_args!("{isa} kernels, {}", threads(num_threads)))?;
    output.line(KernelResult::HEADER)?;
    let mut bench = Bench {
        kernels,
        ceilings,
        output,
        working_set,
        num_rounds: args.measure.rounds,
        results: Vec::new(),
    };
    bench.matmuls(args)?;
    bench.attentions()?;
    output.document(&Report {
        version: env!("CARGO_PKG_VERSION"),
        machine: Machine::detect(),
        ceilings: bench.ceilings,
        setting: Setting::Kernel { isa: isa.name() },
        results: bench.results,
    })
}

struct Bench {
    kernels: CpuKernels,
    ceilings: Ceilings,
    output: Output,
    working_set: usize,
    num_rounds: usize,
    results: Vec<KernelResult>,
}

impl Bench {
    fn matmuls(&mut self, args: &KernelArgs) -> anyhow::Result<()> {
        let types = match args.types.as_slice() {
            [] => &TensorType::COMPUTED,
            asked => asked,
        };
        for dtype in types {
            for shape in &args.shapes {
                if fits(*dtype, *shape) {
                    self.matmul((*dtype, *shape), &args.rows)?;
                } else if !args.types.is_empty() {
                    let Shape(_, columns) = shape;
                    anyhow::bail!(
                        "--types {dtype}: its blocks of {} do not divide {columns} inputs",
                        dtype.block_elements()
                    );
                }
            }
        }
        Ok(())
    }

    /// One matrix with each number of rows.
    fn matmul(
        &mut self,
        (dtype, shape): (TensorType, Shape),
        rows: &[usize],
    ) -> anyhow::Result<()> {
        let Shape(outputs, columns) = shape;
        let tensor = tensor(dtype, shape).context("the shape is too large")?;
        let weight = PackedMatrix::pack(&self.kernels, &tensor)?;
        let num_bytes = weight.num_bytes();
        let mut weights = vec![weight];
        while weights.len() * num_bytes < self.working_set {
            weights.push(PackedMatrix::pack(&self.kernels, &tensor)?);
        }
        for rows in rows.iter().copied() {
            let work = Work {
                kernel: "matmul",
                case: format!("{dtype} {outputs}x{columns}"),
                rows,
                macs: rows * outputs * columns,
                num_bytes,
                is_quantised: dtype.is_quantised(),
            };
            let x: Vec<f32> = (0..rows * columns).map(|i| (i % 17) as f32 - 8.0).collect();
            let mut input = MatmulInput::default();
            let mut out = vec![0.0; rows * outputs];
            let mut turn = weights.iter().cycle();
            let kernels = &self.kernels;
            let seconds = time(self.num_rounds, &mut || {
                let weight = turn.next().expect("a cycle of at least one");
                kernels.load_input(&x, rows, columns, work.is_quantised, &mut input);
                let output = MatmulOutput {
                    weight,
                    bias: None,
                    add: false,
                    out: &mut out,
                };
                kernels.matmul(&input, &mut [output]);
            });
            self.report(work, &seconds)?;
        }
        Ok(())
    }

    fn attentions(&mut self) -> anyhow::Result<()> {
        ATTENTION
            .into_iter()
            .try_for_each(|(tokens, depth)| self.attention(tokens, depth))
    }

    /// The last `tokens` of `depth` positions attend to all before them.
    fn attention(&mut self, tokens: usize, depth: usize) -> anyhow::Result<()> {
        let shape = KvShape {
            num_blocks: depth.div_ceil(LANES),
            num_kv_heads: NUM_KV_HEADS,
            head_dim: HEAD_DIM,
        };
        let num_bytes = 2 * 2 * shape.num_blocks * LANES * NUM_KV_HEADS * HEAD_DIM;
        let layers: Vec<KvLayer> = (0..self.working_set.div_ceil(num_bytes))
            .map(|_| layer(num_bytes / 4))
            .collect();
        let blocks: Vec<BlockId> = (0..shape.num_blocks as u32).map(BlockId).collect();
        let path = |position: usize| TokenPath {
            position: position as u32,
            table: Span32 {
                start: 0,
                end: blocks.len() as u32,
            },
            tail: Span32::default(),
        };
        let paths: Vec<TokenPath> = (depth - tokens..depth).map(path).collect();
        let queries = vec![0.1; tokens * NUM_HEADS * HEAD_DIM];
        let batch = AttentionBatch {
            queries: &queries,
            paths: &paths,
            blocks: &blocks,
            tail_slots: &[],
            num_heads: NUM_HEADS,
            scale: 0.125,
            softcap: None,
            window: None,
        };
        let seen: usize = (depth - tokens + 1..=depth).sum();
        let work = Work {
            kernel: "attention",
            case: format!("f16 depth {depth}"),
            rows: tokens,
            macs: 2 * seen * NUM_HEADS * HEAD_DIM,
            num_bytes,
            is_quantised: false,
        };
        let mut out = vec![0.0; queries.len()];
        let mut turn = layers.iter().cycle();
        let kernels = &self.kernels;
        let seconds = time(self.num_rounds, &mut || {
            let layer = turn.next().expect("a cycle of at least one");
            kernels.attention(shape, layer, &batch, &mut out);
        });
        self.report(work, &seconds)
    }

    fn report(&mut self, work: Work, seconds: &Samples) -> anyhow::Result<()> {
        let result = KernelResult::of(work, seconds, &self.ceilings);
        self.output.line(result.line())?;
        self.results.push(result);
        Ok(())
    }
}

/// Rows of the matrix are whole blocks of the type.
fn fits(dtype: TensorType, Shape(_, columns): Shape) -> bool {
    columns.is_multiple_of(dtype.block_elements())
}

/// Weights that are normal numbers however their bytes are read, so that none is slow to compute with.
fn tensor(dtype: TensorType, Shape(outputs, columns): Shape) -> Option<RawTensor> {
    let shape = vec![outputs, columns];
    let num_bytes = usize::try_from(dtype.num_bytes(&shape)?).ok()?;
    Some(RawTensor {
        name: "weights".to_owned(),
        dtype,
        shape,
        bytes: (0..num_bytes).map(|i| 0x28 | (i * 5 % 8) as u8).collect(),
    })
}

/// Keys and values of `len` numbers each.
fn layer(len: usize) -> KvLayer {
    let numbers = |period: usize| {
        let number = |i| f16::from_f32((i % period) as f32 / period as f32);
        KvData::F16((0..len).map(number).collect())
    };
    KvLayer {
        keys: numbers(17),
        values: numbers(13),
    }
}

/// Seconds per call, a sample per round.
fn time(num_rounds: usize, call: &mut dyn FnMut()) -> Samples {
    // Wakes the threads and makes room; the second call tells how many fill a round.
    call();
    let start = Instant::now();
    call();
    let num_calls = calls_per_round(start.elapsed());
    let round = |_| {
        let start = Instant::now();
        (0..num_calls).for_each(|_| call());
        start.elapsed().as_secs_f64() / f64::from(num_calls)
    };
    let seconds = (0..num_rounds.max(1)).map(round).collect();
    Samples::new(seconds).expect("at least one round")
}

/// So many that a round lasts long enough to be timed well.
fn calls_per_round(one: Duration) -> u32 {
    let nanos = one.as_nanos().max(1);
    u32::try_from(ROUND.as_nanos().div_ceil(nanos)).unwrap_or(u32::MAX)
}

impl KernelResult {
    const HEADER: &str =
        "kernel     case              rows          µs    GMAC/s  % of peak    GB/s  % of read";

    fn of(work: Work, seconds: &Samples, ceilings: &Ceilings) -> Self {
        let seconds = seconds.spread();
        let macs_per_s = work.macs as f64 / seconds.median;
        let bytes_per_s = work.num_bytes as f64 / seconds.median;
        KernelResult {
            kernel: work.kernel,
            case: work.case,
            rows: work.rows,
            seconds,
            macs_per_s,
            share_of_peak: macs_per_s / ceilings.macs(work.is_quantised),
            bytes_per_s,
            share_of_bandwidth: bytes_per_s / ceilings.read(),
        }
    }

    fn line(&self) -> String {
        format!(
            "{:<10} {:<16} {:>5}  {:>10.1}  {:>8.1}  {:>9}  {:>6.1}  {:>9}",
            self.kernel,
            self.case,
            self.rows,
            self.seconds.median * 1e6,
            self.macs_per_s / 1e9,
            percent(Some(self.share_of_peak)),
            self.bytes_per_s / 1e9,
            percent(Some(self.share_of_bandwidth)),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_has_as_many_calls_as_fill_it() {
        assert_eq!(calls_per_round(Duration::from_millis(1)), 20);
        assert_eq!(calls_per_round(Duration::from_millis(7)), 3);
        assert_eq!(calls_per_round(Duration::from_secs(1)), 1);
        assert_eq!(calls_per_round(Duration::ZERO), 20_000_000);
    }

    #[test]
    fn every_call_of_every_round_is_timed() {
        let mut num_calls = 0;
        let samples = time(3, &mut || {
            num_calls += 1;
            std::thread::sleep(Duration::from_millis(30));
        });
        assert_eq!(num_calls, 2 + 3);
        let spread = samples.spread();
        assert!(spread.min >= 0.03 && spread.median <= spread.max);
    }

    #[test]
    fn weights_of_every_type_are_computed_to_finite_numbers() {
        let kernels = CpuKernels::new(1, None).expect("no thread to start");
        let shape = Shape(16, 256);
        for dtype in TensorType::COMPUTED {
            assert!(fits(dtype, shape));
            let tensor = tensor(dtype, shape).expect("a small shape");
            let weight = PackedMatrix::pack(&kernels, &tensor).expect("a type that is computed");
            let mut row = [0.0; 256];
            weight.row(3, &mut row);
            assert!(
                row.iter().all(|w| w.is_finite()) && row.iter().any(|w| *w != 0.0),
                "{dtype}"
            );
        }
    }
}
