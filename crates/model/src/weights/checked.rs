use std::collections::HashSet;

use plimsoll_core::untrusted::quotable;

use super::{Source, Tensor};
use crate::blocks::Vector;
use crate::{ModelError, Shape};

/// Takes tensors from a source and checks that they are what the configuration implies, all of it and nothing else.
pub(crate) struct Checked<'a> {
    source: &'a dyn Source,
    /// Names of those not yet taken, as the source calls them.
    left: HashSet<String>,
}

impl<'a> Checked<'a> {
    pub(crate) fn new(source: &'a dyn Source) -> Self {
        let left = source.names().into_iter().collect();
        Self { source, left }
    }

    /// Bytes of all tensors; 0 if unknown.
    pub(crate) fn total_bytes(&self) -> u64 {
        self.source.total_bytes()
    }

    /// The tensor, which must be there and have the expected shape.
    pub(crate) fn tensor(&mut self, name: &str, expected: &[usize]) -> Result<Tensor<'a>, ModelError> {
        let shape = || Shape(expected.to_vec());
        let tensor = self
            .source
            .tensor(name, expected)?
            .ok_or_else(|| ModelError::MissingTensor {
                name: self.source.stored_name(name),
                expected: shape(),
            })?;
        if tensor.shape.0 != expected {
            return Err(ModelError::MisshapenTensor {
                name: tensor.name,
                expected: shape(),
                found: tensor.shape,
            });
        }
        self.left.remove(&tensor.name);
        Ok(tensor)
    }

    /// As [`Self::tensor`].
    pub(crate) fn vector(&mut self, vector: &Vector) -> Result<Tensor<'a>, ModelError> {
        let unit_offset = vector.unit_offset && !self.source.has_whole_norms();
        let tensor = Tensor {
            unit_offset,
            ..self.tensor(&vector.name, &[vector.len])?
        };
        // Matrices have too many elements: the first step finds out.
        if let Some(index) = tensor.widen()?.iter().position(|value| !value.is_finite()) {
            return Err(ModelError::Weights {
                name: tensor.name,
                message: format!("element {index} is not a number: the file is damaged, download it again"),
            });
        }
        Ok(tensor)
    }

    /// A vector that a model may do without, not taken before.
    pub(crate) fn optional_vector(&mut self, vector: &Vector) -> Result<Option<Tensor<'a>>, ModelError> {
        match self.left.contains(&self.source.stored_name(&vector.name)) {
            true => self.vector(vector).map(Some),
            false => Ok(None),
        }
    }

    /// Checks that no tensor was left that would have changed the output.
    pub(crate) fn finish(self) -> Result<(), ModelError> {
        let mut left: Vec<_> = self.left.into_iter().collect();
        left.sort_unstable();
        let (in_decoder, others): (Vec<_>, Vec<_>) = left
            .into_iter()
            // Tables that old checkpoints store and everybody computes.
            .filter(|name| !name.ends_with("rotary_emb.inv_freq"))
            .partition(|name| {
                [
                    "model.layers.",
                    "layers.",
                    "blk.",
                    "model.language_model.layers.",
                    "language_model.model.layers.",
                ]
                .iter()
                .any(|of| name.starts_with(of))
            });
        if !others.is_empty() {
            tracing::info!(
                "{} tensors outside the decoder are not loaded, such as {}",
                others.len(),
                others[0]
            );
        }
        if in_decoder.is_empty() {
            return Ok(());
        }
        let names = match in_decoder.as_slice() {
            [a, b, c, _, ..] => format!("{a}, {b}, {c} and {} more", in_decoder.len() - 3),
            names => names.join(", "),
        };
        let names = quotable(&names);
        Err(ModelError::UnusedTensors { names })
    }
}
