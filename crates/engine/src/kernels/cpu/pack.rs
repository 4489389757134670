//! Weights in the layout that the kernels read: panels of 16 outputs, unpacked from file formats once, at load.
//!
//! **Float** (F32, F16, BF16, kept at their width): a panel is (k, 16 outputs).
//!
//! **Quantised**: w = scale · q + min, with exact integers q, one scale (and one min where the format has
//! mins) per block of 32, or of 16, and output. All are exact: formats that store them as half floats keep
//! half floats, the others store them as products of numbers short enough for f32. Integers lie in units of
//! 256 bytes, groups of 4 consecutive k for each of 16 outputs, which is what the byte dot products of all
//! processors eat:
//!
//! ```text
//! byte integers:    unit = 16 k: byte 64·g + 4·output + i holds k = 4·g + i, g in 0..4
//! nibble integers:  unit = 32 k: the same bytes, k in the low and k + 16 in the high nibble
//! fifth bits:       (unit, 8 words of 64): word 2·g + h holds in bit 4·output + i that of k = 16·h + 4·g + i
//! scales and mins:  (block, 16 outputs)
//! ```
//!
//! The last panel is padded with zeros. Nothing here multiplies.

mod blocks;

use half::{bf16, f16};

use super::disjoint::Disjoint;
use super::panels::{Panels, Plain};
use super::simd::{Element, FifthBits, LaneArray, UNIT_BYTES};
use super::{CpuKernels, KernelError, LANES};
use crate::loader::{RawTensor, TensorType};
use blocks::{BlockFormat, Decoded, FactorType};

/// A weight matrix (out_features, in_features), packed in panels of 16 output rows.
pub struct PackedMatrix {
    out_features: usize,
    in_features: usize,
    weights: Weights,
}

/// Panels, one after the other.
pub(super) enum Weights {
    /// (panels, in_features, 16)
    F32(Panels<LaneArray<f32>>),
    /// (panels, in_features, 16)
    F16(Panels<LaneArray<f16>>),
    /// (panels, in_features, 16)
    Bf16(Panels<LaneArray<bf16>>),
    /// Integers with scales.
    Quantised(QuantPanels),
}

/// Panels of a quantised matrix.
pub(super) struct QuantPanels {
    integers: IntegerPanels,
    factors: Factors,
}

/// Integers of all panels.
pub(super) struct IntegerPanels {
    kind: QuantKind,
    /// (panels, units)
    units: Panels<[u8; UNIT_BYTES]>,
    /// (panels, units), or empty where integers have no fifth bit.
    fifth_bits: Panels<FifthBits>,
}

/// What integers are multiplied with, at the width that holds it exactly.
pub(super) enum Factors {
    F16(FactorPanels<f16>),
    F32(FactorPanels<f32>),
}

/// Factors of all panels.
pub(super) struct FactorPanels<F> {
    /// (panels, blocks)
    scales: Panels<LaneArray<F>>,
    /// (panels, blocks), or empty when the format has no mins.
    mins: Panels<LaneArray<F>>,
}

/// How integers lie in units and share scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum QuantKind {
    /// 0..=15 as nibbles, blocks of 32.
    U4,
    /// −8..=7 stored as nibbles with 8 added, blocks of 32.
    I4,
    /// 0..=31 as nibbles and fifth bits, blocks of 32.
    U5,
    /// −16..=15 stored with 16 added as nibbles and fifth bits, blocks of 32.
    I5,
    /// −32..=32 as bytes, blocks of 16.
    I6Half,
    /// −128..=127 as bytes, blocks of 32.
    I8,
}

impl QuantKind {
    /// Values that share a scale.
    pub(super) fn block(self) -> usize {
        match self {
            QuantKind::U4 | QuantKind::I4 | QuantKind::U5 | QuantKind::I5 | QuantKind::I8 => 32,
            QuantKind::I6Half => 16,
        }
    }

    /// Values of one output in a unit.
    pub(super) fn unit(self) -> usize {
        match self {
            QuantKind::U4 | QuantKind::I4 | QuantKind::U5 | QuantKind::I5 => 32,
            QuantKind::I6Half | QuantKind::I8 => 16,
        }
    }

    /// What is added to values so that they can be stored unsigned.
    fn offset(self) -> i8 {
        match self {
            QuantKind::U4 | QuantKind::U5 | QuantKind::I6Half | QuantKind::I8 => 0,
            QuantKind::I4 => 8,
            QuantKind::I5 => 16,
        }
    }

