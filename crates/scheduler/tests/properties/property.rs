//! Runs a property over generated cases, with the seed in the failure message.

use proptest::strategy::Strategy;
use proptest::test_runner::{Config, RngSeed, TestRunner};

/// The seed unless `PROPTEST_RNG_SEED` gives another.
const DEFAULT_SEED: u64 = 2026;

/// Checks `body` on `num_cases` cases (`PROPTEST_CASES` overrides), shrinking the first one that panics.
pub fn check_property<S: Strategy>(num_cases: u32, strategy: S, body: impl Fn(S::Value)) {
    // `Config::default` has read the environment; only what is not set there is decided here.
    let mut config = Config::default();
    if std::env::var_os("PROPTEST_CASES").is_none() {
        config.cases = num_cases;
    }
    if let RngSeed::Random = config.rng_seed {
        config.rng_seed = RngSeed::Fixed(DEFAULT_SEED);
    }
    config.failure_persistence = None;
    config.max_shrink_iters = 4096;
    let (seed, cases) = (config.rng_seed, config.cases);
    let outcome = TestRunner::new(config).run(&strategy, |case| {
        body(case);
        Ok(())
    });
    if let Err(failure) = outcome {
        panic!("{failure}\nrun again with PROPTEST_RNG_SEED={seed} PROPTEST_CASES={cases}");
    }
}
