//! Weights in the layout that the kernels read: panels of 16 outputs, unpacked from file formats once, at load.
//!
//! **Float** (F32, F16, BF16, kept at their width): a panel is (k, 16 outputs).
//!
//! **Quantised**: w = scale · q + min, with exact integers q, one scale (and one min where the format has
//! mins) per block of 32, or of 16, and output. All are exact: files store them as products of numbers short
//! enough for f32. Integers lie in units of 256 bytes, groups of 4 consecutive k for each of 16 outputs,
//! which is what the byte dot products of all processors eat:
//!
//! ```text
//! byte integers:    unit = 16 k: byte 64·g + 4·output + i holds k = 4·g + i, g in 0..4
//! nibble integers:  unit = 32 k: the same bytes, k in the low and k + 16 in the high nibble
//! scales and mins:  (block, 16 outputs)
//! ```
//!
//! The last panel is padded with zeros. Nothing here multiplies.

mod blocks;

use half::{bf16, f16};

use super::disjoint::Disjoint;
use super::simd::{Aligned, LaneArray, UNIT_BYTES};
use super::{CpuKernels, KernelError, LANES};
use crate::loader::{RawTensor, TensorType};
use blocks::{BlockFormat, Decoded};

/// A weight matrix (out_features, in_features), packed in panels of 16 output rows.
pub struct PackedMatrix {
    out_features: usize,
    in_features: usize,
    weights: Weights,
}

/// Panels, one after the other.
pub(super) enum Weights {
    /// (panels, in_features, 16)
    F32(Vec<Aligned<LaneArray<f32>>>),
    /// (panels, in_features, 16)
    F16(Vec<Aligned<LaneArray<f16>>>),
    /// (panels, in_features, 16)
    Bf16(Vec<Aligned<LaneArray<bf16>>>),
    /// Integers with scales.
    Quantised(QuantPanels),
}

/// Panels of a quantised matrix.
pub(super) struct QuantPanels {
    /// How integers lie in units and share scales.
    pub kind: QuantKind,
    /// (panels, units)
    pub units: Vec<Aligned<[u8; UNIT_BYTES]>>,
    /// (panels, blocks)
    pub scales: Vec<Aligned<LaneArray<f32>>>,
    /// (panels, blocks), or empty when the format has no mins.
    pub mins: Vec<Aligned<LaneArray<f32>>>,
}

/// How integers lie in units and share scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum QuantKind {
    /// 0..=15 as nibbles, blocks of 32.
    U4,
    /// −8..=7 stored as nibbles with 8 added, blocks of 32.
    I4,
    /// −32..=32 as bytes, blocks of 32.
    I6,
    /// −32..=32 as bytes, blocks of 16.
    I6Half,
    /// −128..=127 as bytes, blocks of 32.
    I8,
}

impl QuantKind {
    /// Values that share a scale.
    pub(super) fn block(self) -> usize {
        match self {
            QuantKind::U4 | QuantKind::I4 | QuantKind::I6 | QuantKind::I8 => 32,
            QuantKind::I6Half => 16,
        }
    }

    /// Values of one output in a unit.
    pub(super) fn unit(self) -> usize {
        match self {
            QuantKind::U4 | QuantKind::I4 => 32,
            QuantKind::I6 | QuantKind::I6Half | QuantKind::I8 => 16,
        }
    }

    /// Writes the values of a unit for output `lane`.
    fn put(self, unit: &mut [u8; UNIT_BYTES], lane: usize, values: &[i8]) {
        let (groups, _) = unit.as_chunks_mut::<64>();
        for (g, group) in groups.iter_mut().enumerate() {
            let bytes = &mut group[4 * lane..4 * lane + 4];
            let near = &values[4 * g..4 * g + 4];
            match self {
                QuantKind::U4 => put_nibbles(bytes, near, &values[16 + 4 * g..20 + 4 * g], 0),
                QuantKind::I4 => put_nibbles(bytes, near, &values[16 + 4 * g..20 + 4 * g], 8),
                QuantKind::I6 | QuantKind::I6Half | QuantKind::I8 => {
                    for (byte, value) in bytes.iter_mut().zip(near) {
                        *byte = *value as u8;
                    }
                }
            }
        }
    }

