//! The tensors of matrices in integers of four bits.

use plimsoll_kernels::WeightType;

use super::{Checked, in_floats};
use crate::ModelError;
use crate::blocks::Matrix;
use crate::quantization::{INT4_WORD, Int4Format, Int4Packing};
use crate::shard::{Axis, Share};
use crate::weights::int4::Int4;
use crate::weights::{Beside, StoredMatrix, Tensor};

impl<'a> Checked<'a> {
    /// A matrix in four bits.
    pub(super) fn int4(
        &mut self,
        matrix: &Matrix,
        format: Int4Format,
    ) -> Result<StoredMatrix<'a>, ModelError> {
        let [outputs, inputs] = matrix.stored_shape();
        let words = |len: usize| len.div_ceil(INT4_WORD);
        let groups = format.groups.count(inputs);
        let (is_compressed, has_zeros) = match format.packing {
            Int4Packing::Compressed { symmetric } => (true, !symmetric),
            Int4Packing::Awq | Int4Packing::Gptq { .. } => (false, true),
        };
        let (codes, scales, zeros) = match format.packing {
            Int4Packing::Compressed { .. } => (
                [outputs, words(inputs)],
                [outputs, groups],
                [words(outputs), groups],
            ),
            Int4Packing::Awq => (
                [inputs, words(outputs)],
                [groups, outputs],
                [groups, words(outputs)],
            ),
            Int4Packing::Gptq { .. } => (
                [words(inputs), outputs],
                [groups, outputs],
                [groups, words(outputs)],
            ),
        };
        let name = |compressed: &str, other: &str| {
            let part = if is_compressed { compressed } else { other };
            format!("{}.{part}", matrix.module)
        };
        let mut tensor = self.integers(&name("weight_packed", "qweight"), WeightType::I32, &codes)?;
        tensor.order = matrix.order;
        if let Some(shape) = self.optional_integers(&name("weight_shape", "shape"), WeightType::I64, &[2])? {
            self.check_shape(&shape, matrix)?;
        }
        let scales = self.floats(&name("weight_scale", "scales"), &scales)?;
        let zeros = match has_zeros {
            true => Some(self.integers(&name("weight_zero_point", "qzeros"), WeightType::I32, &zeros)?),
            false => None,
        };
        let index = name("weight_g_idx", "g_idx");
        let order = match format.ordered {
            true => Some(self.integers(&index, WeightType::I32, &[inputs])?),
            // Stored with those in order too.
            false => self.optional_integers(&index, WeightType::I32, &[inputs])?,
        };
        self.drop_zero_bias(&format!("{}.bias", matrix.module))?;
        let mut stored = Stored {
            codes: tensor,
            scales,
            zeros,
        };
        if let Some(share) = &matrix.share {
            let is_ordered = order
                .as_ref()
                .is_some_and(|order| !is_in_turn(order, format, inputs));
            if share.axis == Axis::Inputs && is_ordered {
                let message = format!(
                    "ranks cannot share the inputs of `{}`, whose groups are out of order (`desc_act`)",
                    matrix.module
                );
                return Err(ModelError::flag("--tensor-parallel-size", message));
            }
            stored = stored.of_rank(format, share, inputs)?;
        }
        let Stored {
            codes: tensor,
            scales,
            zeros,
        } = stored;
        let order = order.filter(|_| {
            matrix
                .share
                .as_ref()
                .is_none_or(|share| share.axis == Axis::Outputs)
        });
        let int4 = Int4::new(format, matrix.shape(), scales, zeros, order.as_ref())?;
        Ok(StoredMatrix {
            tensor,
            beside: Beside::Int4(int4),
        })
    }

    /// A bias of zeros changes nothing: old versions of AutoGPTQ store one for each layer, whether or not the model has any.
    fn drop_zero_bias(&mut self, name: &str) -> Result<(), ModelError> {
        let stored = self.source.stored_name(name);
        if !self.left.contains(&stored) {
            return Ok(());
        }
        let Some(tensor) = self.source.tensor(name, &[])? else {
            return Ok(());
        };
        if in_floats(tensor)?.widen()?.iter().all(|value| *value == 0.0) {
            self.left.remove(&stored);
        }
        Ok(())
    }

    fn check_shape(&self, stored: &Tensor<'_>, matrix: &Matrix) -> Result<(), ModelError> {
        let sizes = stored
            .data
            .as_chunks()
            .0
            .iter()
            .map(|&bytes| i64::from_le_bytes(bytes));
        let want = matrix.stored_shape().map(|size| size as i64);
        if sizes.clone().eq(want) {
            return Ok(());
        }
        Err(ModelError::Weights {
            name: stored.name.clone(),
            message: format!(
                "says {:?}, the configuration implies {want:?}",
                sizes.collect::<Vec<_>>()
            ),
        })
    }
}

/// The tensors of a matrix.
struct Stored<'a> {
    codes: Tensor<'a>,
    scales: Tensor<'a>,
    zeros: Option<Tensor<'a>>,
}

impl Stored<'_> {
    /// A rank's part of a matrix of so many inputs.
    fn of_rank(self, format: Int4Format, share: &Share, inputs: usize) -> Result<Self, ModelError> {
        let group = format.groups.size(inputs);
        let is_compressed = matches!(format.packing, Int4Packing::Compressed { .. });
        // Which dimension of the codes is divided, and how many share a word there.
        let (dimension, unit) = match (format.packing, share.axis) {
            (Int4Packing::Compressed { .. }, Axis::Outputs) => (0, 1),
            (Int4Packing::Compressed { .. }, Axis::Inputs) => (1, INT4_WORD),
            (Int4Packing::Awq, Axis::Outputs) => (1, INT4_WORD),
            (Int4Packing::Awq, Axis::Inputs) => (0, 1),
            (Int4Packing::Gptq { .. }, Axis::Outputs) => (1, 1),
            (Int4Packing::Gptq { .. }, Axis::Inputs) => (0, INT4_WORD),
        };
        let codes = self.codes.cut_units(dimension, share, unit)?;
        let of_outputs = if is_compressed { 0 } else { 1 };
        let (scales, zeros) = match share.axis {
            Axis::Outputs => (
                self.scales.cut_units(of_outputs, share, 1)?,
                (self
                    .zeros
                    .map(|zeros| zeros.cut_units(of_outputs, share, INT4_WORD)))
                .transpose()?,
            ),
            // One group has all inputs, whoever has them.
            Axis::Inputs if group == inputs => (self.scales, self.zeros),
            Axis::Inputs => (
                self.scales.cut_units(1 - of_outputs, share, group)?,
                (self
                    .zeros
                    .map(|zeros| zeros.cut_units(1 - of_outputs, share, group)))
                .transpose()?,
            ),
        };
        Ok(Self { codes, scales, zeros })
    }
}

/// Whether the groups of inputs follow from their places.
fn is_in_turn(order: &Tensor<'_>, format: Int4Format, inputs: usize) -> bool {
    let size = format.groups.size(inputs);
    let groups = order.data.as_chunks().0.iter();
    groups
        .enumerate()
        .all(|(input, &group)| usize::try_from(i32::from_le_bytes(group)) == Ok(input / size))
}

#[cfg(test)]
pub(crate) mod tests;
