//! How long a step takes: a linear model of its rows, with published parameters or fitted to measured steps.
//!
//! After DistServe (arXiv 2401.09670): a prefill of lengths l costs a + b Σl + c Σl², a decode of contexts s
//! costs a + b Σs + c · batch. A step with both reads the weights once and pays the larger a.

use serde::{Deserialize, Serialize};

use crate::plan::{BatchPlan, Row};
use crate::time::Span;

/// What of a plan decides how long it takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepShape {
    /// Tokens in prefill rows.
    pub prefill_tokens: u64,
    /// Σ (end² − start²) over prefill rows, so that the chunks of a prompt add up to its length squared.
    pub prefill_squares: u64,
    /// Rows that feed one token and sample.
    pub decode_rows: u64,
    /// Positions those rows attend to, the fed one included.
    pub decode_context: u64,
}

impl StepShape {
    /// The shape of `plan`. A prompt's last token alone in a row costs what a decode costs and counts as one.
    pub fn of(plan: &BatchPlan) -> Self {
        let mut shape = StepShape::default();
        for row in &plan.rows {
            shape.add(row);
        }
        shape
    }

    fn add(&mut self, row: &Row) {
        let start = u64::from(row.first_position);
        let end = start + u64::from(row.tokens.len());
        if row.sample && row.tokens.len() == 1 {
            self.decode_rows += 1;
            self.decode_context += end;
        } else {
            self.prefill_tokens += end - start;
            self.prefill_squares += end * end - start * start;
        }
    }
}

/// Cost of the prefill rows of a step, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PrefillCost {
    /// Per step.
    pub fixed: f64,
    /// Per token.
    pub per_token: f64,
    /// Per token of a prompt, squared.
    pub per_square: f64,
}

/// Cost of the decode rows of a step, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DecodeCost {
    /// Per step.
    pub fixed: f64,
    /// Per position attended to.
    pub per_context_token: f64,
    /// Per row.
    pub per_row: f64,
}

/// Time of a step as a function of its shape.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct CostModel {
    /// Of prefill rows.
    pub prefill: PrefillCost,
    /// Of decode rows.
    pub decode: DecodeCost,
    /// Of decode rows when there are at least this many.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub large_decode: Option<(u64, DecodeCost)>,
}

const MILLI: f64 = 1e6;

/// A model published for some engine on some machine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Preset {
    /// What it is asked for by.
    pub name: &'static str,
    /// Whose it is.
    pub about: &'static str,
    /// The model.
    pub model: CostModel,
    /// KV blocks of 16 tokens that the machine it describes has room for, where published.
    pub num_blocks: Option<u32>,
}

/// DistServe's formula for one pipeline stage, which adds 1 ms to each prefill. Parameters in milliseconds.
const fn distserve(prefill: [f64; 3], decode: [f64; 3], large: Option<[f64; 3]>) -> CostModel {
    CostModel {
        prefill: PrefillCost {
            fixed: (prefill[0] + 1.0) * MILLI,
            per_token: prefill[1] * MILLI,
            per_square: prefill[2] * MILLI,
        },
        decode: decode_cost(decode),
        large_decode: match large {
            Some(large) => Some((95, decode_cost(large))),
            None => None,
        },
    }
}

const fn decode_cost([fixed, per_context_token, per_row]: [f64; 3]) -> DecodeCost {
    DecodeCost {
        fixed: fixed * MILLI,
        per_context_token: per_context_token * MILLI,
        per_row: per_row * MILLI,
    }
}

/// Every named model. The first is the default.
pub const PRESETS: [Preset; 6] = [
    Preset {
        name: "distserve-13b",
        about: "OPT-13B on one A100, DistServe's engine (its simulator's parameters)",
        model: distserve(
            [18.1025, 0.101912, 7.1223e-06],
            [19.9347, 0.000_626_94, 0.038507],
            Some([7.16619, 0.000_579_80, 0.158311]),
        ),
        num_blocks: Some(66_144 / 16),
    },
    Preset {
        name: "vllm-13b",
        about: "OPT-13B on one A100, vLLM (DistServe's simulator's parameters)",
        model: distserve(
            [22.0522, 0.140509, 8.0766e-06],
            [23.4750, 0.000_592_93, 0.060_726_9],
            Some([20.2064, 0.000_490_77, 0.120003]),
        ),
        num_blocks: Some(66_144 / 16),
    },
    Preset {
        name: "distserve-66b",
        about: "OPT-66B on four A100, DistServe's engine (its simulator's parameters)",
        model: distserve(
            [29.4416, 0.151352, 8.3175e-06],
            [30.7603, 0.000_451_95, 0.063_284_2],
            None,
        ),
        num_blocks: None,
    },
    Preset {
        name: "vllm-66b",
        about: "OPT-66B on four A100, vLLM (DistServe's simulator's parameters)",
        model: distserve(
            [42.9655, 0.212866, 4.6010e-05],
            [39.5818, 0.000_694_57, 0.135809],
            None,
        ),
        num_blocks: None,
    },
    Preset {
        name: "burst",
        about: "the structural benchmark: 0.20 ms per decode step, 4 µs per prefill token",
        model: CostModel {
            prefill: PrefillCost {
                fixed: 0.0,
                per_token: 0.004 * MILLI,
                per_square: 0.0,
            },
            decode: DecodeCost {
                fixed: 0.20 * MILLI,
                per_context_token: 0.0,
                per_row: 0.0,
            },
            large_decode: None,
        },
        num_blocks: None,
    },
    Preset {
        name: "unit",
        about: "1 ms per step, whatever it holds: for tests",
        model: UNIT,
        num_blocks: None,
    },
];

