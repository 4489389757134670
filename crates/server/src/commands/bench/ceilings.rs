//! What this machine can do at best, measured in the same run as what it is compared with.

use std::fmt;

use millpond_engine::kernels::cpu::ceilings::{self, ScanMemory};
use millpond_engine::kernels::cpu::{CpuKernels, KernelError};
use serde::Serialize;

use super::samples::{Samples, Spread};

/// How to measure.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// Threads of the measurements with all threads.
    pub num_threads: usize,
    /// Bytes to scan.
    pub working_set_bytes: usize,
    /// Rounds that medians are taken over, at least 1.
    pub num_rounds: usize,
}

/// Rates per second, medians and ranges over rounds.
#[derive(Clone, Debug, Serialize)]
pub struct Ceilings {
    num_rounds: usize,
    num_threads: usize,
    working_set_bytes: usize,
    /// Bytes that one thread reads.
    read_one_thread: Spread,
    /// Bytes that all threads read together.
    read_all_threads: Spread,
    /// Multiply-adds of bytes, all threads.
    int8_macs: Spread,
    int8_instruction: &'static str,
    /// Multiply-adds of floats, all threads.
    f32_macs: Spread,
    f32_instruction: &'static str,
}

impl Ceilings {
    /// Takes some seconds of all threads.
    pub fn measure(setup: Setup) -> Result<Self, KernelError> {
        let all = CpuKernels::new(setup.num_threads, None)?;
        let one = CpuKernels::new(1, None)?;
        let memory = ScanMemory::new(setup.working_set_bytes)?;
        let instructions = ceilings::instructions();
        let over_rounds = |measure: &dyn Fn() -> f64| {
            // The first round wakes threads and fills caches.
            measure();
            let values = (0..setup.num_rounds.max(1)).map(|_| measure()).collect();
            Samples::new(values).expect("at least one round").spread()
        };
        Ok(Ceilings {
            num_rounds: setup.num_rounds,
            num_threads: all.num_threads(),
            working_set_bytes: memory.num_bytes(),
            read_one_thread: over_rounds(&|| ceilings::read_bandwidth(&one, &memory)),
            read_all_threads: over_rounds(&|| ceilings::read_bandwidth(&all, &memory)),
            int8_macs: over_rounds(&|| ceilings::int8_peak(&all)),
            int8_instruction: instructions.int8,
            f32_macs: over_rounds(&|| ceilings::f32_peak(&all)),
            f32_instruction: instructions.f32,
        })
    }

    /// Bytes per second that all threads read.
    pub fn read(&self) -> f64 {
        self.read_all_threads.median
    }

    /// Multiply-adds per second of products with quantised weights, or with float ones.
    pub fn macs(&self, is_quantised: bool) -> f64 {
        match is_quantised {
            true => self.int8_macs.median,
            false => self.f32_macs.median,
        }
    }
}

/// `1 thread`, `2 threads`.
pub fn threads(count: usize) -> String {
    format!("{count} thread{}", if count == 1 { "" } else { "s" })
}

impl fmt::Display for Ceilings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let working_set = self.working_set_bytes as f64 / f64::from(1 << 20);
        write!(f, "ceilings, medians of {} rounds:", self.num_rounds)?;
        let mut line = |name: &str, rate: &Spread, unit: &str, with: &str| {
            let [median, min, max] = [rate.median, rate.min, rate.max].map(|rate| rate / 1e9);
            write!(
                f,
                "\n  {name:<19} {median:>8.1} {unit} ({min:.1}–{max:.1}), {with}"
            )
        };
        let all = threads(self.num_threads);
        let scanned = format!("{working_set:.1} MiB");
        line("read, 1 thread", &self.read_one_thread, "GB/s", &scanned)?;
        line(
            &format!("read, {all}"),
            &self.read_all_threads,
            "GB/s",
            &scanned,
        )?;
        line(
            &format!("int8, {all}"),
            &self.int8_macs,
            "GMAC/s",
            self.int8_instruction,
        )?;
        line(
            &format!("f32, {all}"),
            &self.f32_macs,
            "GMAC/s",
            self.f32_instruction,
        )
    }
}
