//! What a measurement, or serving at all, depends on besides the program: processor and memory.

use std::num::NonZero;

use serde::Serialize;
use sysinfo::{CpuRefreshKind, MemoryRefreshKind, RefreshKind, System};

/// The machine that we run on.
#[derive(Clone, Debug, Serialize)]
pub struct Machine {
    /// The processor as it calls itself.
    pub processor: String,
    /// What it has of the features that kernels use or could use.
    pub features: Vec<&'static str>,
    /// Threads that run at once, as far as this process may use them.
    pub num_processors: usize,
    /// Memory in all.
    pub memory_bytes: u64,
    /// Memory that can be had without swapping.
    pub available_bytes: u64,
}

impl Machine {
    /// Looks around.
    pub fn detect() -> Self {
        let wanted = RefreshKind::nothing()
            .with_cpu(CpuRefreshKind::nothing())
            .with_memory(MemoryRefreshKind::nothing().with_ram());
        let system = System::new_with_specifics(wanted);
        let brand = system.cpus().first().map(|cpu| cpu.brand().trim());
        Machine {
            processor: match brand {
                Some(brand) if !brand.is_empty() => brand.to_owned(),
                Some(_) | None => std::env::consts::ARCH.to_owned(),
            },
            features: features(),
            num_processors: num_processors(),
            memory_bytes: system.total_memory(),
            available_bytes: system.available_memory(),
        }
    }
}

/// Threads that this process may run at once.
pub fn num_processors() -> usize {
    std::thread::available_parallelism().map_or(1, NonZero::get)
}

/// Names of those features that this processor has.
macro_rules! detected {
    ($is_detected:ident: $($feature:tt),*) => {{
        let mut found = Vec::new();
        $(if std::arch::$is_detected!($feature) {
            found.push($feature);
        })*
        found
    }};
}

#[cfg(target_arch = "x86_64")]
fn features() -> Vec<&'static str> {
    detected!(is_x86_feature_detected:
        "avx2", "fma", "f16c", "avxvnni", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni", "avx512bf16"
    )
}

#[cfg(target_arch = "aarch64")]
fn features() -> Vec<&'static str> {
    detected!(is_aarch64_feature_detected: "neon", "fp16", "bf16", "dotprod", "i8mm", "sve")
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn features() -> Vec<&'static str> {
    Vec::new()
}