    fn has_fifth_bits(self) -> bool {
        matches!(self, QuantKind::U5 | QuantKind::I5)
    }

    /// Bytes of the units and fifth bits of one output.
    fn integer_bytes(self, in_features: usize) -> usize {
        let fifth_bits = if self.has_fifth_bits() {
            size_of::<FifthBits>()
        } else {
            0
        };
        in_features / self.unit() * (UNIT_BYTES + fifth_bits) / LANES
    }

    /// Writes the values of a unit for output `lane`.
    fn put(
        self,
        unit: &mut [u8; UNIT_BYTES],
        fifth_bits: Option<&mut FifthBits>,
        lane: usize,
        values: &[i8],
    ) {
        if self.unit() == 16 {
            return put_bytes(unit, lane, values);
        }
        let mut lifted = [0; 32];
        for (lifted, value) in lifted.iter_mut().zip(values) {
            *lifted = (value + self.offset()) as u8;
        }
        put_nibbles(unit, lane, &lifted);
        if let Some(words) = fifth_bits {
            put_fifth_bits(words, lane, &lifted);
        }
    }

    /// Reads what `put` wrote.
    fn get(
        self,
        unit: &[u8; UNIT_BYTES],
        fifth_bits: Option<&FifthBits>,
        (k, lane): (usize, usize),
    ) -> i8 {
        let (group, bit) = (k % 16 / 4, lane * 4 + k % 4);
        let byte = unit[64 * group + bit];
        if self.unit() == 16 {
            return byte as i8;
        }
        let fifth = fifth_bits.map_or(0, |words| words[2 * group + k / 16] >> bit & 1);
        let lifted = (byte >> (k / 16 * 4) & 15) | (fifth as u8) << 4;
        lifted as i8 - self.offset()
    }
}

/// Writes 16 values of output `lane` as bytes.
fn put_bytes(unit: &mut [u8; UNIT_BYTES], lane: usize, values: &[i8]) {
    let (groups, _) = unit.as_chunks_mut::<64>();
    for (group, values) in groups.iter_mut().zip(values.chunks_exact(4)) {
        for (byte, value) in group[4 * lane..4 * lane + 4].iter_mut().zip(values) {
            *byte = *value as u8;
        }
    }
}

/// Writes the lower four bits of 32 values of output `lane`.
fn put_nibbles(unit: &mut [u8; UNIT_BYTES], lane: usize, values: &[u8; 32]) {
    let (near, far) = values.split_at(16);
    for k in 0..16 {
        unit[k / 4 * 64 + 4 * lane + k % 4] = near[k] & 15 | far[k] << 4;
    }
}

/// Sets the bits of those of 32 values of output `lane` that have a fifth bit.
fn put_fifth_bits(words: &mut FifthBits, lane: usize, values: &[u8; 32]) {
    for (k, value) in values.iter().enumerate() {
        words[k % 16 / 4 * 2 + k / 16] |= u64::from(value >> 4) << (4 * lane + k % 4);
    }
}

impl PackedMatrix {
    /// Packs a matrix, with all threads.
    pub fn pack(kernels: &CpuKernels, tensor: &RawTensor) -> Result<Self, KernelError> {
        let &[out_features, in_features] = tensor.shape.as_slice() else {
            return Err(shape_error(tensor, "(out_features, in_features)".into()));
        };
        let source = Source {
            tensor,
            out_features,
            in_features,
        };
        let weights = match tensor.dtype {
            TensorType::F32 => Weights::F32(source.pack_floats(kernels, f32::from_le_bytes)?),
            TensorType::F16 => Weights::F16(source.pack_floats(kernels, f16::from_le_bytes)?),
            TensorType::BF16 => Weights::Bf16(source.pack_floats(kernels, bf16::from_le_bytes)?),
            TensorType::Q4_0
            | TensorType::Q4_1
            | TensorType::Q5_0
            | TensorType::Q5_1
            | TensorType::Q8_0
            | TensorType::Q2K
            | TensorType::Q3K
            | TensorType::Q4K
            | TensorType::Q5K
            | TensorType::Q6K
            | TensorType::Other(_) => Weights::Quantised(source.pack_quants(kernels)?),
        };
        Ok(PackedMatrix {
            out_features,
            in_features,
            weights,
        })
    }

    /// Rows of the matrix.
    pub fn out_features(&self) -> usize {
        self.out_features
    }

    /// Columns of the matrix.
    pub fn in_features(&self) -> usize {
        self.in_features
    }

