//! Model-based and property tests of the scheduler: thousands of small worlds, judged by the mock model's oracle.
//!
//! Nothing here looks inside the scheduler: what is tested is what a driver sees, plus `check_invariants` after
//! every operation. Tests are named after the scenarios of the reliability plan (S01 to S10, I1 to I8).
//!
//! Cases are drawn from a fixed seed, so that a run is repeatable. For other cases, or more of them:
//! `PROPTEST_RNG_SEED=7 PROPTEST_CASES=100000 cargo test -p millpond-scheduler --test properties`.

mod disagg;
mod equality;
mod faults;
mod harness;
mod kv_twin;
mod ledger;
mod pressure;
mod property;
mod random_operations;
mod throughput;
mod traces;
mod workload;
