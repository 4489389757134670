//! Rotary position embedding: tables of angles made once in f64, and the rotation.
//!
//! Su et al., "RoFormer" (arXiv 2104.09864), in the half-split form: dimension i turns with i + rotary_dim / 2.

use std::f64::consts::PI;

use super::simd::{Simd, instantiate, load_partial, store_partial};
use super::{CpuKernels, disjoint::Disjoint};
use crate::config::{RopeConfig, RopeScaling};

/// Cosines and sines by position and pair.
pub struct RopeTable {
    num_pairs: usize,
    /// (positions, 2, pairs): cosines, then sines.
    angles: Vec<f32>,
}

impl RopeTable {
    /// Angles for positions below `max_positions`.
    pub fn new(config: &RopeConfig, max_positions: usize) -> Self {
        let frequencies = frequencies(config);
        let mut angles = Vec::with_capacity(max_positions * 2 * frequencies.len());
        for position in 0..max_positions {
            let angle = |frequency: &f64| position as f64 * frequency;
            angles.extend(frequencies.iter().map(|f| libm::cos(angle(f)) as f32));
            angles.extend(frequencies.iter().map(|f| libm::sin(angle(f)) as f32));
        }
        RopeTable {
            num_pairs: frequencies.len(),
            angles,
        }
    }

    /// Cosines and sines of a position.
    #[inline(always)]
    fn at(&self, position: u32) -> (&[f32], &[f32]) {
        let start = position as usize * 2 * self.num_pairs;
        self.angles[start..start + 2 * self.num_pairs].split_at(self.num_pairs)
    }
}

/// Radians per position, by pair.
fn frequencies(config: &RopeConfig) -> Vec<f64> {
    (0..config.rotary_dim / 2)
        .map(|pair| {
            let exponent = (2 * pair) as f64 / config.rotary_dim as f64;
            scaled(
                &config.scaling,
                1.0 / libm::pow(config.theta, exponent),
                pair,
            )
        })
        .collect()
}

fn scaled(scaling: &RopeScaling, frequency: f64, pair: usize) -> f64 {
    match scaling {
        RopeScaling::None => frequency,
        RopeScaling::Linear { factor } => frequency / factor,
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max,
        } => {
            // How often the pair turns within the original context.
            let turns = f64::from(*original_max) * frequency / (2.0 * PI);
            let kept = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
            let kept = kept.clamp(0.0, 1.0);
            frequency * (kept + (1.0 - kept) / factor)
        }
        RopeScaling::Factors(factors) => frequency / f64::from(factors[pair]),
    }
}

/// Rotates every head of x (tokens, heads, head_dim).
pub(super) fn rotate(
    kernels: &CpuKernels,
    x: &mut [f32],
    (num_heads, head_dim): (usize, usize),
    positions: &[u32],
    table: &RopeTable,
) {
    let width = num_heads * head_dim;
    assert_eq!(
        x.len(),
        positions.len() * width,
        "(tokens, heads, head_dim)"
    );
    assert!(
        2 * table.num_pairs <= head_dim,
        "a head holds the rotated dimensions"
    );
    let x = Disjoint::new(x);
    let level = kernels.level;
    kernels.over(positions.len(), width, &|tokens| {
        // SAFETY: `over` gives every token to one call.
        let rows = unsafe { x.part(tokens.start * width..tokens.end * width) };
        for (row, &position) in rows.chunks_exact_mut(width).zip(&positions[tokens]) {
            rotate_token(level, row, head_dim, table.at(position));
        }
    });
}

instantiate! {
    /// Rotates the heads of one token.
    fn rotate_token(row: &mut [f32], head_dim: usize, angles: (&[f32], &[f32])) = rotate_token_body
}

#[inline(always)]
fn rotate_token_body<S: Simd>(
    s: S,
    row: &mut [f32],
    head_dim: usize,
    (cosines, sines): (&[f32], &[f32]),
) {
    for head in row.chunks_exact_mut(head_dim) {
        let (first, rest) = head.split_at_mut(cosines.len());
        let second = &mut rest[..sines.len()];
        for start in (0..cosines.len()).step_by(super::LANES) {
            let range = start..cosines.len().min(start + super::LANES);
            let cosine = load_partial(s, &cosines[range.clone()]);
            let sine = load_partial(s, &sines[range.clone()]);
            let a = load_partial(s, &first[range.clone()]);
            let b = load_partial(s, &second[range.clone()]);
            let turned_a = s.mul_add(a, cosine, s.neg(s.mul(b, sine)));
            let turned_b = s.mul_add(b, cosine, s.mul(a, sine));
            store_partial(s, turned_a, &mut first[range.clone()]);
            store_partial(s, turned_b, &mut second[range]);
        }
    }
}