/// Every step takes 1 ms.
pub const UNIT: CostModel = CostModel {
    prefill: PrefillCost {
        fixed: MILLI,
        per_token: 0.0,
        per_square: 0.0,
    },
    decode: DecodeCost {
        fixed: MILLI,
        per_context_token: 0.0,
        per_row: 0.0,
    },
    large_decode: None,
};

/// The preset of this name.
pub fn preset(name: &str) -> Option<&'static Preset> {
    PRESETS.iter().find(|preset| preset.name == name)
}

impl CostModel {
    /// How long a step of this shape takes: at least a nanosecond, so that time goes on.
    pub fn step_time(&self, shape: &StepShape) -> Span {
        let prefill = (shape.prefill_tokens > 0).then_some(&self.prefill);
        let decode = (shape.decode_rows > 0).then(|| self.decode_cost(shape.decode_rows));
        let prefill_fixed = prefill.map_or(0.0, |cost| cost.fixed);
        let decode_fixed = decode.map_or(0.0, |cost| cost.fixed);
        let variable = prefill.map_or(0.0, |cost| {
            cost.per_token * shape.prefill_tokens as f64
                + cost.per_square * shape.prefill_squares as f64
        }) + decode.map_or(0.0, |cost| {
            cost.per_context_token * shape.decode_context as f64
                + cost.per_row * shape.decode_rows as f64
        });
        let nanos = prefill_fixed.max(decode_fixed) + variable;
        Span((nanos.round() as u64).max(1))
    }

    fn decode_cost(&self, num_rows: u64) -> &DecodeCost {
        match &self.large_decode {
            Some((from, large)) if num_rows >= *from => large,
            Some(_) | None => &self.decode,
        }
    }

    /// The model whose relative errors over `steps` are least in the sum of squares, without negative
    /// costs; `None` when there is no step.
    pub fn fit(steps: &[(StepShape, Span)]) -> Option<CostModel> {
        let mut used = [true; NUM_FEATURES];
        loop {
            let weights = least_squares(steps, &used)?;
            let negative = (0..NUM_FEATURES).filter(|i| used[*i] && weights[*i] < 0.0);
            let worst = negative.min_by(|a, b| weights[*a].total_cmp(&weights[*b]));
            match worst {
                Some(worst) => used[worst] = false,
                None => return Some(CostModel::from_weights(weights)),
            }
        }
    }

    fn from_weights([fixed, token, square, context, row]: [f64; NUM_FEATURES]) -> Self {
        CostModel {
            prefill: PrefillCost {
                fixed,
                per_token: token,
                per_square: square,
            },
            decode: DecodeCost {
                fixed,
                per_context_token: context,
                per_row: row,
            },
            large_decode: None,
        }
    }
}

const NUM_FEATURES: usize = 5;

fn features(shape: &StepShape) -> [f64; NUM_FEATURES] {
    [
        1.0,
        shape.prefill_tokens as f64,
        shape.prefill_squares as f64,
        shape.decode_context as f64,
        shape.decode_rows as f64,
    ]
}

/// Weights of the used features by the normal equations; features that never vary alone weigh nothing.
fn least_squares(
    steps: &[(StepShape, Span)],
    used: &[bool; NUM_FEATURES],
) -> Option<[f64; NUM_FEATURES]> {
    if steps.is_empty() {
        return None;
    }
    let mut rows = [[0.0; NUM_FEATURES + 1]; NUM_FEATURES];
    let scale = scales(steps);
    for (shape, time) in steps {
        let nanos = (time.0 as f64).max(1.0);
        // Errors count relative to the step's own time.
        let x = features(shape);
        let scaled = |i: usize| match used[i] {
            true => x[i] / scale[i] / nanos,
            false => 0.0,
        };
        for (i, row) in rows.iter_mut().enumerate() {
            for (j, cell) in row.iter_mut().take(NUM_FEATURES).enumerate() {
                *cell += scaled(i) * scaled(j);
            }
            row[NUM_FEATURES] += scaled(i);
        }
    }
    let solution = solve(rows);
    Some(std::array::from_fn(|i| solution[i] / scale[i]))
}

