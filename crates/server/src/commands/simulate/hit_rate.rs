//! `millpond simulate --hit-rate`: prefix-cache hits of a trace, one request after another, per capacity.

use std::collections::BTreeMap;

use anyhow::Context;
use millpond_scheduler::SchedulerConfig;
use millpond_scheduler::sim::hit_rate::{NamedBlocks, hit_rate};
use serde::Serialize;

use super::summary::HitRate;
use super::traces::{MOONCAKE_BLOCK, Trace};
use super::{html, json};
use crate::cli::{Capacity, Format, SimulateArgs};

/// Hits at one capacity.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Row {
    /// Blocks of the pool; none if it is unlimited.
    pub capacity: Option<u32>,
    /// Hit blocks over blocks.
    pub hit_rate: f64,
    /// By all definitions.
    #[serde(flatten)]
    pub all: HitRate,
}

/// Runs the command.
pub fn run(args: &SimulateArgs) -> anyhow::Result<()> {
    let source = args.arrivals.trace_source();
    let trace = source.context("--hit-rate needs a trace")?.read()?;
    let names = names(&trace)?;
    let requests: Vec<NamedBlocks<'_>> = names
        .iter()
        .zip(&trace.rows)
        .map(|(names, row)| NamedBlocks {
            names,
            num_tokens: row.prompt.num_tokens(),
        })
        .collect();
    let config = SchedulerConfig::default();
    let row = |capacity: &Capacity| {
        let hits = hit_rate(&requests, MOONCAKE_BLOCK, capacity.0, &config);
        Row {
            capacity: capacity.0,
            hit_rate: hits.block_weighted(),
            all: HitRate::of(&hits),
        }
    };
    let rows: Vec<Row> = args.capacities.iter().map(row).collect();
    args.output.write(&match args.output.format {
        Format::Json => json(&rows)?,
        Format::Text => text(&rows),
        Format::Html => html::page(&text(&rows)),
    })
}

/// The blocks' names as small numbers.
fn names(trace: &Trace) -> anyhow::Result<Vec<Vec<u32>>> {
    anyhow::ensure!(
        trace.rows.iter().all(|row| !row.hashes.is_empty()),
        "--hit-rate needs a trace that names prefix blocks (`hash_ids`)"
    );
    let mut numbers = BTreeMap::new();
    let number = |hash: &u64, numbers: &mut BTreeMap<u64, u32>| {
        let next = numbers.len() as u32;
        *numbers.entry(*hash).or_insert(next)
    };
    let rows = trace.rows.iter().map(|row| {
        let hashes = row.hashes.iter();
        hashes.map(|hash| number(hash, &mut numbers)).collect()
    });
    Ok(rows.collect())
}

fn text(rows: &[Row]) -> String {
    let mut text = String::from(
        "   capacity   of blocks   of tokens   mean per request   requests with a hit\n",
    );
    for row in rows {
        let capacity = row
            .capacity
            .map_or("unlimited".to_owned(), |blocks| blocks.to_string());
        text.push_str(&format!(
            "{capacity:>11} {:>11.4} {:>11.4} {:>18.4} {:>21.4}\n",
            row.all.block_weighted,
            row.all.token_weighted,
            row.all.mean_per_request,
            row.all.share_with_hit
        ));
    }
    text
}
