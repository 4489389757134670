//! exp, ln, tanh and what is made of them: one polynomial each, with the same bits on every processor.
//!
//! Errors are below 2 units in the last place of the result (tanh: of 1). Results that would be denormal are zero, so that speed
//! does not depend on the data. Polynomials are our own fits at Chebyshev nodes after the usual range
//! reduction (Cody and Waite, "Software Manual for the Elementary Functions", 1980).

use super::LANES;
use super::simd::{Level, Simd, instantiate, load_partial, store_partial};

/// ln 2 in two parts; the first has 9 significant bits, so that its product with an exponent is exact.
const LN2_HIGH: f32 = 0.693_359_4;
const LN2_LOW: f32 = -2.121_944_4e-4;

/// ln of the smallest normal float: below it exp is zero.
const EXP_MIN: f32 = -87.336_54;
/// Above it exp is infinite; a bound that keeps exponents in range.
const EXP_MAX: f32 = 89.0;

/// (eʳ − 1 − r) / r² for |r| ≤ ln 2 / 2, lowest power first; relative error of eʳ 1e-8.
const EXP: [f32; 5] = [
    0.5,
    0.166_665_76,
    0.041_666_552,
    0.008_363_233,
    0.001_392_625,
];

/// (ln(1 + f) − f + f²/2) / f³ for √½ ≤ 1 + f ≤ √2.
const LN: [f32; 9] = [
    0.333_333_3,
    -0.249_999_97,
    0.200_007_16,
    -0.166_678_03,
    0.142_490_58,
    -0.124_256_87,
    0.116_854_2,
    -0.114_797_34,
    0.069_716_11,
];

/// (tanh x − x) / x³ as a polynomial of x² for |x| ≤ 0.625.
const TANH: [f32; 5] = [
    -0.333_333_28,
    0.133_327_7,
    -0.053_850_908,
    0.020_997_18,
    -0.006_096_714,
];

/// eˣ
pub fn exp(x: f32) -> f32 {
    let mut lane = [x];
    exp_in_place(&mut lane);
    lane[0]
}

/// Natural logarithm: −∞ of 0, NaN of negative numbers.
pub fn ln(x: f32) -> f32 {
    let mut lane = [x];
    ln_in_place(&mut lane);
    lane[0]
}

/// x = eˣ for every element.
pub fn exp_in_place(x: &mut [f32]) {
    exp_slice(Level::detect(), x);
}

/// x = ln x for every element.
pub fn ln_in_place(x: &mut [f32]) {
    ln_slice(Level::detect(), x);
}

instantiate! {
    /// eˣ of a slice.
    pub(super) fn exp_slice(x: &mut [f32]) = exp_slice_body
}

instantiate! {
    /// ln of a slice.
    pub(super) fn ln_slice(x: &mut [f32]) = ln_slice_body
}

instantiate! {
    /// x = c · tanh(x / c) of a slice.
    pub(super) fn softcap_slice(x: &mut [f32], cap: f32) = softcap_slice_body
}

#[inline(always)]
fn exp_slice_body<S: Simd>(s: S, x: &mut [f32]) {
    let (chunks, rest) = x.as_chunks_mut::<LANES>();
    for chunk in chunks {
        s.store(exp_lanes(s, s.load(chunk)), chunk);
    }
    store_partial(s, exp_lanes(s, load_partial(s, rest)), rest);
}

#[inline(always)]
fn ln_slice_body<S: Simd>(s: S, x: &mut [f32]) {
    let (chunks, rest) = x.as_chunks_mut::<LANES>();
    for chunk in chunks {
        s.store(ln_lanes(s, s.load(chunk)), chunk);
    }
    store_partial(s, ln_lanes(s, load_partial(s, rest)), rest);
}

#[inline(always)]
fn softcap_slice_body<S: Simd>(s: S, x: &mut [f32], cap: f32) {
    let (chunks, rest) = x.as_chunks_mut::<LANES>();
    for chunk in chunks {
        s.store(softcap_lanes(s, s.load(chunk), cap), chunk);
    }
    store_partial(s, softcap_lanes(s, load_partial(s, rest), cap), rest);
}

