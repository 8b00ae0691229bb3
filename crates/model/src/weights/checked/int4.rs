//! The tensors of matrices in integers of four bits.

use plimsoll_kernels::WeightType;

use super::{Checked, in_floats};
use crate::ModelError;
use crate::blocks::Matrix;
use crate::quantization::{INT4_WORD, Int4Format, Int4Packing};
use crate::weights::int4::Int4;
use crate::weights::{Beside, StoredMatrix, Tensor};

impl<'a> Checked<'a> {
    /// A matrix in four bits.
    pub(super) fn int4(
        &mut self,
        matrix: &Matrix,
        format: Int4Format,
    ) -> Result<StoredMatrix<'a>, ModelError> {
        let [outputs, inputs] = matrix.shape();
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
        let int4 = Int4::new(format, [outputs, inputs], scales, zeros, order.as_ref())?;
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
        let want = matrix.shape().map(|size| size as i64);
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

#[cfg(test)]
pub(crate) mod tests;