    /// Bytes held.
    pub fn num_bytes(&self) -> usize {
        match &self.weights {
            Weights::F32(panels) => panels.num_bytes(),
            Weights::F16(panels) => panels.num_bytes(),
            Weights::Bf16(panels) => panels.num_bytes(),
            Weights::Quantised(panels) => panels.num_bytes(),
        }
    }

    /// Bytes that a matrix of this type will hold; none for a type that no kernel computes.
    pub fn packed_bytes(dtype: TensorType, out_features: usize, in_features: usize) -> Option<u64> {
        let outputs = out_features.next_multiple_of(LANES) as u64;
        let per_output = match dtype {
            TensorType::F32 => in_features * size_of::<f32>(),
            TensorType::F16 | TensorType::BF16 => in_features * size_of::<f16>(),
            quantised => {
                let format = BlockFormat::of(quantised)?;
                let num_factors = if format.has_mins { 2 } else { 1 };
                let factors = in_features / format.kind.block() * num_factors;
                format.kind.integer_bytes(in_features) + factors * format.factor.num_bytes()
            }
        };
        Some(outputs * per_output as u64)
    }

    /// True when products want int8 activations.
    pub fn is_quantised(&self) -> bool {
        matches!(self.weights, Weights::Quantised(_))
    }

    /// Row `index` as f32 (embedding lookup). Panics when there is no such row or `out` is not one row.
    pub fn row(&self, index: usize, out: &mut [f32]) {
        assert!(
            index < self.out_features,
            "row {index} of a matrix of {}",
            self.out_features
        );
        assert_eq!(out.len(), self.in_features, "a row has in_features values");
        let (panel, lane) = (index / LANES, index % LANES);
        match &self.weights {
            Weights::F32(panels) => float_row(self.panel(panels, panel), lane, f32::from, out),
            Weights::F16(panels) => float_row(self.panel(panels, panel), lane, f16::to_f32, out),
            Weights::Bf16(panels) => float_row(self.panel(panels, panel), lane, bf16::to_f32, out),
            Weights::Quantised(panels) => panels.row((panel, lane), out),
        }
    }

    /// Panels of 16 outputs.
    pub(super) fn num_panels(&self) -> usize {
        self.out_features.div_ceil(LANES)
    }

    /// The panels.
    pub(super) fn weights(&self) -> &Weights {
        &self.weights
    }

    /// One panel of a float matrix: (in_features, 16).
    pub(super) fn panel<'a, T: Plain>(&self, panels: &'a Panels<T>, index: usize) -> &'a [T] {
        &panels.as_slice()[index * self.in_features..(index + 1) * self.in_features]
    }
}

/// One panel of a quantised matrix.
#[derive(Clone, Copy)]
pub(super) struct QuantPanel<'a, F> {
    /// By unit.
    pub units: &'a [[u8; UNIT_BYTES]],
    /// By unit, or empty.
    pub fifth_bits: &'a [FifthBits],
    /// By block.
    pub scales: &'a [LaneArray<F>],
    /// By block, or empty.
    pub mins: &'a [LaneArray<F>],
}

impl QuantPanels {
    /// Integers and what they are multiplied with.
    pub(super) fn parts(&self) -> (&IntegerPanels, &Factors) {
        (&self.integers, &self.factors)
    }

    fn num_bytes(&self) -> usize {
        let factors = match &self.factors {
            Factors::F16(factors) => factors.scales.num_bytes() + factors.mins.num_bytes(),
            Factors::F32(factors) => factors.scales.num_bytes() + factors.mins.num_bytes(),
        };
        self.integers.units.num_bytes() + self.integers.fifth_bits.num_bytes() + factors
    }

    /// The weights of output (panel, lane).
    fn row(&self, output: (usize, usize), out: &mut [f32]) {
        match &self.factors {
            Factors::F16(factors) => self.integers.row(factors, output, out),
            Factors::F32(factors) => self.integers.row(factors, output, out),
        }
    }
}

impl IntegerPanels {
    /// How the integers are stored.
    pub(super) fn kind(&self) -> QuantKind {
        self.kind
    }