/// The largest value of each feature, so that the equations are well conditioned.
fn scales(steps: &[(StepShape, Span)]) -> [f64; NUM_FEATURES] {
    let mut scale = [1.0f64; NUM_FEATURES];
    for (shape, _) in steps {
        for (largest, value) in scale.iter_mut().zip(features(shape)) {
            *largest = largest.max(value);
        }
    }
    scale
}

/// Gauss-Jordan elimination with diagonal pivots, which suits a positive semidefinite matrix.
fn solve(mut rows: [[f64; NUM_FEATURES + 1]; NUM_FEATURES]) -> [f64; NUM_FEATURES] {
    let largest = (0..NUM_FEATURES).map(|i| rows[i][i]).fold(0.0, f64::max);
    let mut solved = [false; NUM_FEATURES];
    for pivot in 0..NUM_FEATURES {
        if rows[pivot][pivot] <= largest * 1e-12 {
            continue;
        }
        solved[pivot] = true;
        let by = rows[pivot];
        for (i, row) in rows.iter_mut().enumerate() {
            let factor = match i == pivot {
                true => 1.0 - 1.0 / by[pivot],
                false => row[pivot] / by[pivot],
            };
            for (cell, other) in row.iter_mut().zip(by) {
                *cell -= factor * other;
            }
        }
    }
    std::array::from_fn(|i| match solved[i] {
        true => rows[i][NUM_FEATURES],
        false => 0.0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::dice::Dice;

    fn shape(prefill: u64, rows: u64, context: u64) -> StepShape {
        StepShape {
            prefill_tokens: prefill,
            prefill_squares: prefill * prefill,
            decode_rows: rows,
            decode_context: context,
        }
    }

    #[test]
    fn presets_give_the_published_times() {
        let time = |name, shape| preset(name).expect("there").model.step_time(&shape).0;
        assert_eq!(time("burst", shape(0, 16, 999)), 200_000);
        assert_eq!(time("burst", shape(100, 0, 0)), 400_000);
        assert_eq!(time("burst", shape(100, 1, 9)), 600_000);
        // (18.1025 + 0.101912 · 512 + 7.1223e-06 · 512²) + 1, in milliseconds.
        assert_eq!(time("distserve-13b", shape(512, 0, 0)), 73_148_512);
        // 19.9347 + 0.00062694 · 4000 + 0.038507 · 10
        assert_eq!(time("distserve-13b", shape(0, 10, 4000)), 22_827_530);
        // From 95 rows on the other set: 7.16619 + 0.00057980 · 40000 + 0.158311 · 95
        assert_eq!(time("distserve-13b", shape(0, 95, 40_000)), 45_397_735);
        assert_eq!(time("unit", shape(7, 3, 9)), 1_000_000);
    }

    #[test]
    fn chunks_of_a_prompt_cost_their_tokens_and_squares_once() {
        let row = |first: u32, end: u32, sample| Row {
            sequence: crate::SequenceId(0),
            first_position: first,
            tokens: crate::Span32 { start: first, end },
            blocks: crate::Span32::default(),
            sample,
            prompt_logprobs: crate::Span32::default(),
        };
        let plan = BatchPlan {
            rows: vec![row(0, 10, false), row(10, 25, true), row(30, 31, true)],
            ..BatchPlan::default()
        };
        let expected = StepShape {
            prefill_tokens: 25,
            prefill_squares: 625,
            decode_rows: 1,
            decode_context: 31,
        };
        assert_eq!(StepShape::of(&plan), expected);
    }

    #[test]
    fn a_fit_finds_the_model_that_made_the_steps() {
        let truth = CostModel::from_weights([3e6, 5e4, 12.0, 800.0, 9e4]);
        let mut dice = Dice::new(3);
        let mut draw = || {
            let rows = dice.below(32);
            shape(dice.below(500), rows, rows * (1 + dice.below(900)))
        };
        let steps: Vec<_> = (0..200).map(|_| draw()).collect();
        let steps: Vec<_> = steps.iter().map(|s| (*s, truth.step_time(s))).collect();
        let fitted = CostModel::fit(&steps).expect("there are steps");
        for (shape, time) in &steps {
            let error = fitted.step_time(shape).0 as f64 / time.0 as f64 - 1.0;
            assert!(error.abs() < 1e-4, "{shape:?}: {error}");
        }
    }

    #[test]
    fn a_fit_has_no_negative_cost_and_survives_features_that_never_occur() {
        let steps = [
            (shape(0, 1, 100), Span(1000)),
            (shape(0, 1, 200), Span(900)),
        ];
        let fitted = CostModel::fit(&steps).expect("there are steps");
        assert_eq!(fitted.decode.per_context_token, 0.0);
        assert!((900..=1000).contains(&fitted.step_time(&steps[0].0).0));
        assert_eq!(fitted.prefill.per_token, 0.0);
        assert_eq!(CostModel::fit(&[]), None);
    }
}