    /// Reads what `put` wrote.
    fn get(self, unit: &[u8; UNIT_BYTES], (k, lane): (usize, usize)) -> i8 {
        let byte = unit[k % 16 / 4 * 64 + lane * 4 + k % 4];
        match self {
            QuantKind::U4 => (byte >> (k / 16 * 4) & 15) as i8,
            QuantKind::I4 => (byte >> (k / 16 * 4) & 15) as i8 - 8,
            QuantKind::I6 | QuantKind::I6Half | QuantKind::I8 => byte as i8,
        }
    }
}

/// Low nibbles from `near`, high ones from `far`, each with `offset` added.
fn put_nibbles(bytes: &mut [u8], near: &[i8], far: &[i8], offset: i8) {
    for ((byte, near), far) in bytes.iter_mut().zip(near).zip(far) {
        *byte = (near + offset) as u8 | ((far + offset) as u8) << 4;
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
            Weights::F32(panels) => size_of_val(panels.as_slice()),
            Weights::F16(panels) => size_of_val(panels.as_slice()),
            Weights::Bf16(panels) => size_of_val(panels.as_slice()),
            Weights::Quantised(panels) => {
                size_of_val(panels.units.as_slice())
                    + size_of_val(panels.scales.as_slice())
                    + size_of_val(panels.mins.as_slice())
            }
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
                let units = in_features / format.kind.unit() * (UNIT_BYTES / LANES);
                let factors = in_features / format.kind.block() * num_factors;
                units + factors * size_of::<f32>()
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
            Weights::Quantised(panels) => {
                panels.panel(panel, self.in_features).row(lane, out);
            }
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
    pub(super) fn panel<'a, T>(&self, panels: &'a [T], index: usize) -> &'a [T] {
        &panels[index * self.in_features..(index + 1) * self.in_features]
    }
}

/// One panel of a quantised matrix.
#[derive(Clone, Copy)]
pub(super) struct QuantPanel<'a> {
    kind: QuantKind,
    /// By unit.
    pub units: &'a [Aligned<[u8; UNIT_BYTES]>],
    /// By block.
    pub scales: &'a [Aligned<LaneArray<f32>>],
    /// By block, or empty.
    pub mins: &'a [Aligned<LaneArray<f32>>],
}

impl QuantPanels {
    /// Panel `index` of a matrix with `in_features` columns.
    #[inline(always)]
    pub(super) fn panel(&self, index: usize, in_features: usize) -> QuantPanel<'_> {
        let num_units = in_features / self.kind.unit();
        let num_blocks = in_features / self.kind.block();
        let blocks = index * num_blocks..(index + 1) * num_blocks;
        QuantPanel {
            kind: self.kind,
            units: &self.units[index * num_units..(index + 1) * num_units],
            scales: &self.scales[blocks.clone()],
            mins: if self.mins.is_empty() {
                &[]
            } else {
                &self.mins[blocks]
            },
        }
    }
}

impl QuantPanel<'_> {
    /// The weights of one output. Two roundings, as the file formats define it.
    fn row(&self, lane: usize, out: &mut [f32]) {
        for (k, value) in out.iter_mut().enumerate() {
            let (unit, block) = (k / self.kind.unit(), k / self.kind.block());
            let quant = self
                .kind
                .get(&self.units[unit].0, (k % self.kind.unit(), lane));
            *value = self.scales[block].0[lane] * f32::from(quant);
            if let Some(min) = self.mins.get(block) {
                *value += min.0[lane];
            }
        }
    }
}

