//! Matrices of four bits as checkpoints pack them: their tensors, and what these mean.

use std::ops::Range;

use half::bf16;
use plimsoll_kernels::WeightType;
use rayon::prelude::*;

use super::Tensor;
use crate::blocks::RowOrder;
use crate::quantization::{INT4_WORD, Int4Format, Int4Packing};
use crate::{ModelError, Shape};

/// The zero of symmetric codes.
const MIDDLE: u8 = 8;
/// Bits of a word below the code of each output, in AWQ.
const AWQ_SHIFTS: [u32; INT4_WORD] = [0, 16, 4, 20, 8, 24, 12, 28];
/// What makes words of zeros less 1 words of zeros, as GPTQModel does it.
const ONES: u32 = 0x1111_1111;
/// Outputs that are unpacked at once: whole lines of what is stored with neighbouring outputs beside each other.
const ROWS_AT_ONCE: usize = 64;

/// What belongs to the codes of a matrix in four bits, in the order of stored outputs.
#[derive(Debug)]
pub(crate) struct Int4<'a> {
    format: Int4Format,
    outputs: usize,
    inputs: usize,
    scales: Tensor<'a>,
    zeros: Option<Tensor<'a>>,
    /// The group of each input, where that does not follow from its index.
    order: Option<Vec<usize>>,
}

/// What inputs of a group share.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Group {
    pub(crate) scale: f32,
    /// Less than 16.
    pub(crate) zero: u8,
}

impl Group {
    /// The element that a code stands for.
    pub(crate) fn element(self, code: u8) -> f32 {
        f32::from(i16::from(code) - i16::from(self.zero)) * self.scale
    }
}

/// The group of each input.
fn order_of(stored: &Tensor<'_>, groups: usize) -> Result<Vec<usize>, ModelError> {
    let order = stored
        .data
        .as_chunks()
        .0
        .iter()
        .map(|&bytes| i32::from_le_bytes(bytes));
    let group = |(input, group): (usize, i32)| {
        let known = usize::try_from(group).ok().filter(|&group| group < groups);
        known.ok_or_else(|| ModelError::Weights {
            name: stored.name.clone(),
            message: format!(
                "input {input} is in group {group} of {groups}: the file is damaged, download it again"
            ),
        })
    };
    order.enumerate().map(group).collect()
}

impl<'a> Int4<'a> {
    /// Of tensors of the shapes that the format asks for; `order` is the group of each input.
    ///
    /// # Errors
    /// [`ModelError::Weights`] where there is no such group.
    pub(super) fn new(
        format: Int4Format,
        [outputs, inputs]: [usize; 2],
        scales: Tensor<'a>,
        zeros: Option<Tensor<'a>>,
        order: Option<&Tensor<'_>>,
    ) -> Result<Self, ModelError> {
        let groups = format.groups.count(inputs);
        let size = format.groups.size(inputs);
        let order = order.map(|order| order_of(order, groups)).transpose()?;
        let is_other = |order: &Vec<usize>| {
            order
                .iter()
                .enumerate()
                .any(|(input, group)| input / size != *group)
        };
        Ok(Self {
            format,
            outputs,
            inputs,
            scales,
            zeros,
            order: order.filter(is_other),
        })
    }
}

