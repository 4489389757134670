//! Simulation: the production scheduler under virtual time, with costs, faults and workloads as data.
//!
//! No file, clock or thread lives here; the same seed gives the same run, event for event.

pub mod agenda;
pub mod cost_model;
pub mod dice;
pub mod faults;
pub mod histogram;
pub mod hit_rate;
pub mod journal;
pub mod link;
pub mod report;
pub mod scenario;
pub mod simulation;
pub mod worker;
pub mod workload;
