//! Time per token of the sampling pipeline on a vocabulary of 49,152.
//!
//! `cargo bench -p millpond-engine --bench sampling`

use std::hint::black_box;
use std::sync::Arc;

use criterion::{Criterion, criterion_group, criterion_main};
use millpond_engine::sampling::logprobs::position_logprobs;
use millpond_engine::sampling::{Sampler, SamplingState};
use millpond_scheduler::{
    CacheSalt, Deadlines, Request, RequestId, SamplingParams, StopConditions, Timestamp, TokenId,
};

/// Bell-shaped logits, the most likely one about 4 standard deviations above the mean, as of a real model.
fn logits() -> Vec<f32> {
    let dice = |i: u32, k: u32| ((i * 4 + k) * 7919 % 48_611) as f32 / 48_611.0;
    (0..49_152)
        .map(|i| ((0..4).map(|k| dice(i, k)).sum::<f32>() - 2.0) * 8.0)
        .collect()
}

fn state(sampling: SamplingParams) -> SamplingState {
    let request = Request {
        id: RequestId(1),
        prompt: (0..1000).map(TokenId).collect(),
        sampling,
        stop: StopConditions {
            max_tokens: 100,
            min_tokens: 0,
            stop_token_ids: Vec::new(),
            eos_token_ids: Vec::new(),
            ignore_eos: true,
        },
        num_choices: 1,
        priority: 0,
        salt: CacheSalt::default(),
        arrival: Timestamp::default(),
        deadlines: Deadlines::default(),
    };
    SamplingState::new(&Arc::new(request), 0, &[])
}

fn warm() -> SamplingParams {
    SamplingParams {
        temperature: 1.0,
        ..SamplingParams::default()
    }
}

fn pipeline(c: &mut Criterion) {
    let cases = [
        ("greedy", SamplingParams::default()),
        ("temperature", warm()),
        (
            "top_k 40",
            SamplingParams {
                top_k: 40,
                ..warm()
            },
        ),
        (
            "top_p 0.9",
            SamplingParams {
                top_p: 0.9,
                ..warm()
            },
        ),
        (
            "min_p 0.05",
            SamplingParams {
                min_p: 0.05,
                ..warm()
            },
        ),
        (
            "top_k 40, top_p 0.9, repetition 1.1",
            SamplingParams {
                top_k: 40,
                top_p: 0.9,
                repetition_penalty: 1.1,
                ..warm()
            },
        ),
        (
            "top_p 0.99, temperature 5",
            SamplingParams {
                top_p: 0.99,
                temperature: 5.0,
                ..warm()
            },
        ),
    ];
    let logits = logits();
    let mut sampler = Sampler::new(logits.len());
    for (name, sampling) in cases {
        let state = state(sampling);
        let mut position = 0;
        c.bench_function(name, |b| {
            b.iter(|| {
                position += 1;
                sampler.sample(black_box(&logits), &state, position)
            })
        });
    }
    c.bench_function("logprobs, 5 alternatives", |b| {
        b.iter(|| position_logprobs(black_box(&logits), TokenId(7), 5))
    });
}

criterion_group!(benches, pipeline);
criterion_main!(benches);