impl Int4<'_> {
    /// The group of each input, where that does not follow from its index.
    pub(crate) fn order(&self) -> Option<&[usize]> {
        self.order.as_deref()
    }

    /// Inputs of a group.
    pub(crate) fn group_inputs(&self) -> usize {
        self.format.groups.size(self.inputs)
    }

    /// Eight codes of a stored output, from input `8 * octet` on, the first in the lowest bits.
    fn octet(&self, codes: &Tensor<'_>, output: usize, octet: usize) -> u32 {
        match self.format.packing {
            Int4Packing::Compressed { .. } => word(codes, output * self.inputs.div_ceil(INT4_WORD) + octet),
            Int4Packing::Gptq { .. } => word(codes, octet * self.outputs + output),
            Int4Packing::Awq => {
                let width = self.outputs.div_ceil(INT4_WORD);
                let first = octet * INT4_WORD * width + output / INT4_WORD;
                let shift = AWQ_SHIFTS[output % INT4_WORD];
                let code = |input: usize| word(codes, first + input * width) >> shift & 15;
                (0..INT4_WORD).fold(0, |octet, input| octet | code(input) << (4 * input))
            }
        }
    }

    /// Codes of outputs, in order, in words of eight inputs: `[rows, inputs / 8]`.
    pub(crate) fn unpack(&self, codes: &Tensor<'_>, rows: Range<usize>, out: &mut Vec<u32>) {
        let width = self.inputs / INT4_WORD;
        out.clear();
        out.resize(rows.len() * width, 0);
        let stored: Vec<usize> = rows.map(|row| codes.order.stored(row)).collect();
        // Neighbouring outputs are neighbours in most layouts.
        for octet in 0..width {
            for (row, &output) in stored.iter().enumerate() {
                out[row * width + octet] = self.octet(codes, output, octet);
            }
        }
    }

    /// The groups of an output, in order.
    pub(crate) fn groups(&self, order: RowOrder, row: usize) -> Result<Vec<Group>, ModelError> {
        let output = order.stored(row);
        let count = self.format.groups.count(self.inputs);
        let group = |index: usize| {
            let (at, zeros_at, shift) = match self.format.packing {
                Int4Packing::Compressed { .. } => (
                    output * count + index,
                    output / INT4_WORD * count + index,
                    4 * (output % INT4_WORD) as u32,
                ),
                Int4Packing::Awq | Int4Packing::Gptq { .. } => {
                    let width = self.outputs.div_ceil(INT4_WORD);
                    let shift = match self.format.packing {
                        Int4Packing::Awq => AWQ_SHIFTS[output % INT4_WORD],
                        _ => 4 * (output % INT4_WORD) as u32,
                    };
                    (
                        index * self.outputs + output,
                        index * width + output / INT4_WORD,
                        shift,
                    )
                }
            };
            let scale = self.scales.element(at);
            if !scale.is_finite() {
                return Err(ModelError::Weights {
                    name: self.scales.name.clone(),
                    message: format!("element {at} is {scale}: the file is damaged, download it again"),
                });
            }
            let zero = match &self.zeros {
                None => MIDDLE,
                Some(zeros) => {
                    let stored = word(zeros, zeros_at);
                    let whole = match self.format.packing {
                        Int4Packing::Gptq { zeros_less_one: true } => stored.wrapping_add(ONES),
                        _ => stored,
                    };
                    (whole >> shift & 15) as u8
                }
            };
            Ok(Group { scale, zero })
        };
        (0..count).map(group).collect()
    }

    /// All elements, rounded to `bf16`, in order.
    pub(super) fn dequantised<'b>(&self, codes: Tensor<'b>) -> Result<Tensor<'b>, ModelError> {
        let (outputs, inputs) = (self.outputs, self.inputs);
        let row_bytes = inputs * size_of::<bf16>();
        let mut data = vec![0; outputs * row_bytes];
        let size = self.format.groups.size(inputs);
        let some = data.par_chunks_mut(ROWS_AT_ONCE * row_bytes).enumerate();
        some.try_for_each_init(Vec::new, |unpacked, (index, out)| -> Result<(), ModelError> {
            let first = index * ROWS_AT_ONCE;
            self.unpack(&codes, first..first + out.len() / row_bytes, unpacked);
            let rows = unpacked
                .chunks_exact(inputs / INT4_WORD)
                .zip(out.chunks_exact_mut(row_bytes));
            for (row, (words, out)) in rows.enumerate() {
                let groups = self.groups(codes.order, first + row)?;
                for (input, out) in out.as_chunks_mut().0.iter_mut().enumerate() {
                    let group = self.order().map_or(input / size, |order| order[input]);
                    let element = groups[group].element(code(words, input));
                    *out = bf16::from_f32(element).to_le_bytes();
                }
            }
            Ok(())
        })?;
        Ok(Tensor {
            dtype: WeightType::Bf16,
            shape: Shape(vec![outputs, inputs]),
            order: RowOrder::Plain,
            data: data.into(),
            ..codes
        })
    }
}

/// The code of an input in words of eight.
pub(crate) fn code(words: &[u32], input: usize) -> u8 {
    (words[input / INT4_WORD] >> (4 * (input % INT4_WORD)) & 15) as u8
}

fn word(tensor: &Tensor<'_>, index: usize) -> u32 {
    u32::from_le_bytes(tensor.data.as_chunks().0[index])
}
