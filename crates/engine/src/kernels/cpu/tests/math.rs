use super::super::math::{exp_in_place, exp_slice, ln, ln_in_place, ln_slice, softcap_slice};
use super::super::simd::Level;
use super::super::{Isa, math::exp};
use super::{Noise, bits};

/// A function over slices, at a level.
type Slice = fn(Level, &mut [f32]);

/// Both instruction sets give the same bits, within `max_ulps` of `exact` rounded to f32.
fn check(function: Slice, inputs: &[f32], exact: impl Fn(f64) -> f64, max_ulps: f64) {
    let mut portable = inputs.to_vec();
    function(
        Level::of(Isa::Portable).expect("always there"),
        &mut portable,
    );
    let mut best = inputs.to_vec();
    function(Level::detect(), &mut best);
    assert_eq!(bits(&portable), bits(&best));
    for (x, y) in inputs.iter().zip(&best) {
        let expected = exact(f64::from(*x));
        let ulp = f64::from(f32::EPSILON) * expected.abs().log2().floor().exp2();
        let error = (f64::from(*y) - expected).abs();
        assert!(error <= max_ulps * ulp, "f({x}) = {y}, expected {expected}");
    }
}

#[test]
fn exp_is_within_two_units_in_the_last_place() {
    let mut noise = Noise(1);
    let mut inputs: Vec<f32> = (0..20_011).map(|_| noise.uniform() * 87.3).collect();
    inputs.extend((0..20_000).map(|_| noise.uniform()));
    inputs.extend([88.0, 88.5, 88.72, -87.33, 1e-8, -1e-8]);
    check(exp_slice, &inputs, f64::exp, 2.0);
}

#[test]
fn ln_is_within_two_units_in_the_last_place() {
    let mut noise = Noise(2);
    let mut inputs: Vec<f32> = (0..20_011).map(|_| 1.0 + noise.uniform() * 0.5).collect();
    inputs.extend((0..20_000).map(|_| f32::from_bits(noise.bits() as u32 % 0x7f80_0000)));
    inputs.extend([
        f32::MIN_POSITIVE,
        1e-45,
        f32::MAX,
        0.999_999_94,
        1.000_000_1,
    ]);
    inputs.retain(|x| *x != 0.0);
    check(ln_slice, &inputs, f64::ln, 2.0);
}

#[test]
fn softcap_follows_tanh() {
    let cap = 30.0;
    let mut noise = Noise(3);
    let mut inputs: Vec<f32> = (0..20_011).map(|_| noise.uniform() * 300.0).collect();
    inputs.extend((0..20_000).map(|_| noise.uniform() * 0.1));
    let exact = |x: f64| 30.0 * (x / 30.0).tanh();
    check(
        |level, x| softcap_slice(level, x, 30.0),
        &inputs,
        exact,
        4.0,
    );
    let mut edges = [0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, 1e30];
    softcap_slice(Level::detect(), &mut edges, cap);
    assert_eq!(edges, [0.0, -0.0, cap, -cap, cap]);
}

#[test]
fn edges_are_exact() {
    let exps = [
        (0.0, 1.0),
        (-0.0, 1.0),
        (f32::NEG_INFINITY, 0.0),
        (f32::INFINITY, f32::INFINITY),
        (88.73, f32::INFINITY),
        (1e38, f32::INFINITY),
        (-87.34, 0.0),
        (-1e38, 0.0),
    ];
    for (x, expected) in exps {
        assert_eq!(exp(x).to_bits(), expected.to_bits(), "exp({x})");
    }
    let lns = [
        (1.0, 0.0),
        (0.0, f32::NEG_INFINITY),
        (-0.0, f32::NEG_INFINITY),
        (f32::INFINITY, f32::INFINITY),
    ];
    for (x, expected) in lns {
        assert_eq!(ln(x).to_bits(), f32::to_bits(expected), "ln({x})");
    }
    assert!(exp(f32::NAN).is_nan());
    for x in [f32::NAN, -1.0, -1e-40, f32::NEG_INFINITY] {
        assert!(ln(x).is_nan(), "ln({x})");
    }
}

#[test]
fn exp_is_monotone_around_one() {
    let mut inputs: Vec<f32> = (0..4000).map(|i| (i - 2000) as f32 * 1e-6).collect();
    exp_in_place(&mut inputs);
    assert!(inputs.is_sorted());
}

#[test]
fn slices_and_single_values_agree() {
    let inputs = Noise(4).uniforms(37);
    let mut exps = inputs.clone();
    exp_in_place(&mut exps);
    let mut lns: Vec<f32> = inputs.iter().map(|x| x.abs()).collect();
    ln_in_place(&mut lns);
    for (i, x) in inputs.iter().enumerate() {
        assert_eq!(exps[i].to_bits(), exp(*x).to_bits());
        assert_eq!(lns[i].to_bits(), ln(x.abs()).to_bits());
    }
}
