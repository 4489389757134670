//! The block formats of GGUF files as exact integers, scales and mins.
//!
//! Layouts as the GGML project defines them for each type; every decoder takes one block of the size that
//! its [`BlockFormat`] names. Nothing here knows of panels.

use half::f16;

use super::QuantKind;
use crate::loader::TensorType;

/// One file format.
pub(super) struct BlockFormat {
    /// Values in a block of the file.
    pub values: usize,
    /// Bytes of it.
    pub bytes: usize,
    /// How we keep its integers.
    pub kind: QuantKind,
    /// Whether values have a min beside the scale.
    pub has_mins: bool,
    /// What scales and mins fit in exactly.
    pub factor: FactorType,
    /// Unpacks one block.
    pub decode: fn(&[u8], &mut Decoded),
}

/// The width of scales and mins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FactorType {
    /// Half floats, as the file has them.
    F16,
    /// Products of a half float and a small integer.
    F32,
}

impl FactorType {
    /// Of one factor.
    pub(super) fn num_bytes(self) -> usize {
        match self {
            FactorType::F16 => size_of::<f16>(),
            FactorType::F32 => size_of::<f32>(),
        }
    }
}

/// One unpacked block: value k is scales[k / b] · quants[k] + mins[k / b], b = `kind.block()`.
pub(super) struct Decoded {
    pub quants: [i8; 256],
    pub scales: [f32; 16],
    pub mins: [f32; 16],
}

impl Default for Decoded {
    fn default() -> Self {
        Decoded {
            quants: [0; 256],
            scales: [0.0; 16],
            mins: [0.0; 16],
        }
    }
}

impl BlockFormat {
    /// The format of a tensor type, if it has blocks that we compute.
    pub(super) fn of(dtype: TensorType) -> Option<Self> {
        let (values, bytes, kind, has_mins, decode): (_, _, _, _, fn(&[u8], &mut Decoded)) =
            match dtype {
                TensorType::Q4_0 => (32, 18, QuantKind::I4, false, decode_q4_0),
                TensorType::Q4_1 => (32, 20, QuantKind::U4, true, decode_q4_1),
                TensorType::Q5_0 => (32, 22, QuantKind::I5, false, decode_q5_0),
                TensorType::Q5_1 => (32, 24, QuantKind::U5, true, decode_q5_1),
                TensorType::Q8_0 => (32, 34, QuantKind::I8, false, decode_q8_0),
                TensorType::Q2K => (256, 84, QuantKind::I6Half, true, decode_q2_k),
                TensorType::Q3K => (256, 110, QuantKind::I6Half, false, decode_q3_k),
                TensorType::Q4K => (256, 144, QuantKind::U4, true, decode_q4_k),
                TensorType::Q5K => (256, 176, QuantKind::U5, true, decode_q5_k),
                TensorType::Q6K => (256, 210, QuantKind::I6Half, false, decode_q6_k),
                TensorType::F32 | TensorType::F16 | TensorType::BF16 | TensorType::Other(_) => {
                    return None;
                }
            };
        // Blocks of 32 that are no k-quant store their factors as they are.
        let factor = if values == 32 {
            FactorType::F16
        } else {
            FactorType::F32
        };
        Some(BlockFormat {
            values,
            bytes,
            kind,
            has_mins,
            factor,
            decode,
        })
    }
}

/// The half float at `at`.
fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// Nibbles of 16 bytes: the low ones first.
fn nibbles(bytes: &[u8], quants: &mut [i8]) {
    let (low, high) = quants.split_at_mut(bytes.len());
    for ((byte, low), high) in bytes.iter().zip(low).zip(high) {
        *low = (byte & 15) as i8;
        *high = (byte >> 4) as i8;
    }
}

/// scale, 16 bytes of nibbles; 8 is zero.
fn decode_q4_0(block: &[u8], out: &mut Decoded) {
    out.scales[0] = half_at(block, 0);
    nibbles(&block[2..18], &mut out.quants[..32]);
    subtract(8, &mut out.quants[..32]);
}

/// scale, min, 16 bytes of nibbles.
fn decode_q4_1(block: &[u8], out: &mut Decoded) {
    out.scales[0] = half_at(block, 0);
    out.mins[0] = half_at(block, 2);
    nibbles(&block[4..20], &mut out.quants[..32]);
}

/// scale, fifth bits, 16 bytes of nibbles; 16 is zero.
fn decode_q5_0(block: &[u8], out: &mut Decoded) {
    out.scales[0] = half_at(block, 0);
    nibbles(&block[6..22], &mut out.quants[..32]);
    fifth_bits(&block[2..6], &mut out.quants[..32]);
    subtract(16, &mut out.quants[..32]);
}

/// scale, min, fifth bits, 16 bytes of nibbles.
fn decode_q5_1(block: &[u8], out: &mut Decoded) {
    out.scales[0] = half_at(block, 0);
    out.mins[0] = half_at(block, 2);
    nibbles(&block[8..24], &mut out.quants[..32]);
    fifth_bits(&block[4..8], &mut out.quants[..32]);
}