    /// Panel `index` of a matrix with `in_features` columns.
    #[inline(always)]
    pub(super) fn panel<'a, F: Element>(
        &'a self,
        factors: &'a FactorPanels<F>,
        index: usize,
        in_features: usize,
    ) -> QuantPanel<'a, F> {
        let num_units = in_features / self.kind.unit();
        let num_blocks = in_features / self.kind.block();
        QuantPanel {
            units: equal_part(self.units.as_slice(), index, num_units),
            fifth_bits: equal_part(self.fifth_bits.as_slice(), index, num_units),
            scales: equal_part(factors.scales.as_slice(), index, num_blocks),
            mins: equal_part(factors.mins.as_slice(), index, num_blocks),
        }
    }

    /// Two roundings, as the file formats define it.
    fn row<F: Element>(
        &self,
        factors: &FactorPanels<F>,
        (panel, lane): (usize, usize),
        out: &mut [f32],
    ) {
        let panel = self.panel(factors, panel, out.len());
        let (unit_len, block_len) = (self.kind.unit(), self.kind.block());
        for (k, value) in out.iter_mut().enumerate() {
            let (unit, block) = (k / unit_len, k / block_len);
            let fifth_bits = panel.fifth_bits.get(unit);
            let at = (k % unit_len, lane);
            let quant = self.kind.get(&panel.units[unit], fifth_bits, at);
            *value = panel.scales[block][lane].to_f32() * f32::from(quant);
            if let Some(min) = panel.mins.get(block) {
                *value += min[lane].to_f32();
            }
        }
    }
}

/// Part `index` of a slice cut into parts of `len`; empty when the slice is.
#[inline(always)]
fn equal_part<T>(slice: &[T], index: usize, len: usize) -> &[T] {
    if slice.is_empty() {
        return &[];
    }
    &slice[index * len..(index + 1) * len]
}

fn float_row<T: Copy>(
    panel: &[LaneArray<T>],
    lane: usize,
    widen: impl Fn(T) -> f32,
    out: &mut [f32],
) {
    for (value, lanes) in out.iter_mut().zip(panel) {
        *value = widen(lanes[lane]);
    }
}

/// A tensor that is being packed.
struct Source<'a> {
    tensor: &'a RawTensor,
    out_features: usize,
    in_features: usize,
}

impl Source<'_> {
    fn num_panels(&self) -> usize {
        self.out_features.div_ceil(LANES)
    }

    /// The bytes of each row, after a look at their number.
    fn rows(&self, row_bytes: usize) -> Result<Vec<&[u8]>, KernelError> {
        let expected = self.out_features.checked_mul(row_bytes);
        if expected != Some(self.tensor.bytes.len()) || row_bytes == 0 {
            let actual = self.tensor.bytes.len();
            return Err(self.shape_error(format!("{row_bytes} bytes a row, not {actual} in all")));
        }
        Ok(self.tensor.bytes.chunks_exact(row_bytes).collect())
    }

    fn shape_error(&self, expected: String) -> KernelError {
        shape_error(self.tensor, expected)
    }

    fn pack_floats<T: Element, const N: usize>(
        &self,
        kernels: &CpuKernels,
        read: fn([u8; N]) -> T,
    ) -> Result<Panels<LaneArray<T>>, KernelError> {
        let row_bytes = self.in_features.checked_mul(N).unwrap_or(0);
        let rows = self.rows(row_bytes)?;
        let len = self.num_panels() * self.in_features;
        let mut panels = Panels::<LaneArray<T>>::zeros(len)?;
        let shared = Disjoint::new(panels.as_mut_slice());
        kernels.for_each(self.num_panels(), &|panel| {
            let range = panel * self.in_features..(panel + 1) * self.in_features;
            // SAFETY: each panel is one index.
            let panel_out = unsafe { shared.part(range) };
            for (lane, row) in panel_rows(&rows, panel).iter().enumerate() {
                let (values, _) = row.as_chunks::<N>();
                for (to, value) in panel_out.iter_mut().zip(values) {
                    to[lane] = read(*value);
                }
            }
        });
        Ok(panels)
    }

    fn pack_quants(&self, kernels: &CpuKernels) -> Result<QuantPanels, KernelError> {
        let format =
            BlockFormat::of(self.tensor.dtype).ok_or_else(|| KernelError::UnsupportedType {
                name: self.tensor.name.clone(),
                dtype: self.tensor.dtype,
            })?;
        if !self.in_features.is_multiple_of(format.values) {
            return Err(self.shape_error(format!("in_features in blocks of {}", format.values)));
        }
        let num_blocks = self.in_features / format.values;
        let rows = self.rows(num_blocks.checked_mul(format.bytes).unwrap_or(0))?;
        let mut integers = IntegerPanels::zeros(format.kind, self.num_panels(), self.in_features)?;
        let target = integers.shared();
        let factors = match format.factor {
            FactorType::F16 => Factors::F16(self.pack_blocks(kernels, &format, &rows, &target)?),
            FactorType::F32 => Factors::F32(self.pack_blocks(kernels, &format, &rows, &target)?),
        };
        Ok(QuantPanels { integers, factors })
    }

    /// Unpacks every block: integers go to `integers`, factors are returned.
    fn pack_blocks<F: Element>(
        &self,
        kernels: &CpuKernels,
        format: &BlockFormat,
        rows: &[&[u8]],
        integers: &SharedIntegers<'_>,
    ) -> Result<FactorPanels<F>, KernelError> {
        let num_panels = self.num_panels();
        let num_blocks = num_panels * (self.in_features / format.kind.block());
        let mut factors = FactorPanels {
            scales: Panels::zeros(num_blocks)?,
            mins: Panels::zeros(if format.has_mins { num_blocks } else { 0 })?,
        };
        let scales = Disjoint::new(factors.scales.as_mut_slice());
        let mins = Disjoint::new(factors.mins.as_mut_slice());
        kernels.for_each(num_panels, &|panel| {
            // SAFETY: each panel is one index, and parts of equal size by panel do not overlap.
            let mut target = unsafe {
                PanelTarget {
                    units: integers.units.equal_part(panel, num_panels),
                    fifth_bits: integers.fifth_bits.equal_part(panel, num_panels),
                    scales: scales.equal_part(panel, num_panels),
                    mins: mins.equal_part(panel, num_panels),
                }
            };
            for (lane, row) in panel_rows(rows, panel).iter().enumerate() {
                target.pack_row(format, lane, row);
            }
        });
        Ok(factors)
    }
}

