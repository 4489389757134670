use super::super::{CpuKernels, InputRows, MatmulInput, RopeTable};
use super::{Noise, assert_close, same_everywhere};
use crate::config::{Activation, RopeConfig, RopeScaling};

/// Odd sizes, sizes of real models, and one large enough to be spread over threads.
const SHAPES: [(usize, usize); 6] = [(1, 1), (3, 17), (2, 16), (5, 576), (7, 100), (70, 640)];

/// The rows as the float products see them.
fn made(kernels: &CpuKernels, source: InputRows<'_>, rows: usize) -> Vec<f32> {
    let mut input = MatmulInput::default();
    kernels.load_input(source, rows, source.len() / rows, false, &mut input);
    (0..rows)
        .flat_map(|row| input.float_row(row))
        .copied()
        .collect()
}

#[test]
fn rms_norm_matches_its_definition() {
    for (rows, width) in SHAPES {
        let mut noise = Noise(1);
        let (x, weight) = (noise.uniforms(rows * width), noise.uniforms(width));
        let actual = same_everywhere(|kernels| {
            let normed = InputRows::Normed {
                x: &x,
                weight: &weight,
                eps: 1e-5,
            };
            let out = made(kernels, normed, rows);
            let mut in_place = x.clone();
            kernels.rms_norm_in_place(&mut in_place, &weight, 1e-5);
            assert_eq!(out, in_place);
            out
        });
        let mut expected = Vec::new();
        for row in x.chunks(width) {
            let squares: f64 = row.iter().map(|x| f64::from(*x).powi(2)).sum();
            let factor = 1.0 / (squares / width as f64 + 1e-5).sqrt();
            let row = row.iter().zip(&weight);
            expected.extend(row.map(|(x, w)| f64::from(*x) * factor * f64::from(*w)));
        }
        assert_close(&actual, &expected, 1e-6);
    }
}

#[test]
fn a_row_is_normed_alone() {
    let mut noise = Noise(2);
    let (x, weight) = (noise.uniforms(64 * 576), noise.uniforms(576));
    same_everywhere(|kernels| {
        let mut together = x.clone();
        kernels.rms_norm_in_place(&mut together, &weight, 1e-6);
        let mut alone = x[13 * 576..14 * 576].to_vec();
        kernels.rms_norm_in_place(&mut alone, &weight, 1e-6);
        assert_eq!(together[13 * 576..14 * 576], alone);
        together
    });
}

#[test]
fn gates_match_their_definitions() {
    let silu = |x: f64| x / (1.0 + (-x).exp());
    let gelu = |x: f64| {
        let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
        // ½·(1 + tanh u), which f64 would round to 0 far below 0.
        x / (1.0 + (-2.0 * inner).exp())
    };
    check_gate(Activation::Silu, silu);
    check_gate(Activation::GeluTanh, gelu);
}

fn check_gate(activation: Activation, exact: fn(f64) -> f64) {
    for len in [3, 16, 31, 1536, 20_000] {
        let mut noise = Noise(3);
        let gate: Vec<f32> = (0..len).map(|_| noise.uniform() * 12.0).collect();
        let up = noise.uniforms(len);
        let actual = same_everywhere(|kernels| {
            let gated = InputRows::Gated {
                activation,
                gate: &gate,
                up: &up,
            };
            made(kernels, gated, 1)
        });
        let pairs = gate.iter().zip(&up);
        let expected: Vec<f64> = pairs
            .map(|(gate, up)| exact(f64::from(*gate)) * f64::from(*up))
            .collect();
        assert_close(&actual, &expected, 1e-6);
    }
}

#[test]
fn sums_and_softcaps_match_their_definitions() {
    for len in [1, 15, 16, 20_001] {
        let mut noise = Noise(4);
        let (x, y) = (noise.uniforms(len), noise.uniforms(len));
        let sums = same_everywhere(|kernels| {
            let mut out = x.clone();
            kernels.add(&mut out, &y);
            out
        });
        let expected: Vec<f32> = x.iter().zip(&y).map(|(x, y)| x + y).collect();
        assert_eq!(sums, expected);
        let capped = same_everywhere(|kernels| {
            let mut out = x.clone();
            kernels.softcap(&mut out, 0.5);
            out
        });
        let expected: Vec<f64> = x
            .iter()
            .map(|x| 0.5 * (f64::from(*x) / 0.5).tanh())
            .collect();
        assert_close(&capped, &expected, 1e-6);
    }
}

#[test]
fn rope_matches_its_definition() {
    let llama3 = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max: 64,
    };
    // What each scaling does to the frequency of pair `i`, by definition.
    check_rope(RopeScaling::None, |frequency, _| frequency);
    check_rope(RopeScaling::Linear { factor: 4.0 }, |frequency, _| {
        frequency / 4.0
    });
    check_rope(llama3, |frequency, _| {
        let wavelength = 2.0 * std::f64::consts::PI / frequency;
        if wavelength < 64.0 / 4.0 {
            frequency
        } else if wavelength > 64.0 {
            frequency / 8.0
        } else {
            let smooth = (64.0 / wavelength - 1.0) / (4.0 - 1.0);
            (1.0 - smooth) * frequency / 8.0 + smooth * frequency
        }
    });
    let factors = RopeScaling::Factors((0..32).map(|i| 1.0 + i as f32).collect());
    check_rope(factors, |frequency, pair| frequency / (1.0 + pair as f64));
}

fn check_rope(scaling: RopeScaling, scale: fn(f64, usize) -> f64) {
    // (heads, head_dim, rotary_dim): small models, real ones, a partly rotated head.
    for (num_heads, head_dim, rotary_dim) in [(2, 16, 16), (9, 64, 64), (3, 64, 48), (4, 32, 32)] {
        let config = RopeConfig {
            theta: 10_000.0,
            rotary_dim,
            scaling: scaling.clone(),
        };
        let table = RopeTable::new(&config, 200);
        let positions = [0, 1, 2, 199, 57];
        let x = Noise(5).uniforms(positions.len() * num_heads * head_dim);
        let actual = same_everywhere(|kernels| {
            let mut out = x.clone();
            kernels.rope(&mut out, num_heads, head_dim, &positions, &table);
            out
        });
        let mut expected: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
        for (row, head) in expected.chunks_mut(head_dim).enumerate() {
            for pair in 0..rotary_dim / 2 {
                let exponent = 2.0 * pair as f64 / rotary_dim as f64;
                let frequency = scale(10_000f64.powf(-exponent), pair);
                let (sin, cos) = (f64::from(positions[row / num_heads]) * frequency).sin_cos();
                let (a, b) = (head[pair], head[pair + rotary_dim / 2]);
                head[pair] = a * cos - b * sin;
                head[pair + rotary_dim / 2] = b * cos + a * sin;
            }
        }
        assert_close(&actual, &expected, 1e-6);
    }
}
