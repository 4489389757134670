//! Hit rates of the prefix cache on Mooncake's conversation trace, against a twin and the reference table.
//!
//! The twin runs on the first 1,000 requests, which are a fixture. For the whole table give the path of the
//! whole trace: `MOONCAKE_TRACE=mooncake_conversation.jsonl cargo test -p millpond-scheduler --test mooncake --
//! --include-ignored`.

mod twin;

use std::path::{Path, PathBuf};

use millpond_scheduler::SchedulerConfig;
use millpond_scheduler::sim::hit_rate::{NamedBlocks, hit_rate};
use millpond_scheduler::sim::report::Hits;
use serde::Deserialize;

const BLOCK_TOKENS: u32 = 512;

#[derive(Deserialize)]
struct TraceRow {
    input_length: u32,
    hash_ids: Vec<u32>,
}

impl TraceRow {
    fn blocks(&self) -> NamedBlocks<'_> {
        NamedBlocks {
            names: &self.hash_ids,
            num_tokens: self.input_length,
        }
    }
}

fn read(path: &Path) -> Vec<TraceRow> {
    let text =
        std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let rows = text.lines().map(serde_json::from_str);
    rows.collect::<Result<_, _>>().expect("the trace is whole")
}

fn fixture() -> Vec<TraceRow> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures");
    read(&root.join("traces/mooncake_conversation_1000.jsonl"))
}

#[expect(
    clippy::disallowed_methods,
    reason = "where the whole trace lies is for whoever runs the test to say"
)]
fn whole_trace() -> Vec<TraceRow> {
    let path = std::env::var_os("MOONCAKE_TRACE").expect("MOONCAKE_TRACE names the whole trace");
    read(&PathBuf::from(path))
}

fn hits(trace: &[TraceRow], capacity: Option<u32>, config: &SchedulerConfig) -> Hits {
    let requests: Vec<NamedBlocks<'_>> = trace.iter().map(TraceRow::blocks).collect();
    hit_rate(&requests, BLOCK_TOKENS, capacity, config)
}

#[test]
fn lru_hits_what_a_slow_twin_hits() {
    let trace = fixture();
    for capacity in [
        Some(1),
        Some(40),
        Some(1_000),
        Some(3_000),
        Some(8_000),
        None,
    ] {
        let found = hits(&trace, capacity, &SchedulerConfig::default());
        let expected = twin::lru(trace.iter().map(|row| row.hash_ids.as_slice()), capacity);
        assert_eq!(
            (found.num_hit_blocks, found.num_blocks),
            expected,
            "{capacity:?}"
        );
        assert_eq!(found.num_requests, 1_000);
    }
}

/// Blocks, and the hit rate to four digits, of leaf LRU: two independent implementations agree on it.
const LRU_TABLE: [(Option<u32>, f64); 9] = [
    (Some(1_000), 0.0445),
    (Some(2_000), 0.0543),
    (Some(5_859), 0.1361),
    (Some(10_000), 0.2116),
    (Some(20_000), 0.2878),
    (Some(30_000), 0.3257),
    (Some(50_000), 0.3546),
    (Some(97_656), 0.3635),
    (None, 0.3664),
];

#[test]
#[ignore = "needs the whole trace"]
fn lru_gives_the_reference_table() {
    let trace = whole_trace();
    for (capacity, expected) in LRU_TABLE {
        let found = hits(&trace, capacity, &SchedulerConfig::default());
        let rounded = (found.block_weighted() * 1e4).round() / 1e4;
        assert_eq!(rounded, expected, "{capacity:?}");
        if capacity.is_none() {
            assert_eq!((found.num_blocks, found.num_requests), (288_500, 12_031));
            assert_eq!((found.token_weighted() * 1e4).round(), 3736.0);
            assert_eq!((found.mean_per_request() * 1e4).round(), 4094.0);
        }
    }
}
