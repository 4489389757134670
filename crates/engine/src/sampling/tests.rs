//! The pipeline against right answers of other implementations, against its own law, and at its edges.

use std::path::Path;
use std::sync::Arc;

use millpond_scheduler::{
    CacheSalt, Deadlines, Request, RequestId, RowError, SamplingParams, StopConditions, Timestamp,
    TokenId,
};
use serde::Deserialize;

use super::logprobs::position_logprobs;
use super::{Sampler, SamplingState, probabilities};

/// A request for as many tokens as it takes.
fn request(prompt: &[u32], sampling: SamplingParams) -> Request {
    Request {
        id: RequestId(1),
        prompt: prompt.iter().copied().map(TokenId).collect(),
        sampling,
        stop: StopConditions {
            max_tokens: 1000,
            min_tokens: 0,
            stop_token_ids: Vec::new(),
            eos_token_ids: Vec::new(),
            ignore_eos: false,
        },
        num_choices: 1,
        priority: 0,
        salt: CacheSalt::default(),
        arrival: Timestamp::default(),
        deadlines: Deadlines::default(),
    }
}

fn warm() -> SamplingParams {
    SamplingParams {
        temperature: 1.0,
        ..SamplingParams::default()
    }
}

/// The state after no output.
fn state(request: Request) -> SamplingState {
    SamplingState::new(&Arc::new(request), 0, &[])
}

fn sample(logits: &[f32], state: &SamplingState, position: u32) -> Result<u32, RowError> {
    let token = Sampler::new(logits.len()).sample(logits, state, position);
    token.map(|token| token.0)
}

mod fixtures {
    use std::collections::BTreeMap;

    use super::*;

    #[derive(Deserialize)]
    struct File {
        tolerance_abs: f32,
        cases: Vec<Case>,
    }

    #[derive(Deserialize)]
    pub struct Case {
        pub name: String,
        params: Params,
        pub logits: Vec<f32>,
        prompt_ids: Vec<u32>,
        output_ids: Vec<u32>,
        pub expected_vllm: Vec<f32>,
        check: Option<String>,
    }

    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Params {
        temperature: Option<f32>,
        top_k: Option<i64>,
        top_p: Option<f32>,
        min_p: Option<f32>,
        repetition_penalty: Option<f32>,
        frequency_penalty: Option<f32>,
        presence_penalty: Option<f32>,
        #[serde(default)]
        logit_bias: BTreeMap<u32, f32>,
    }

    impl Params {
        fn sampling(&self) -> SamplingParams {
            let bias = self.logit_bias.iter();
            SamplingParams {
                temperature: self.temperature.unwrap_or(1.0),
                // −1 is another spelling of "all".
                top_k: u32::try_from(self.top_k.unwrap_or(0)).unwrap_or(0),
                top_p: self.top_p.unwrap_or(1.0),
                min_p: self.min_p.unwrap_or(0.0),
                repetition_penalty: self.repetition_penalty.unwrap_or(1.0),
                frequency_penalty: self.frequency_penalty.unwrap_or(0.0),
                presence_penalty: self.presence_penalty.unwrap_or(0.0),
                logit_bias: bias.map(|(id, bias)| (TokenId(*id), *bias)).collect(),
                ..SamplingParams::default()
            }
        }
    }

    impl Case {
        pub fn state(&self, seed: u64, choice: u32) -> SamplingState {
            let sampling = SamplingParams {
                seed,
                ..self.params.sampling()
            };
            let output: Vec<_> = self.output_ids.iter().copied().map(TokenId).collect();
            SamplingState::new(
                &Arc::new(request(&self.prompt_ids, sampling)),
                choice,
                &output,
            )
        }
    }

    fn read() -> File {
        let path =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/sampling/cases.json");
        let text = std::fs::read_to_string(path).expect("the fixture is in the repository");
        serde_json::from_str(&text).expect("the fixture has this layout")
    }

    pub fn cases() -> Vec<Case> {
        read().cases
    }

    #[test]
    fn every_case_has_the_expected_law() {
        let file = read();
        assert_eq!(file.cases.len(), 63);
        for case in file.cases {
            let mut law = probabilities(&case.logits, &case.state(0, 0)).expect("finite logits");
            let mut expected = case.expected_vllm;
            if case.check.is_some() {
                // Which of tied tokens survive is not defined between implementations.
                law.sort_unstable_by(f32::total_cmp);
                expected.sort_unstable_by(f32::total_cmp);
            }
            for (token, (got, want)) in law.iter().zip(&expected).enumerate() {
                let context = format!("{}, token {token}: {got} for {want}", case.name);
                assert!((got - want).abs() <= file.tolerance_abs, "{context}");
                assert_eq!(*got == 0.0, *want == 0.0, "{context}");
            }
        }
    }
}