fn float_row<T: Copy>(
    panel: &[Aligned<LaneArray<T>>],
    lane: usize,
    widen: impl Fn(T) -> f32,
    out: &mut [f32],
) {
    for (value, lanes) in out.iter_mut().zip(panel) {
        *value = widen(lanes.0[lane]);
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

    fn pack_floats<T: Copy + Default + Send + Sync, const N: usize>(
        &self,
        kernels: &CpuKernels,
        read: fn([u8; N]) -> T,
    ) -> Result<Vec<Aligned<LaneArray<T>>>, KernelError> {
        let row_bytes = self.in_features.checked_mul(N).unwrap_or(0);
        let rows = self.rows(row_bytes)?;
        let len = self.num_panels() * self.in_features;
        let mut panels = vec![Aligned([T::default(); LANES]); len];
        let shared = Disjoint::new(&mut panels);
        kernels.for_each(self.num_panels(), &|panel| {
            let range = panel * self.in_features..(panel + 1) * self.in_features;
            // SAFETY: each panel is one index.
            let panel_out = unsafe { shared.part(range) };
            for (lane, row) in panel_rows(&rows, panel).iter().enumerate() {
                let (values, _) = row.as_chunks::<N>();
                for (to, value) in panel_out.iter_mut().zip(values) {
                    to.0[lane] = read(*value);
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
        let num_panels = self.num_panels();
        let mut panels = QuantPanels::zeros(&format, num_panels, self.in_features);
        let shared = SharedPanels::new(&mut panels, num_panels);
        kernels.for_each(num_panels, &|panel| {
            // SAFETY: each panel is one index.
            let mut target = unsafe { shared.panel(panel) };
            for (lane, row) in panel_rows(&rows, panel).iter().enumerate() {
                target.pack_row(&format, lane, row);
            }
        });
        Ok(panels)
    }
}

/// The up to 16 rows of a panel.
fn panel_rows<'a, 'b>(rows: &'a [&'b [u8]], panel: usize) -> &'a [&'b [u8]] {
    &rows[panel * LANES..rows.len().min((panel + 1) * LANES)]
}

impl QuantPanels {
    fn zeros(format: &BlockFormat, num_panels: usize, in_features: usize) -> Self {
        let kind = format.kind;
        let num_blocks = num_panels * (in_features / kind.block());
        let num_units = num_panels * (in_features / kind.unit());
        let zeros = Aligned([0.0; LANES]);
        QuantPanels {
            kind,
            units: vec![Aligned([0; UNIT_BYTES]); num_units],
            scales: vec![zeros; num_blocks],
            mins: vec![zeros; if format.has_mins { num_blocks } else { 0 }],
        }
    }
}

/// Panels that several threads fill.
struct SharedPanels<'a> {
    units: Disjoint<'a, Aligned<[u8; UNIT_BYTES]>>,
    scales: Disjoint<'a, Aligned<LaneArray<f32>>>,
    mins: Disjoint<'a, Aligned<LaneArray<f32>>>,
    num_panels: usize,
}

impl<'a> SharedPanels<'a> {
    fn new(panels: &'a mut QuantPanels, num_panels: usize) -> Self {
        SharedPanels {
            units: Disjoint::new(&mut panels.units),
            scales: Disjoint::new(&mut panels.scales),
            mins: Disjoint::new(&mut panels.mins),
            num_panels,
        }
    }

    /// # Safety
    /// No two calls at the same time for the same panel.
    unsafe fn panel(&self, index: usize) -> PanelTarget<'_> {
        let part = |len: usize| {
            let len = len / self.num_panels;
            index * len..(index + 1) * len
        };
        // SAFETY: equal parts by panel, and the caller's promise.
        unsafe {
            PanelTarget {
                units: self.units.part(part(self.units.len())),
                scales: self.scales.part(part(self.scales.len())),
                mins: self.mins.part(part(self.mins.len())),
            }
        }
    }
}

/// A panel that is being filled.
struct PanelTarget<'a> {
    units: &'a mut [Aligned<[u8; UNIT_BYTES]>],
    scales: &'a mut [Aligned<LaneArray<f32>>],
    mins: &'a mut [Aligned<LaneArray<f32>>],
}

impl PanelTarget<'_> {
    /// Unpacks the file blocks of one output row.
    fn pack_row(&mut self, format: &BlockFormat, lane: usize, row: &[u8]) {
        let mut decoded = Decoded::default();
        let (unit, block) = (format.kind.unit(), format.kind.block());
        for (index, bytes) in row.chunks_exact(format.bytes).enumerate() {
            (format.decode)(bytes, &mut decoded);
            let first_unit = index * (format.values / unit);
            let values = decoded.quants[..format.values].chunks_exact(unit);
            for (target, values) in self.units[first_unit..].iter_mut().zip(values) {
                format.kind.put(&mut target.0, lane, values);
            }
            let num_blocks = format.values / block;
            for b in 0..num_blocks {
                self.scales[index * num_blocks + b].0[lane] = decoded.scales[b];
                if let Some(min) = self.mins.get_mut(index * num_blocks + b) {
                    min.0[lane] = decoded.mins[b];
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