/// The up to 16 rows of a panel.
fn panel_rows<'a, 'b>(rows: &'a [&'b [u8]], panel: usize) -> &'a [&'b [u8]] {
    &rows[panel * LANES..rows.len().min((panel + 1) * LANES)]
}

impl IntegerPanels {
    fn zeros(kind: QuantKind, num_panels: usize, in_features: usize) -> Result<Self, KernelError> {
        let num_units = num_panels * (in_features / kind.unit());
        let num_words = if kind.has_fifth_bits() { num_units } else { 0 };
        Ok(IntegerPanels {
            kind,
            units: Panels::zeros(num_units)?,
            fifth_bits: Panels::zeros(num_words)?,
        })
    }

    fn shared(&mut self) -> SharedIntegers<'_> {
        SharedIntegers {
            units: Disjoint::new(self.units.as_mut_slice()),
            fifth_bits: Disjoint::new(self.fifth_bits.as_mut_slice()),
        }
    }
}

/// Integers that several threads fill.
struct SharedIntegers<'a> {
    units: Disjoint<'a, [u8; UNIT_BYTES]>,
    fifth_bits: Disjoint<'a, FifthBits>,
}

/// A panel that is being filled.
struct PanelTarget<'a, F> {
    units: &'a mut [[u8; UNIT_BYTES]],
    fifth_bits: &'a mut [FifthBits],
    scales: &'a mut [LaneArray<F>],
    mins: &'a mut [LaneArray<F>],
}

impl<F: Element> PanelTarget<'_, F> {
    /// Unpacks the file blocks of one output row.
    fn pack_row(&mut self, format: &BlockFormat, lane: usize, row: &[u8]) {
        let mut decoded = Decoded::default();
        let (unit, block) = (format.kind.unit(), format.kind.block());
        for (index, bytes) in row.chunks_exact(format.bytes).enumerate() {
            (format.decode)(bytes, &mut decoded);
            let first_unit = index * (format.values / unit);
            let values = decoded.quants[..format.values].chunks_exact(unit);
            for (unit, values) in (first_unit..).zip(values) {
                let fifth_bits = self.fifth_bits.get_mut(unit);
                format
                    .kind
                    .put(&mut self.units[unit], fifth_bits, lane, values);
            }
            let num_blocks = format.values / block;
            for b in 0..num_blocks {
                self.scales[index * num_blocks + b][lane] = F::from_f32(decoded.scales[b]);
                if let Some(min) = self.mins.get_mut(index * num_blocks + b) {
                    min[lane] = F::from_f32(decoded.mins[b]);
                }
            }
        }
    }
}

fn shape_error(tensor: &RawTensor, expected: String) -> KernelError {
    KernelError::Shape {
        name: tensor.name.clone(),
        shape: tensor.shape.clone(),
        expected,
    }
}
