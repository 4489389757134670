//! Seeds of mixed faults: each is a small world full of trouble in which no promise may be broken.
//!
//! One aggregated worker, or two prefill and two decode workers; clients leave, workers die and come back,
//! steps fail, transfers are lost, late, repeated and damaged. Every request must end exactly once with the
//! tokens it gets alone, every invariant hold after every step, and everything be over 30 simulated seconds
//! after the last fault. For other seeds: `MILLPOND_SEEDS=500..20000 cargo test -p millpond-scheduler --test seeds`.

use std::ops::Range;
use std::process::Command;

use millpond_scheduler::sim::report::Report;
use millpond_scheduler::sim::scenario::Scenario;

const SEEDS: Range<u64> = 0..500;

/// Seeds between two that are played twice.
const TWICE_EVERY: u64 = 100;

/// Seeds that once showed a bug.
const REGRESSIONS: [u64; 0] = [];

#[expect(
    clippy::disallowed_methods,
    reason = "whoever runs the tests may ask for other seeds"
)]
fn seeds() -> Range<u64> {
    let Ok(text) = std::env::var("MILLPOND_SEEDS") else {
        return SEEDS;
    };
    let parsed = text
        .split_once("..")
        .and_then(|(from, to)| Some(from.parse().ok()?..to.parse().ok()?));
    parsed.unwrap_or_else(|| panic!("MILLPOND_SEEDS={text:?} is not a range such as 500..20000"))
}

fn commit() -> String {
    let output = Command::new("git").args(["rev-parse", "HEAD"]).output();
    let commit = output.ok().filter(|output| output.status.success());
    commit.map_or("unknown".into(), |output| {
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    })
}

/// Plays a seed; a broken promise is reported with all it takes to see it again.
fn play(seed: u64) -> Report {
    Scenario::new(seed).run(None).unwrap_or_else(|violation| {
        panic!(
            "{violation}\ncommit {}\nrun again with: millpond simulate --scenario {seed}",
            commit()
        )
    })
}

#[test]
fn no_promise_is_broken_whatever_goes_wrong() {
    let seeds = seeds();
    let mut total = Report::default();
    for seed in seeds.clone().chain(REGRESSIONS) {
        let report = play(seed);
        if seed.is_multiple_of(TWICE_EVERY) {
            assert_eq!(
                play(seed),
                report,
                "seed {seed} went another way the second time"
            );
        }
        add(&mut total, &report);
    }
    let ended = total.ended;
    println!(
        "{} seeds: {} steps, {} faults, {ended:?}, {:?}, {:?}",
        seeds.end - seeds.start,
        total.num_steps,
        total.num_faults,
        total.transfers,
        total.lost
    );
    // The seeds would prove nothing if nothing happened in them.
    let per_seed = |count: u64| count / (seeds.end - seeds.start);
    assert!(per_seed(ended.finished) >= 5 && per_seed(total.num_faults) >= 3);
    assert!(ended.cancelled > 0 && ended.failed > 0 && ended.timed_out > 0);
    assert!(total.transfers.completed > 0 && total.transfers.failed > 0);
    assert!(total.lost.num_preemptions > 0 && total.hits.num_hit_tokens > 0);
}

fn add(total: &mut Report, one: &Report) {
    total.num_steps += one.num_steps;
    total.num_faults += one.num_faults;
    total.hits.num_hit_tokens += one.hits.num_hit_tokens;
    total.lost.num_preemptions += one.lost.num_preemptions;
    total.ended.finished += one.ended.finished;
    total.ended.cancelled += one.ended.cancelled;
    total.ended.timed_out += one.ended.timed_out;
    total.ended.failed += one.ended.failed;
    total.ended.refused += one.ended.refused;
    total.transfers.started += one.transfers.started;
    total.transfers.completed += one.transfers.completed;
    total.transfers.failed += one.transfers.failed;
}
