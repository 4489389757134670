//! S02: realistic traces, with shared prefixes, tenants, long prompts among short ones, and cancel storms.

use millpond_scheduler::{RequestId, SchedulerConfig};
use proptest::prelude::*;

use crate::harness::Harness;
use crate::property::check_property;
use crate::workload::{Ask, Prompt};

/// Requests by the step at which they arrive, and the storms that cancel some of them.
#[derive(Clone, Debug)]
struct Trace {
    config: SchedulerConfig,
    arrivals: Vec<Arrival>,
    storms: Vec<Storm>,
}

#[derive(Clone, Debug)]
struct Arrival {
    step: u32,
    ask: Ask,
}

/// At `step`, every live request whose id leaves `remainder` when divided by `modulus` is aborted.
#[derive(Clone, Debug)]
struct Storm {
    step: u32,
    modulus: u64,
    remainder: u64,
    in_flight: bool,
}

fn arrivals() -> impl Strategy<Value = Arrival> {
    let length = prop_oneof![6 => 1u32..80, 2 => Just(512u32), 1 => Just(3000u32)];
    let prompt = (0u8..2, length, 0u8..4, 1u32..40);
    (0u32..120, prompt, 1u32..60, 0u8..3, 1u32..=3).prop_map(
        |(step, (family, shared, tail, own), max_tokens, salt, num_choices)| {
            let mut ask = Ask::plain(tail, own, max_tokens);
            ask.prompt = Prompt {
                family,
                shared,
                tail,
                own,
            };
            ask.salt = salt;
            ask.num_choices = num_choices;
            Arrival { step, ask }
        },
    )
}

fn storms() -> impl Strategy<Value = Storm> {
    (0u32..140, 1u64..4, 0u64..4, any::<bool>()).prop_map(
        |(step, modulus, remainder, in_flight)| Storm {
            step,
            modulus,
            remainder: remainder % modulus,
            in_flight,
        },
    )
}

fn traces() -> impl Strategy<Value = Trace> {
    (
        210u32..600,
        prop::collection::vec(arrivals(), 5..50),
        prop::collection::vec(storms(), 0..3),
    )
        .prop_map(|(num_blocks, mut arrivals, storms)| {
            arrivals.sort_by_key(|arrival| arrival.step);
            let config = SchedulerConfig {
                num_blocks,
                max_sequences: 32,
                max_batch_tokens: 512,
                ..SchedulerConfig::default()
            };
            Trace {
                config,
                arrivals,
                storms,
            }
        })
}

fn replay(trace: &Trace) {
    let mut harness = Harness::new(trace.config.clone());
    let mut arrivals = trace.arrivals.iter().enumerate().peekable();
    for step in 0..140 {
        while let Some((id, arrival)) = arrivals.next_if(|(_, arrival)| arrival.step <= step) {
            harness.submit(arrival.ask.request(id as u64, harness.now));
        }
        let is_now = |storm: &&Storm| storm.step == step;
        let (in_flight, between): (Vec<&Storm>, Vec<&Storm>) = trace
            .storms
            .iter()
            .filter(is_now)
            .partition(|storm| storm.in_flight);
        between
            .into_iter()
            .for_each(|storm| blow(&mut harness, storm));
        if harness.schedule() {
            in_flight
                .into_iter()
                .for_each(|storm| blow(&mut harness, storm));
            harness.finish_step();
        }
    }
    harness.drain();
}

fn blow(harness: &mut Harness, storm: &Storm) {
    let live = harness.ledger.live().map(|(id, _)| id.request);
    let mut hit: Vec<RequestId> = live
        .filter(|request| request.0 % storm.modulus == storm.remainder)
        .collect();
    hit.dedup();
    for request in hit {
        harness.abort(request);
    }
}

#[test]
fn s02_traces_give_every_request_its_solo_output() {
    check_property(60, traces(), |trace| replay(&trace));
}