mod draws {
    use super::*;

    /// What changes from draw to draw; every one of them must be enough to make draws independent.
    #[derive(Clone, Copy, Debug)]
    enum Varied {
        Seed,
        Choice,
        Position,
    }

    const ALL_VARIED: [Varied; 3] = [Varied::Seed, Varied::Choice, Varied::Position];

    fn draw(case: &fixtures::Case, varied: Varied, index: u32) -> usize {
        let (seed, choice, position) = match varied {
            Varied::Seed => (u64::from(index), 0, 17),
            Varied::Choice => (5, index, 17),
            Varied::Position => (5, 0, index),
        };
        let token = sample(&case.logits, &case.state(seed, choice), position);
        token.expect("something is left") as usize
    }

    /// χ² of `counts` against `law`, cells below 5 expected merged, and the critical value for p = 0.001
    /// (Wilson and Hilferty's approximation).
    fn chi_square(counts: &[u32], law: &[f64]) -> (f64, f64) {
        let draws = f64::from(counts.iter().sum::<u32>());
        let mut cells = Vec::new();
        let mut small = (0.0, 0.0);
        for (count, p) in counts.iter().zip(law) {
            let cell = (f64::from(*count), p * draws);
            match cell.1 {
                0.0 => assert_eq!(*count, 0, "a token of probability 0 was drawn"),
                5.0.. => cells.push(cell),
                _few => small = (small.0 + cell.0, small.1 + cell.1),
            }
        }
        if small.1 > 0.0 {
            cells.push(small);
        }
        let statistic = cells
            .iter()
            .map(|(got, want)| (got - want).powi(2) / want)
            .sum();
        let freedom = (cells.len() - 1).max(1) as f64;
        let spread = 2.0 / (9.0 * freedom);
        (
            statistic,
            freedom * (1.0 - spread + 3.0902 * spread.sqrt()).powi(3),
        )
    }

    #[test]
    fn draws_follow_the_law() {
        let names = [
            "plain",
            "temp5.0",
            "topk_topp_temp",
            "flat_topp",
            "kitchen_sink",
        ];
        let cases = fixtures::cases();
        for case in cases
            .iter()
            .filter(|case| names.contains(&case.name.as_str()))
        {
            let law = probabilities(&case.logits, &case.state(0, 0)).expect("finite logits");
            let law: Vec<f64> = law.into_iter().map(f64::from).collect();
            for varied in ALL_VARIED {
                let mut counts = vec![0; law.len()];
                for index in 0..20_000 {
                    counts[draw(case, varied, index)] += 1;
                }
                let (statistic, critical) = chi_square(&counts, &law);
                let name = &case.name;
                assert!(
                    statistic < critical,
                    "{name}, {varied:?}: {statistic} > {critical}"
                );
            }
        }
    }

    /// Neighbouring seeds, choices and positions, and the two halves of the vocabulary, draw independently.
    #[test]
    fn neighbouring_draws_are_independent() {
        let cases = fixtures::cases();
        let case = cases
            .iter()
            .find(|case| case.name == "topk5")
            .expect("a case of 5 tokens");
        let law = probabilities(&case.logits, &case.state(0, 0)).expect("finite logits");
        let pairs: Vec<f64> = law
            .iter()
            .flat_map(|p| law.iter().map(|q| f64::from(*p) * f64::from(*q)))
            .collect();
        for varied in ALL_VARIED {
            let mut counts = vec![0; pairs.len()];
            for index in 0..20_000 {
                let (first, second) = (
                    draw(case, varied, 2 * index),
                    draw(case, varied, 2 * index + 1),
                );
                counts[first * law.len() + second] += 1;
            }
            let (statistic, critical) = chi_square(&counts, &pairs);
            assert!(statistic < critical, "{varied:?}: {statistic} > {critical}");
        }
    }

    #[test]
    fn a_draw_repeats() {
        let case = &fixtures::cases()[0];
        for index in 0..100 {
            assert_eq!(
                draw(case, Varied::Position, index),
                draw(case, Varied::Position, index)
            );
        }
    }

