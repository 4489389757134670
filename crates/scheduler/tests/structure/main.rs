//! Structural benchmarks: counts that follow from the design and differ on no machine, printed as tables.
//!
//! `cargo test -p millpond-scheduler --test structure -- --nocapture` shows them. Times in them are simulated.

use std::collections::BTreeMap;

use millpond_scheduler::config::Role;
use millpond_scheduler::sim::cost_model::{CostModel, preset};
use millpond_scheduler::sim::faults::FaultRates;
use millpond_scheduler::sim::link::LinkSpeed;
use millpond_scheduler::sim::report::Report;
use millpond_scheduler::sim::simulation::{Simulation, SimulationConfig, Watch};
use millpond_scheduler::sim::worker::{CheckEvery, Stand, WorkerConfig};
use millpond_scheduler::sim::workload::{Generator, Lengths, Prompt, Session, Turn, Workload};
use millpond_scheduler::{SchedulerConfig, Span, Timestamp};

const BLOCK_SIZE: u32 = 16;

/// Of SmolLM2-135M: 2 × 30 layers × 3 heads × 64 numbers × 2 bytes.
const KV_BYTES_PER_TOKEN: f64 = 23_040.0;

fn simulate(
    roles: &[Role],
    scheduler: &SchedulerConfig,
    cost: CostModel,
    workload: &Workload,
) -> Report {
    let worker = |role: &Role| WorkerConfig {
        scheduler: SchedulerConfig {
            role: *role,
            ..scheduler.clone()
        },
        cost,
    };
    let config = SimulationConfig {
        workers: roles.iter().map(worker).collect(),
        link: LinkSpeed {
            bytes_per_second: 25e9,
            latency: Span(10_000),
            bytes_per_token: KV_BYTES_PER_TOKEN,
        },
        faults: FaultRates::NONE,
        faults_until: Timestamp(0),
        settle_within: None,
        timeout: None,
        seed: 0,
        stand: Stand::Oracle,
        check: CheckEvery(1),
        slo: None,
    };
    let simulation = Simulation::new(config, workload, Watch::default()).expect("a valid config");
    simulation.run().expect("no promise is broken")
}

fn millis(span: Span) -> f64 {
    span.as_secs_f64() * 1e3
}

/// A conversation of `num_turns` turns, each of which adds one block of question and one of answer.
fn conversation(num_turns: u32) -> Workload {
    let turn = |turn: u32| Turn {
        pause: Span(0),
        prompt: Prompt::distinct(u64::from(turn), BLOCK_SIZE),
        num_output: BLOCK_SIZE,
        num_choices: 1,
    };
    Workload {
        sessions: vec![Session {
            start: Timestamp(0),
            tenant: 0,
            priority: 0,
            turns: (0..num_turns).map(turn).collect(),
        }],
    }
}

/// Blocks named by the entries of a flat map from each cached prompt to all its blocks.
fn flat_references(num_turns: u32) -> u32 {
    let prefixes: BTreeMap<u32, u32> = (1..=num_turns).map(|turn| (turn, 2 * turn)).collect();
    prefixes.values().sum()
}

#[test]
fn a_radix_tree_refers_to_each_block_once_and_a_hit_skips_the_prefill() {
    println!(
        "turns | radix: blocks | flat map: block references | prefill tokens, cached | not cached"
    );
    let mut previous = None;
    for num_turns in [8, 16, 32, 64] {
        let workload = conversation(num_turns);
        let run = |prefix_cache| {
            let config = SchedulerConfig {
                prefix_cache,
                ..SchedulerConfig::default()
            };
            let unit = preset("unit").expect("it is there").model;
            simulate(&[Role::Aggregated], &config, unit, &workload)
        };
        let (warm, cold) = (run(true), run(false));
        let last = warm.series.samples.last().expect("there were steps");
        let num_cached = last.blocks.cached_evictable + last.blocks.cached_pinned;
        let num_computed = |report: &Report| report.hits.num_tokens - report.hits.num_hit_tokens;
        let (with, without) = (num_computed(&warm), num_computed(&cold));
        let flat = flat_references(num_turns);
        println!("{num_turns:>5} | {num_cached:>13} | {flat:>26} | {with:>22} | {without:>10}");
        // The last answer's last token has no keys and values, so its block is not full.
        assert!(num_cached <= 2 * num_turns);
        if let Some((half_cached, half_flat, half_with, half_without)) = previous {
            assert!(num_cached <= 2 * half_cached + 2, "linear");
            assert!(flat > 3 * half_flat, "quadratic");
            assert!(with <= 2 * half_with + 2 * u64::from(BLOCK_SIZE), "linear");
            assert!(without > 3 * half_without, "quadratic");
        }
        previous = Some((num_cached, flat, with, without));
    }
}

#[test]
fn a_burst_on_one_pool_whole_or_in_chunks_and_on_two_pools() {
    let burst = Generator::Bursts {
        size: 16,
        every: Span::from_secs(1),
        num_bursts: 1,
        lengths: Lengths::Uniform {
            prompt: (64, 256),
            output: (64, 64),
        },
    };
    let workload = burst.generate(0);
    let cost = preset("burst").expect("it is there").model;
    let budget = |max_batch_tokens| SchedulerConfig {
        max_batch_tokens,
        max_sequences: 32,
        ..SchedulerConfig::default()
    };
    let aggregated: &[Role] = &[Role::Aggregated];
    let split: &[Role] = &[Role::Prefill, Role::Decode];
    let rows = [
        ("one pool, whole prompts", aggregated, 288),
        ("one pool, chunks of 32", aggregated, 48),
        ("prefill and decode pools", split, 288),
    ];
    println!(
        "{:<25} | ITL, ms, p50 / p90 / p99 | TTFT p50, ms | output tokens/s",
        "16 requests at once"
    );
    let run = |(name, roles, max_batch_tokens): (&str, &[Role], u32)| {
        let report = simulate(roles, &budget(max_batch_tokens), cost, &workload);
        println!(
            "{name:<25} | {:>8.3} / {:.3} / {:.3} | {:>12.2} | {:>15.0}",
            millis(report.itl.quantile(0.5)),
            millis(report.itl.quantile(0.9)),
            millis(report.itl.quantile(0.99)),
            millis(report.ttft.quantile(0.5)),
            report.tokens_per_second()
        );
        [0.9, 0.99].map(|share| millis(report.itl.quantile(share)))
    };
    let [[_, whole], [_, chunked], [steady, handed_over]] = rows.map(run);
    assert!(whole > 5.0 * 0.20, "whole prompts stall the others");
    assert!(chunked < 2.0 * 0.20, "chunks stall them a little");
    assert!(
        steady < 1.1 * 0.20,
        "on a pool of their own nobody stalls them"
    );
    // One token in 63 waits for the hand-off: the transfer, and the step that is under way.
    assert!(handed_over < whole / 2.0, "{handed_over}");
}