/// scale, 32 signed bytes.
fn decode_q8_0(block: &[u8], out: &mut Decoded) {
    out.scales[0] = half_at(block, 0);
    for (quant, byte) in out.quants[..32].iter_mut().zip(&block[2..34]) {
        *quant = *byte as i8;
    }
}

/// Bit k of four bytes is the fifth bit of value k.
fn fifth_bits(bits: &[u8], quants: &mut [i8]) {
    for (k, quant) in quants.iter_mut().enumerate() {
        *quant |= ((bits[k / 8] >> (k % 8) & 1) << 4) as i8;
    }
}

fn subtract(zero: i8, quants: &mut [i8]) {
    for quant in quants {
        *quant -= zero;
    }
}

/// 16 bytes of (scale, min) nibbles, 64 bytes of 2-bit values, scale of scales, scale of mins.
fn decode_q2_k(block: &[u8], out: &mut Decoded) {
    let (scale, min) = (half_at(block, 80), half_at(block, 82));
    for (b, byte) in block[..16].iter().enumerate() {
        out.scales[b] = scale * f32::from(byte & 15);
        out.mins[b] = -(min * f32::from(byte >> 4));
    }
    two_bits(&block[16..80], &mut out.quants);
}

/// 32 bytes of third bits, 64 bytes of 2-bit values, 12 bytes of 6-bit scales, scale of scales.
fn decode_q3_k(block: &[u8], out: &mut Decoded) {
    two_bits(&block[32..96], &mut out.quants);
    // Value k has its third bit in bit k / 32 of byte k % 32; values without it are 4 less.
    for (k, quant) in out.quants.iter_mut().enumerate() {
        *quant -= 4 * (1 - (block[k % 32] >> (k / 32) & 1) as i8);
    }
    let scale = half_at(block, 108);
    for b in 0..16 {
        let low = block[96 + b % 8] >> (b / 8 * 4) & 15;
        let high = block[104 + b % 4] >> (b / 4 * 2) & 3;
        out.scales[b] = scale * f32::from((low | high << 4) as i8 - 32);
    }
}

/// Values 128·h + 32·s + l of 2 bits: bits 2·s of byte 32·h + l.
fn two_bits(bytes: &[u8], quants: &mut [i8; 256]) {
    for (k, quant) in quants.iter_mut().enumerate() {
        *quant = (bytes[k / 128 * 32 + k % 32] >> (k % 128 / 32 * 2) & 3) as i8;
    }
}

/// Scale of scales, scale of mins, 12 bytes of 6-bit scales and mins, 128 bytes of nibbles.
fn decode_q4_k(block: &[u8], out: &mut Decoded) {
    six_bit_scales(block, out);
    nibble_pairs(&block[16..144], &mut out.quants);
}

/// As Q4_K, with 32 bytes of fifth bits before the nibbles.
fn decode_q5_k(block: &[u8], out: &mut Decoded) {
    six_bit_scales(block, out);
    nibble_pairs(&block[48..176], &mut out.quants);
    // Value k has its fifth bit in bit k / 32 of byte k % 32.
    for (k, quant) in out.quants.iter_mut().enumerate() {
        *quant |= ((block[16 + k % 32] >> (k / 32) & 1) << 4) as i8;
    }
}

/// Four times 32 bytes: 32 low nibbles, then the 32 high ones.
fn nibble_pairs(bytes: &[u8], quants: &mut [i8; 256]) {
    for (bytes, quants) in bytes.chunks_exact(32).zip(quants.chunks_exact_mut(64)) {
        nibbles(bytes, quants);
    }
}

/// Eight scales and mins of 6 bits in 12 bytes: four whole ones each, then nibbles whose upper bits are the
/// spare bits of the whole ones.
fn six_bit_scales(block: &[u8], out: &mut Decoded) {
    let (scale, min) = (half_at(block, 0), half_at(block, 2));
    let packed = &block[4..16];
    for b in 0..8 {
        let (s, m) = if b < 4 {
            (packed[b] & 63, packed[b + 4] & 63)
        } else {
            (
                packed[b + 4] & 15 | packed[b - 4] >> 6 << 4,
                packed[b + 4] >> 4 | packed[b] >> 6 << 4,
            )
        };
        out.scales[b] = scale * f32::from(s);
        out.mins[b] = -(min * f32::from(m));
    }
}

/// 128 bytes of low nibbles, 64 bytes of upper bit pairs, 16 signed scales, scale of scales; 32 is zero.
fn decode_q6_k(block: &[u8], out: &mut Decoded) {
    let (low, high) = (&block[..128], &block[128..192]);
    for (k, quant) in out.quants.iter_mut().enumerate() {
        // Halves of 128 values; in each four runs of 32: low nibbles of 64 bytes, then their high ones.
        let (part, run, l) = (k / 128, k % 128 / 32, k % 32);
        let nibble = low[64 * part + 32 * (run % 2) + l] >> (run / 2 * 4) & 15;
        let pair = high[32 * part + l] >> (run * 2) & 3;
        *quant = (nibble | pair << 4) as i8 - 32;
    }
    let scale = half_at(block, 208);
    for b in 0..16 {
        out.scales[b] = scale * f32::from(block[192 + b] as i8);
    }
}
