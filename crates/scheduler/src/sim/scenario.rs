//! Small worlds full of trouble, one per seed: the seeds that hunt for bugs in tests and replay them by hand.
//!
//! Everything differs from seed to seed: pools, limits, workload, faults. The oracle judges every token.

use std::fmt;

use super::cost_model::UNIT;
use super::dice::Dice;
use super::faults::FaultRates;
use super::link::LinkSpeed;
use super::report::Report;
use super::simulation::{Simulation, SimulationConfig, Violation, Watch};
use super::worker::{CheckEvery, Stand, WorkerConfig};
use super::workload::{Part, Prompt, Session, Turn, Workload};
use crate::config::{Role, SchedulerConfig};
use crate::time::{Span, Timestamp};

/// When everything must be over, after the last arrival and the last fault (reliability plan, liveness phase).
const SETTLE_WITHIN: Span = Span::from_secs(30);

/// Tokens of the longest conversation.
const MAX_CONTEXT: u32 = 200;

/// A world and what happens in it.
#[derive(Clone, Debug, PartialEq)]
pub struct Scenario {
    /// The world.
    pub config: SimulationConfig,
    /// What arrives.
    pub workload: Workload,
}

impl Scenario {
    /// The scenario of this seed: even seeds have one aggregated worker, odd ones two prefill and two decode
    /// workers.
    pub fn new(seed: u64) -> Self {
        let dice = Dice::new(seed);
        let workload = workload(&mut dice.fork(1));
        Scenario {
            config: config(seed, &mut dice.fork(2)),
            workload,
        }
    }

    /// Plays it. Every line of the event log goes to `log`.
    pub fn run<'a>(&'a self, log: Option<&'a mut dyn FnMut(&str)>) -> Result<Report, Violation> {
        let watch = Watch {
            log,
            progress: None,
        };
        let simulation = Simulation::new(self.config.clone(), &self.workload, watch);
        let broken = |error: crate::config::ConfigError| Violation {
            seed: self.config.seed,
            at: 0,
            what: error.to_string(),
        };
        simulation.map_err(broken)?.run()
    }
}

impl fmt::Display for Scenario {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let limits = self.config.workers.first().map(|worker| &worker.scheduler);
        write!(
            f,
            "seed {}: {} workers, {} requests in {} sessions, faults until {} ms, timeout {:?}, {:?}, {limits:?}",
            self.config.seed,
            self.config.workers.len(),
            self.workload.num_requests(),
            self.workload.sessions.len(),
            self.config.faults_until.0 / 1_000_000,
            self.config.timeout,
            self.config.faults,
        )
    }
}

fn config(seed: u64, dice: &mut Dice) -> SimulationConfig {
    let limits = limits(dice);
    let roles: &[Role] = match seed.is_multiple_of(2) {
        true => &[Role::Aggregated],
        false => &[Role::Prefill, Role::Prefill, Role::Decode, Role::Decode],
    };
    let worker = |role: &Role| WorkerConfig {
        scheduler: SchedulerConfig {
            role: *role,
            ..limits.clone()
        },
        cost: UNIT,
    };
    SimulationConfig {
        workers: roles.iter().map(worker).collect(),
        link: LinkSpeed {
            bytes_per_second: 1e6,
            latency: Span::from_millis(dice.below(20)),
            bytes_per_token: 100.0,
        },
        faults: FaultRates::MIXED.times(f64::from(dice.between(0, 8)) / 4.0),
        faults_until: Timestamp(0) + Span::from_millis(1_000 + dice.below(14_000)),
        settle_within: Some(SETTLE_WITHIN),
        timeout: dice
            .chance(0.3)
            .then(|| Span::from_millis(500 + dice.below(20_000))),
        seed,
        stand: Stand::Oracle,
        check: CheckEvery(1),
        slo: None,
    }
}

/// Limits so tight that everything runs out now and then.
fn limits(dice: &mut Dice) -> SchedulerConfig {
    let block_size = dice.pick(&[1, 2, 4, 16]).copied().unwrap_or(1);
    // The longest request just fits into the smallest pool.
    let num_blocks = dice
        .between(MAX_CONTEXT + 1, 2 * MAX_CONTEXT)
        .div_ceil(block_size);
    let max_sequences = dice.between(1, 16);
    SchedulerConfig {
        block_size,
        num_blocks,
        max_batch_tokens: max_sequences + dice.between(0, 60),
        max_sequences,
        max_waiting: dice.between(4, 40),
        max_context: MAX_CONTEXT,
        prefix_cache: dice.chance(0.9),
        partial_copies: dice.chance(0.8),
        ..SchedulerConfig::default()
    }
}

fn workload(dice: &mut Dice) -> Workload {
    let num_sessions = dice.between(4, 24);
    let busy = Span::from_millis(100 + dice.below(6_000));
    let sessions = (0..num_sessions).map(|number| session(number, busy, dice));
    Workload {
        sessions: sessions.collect(),
    }
    .sorted()
}

fn session(number: u32, busy: Span, dice: &mut Dice) -> Session {
    let num_turns = dice.between(1, 3);
    // A few common beginnings, cut anywhere.
    let shared = Part {
        key: u64::MAX - dice.below(3),
        num_tokens: dice.between(0, 40),
    };
    let turn = |turn: u32| {
        let own = Part {
            key: u64::from(number) << 8 | u64::from(turn),
            num_tokens: dice.between(1, 24),
        };
        Turn {
            pause: Span::from_millis(match turn {
                0 => 0,
                _ => dice.below(300),
            }),
            prompt: Prompt::Parts(match turn {
                0 => vec![shared, own],
                _ => vec![own],
            }),
            num_output: dice.between(1, 48),
            num_choices: match dice.chance(0.2) {
                true => dice.between(2, 4),
                false => 1,
            },
        }
    };
    let turns = (0..num_turns).map(turn).collect();
    Session {
        start: Timestamp(dice.below(busy.0)),
        tenant: number % 3,
        priority: dice.between(0, 2) as i32,
        turns,
    }
}
