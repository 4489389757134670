//! Time of one steady decode step, schedule and commit together, with a runner that costs nothing.

use std::hint::black_box;
use std::sync::Arc;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use millpond_scheduler::{
    BatchPlan, CacheSalt, Deadlines, Event, ModelOutput, OutputRow, Request, RequestId, RowVerdict,
    SamplingParams, Scheduler, SchedulerConfig, Span32, StopConditions, Timestamp, TokenId,
};

const PROMPT_LEN: u32 = 128;
const MAX_TOKENS: u32 = 1_024;

/// A scheduler with all sequences decoding, and the buffers of its loop.
struct Loop {
    scheduler: Scheduler,
    plan: BatchPlan,
    output: ModelOutput,
    events: Vec<Event>,
    num_sequences: u32,
    next_id: u64,
}

impl Loop {
    fn new(num_sequences: u32) -> Self {
        let blocks_each = (PROMPT_LEN + MAX_TOKENS).div_ceil(16);
        let config = SchedulerConfig {
            num_blocks: num_sequences * (blocks_each + 2),
            max_sequences: num_sequences,
            max_batch_tokens: num_sequences + 512,
            max_waiting: num_sequences,
            ..SchedulerConfig::default()
        };
        Loop {
            scheduler: Scheduler::new(config).expect("valid"),
            plan: BatchPlan::default(),
            output: ModelOutput::default(),
            events: Vec::new(),
            num_sequences,
            next_id: 0,
        }
    }

    /// Keeps the set full: sequences that ended are replaced before the next measured step.
    fn refill(&mut self) {
        while self.scheduler.stats().num_running < self.num_sequences {
            let stats = self.scheduler.stats();
            for _ in stats.num_running + stats.num_waiting..self.num_sequences {
                self.add();
            }
            self.step();
        }
    }

    fn add(&mut self) {
        let id = self.next_id;
        self.next_id += 1;
        let request = Request {
            id: RequestId(id),
            prompt: (0..PROMPT_LEN)
                .map(|t| TokenId(t ^ (id as u32).wrapping_mul(2_654_435_761)))
                .collect(),
            sampling: SamplingParams::default(),
            stop: StopConditions {
                max_tokens: MAX_TOKENS,
                min_tokens: 0,
                stop_token_ids: Vec::new(),
                eos_token_ids: vec![TokenId(0)],
                ignore_eos: false,
            },
            num_choices: 1,
            priority: 0,
            salt: CacheSalt::default(),
            arrival: Timestamp(id),
            deadlines: Deadlines::default(),
        };
        self.scheduler
            .add(Arc::new(request), Timestamp(id))
            .expect("acceptable");
    }

    fn step(&mut self) {
        self.events.clear();
        self.scheduler
            .schedule(Timestamp(0), &mut self.plan, &mut self.events);
        self.execute();
        self.scheduler
            .commit(&self.plan, &self.output, Timestamp(0), &mut self.events);
        black_box(&self.events);
    }

    /// The least a runner can do: one token per sampling row.
    fn execute(&mut self) {
        self.output.clear();
        for row in &self.plan.rows {
            let start = self.output.tokens.len() as u32;
            self.output.tokens.extend(row.sample.then_some(TokenId(7)));
            self.output.rows.push(OutputRow {
                tokens: Span32 {
                    start,
                    end: self.output.tokens.len() as u32,
                },
                num_computed: row.tokens.len(),
                logprobs: Span32::default(),
                prompt_logprobs: Span32::default(),
                verdict: RowVerdict::Continue,
            });
        }
    }
}

fn steady_decode(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("steady_decode");
    for num_sequences in [32, 256, 1_024, 4_096] {
        let mut state = Loop::new(num_sequences);
        group.throughput(Throughput::Elements(u64::from(num_sequences)));
        let id = BenchmarkId::from_parameter(num_sequences);
        group.bench_function(id, |bencher| {
            bencher.iter_custom(|num_steps| {
                let mut elapsed = std::time::Duration::ZERO;
                for _ in 0..num_steps {
                    state.refill();
                    let start = clock();
                    state.step();
                    elapsed += start.elapsed();
                }
                elapsed
            });
        });
    }
    group.finish();
}

#[expect(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "a benchmark measures time; the code it measures may not"
)]
fn clock() -> std::time::Instant {
    std::time::Instant::now()
}

criterion_group!(benches, steady_decode);
criterion_main!(benches);
