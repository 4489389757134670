//! Row by row and element by element: norms, gates, sums.
//!
//! A row's result depends on that row alone; rows are only spread over threads.

use super::math::{sigmoid_lanes, softcap_slice};
use super::simd::{Level, Simd, instantiate, load_partial, store_partial};
use super::{CpuKernels, LANES, disjoint::Disjoint};
use crate::config::Activation;

/// x = x / rms(x) · weight for each row of `weight.len()` values.
pub(super) fn rms_norm_in_place(kernels: &CpuKernels, x: &mut [f32], weight: &[f32], eps: f32) {
    let width = checked_width(x, weight);
    let num_rows = x.len() / width;
    let x = Disjoint::new(x);
    let level = kernels.level;
    kernels.over(num_rows, width, &|rows| {
        // SAFETY: `over` gives every row to one call.
        let rows = unsafe { x.part(rows.start * width..rows.end * width) };
        norm_rows(level, rows, weight, eps);
    });
}

fn checked_width(x: &[f32], weight: &[f32]) -> usize {
    let width = weight.len();
    assert!(
        width > 0 && x.len().is_multiple_of(width),
        "rows of {width} values"
    );
    width
}

/// x += y
pub(super) fn add(kernels: &CpuKernels, x: &mut [f32], y: &[f32]) {
    assert_eq!(x.len(), y.len(), "the sum of equal shapes");
    let x = Disjoint::new(x);
    kernels.over(y.len(), 1, &|range| {
        // SAFETY: `over` gives every element to one call.
        let x = unsafe { x.part(range.clone()) };
        for (x, y) in x.iter_mut().zip(&y[range]) {
            *x += y;
        }
    });
}

/// out = activation(gate) · up
pub(super) fn gate_slice(
    level: Level,
    activation: Activation,
    (gate, up): (&[f32], &[f32]),
    out: &mut [f32],
) {
    match activation {
        Activation::Silu => silu_gate(level, gate, up, out),
        Activation::GeluTanh => gelu_gate(level, gate, up, out),
    }
}

/// x = cap · tanh(x / cap)
pub(super) fn softcap(kernels: &CpuKernels, x: &mut [f32], cap: f32) {
    let len = x.len();
    let x = Disjoint::new(x);
    let level = kernels.level;
    kernels.over(len, EXP_COST, &|range| {
        // SAFETY: `over` gives every element to one call.
        softcap_slice(level, unsafe { x.part(range) }, cap);
    });
}

/// An exponential costs about this many plain elements.
pub(super) const EXP_COST: usize = 8;

instantiate! {
    /// Norm of each row of `weight.len()` values, in place.
    pub(super) fn norm_rows(x: &mut [f32], weight: &[f32], eps: f32) = norm_rows_body
}

instantiate! {
    /// out = gate · sigmoid(gate) · up
    fn silu_gate(gate: &[f32], up: &[f32], out: &mut [f32]) = silu_gate_body
}

instantiate! {
    /// out = gelu(gate) · up, tanh form.
    fn gelu_gate(gate: &[f32], up: &[f32], out: &mut [f32]) = gelu_gate_body
}

#[inline(always)]
fn norm_rows_body<S: Simd>(s: S, x: &mut [f32], weight: &[f32], eps: f32) {
    for row in x.chunks_exact_mut(weight.len()) {
        let mean = sum_of_squares(s, row) / row.len() as f32;
        scale_row(s, row, weight, 1.0 / (mean + eps).sqrt());
    }
}

#[inline(always)]
fn sum_of_squares<S: Simd>(s: S, row: &[f32]) -> f32 {
    let (chunks, rest) = row.as_chunks::<LANES>();
    let mut sums = s.splat(0.0);
    for chunk in chunks {
        let x = s.load(chunk);
        sums = s.mul_add(x, x, sums);
    }
    let x = load_partial(s, rest);
    s.sum(s.mul_add(x, x, sums))
}

/// row = row · factor · weight
#[inline(always)]
fn scale_row<S: Simd>(s: S, row: &mut [f32], weight: &[f32], factor: f32) {
    let factor = s.splat(factor);
    let (chunks, rest) = row.as_chunks_mut::<LANES>();
    let (weights, rest_weights) = weight.as_chunks::<LANES>();
    for (chunk, weight) in chunks.iter_mut().zip(weights) {
        s.store(s.mul(s.mul(s.load(chunk), factor), s.load(weight)), chunk);
    }
    let scaled = s.mul(load_partial(s, rest), factor);
    store_partial(s, s.mul(scaled, load_partial(s, rest_weights)), rest);
}

#[inline(always)]
fn silu_gate_body<S: Simd>(s: S, gate: &[f32], up: &[f32], out: &mut [f32]) {
    let (gates, gate_rest) = gate.as_chunks::<LANES>();
    let (ups, up_rest) = up.as_chunks::<LANES>();
    let (outs, out_rest) = out.as_chunks_mut::<LANES>();
    for ((gate, up), out) in gates.iter().zip(ups).zip(outs) {
        s.store(silu_lanes(s, s.load(gate), s.load(up)), out);
    }
    let rest = silu_lanes(s, load_partial(s, gate_rest), load_partial(s, up_rest));
    store_partial(s, rest, out_rest);
}

#[inline(always)]
fn gelu_gate_body<S: Simd>(s: S, gate: &[f32], up: &[f32], out: &mut [f32]) {
    let (gates, gate_rest) = gate.as_chunks::<LANES>();
    let (ups, up_rest) = up.as_chunks::<LANES>();
    let (outs, out_rest) = out.as_chunks_mut::<LANES>();
    for ((gate, up), out) in gates.iter().zip(ups).zip(outs) {
        s.store(gelu_lanes(s, s.load(gate), s.load(up)), out);
    }
    let rest = gelu_lanes(s, load_partial(s, gate_rest), load_partial(s, up_rest));
    store_partial(s, rest, out_rest);
}

#[inline(always)]
fn silu_lanes<S: Simd>(s: S, gate: S::Floats, up: S::Floats) -> S::Floats {
    s.mul(s.mul(gate, sigmoid_lanes(s, gate)), up)
}

/// ½·(1 + tanh u) is sigmoid(2u), without the cancellation at negative u.
#[inline(always)]
fn gelu_lanes<S: Simd>(s: S, gate: S::Floats, up: S::Floats) -> S::Floats {
    const TWICE_SQRT_2_OVER_PI: f32 = 1.595_769_2;
    const CUBIC: f32 = 0.044_715;
    let squared = s.mul(gate, gate);
    let inner = s.mul(gate, s.mul_add(squared, s.splat(CUBIC), s.splat(1.0)));
    let doubled = s.mul(inner, s.splat(TWICE_SQRT_2_OVER_PI));
    s.mul(s.mul(gate, sigmoid_lanes(s, doubled)), up)
}