    /// A sampler that served others draws what a new one draws.
    #[test]
    fn scratch_memory_does_not_leak_into_results() {
        let mut used = Sampler::new(8);
        for case in fixtures::cases() {
            let state = case.state(11, 0);
            let expected = Sampler::new(32).sample(&case.logits, &state, 3);
            assert_eq!(
                used.sample(&case.logits, &state, 3),
                expected,
                "{}",
                case.name
            );
        }
    }
}

/// A vocabulary of real size, bell-shaped, with ties.
fn large_vocabulary() -> Vec<f32> {
    (0..49_152_u32)
        .map(|i| {
            let dice = (0..4).map(|k| ((i * 4 + k) * 7919 % 48_611) as f32 / 48_611.0);
            (dice.sum::<f32>() - 2.0) * 8.0
        })
        .collect()
}

/// The filters' shortcuts (growing reach, quickselect) keep what a full sort would keep.
#[test]
fn filters_of_a_large_vocabulary_equal_those_of_a_full_sort() {
    let logits = large_vocabulary();
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)));
    for (temperature, top_k, top_p) in [
        (1.0, 0, 0.9),
        (0.3, 0, 0.5),
        (20.0, 0, 0.99),
        (1.0, 40, 1.0),
        (1.0, 1000, 0.7),
        (2.0, 40_000, 0.999),
        (1.0, 0, 0.0),
    ] {
        let params = SamplingParams {
            top_k,
            top_p,
            temperature,
            ..SamplingParams::default()
        };
        let law = probabilities(&logits, &state(request(&[0], params))).expect("finite logits");
        let kept = order.iter().take_while(|token| law[**token] > 0.0).count();
        let num_positive = law.iter().filter(|p| **p > 0.0).count();
        assert_eq!(
            kept, num_positive,
            "the kept tokens are the most likely ones"
        );
        let expected = nucleus_by_sort(&order, &logits, (temperature, top_k as usize, top_p));
        assert_eq!(kept, expected, "T {temperature}, k {top_k}, p {top_p}");
    }
}

/// Number of tokens that stay, by the definition, in f64.
fn nucleus_by_sort(
    order: &[usize],
    logits: &[f32],
    (temperature, top_k, top_p): (f32, usize, f32),
) -> usize {
    let mut num = order.len();
    if 0 < top_k && top_k < num {
        let kth = logits[order[top_k - 1]];
        num = order
            .iter()
            .take_while(|token| logits[**token] >= kth)
            .count();
    }
    if top_p >= 1.0 {
        return num;
    }
    let peak = f64::from(logits[order[0]]);
    let weight =
        |token: &usize| ((f64::from(logits[*token]) - peak) / f64::from(temperature)).exp();
    let total: f64 = order[..num].iter().map(weight).sum();
    let mut before = 0.0;
    let kept = order[..num].iter().take_while(|token| {
        let stays = before < f64::from(top_p) * total;
        before += weight(token);
        stays
    });
    kept.count().max(1)
}

#[test]
fn greedy_takes_the_lowest_of_equal_tokens() {
    let mut logits = vec![0.5; 300];
    for tied in [70, 131, 299] {
        logits[tied] = 3.0;
    }
    for temperature in [0.0, 9e-6] {
        let params = SamplingParams {
            temperature,
            seed: 3,
            ..warm()
        };
        assert_eq!(sample(&logits, &state(request(&[0], params)), 9), Ok(70));
    }
}

#[test]
fn non_finite_logits_fail_the_row() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for temperature in [0.0, 1.0] {
            let mut logits = vec![0.0; 40];
            logits[33] = bad;
            let params = SamplingParams {
                temperature,
                // A mask that hides the bad logit does not excuse it.
                allowed_token_ids: Some(vec![TokenId(1)]),
                ..warm()
            };
            let token = sample(&logits, &state(request(&[0], params)), 0);
            assert_eq!(token, Err(RowError::NonFiniteLogits), "{bad}");
        }
    }
}

#[test]
fn masks_that_leave_nothing_fail_the_row() {
    let logits = [1.0, 2.0, 3.0];
    for temperature in [0.0, 1.0] {
        let mut request = request(
            &[0],
            SamplingParams {
                temperature,
                ..warm()
            },
        );
        request.stop.min_tokens = 1;
        request.stop.stop_token_ids = vec![TokenId(1)];
        for allowed in [
            vec![],
            vec![TokenId(1)],
            vec![TokenId(3), TokenId(u32::MAX)],
        ] {
            request.sampling.allowed_token_ids = Some(allowed);
            let token = sample(&logits, &state(request.clone()), 0);
            assert_eq!(token, Err(RowError::NothingToSample));
        }
        assert_eq!(
            sample(&[], &state(request), 0),
            Err(RowError::NothingToSample)
        );
    }
}

