mod shape;

use std::fmt;

use plimsoll_core::Oom;
use plimsoll_device::{Arena, Budget};

use crate::dense::Dense;
use crate::dtype::{Matrix, WeightError, WeightType};
use crate::format::Format;
use crate::panel::{PANEL, Target};
use crate::parallel::{Disjoint, run_ranges};
use crate::quantize::Activations;
use crate::quantized::Quantized;
use crate::simd::Level;

pub use shape::LinearShape;

/// `y = x Wᵀ + b`, with weights packed at load into panels of sixteen outputs, in their own precision: floats as they are,
/// quantised types as integer codes that are multiplied with activations quantised to 15 bits, with a scale per 32 elements.
///
/// Several matrices that take the same input (q, k, v; gate, up) are stacked along the output: one read of the input, one
/// quantisation, one fork.
pub struct Linear {
    parts: Vec<Part>,
    inputs: usize,
    outputs: usize,
    bias: Option<Vec<f32>>,
}

struct Part {
    weights: Packed,
    /// First output column.
    first: usize,
    outputs: usize,
}

enum Packed {
    Dense(Dense),
    Quantized(Quantized),
}

impl Linear {
    /// Packs `parts`, stacked in this order; `bias` is `[outputs]` of all of them.
    ///
    /// # Errors
    /// [`WeightError`] if the parts do not fit each other or memory runs out.
    pub fn new(parts: &[Matrix<'_>], bias: Option<&[f32]>, budget: &Budget) -> Result<Self, WeightError> {
        let inputs = parts.first().map_or(0, Matrix::cols);
        if inputs == 0 || parts.iter().any(|part| part.cols() != inputs) {
            return Err(WeightError::Parts(parts.iter().map(Matrix::cols).collect()));
        }
        let mut outputs = 0;
        let mut packed = Vec::with_capacity(parts.len());
        for part in parts {
            packed.push(Part {
                weights: Packed::new(part, budget)?,
                first: outputs,
                outputs: part.rows(),
            });
            outputs += part.rows();
        }
        if let Some(bias) = bias.filter(|bias| bias.len() != outputs) {
            return Err(WeightError::Bias {
                bias: bias.len(),
                outputs,
            });
        }
        Ok(Self {
            parts: packed,
            inputs,
            outputs,
            bias: bias.map(<[f32]>::to_vec),
        })
    }

    /// Width of the input.
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// Width of the output, all parts together.
    pub fn outputs(&self) -> usize {
        self.outputs
    }

    /// Bytes of memory.
    pub fn bytes(&self) -> u64 {
        let packed: usize = self.parts.iter().map(|part| part.weights.bytes()).sum();
        (packed + self.bias.as_ref().map_or(0, |bias| size_of_val(&bias[..]))) as u64
    }

    /// `x` is `[m, inputs]`, `out` is `[m, outputs]`. A row of `out` depends on its row of `x` alone, to the bit.
    ///
    /// # Errors
    /// [`Oom`] if the arena has no room for the quantised input.
    pub fn forward(&self, x: &[f32], out: &mut [f32], arena: &Arena) -> Result<(), Oom> {
        self.forward_in_room(x.len() / self.inputs, x, out, arena)
    }

    /// The same where rows of `out` may be wider than the outputs: what is behind them stays as it is.
    ///
    /// # Errors
    /// As [`Self::forward`].
    pub fn forward_to_wider(&self, x: &[f32], out: &mut [f32], arena: &Arena) -> Result<(), Oom> {
        self.forward_at(Level::detect(), x.len() / self.inputs, x, out, arena)
    }

    /// As [`Self::forward`], for which the arena is asked for as much as `room` rows need, at least those of `x`.
    ///
    /// # Errors
    /// As [`Self::forward`].
    pub fn forward_in_room(&self, room: usize, x: &[f32], out: &mut [f32], arena: &Arena) -> Result<(), Oom> {
        let rows = x.len() / self.inputs;
        assert_eq!(out.len(), rows * self.outputs, "out is not [m, {}]", self.outputs);
        self.forward_at(Level::detect(), room, x, out, arena)
    }

    fn forward_at(
        &self,
        level: Level,
        room: usize,
        x: &[f32],
        out: &mut [f32],
        arena: &Arena,
    ) -> Result<(), Oom> {
        let rows = x.len() / self.inputs;
        assert!(rows <= room, "{rows} rows in room for {room}");
        assert_eq!(x.len(), rows * self.inputs, "x is not [m, {}]", self.inputs);
        let stride = out.len().checked_div(rows).unwrap_or(self.outputs);
        assert!(
            stride >= self.outputs && out.len() == rows * stride,
            "out is not [m, {}]",
            self.outputs
        );
        let frame = arena.frame();
        let formats = self.parts.iter().filter_map(|part| part.weights.format());
        let activations = match shape::quantised_input(formats) {
            Some(halves) => Some(Activations::quantize(
                level,
                room,
                x,
                self.inputs,
                halves,
                &frame,
            )?),
            None => None,
        };
        let out = Disjoint::new(out);
        let panels: usize = self.parts.iter().map(Part::panels).sum();
        run_ranges(panels, 1, &|panels| {
            let mut first = 0;
            for part in &self.parts {
                let range = panels.start.max(first)..panels.end.min(first + part.panels());
                if !range.is_empty() {
                    let target = Target {
                        out: &out,
                        stride,
                        first: part.first,
                        outputs: part.outputs,
                    };
                    let range = range.start - first..range.end - first;
                    match (&part.weights, &activations) {
                        (Packed::Dense(weights), _) => weights.multiply(level, x, rows, range, &target),
                        (Packed::Quantized(weights), Some(x)) => weights.multiply(level, x, range, &target),
                        (Packed::Quantized(_), None) => unreachable!("quantised parts quantise their input"),
                    }
                }
                first += part.panels();
            }
        });
        if let Some(bias) = &self.bias {
            for row in 0..rows {
                // SAFETY: the parallel writers are done.
                let row = unsafe { out.part(row * stride, self.outputs) };
                row.iter_mut().zip(bias).for_each(|(y, b)| *y += b);
            }
        }
        Ok(())
    }

    /// Writes row `row` of the (stacked) weight matrix, widened to `f32`.
    pub(crate) fn weight_row(&self, row: usize, out: &mut [f32]) {
        assert_eq!(out.len(), self.inputs);
        let part = self
            .parts
            .iter()
            .rfind(|part| part.first <= row)
            .expect("the first part starts at 0");
        assert!(row - part.first < part.outputs, "row {row} of {}", self.outputs);
        match &part.weights {
            Packed::Dense(weights) => weights.row(row - part.first, out),
            Packed::Quantized(weights) => weights.row(row - part.first, out),
        }
    }
}

impl Part {
    fn panels(&self) -> usize {
        self.outputs.div_ceil(PANEL)
    }
}

impl Packed {
    fn new(matrix: &Matrix<'_>, budget: &Budget) -> Result<Self, WeightError> {
        Ok(match matrix.dtype() {
            WeightType::F32 | WeightType::F16 | WeightType::Bf16 => Self::Dense(Dense::new(matrix, budget)?),
            _ => Self::Quantized(Quantized::new(matrix, budget)?),
        })
    }

    fn bytes(&self) -> usize {
        match self {
            Self::Dense(weights) => weights.bytes(),
            Self::Quantized(weights) => weights.bytes(),
        }
    }

    fn format(&self) -> Option<Format> {
        match self {
            Self::Dense(_) => None,
            Self::Quantized(weights) => Some(weights.format()),
        }
    }
}

impl fmt::Debug for Linear {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Linear")
            .field("inputs", &self.inputs)
            .field("outputs", &self.outputs)
            .field("bytes", &self.bytes())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
