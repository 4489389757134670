//! Runs a property over generated cases, with the seed in the failure message.

use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngSeed, TestRunner};

/// The seed unless `PROPTEST_RNG_SEED` gives another.
const DEFAULT_SEED: u64 = 2026;

/// Looking for a smaller failing case ends after this long.
const MAX_SHRINK_MILLIS: u32 = 30_000;

/// Checks `body` on `num_cases` cases (`PROPTEST_CASES` overrides), shrinking the first one that panics.
pub fn check_property<S: Strategy>(num_cases: u32, strategy: S, body: impl Fn(S::Value)) {
    let config = config(num_cases);
    let (seed, cases) = (config.rng_seed, config.cases);
    let outcome = TestRunner::new(config).run(&strategy, |case| {
        body(case);
        Ok(())
    });
    if let Err(failure) = outcome {
        panic!("{failure}\nrun again with PROPTEST_RNG_SEED={seed} PROPTEST_CASES={cases}");
    }
}

/// `Config::default` reads the environment; what is not set there is decided here.
#[expect(
    clippy::disallowed_methods,
    reason = "whoever runs the tests may ask for more cases, or others"
)]
fn config(num_cases: u32) -> Config {
    let mut config = Config::default();
    if std::env::var_os("PROPTEST_CASES").is_none() {
        config.cases = num_cases;
    }
    if let RngSeed::Random = config.rng_seed {
        config.rng_seed = RngSeed::Fixed(DEFAULT_SEED);
    }
    config.failure_persistence = None;
    config.max_shrink_iters = 4096;
    config.max_shrink_time = MAX_SHRINK_MILLIS;
    config
}

/// The first `num_cases` cases of the default seed, whatever the environment says.
pub fn sample_cases<S: Strategy>(num_cases: usize, strategy: S) -> Vec<S::Value> {
    let config = Config {
        rng_seed: RngSeed::Fixed(DEFAULT_SEED),
        ..Config::default()
    };
    let mut runner = TestRunner::new(config);
    let mut draw = || strategy.new_tree(&mut runner).map(|tree| tree.current());
    let cases = (0..num_cases).map(|_| draw());
    cases
        .collect::<Result<_, _>>()
        .expect("no strategy here rejects")
}