/// eˣ in lanes.
#[inline(always)]
pub(super) fn exp_lanes<S: Simd>(s: S, x: S::Floats) -> S::Floats {
    let bounded = s.min(s.splat(EXP_MAX), x);
    let n = s.round(s.mul(bounded, s.splat(std::f32::consts::LOG2_E)));
    let r = s.mul_add(n, s.splat(-LN2_HIGH), bounded);
    let r = s.mul_add(n, s.splat(-LN2_LOW), r);
    let p = s.mul_add(polynomial(s, r, &EXP), s.mul(r, r), r);
    let p = s.add(p, s.splat(1.0));
    s.select_less((x, s.splat(EXP_MIN)), s.splat(0.0), s.scale(p, n))
}

/// Natural logarithm in lanes.
#[inline(always)]
pub(super) fn ln_lanes<S: Simd>(s: S, x: S::Floats) -> S::Floats {
    let (zero, infinity) = (s.splat(0.0), s.splat(f32::INFINITY));
    let smallest = s.splat(f32::MIN_POSITIVE);
    // Denormals are lifted by 2^24 into the range of normal numbers.
    let lifted = s.select_less((x, smallest), s.mul(x, s.splat(16_777_216.0)), x);
    let (mantissa, exponent) = s.split_exponent(lifted);
    let exponent = s.sub(exponent, s.select_less((x, smallest), s.splat(24.0), zero));
    let f = s.sub(mantissa, s.splat(1.0));
    let squared = s.mul(f, f);
    let tail = s.mul(s.mul(polynomial(s, f, &LN), f), squared);
    let tail = s.mul_add(exponent, s.splat(LN2_LOW), tail);
    let tail = s.mul_add(squared, s.splat(-0.5), tail);
    let result = s.mul_add(exponent, s.splat(LN2_HIGH), s.add(f, tail));
    // Edges: ∞ and NaN pass, 0 gives −∞, negative numbers NaN.
    let result = s.select_less((x, infinity), result, x);
    let edge = s.select_less((x, zero), s.splat(f32::NAN), s.neg(infinity));
    let edge = s.select_less((x, smallest), edge, x);
    s.select_less((zero, x), result, edge)
}

/// 1 / (1 + e⁻ˣ) in lanes.
#[inline(always)]
pub(super) fn sigmoid_lanes<S: Simd>(s: S, x: S::Floats) -> S::Floats {
    let one = s.splat(1.0);
    s.div(one, s.add(one, exp_lanes(s, s.neg(x))))
}

/// Hyperbolic tangent in lanes.
#[inline(always)]
pub(super) fn tanh_lanes<S: Simd>(s: S, x: S::Floats) -> S::Floats {
    let squared = s.mul(x, x);
    let cubed = s.mul(squared, x);
    let near = s.mul_add(polynomial(s, squared, &TANH), cubed, x);
    let magnitude = s.max(s.neg(x), x);
    let (one, two) = (s.splat(1.0), s.splat(2.0));
    let doubled = exp_lanes(s, s.add(magnitude, magnitude));
    let far = s.sub(one, s.div(two, s.add(doubled, one)));
    let far = s.select_less((x, s.splat(0.0)), s.neg(far), far);
    s.select_less((magnitude, s.splat(0.625)), near, far)
}

/// c · tanh(x / c) in lanes.
#[inline(always)]
pub(super) fn softcap_lanes<S: Simd>(s: S, x: S::Floats, cap: f32) -> S::Floats {
    let cap = s.splat(cap);
    s.mul(cap, tanh_lanes(s, s.div(x, cap)))
}

/// Σ coefficients[i] · xⁱ by Horner's rule.
#[inline(always)]
fn polynomial<S: Simd, const N: usize>(s: S, x: S::Floats, coefficients: &[f32; N]) -> S::Floats {
    let mut sum = s.splat(coefficients[N - 1]);
    for i in (0..N - 1).rev() {
        sum = s.mul_add(sum, x, s.splat(coefficients[i]));
    }
    sum
}
