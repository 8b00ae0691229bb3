//! Declarations of stored tensors, under the names of Hugging Face checkpoints.

use crate::spec::NormSpec;

/// A vector.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Vector {
    pub(crate) name: String,
    pub(crate) len: usize,
    /// Stored less 1, as far as the source does not say otherwise.
    pub(crate) unit_offset: bool,
}

impl Vector {
    pub(crate) fn plain(name: impl Into<String>, len: usize) -> Self {
        Self {
            name: name.into(),
            len,
            unit_offset: false,
        }
    }

    pub(crate) fn norm(name: impl Into<String>, len: usize, norm: NormSpec) -> Self {
        Self {
            unit_offset: norm.unit_offset,
            ..Self::plain(name, len)
        }
    }
}

/// Projections of the same inputs, stacked along the output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Stack {
    /// Names, without `.weight` or `.bias`, and outputs.
    pub(crate) parts: Vec<(String, usize)>,
    pub(crate) inputs: usize,
    pub(crate) bias: bool,
}

impl Stack {
    pub(crate) fn one(name: impl Into<String>, outputs: usize, inputs: usize) -> Self {
        Self {
            parts: vec![(name.into(), outputs)],
            inputs,
            bias: false,
        }
    }

    /// Outputs of all parts.
    pub(crate) fn outputs(&self) -> usize {
        self.parts.iter().map(|(_, outputs)| outputs).sum()
    }

    /// Names and outputs of the matrices.
    pub(crate) fn weights(&self) -> impl Iterator<Item = (String, usize)> {
        self.parts
            .iter()
            .map(|(name, outputs)| (format!("{name}.weight"), *outputs))
    }

    /// The biases; none where there is no bias.
    pub(crate) fn biases(&self) -> impl Iterator<Item = Vector> {
        let parts = if self.bias { self.parts.as_slice() } else { &[] };
        parts
            .iter()
            .map(|(name, outputs)| Vector::plain(format!("{name}.bias"), *outputs))
    }
}
