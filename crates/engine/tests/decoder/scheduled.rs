//! The scheduler over a real decoder: what it does to share and to save memory changes no token (A6).

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::session::{Random, Setup, fixture, open_runner, request};
use millpond_scheduler::scheduler::Scheduler;
use millpond_scheduler::stats::SchedulerStats;
use millpond_scheduler::{
    BatchPlan, Event, FinishReason, ModelOutput, ModelRunner, Request, RequestId, SamplingParams,
    SchedulerConfig, Timestamp, TokenId,
};

/// Tokens by request and choice.
type Outputs = BTreeMap<(RequestId, u32), Vec<TokenId>>;

const NUM_OUTPUT: u32 = 48;
const NUM_REQUESTS: u64 = 12;

/// Every second request shares a long prefix; every third samples; one asks for three choices.
fn requests() -> Vec<Request> {
    let mut random = Random(11);
    let mut tokens = |len| -> Vec<TokenId> {
        (0..len)
            .map(|_| TokenId(3 + random.below(500) as u32))
            .collect()
    };
    let shared = tokens(70);
    let ask = |id: u64| {
        let own = tokens(5 + id as usize * 7);
        let prompt = match id % 2 {
            0 => [shared.clone(), own].concat(),
            _ => own,
        };
        let sampling = SamplingParams {
            seed: id,
            temperature: if id.is_multiple_of(3) { 1.0 } else { 0.0 },
            top_p: 0.95,
            presence_penalty: 0.5,
            ..SamplingParams::default()
        };
        let mut request = request(id, &prompt, sampling);
        request.stop.max_tokens = NUM_OUTPUT;
        request.num_choices = if id == 6 { 3 } else { 1 };
        request
    };
    (0..NUM_REQUESTS).map(ask).collect()
}

/// Runs all requests to their ends; they arrive one step after the other.
fn run(model: &str, config: &SchedulerConfig, requests: &[Request]) -> (Outputs, SchedulerStats) {
    let setup = Setup {
        num_threads: 2,
        num_blocks: config.num_blocks,
        ..Setup::default()
    };
    let mut runner = open_runner(&fixture("tiny").join(model), setup);
    let mut scheduler = Scheduler::new(config.clone()).expect("a valid configuration");
    let mut arriving = requests.iter().cloned().map(Arc::new);
    let (mut plan, mut output, mut events) = Default::default();
    let mut outputs = Outputs::new();
    for step in 0.. {
        let now = Timestamp(step);
        let arrived = arriving.next();
        if let Some(request) = &arrived {
            scheduler
                .add(Arc::clone(request), now)
                .expect("the request fits");
        }
        if arrived.is_none() && !scheduler.has_work() {
            break;
        }
        scheduler.schedule(now, &mut plan, &mut events);
        runner.execute(&plan, &mut output).expect("the step runs");
        scheduler.commit(&plan, &output, now, &mut events);
        collect(&plan, &output, &mut events, &mut outputs);
    }
    (outputs, scheduler.stats())
}

fn collect(plan: &BatchPlan, output: &ModelOutput, events: &mut Vec<Event>, outputs: &mut Outputs) {
    assert_eq!(plan.rows.len(), output.rows.len());
    for event in events.drain(..) {
        match event {
            Event::Accepted {
                request,
                choice,
                row,
                num_tokens,
            } => {
                let tokens = output.row_tokens(&output.rows[row as usize]);
                let accepted = &tokens[..num_tokens as usize];
                outputs
                    .entry((request, choice))
                    .or_default()
                    .extend_from_slice(accepted);
            }
            Event::Finished { reason, .. } => assert_eq!(reason, FinishReason::Length),
            Event::Prefilled { .. }
            | Event::OfferExpired { .. }
            | Event::Reserved { .. }
            | Event::TransferExpired { .. } => panic!("{event:?} from a worker of its own"),
        }
    }
}

/// Each request on its own: no cache, no neighbour, the whole prompt in one step.
fn one_by_one(model: &str) -> Outputs {
    let config = SchedulerConfig {
        max_batch_tokens: 1024,
        prefix_cache: false,
        partial_copies: false,
        ..SchedulerConfig::default()
    };
    let runs = requests()
        .into_iter()
        .map(|request| run(model, &config, &[request]).0);
    runs.flatten().collect()
}

fn check(model: &str) {
    let reference = one_by_one(model);
    assert_eq!(reference.len(), NUM_REQUESTS as usize + 2);
    let roomy = SchedulerConfig {
        max_sequences: 16,
        ..SchedulerConfig::default()
    };
    let cases = [
        ("together", roomy.clone()),
        (
            "small chunks",
            SchedulerConfig {
                max_batch_tokens: 9,
                max_sequences: 5,
                ..roomy.clone()
            },
        ),
        (
            "whole blocks only",
            SchedulerConfig {
                partial_copies: false,
                ..roomy.clone()
            },
        ),
        (
            "no cache",
            SchedulerConfig {
                prefix_cache: false,
                ..roomy.clone()
            },
        ),
        (
            "tight pool",
            SchedulerConfig {
                num_blocks: 16,
                max_batch_tokens: 64,
                ..roomy
            },
        ),
    ];
    for (name, config) in cases {
        let (outputs, stats) = run(model, &config, &requests());
        assert_eq!(outputs, reference, "{model}, {name}");
        let hits = stats.counters.prefix_hit_tokens;
        assert_eq!(
            hits > 0,
            config.prefix_cache,
            "{model}, {name}: {hits} hits"
        );
        if name == "tight pool" {
            assert!(
                stats.counters.num_preemptions > 0,
                "{model}: the pool was meant to be too small"
            );
        }
    }
}

#[test]
fn llama_keeps_its_tokens_under_any_schedule() {
    check("llama");
}

#[test]
fn a_sliding_window_keeps_its_tokens_under_any_schedule() {
    check("mistral_sliding");
}

#[test]
fn local_and_global_layers_keep_their_tokens_under_any_schedule() {
    check("gemma3_text");
}
