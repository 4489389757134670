//! From a model's name to a running engine, with progress on standard error.

use std::path::PathBuf;

use millpond_engine::fetch::{self, FetchError};
use millpond_engine::llm::{EngineOptions, Llm, MemoryPlan};

use super::progress::{FetchBar, LoadBar};

/// The model that needs no file.
pub const MOCK: &str = "mock";

/// Fetches a model if it is not here yet.
pub fn fetch(spec: &str) -> Result<PathBuf, FetchError> {
    let mut bar = FetchBar::new();
    fetch::resolve(spec, &mut |progress| bar.show(progress))
}

/// Fetches and loads a model.
pub fn load(spec: &str, options: EngineOptions) -> anyhow::Result<Llm> {
    if spec == MOCK {
        return Ok(Llm::mock(options)?);
    }
    let path = fetch(spec)?;
    let mut bar = LoadBar::new();
    Ok(Llm::load(&path, options, &mut |done, total| {
        bar.show(done, total);
    })?)
}

/// What memory is used for, in one line.
pub fn describe_memory(plan: &MemoryPlan) -> String {
    let num_tokens = u64::from(plan.num_blocks) * u64::from(plan.block_size);
    format!(
        "{} weights + {} keys and values of {num_tokens} tokens ({} blocks of {}) + {} workspace = {}",
        mebibytes(plan.weight_bytes),
        mebibytes(plan.kv_bytes),
        plan.num_blocks,
        plan.block_size,
        mebibytes(plan.workspace_bytes),
        mebibytes(plan.weight_bytes + plan.kv_bytes + plan.workspace_bytes),
    )
}

/// Bytes for people.
pub fn mebibytes(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_memory_plan_is_one_line() {
        let plan = MemoryPlan {
            weight_bytes: 3 << 20,
            kv_bytes: 2 << 20,
            workspace_bytes: 1 << 20,
            kv_bytes_per_token: 1024,
            num_blocks: 128,
            block_size: 16,
        };
        assert_eq!(
            describe_memory(&plan),
            "3.0 MiB weights + 2.0 MiB keys and values of 2048 tokens (128 blocks of 16) + 1.0 MiB workspace = 6.0 MiB"
        );
    }
}