#[test]
fn bias_cannot_lift_a_mask() {
    let params = SamplingParams {
        allowed_token_ids: Some(vec![TokenId(0), TokenId(2)]),
        logit_bias: vec![(TokenId(1), 100.0), (TokenId(9), 5.0)],
        ..warm()
    };
    let law = probabilities(&[0.0, 5.0, 0.0], &state(request(&[0], params)));
    assert_eq!(law, Ok(vec![0.5, 0.0, 0.5]));
}

#[test]
fn min_tokens_forbids_what_would_end_the_output() {
    let logits = [9.0, 8.0, 7.0, 1.0];
    let mut request = request(&[0], SamplingParams::default());
    request.stop.min_tokens = 2;
    request.stop.eos_token_ids = vec![TokenId(0)];
    request.stop.stop_token_ids = vec![TokenId(1), TokenId(77)];
    for (ignore_eos, expected) in [(false, [2, 2, 0]), (true, [0, 0, 0])] {
        request.stop.ignore_eos = ignore_eos;
        let mut state = state(request.clone());
        for token in expected {
            assert_eq!(
                sample(&logits, &state, 0),
                Ok(token),
                "ignore_eos {ignore_eos}"
            );
            state.accept(TokenId(token));
        }
        assert_eq!(state.num_output(), 3);
    }
}

#[test]
fn extreme_penalties_leave_finite_laws() {
    for (repetition_penalty, frequency_penalty) in [(f32::MIN_POSITIVE, 0.0), (f32::MAX, f32::MAX)]
    {
        let params = SamplingParams {
            repetition_penalty,
            frequency_penalty,
            ..warm()
        };
        let request = Arc::new(request(&[0, 1], params));
        let state = SamplingState::new(&request, 0, &[TokenId(1), TokenId(2)]);
        let law = probabilities(&[1e30, -1e30, 0.5, 0.25], &state).expect("finite logits");
        assert!(law.iter().all(|p| p.is_finite()), "{law:?}");
        assert!((law.iter().sum::<f32>() - 1.0).abs() < 1e-5, "{law:?}");
    }
}

#[test]
fn a_rebuilt_state_equals_one_that_followed() {
    let params = SamplingParams {
        repetition_penalty: 1.2,
        frequency_penalty: 0.5,
        ..warm()
    };
    let request = Arc::new(request(&[5, 3, 5, 9], params));
    let output: Vec<_> = [9, 1, 1, 40, 3, 1, 0].map(TokenId).to_vec();
    for cut in 0..=output.len() {
        let mut followed = SamplingState::new(&request, 2, &output[..cut]);
        for token in &output[cut..] {
            followed.accept(*token);
        }
        assert_eq!(followed, SamplingState::new(&request, 2, &output));
    }
}

#[test]
fn log_probabilities_are_those_of_the_raw_logits() {
    let logits = large_vocabulary();
    let peak = f64::from(logits.iter().copied().fold(f32::MIN, f32::max));
    let sum: f64 = logits.iter().map(|x| (f64::from(*x) - peak).exp()).sum();
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)));
    for (chosen, num_top) in [(order[0], 0), (order[4], 5), (order[40_000], 20)] {
        let report = position_logprobs(&logits, TokenId(chosen as u32), num_top);
        let expected = |token: usize| (f64::from(logits[token]) - peak - sum.ln()) as f32;
        assert!((report.chosen.logprob - expected(chosen)).abs() < 2e-6);
        let larger = logits.iter().filter(|x| **x > logits[chosen]).count();
        assert_eq!(report.rank as usize, larger + 1);
        assert_eq!(report.top.len(), num_top as usize);
        for (entry, token) in report.top.iter().zip(&order) {
            assert_eq!(entry.token.0 as usize, *token);
            assert!((entry.logprob - expected(*token)).abs() < 2e-6);
        }
    }
}

#[test]
fn log_probabilities_of_odd_questions() {
    let report = position_logprobs(&[0.0, 0.0], TokenId(7), 5);
    assert_eq!(report.chosen.logprob, f32::NEG_INFINITY);
    assert_eq!(report.rank, 3);
    let top: Vec<_> = report.top.iter().map(|entry| entry.token.0).collect();
    assert_eq!(top, [0, 1], "no more than the vocabulary, ties by id");
}
