//! Declarations of stored tensors, under the names of Hugging Face checkpoints.

use plimsoll_kernels::GgufFormat;

use super::{Among, RowOrder};
use crate::quantization::{MatrixFormat, Quantization};
use crate::shard::{Axis, Shard, Share};
use crate::spec::NormSpec;

/// A vector.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Vector {
    pub(crate) name: String,
    pub(crate) len: usize,
    /// The shape in which the elements are stored, if that is not one dimension.
    pub(crate) shape: Option<Vec<usize>>,
    /// Stored less 1, as far as the source does not say otherwise.
    pub(crate) unit_offset: bool,
    /// Of an expert.
    pub(crate) expert: Option<InExperts>,
    /// Which of the stored elements, along the first dimension, where they are not all.
    pub(crate) share: Option<Share>,
}

impl Vector {
    pub(crate) fn plain(name: impl Into<String>, len: usize) -> Self {
        Self {
            name: name.into(),
            len,
            shape: None,
            unit_offset: false,
            expert: None,
            share: None,
        }
    }

    /// A rank's part of a longer one: the lengths of pieces that lie one after the other, and among whom each is divided.
    pub(crate) fn divided(self, parts: &[(usize, Shard)]) -> Self {
        Self {
            share: Share::of_parts(Axis::Outputs, parts),
            ..self
        }
    }

    /// The shape in which it is stored.
    pub(crate) fn stored_shape(&self) -> Vec<usize> {
        let mut shape = self.shape.clone().unwrap_or_else(|| vec![self.len]);
        if let Some(share) = &self.share {
            shape[0] = share.of;
        }
        shape
    }

    /// Stored in three dimensions.
    pub(crate) fn shaped(name: impl Into<String>, shape: [usize; 3]) -> Self {
        Self {
            shape: Some(shape.to_vec()),
            ..Self::plain(name, shape.iter().product())
        }
    }

    /// Rows of a table, one after the other.
    pub(crate) fn table(name: impl Into<String>, shape: [usize; 2]) -> Self {
        Self {
            shape: Some(shape.to_vec()),
            ..Self::plain(name, shape.iter().product())
        }
    }

    pub(crate) fn norm(name: impl Into<String>, len: usize, norm: NormSpec) -> Self {
        Self {
            unit_offset: norm.unit_offset,
            ..Self::plain(name, len)
        }
    }
}

/// A matrix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Matrix {
    /// Its module, whose tensors have names that begin so.
    pub(crate) module: String,
    pub(crate) outputs: usize,
    pub(crate) inputs: usize,
    pub(crate) format: MatrixFormat,
    /// How the checkpoint orders its outputs.
    pub(crate) order: RowOrder,
    /// Of an expert.
    pub(crate) expert: Option<InExperts>,
    /// How its tensor lies, in a checkpoint of floats.
    pub(crate) stored_as: StoredAs,
    /// Which of the stored rows or columns, where they are not all.
    pub(crate) share: Option<Share>,
}

/// Where a matrix or a bias of an expert is in a checkpoint that stores those of all experts as one tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct InExperts {
    /// The name of that tensor, in front of `_bias` and the like.
    pub(crate) stacked: String,
    /// The expert, and how many there are.
    pub(crate) index: usize,
    pub(crate) count: usize,
    /// Which of an expert's rows, where gate and up are one tensor.
    pub(crate) rows: Among,
    /// Matrices in floats are stored as `[inputs, outputs]`.
    pub(crate) transposed: bool,
}

/// How checkpoints store a matrix that is whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum StoredAs {
    /// As the weight of its module: `[outputs, inputs]`.
    Weight,
    /// As the kernel of a convolution that does not overlap: `[outputs, ..these]`, which are the inputs.
    Kernel(Vec<usize>),
    /// As a parameter by itself: `[inputs, outputs]`.
    Parameter,
}

impl Matrix {
    /// The name of its elements.
    pub(crate) fn name(&self) -> String {
        match self.stored_as {
            StoredAs::Weight | StoredAs::Kernel(_) => format!("{}.weight", self.module),
            StoredAs::Parameter => self.module.clone(),
        }
    }

    pub(crate) fn shape(&self) -> [usize; 2] {
        [self.outputs, self.inputs]
    }

    /// The shape in which it is stored.
    pub(crate) fn stored_shape(&self) -> [usize; 2] {
        match &self.share {
            None => self.shape(),
            Some(Share {
                axis: Axis::Outputs,
                of,
                ..
            }) => [*of, self.inputs],
            Some(Share {
                axis: Axis::Inputs,
                of,
                ..
            }) => [self.outputs, *of],
        }
    }

    /// A rank's outputs of a larger matrix.
    pub(crate) fn outputs_of(self, shard: Shard) -> Self {
        let all = [(self.outputs, shard)];
        self.outputs_of_parts(&all)
    }

    /// The same of one whose outputs are pieces that lie one after the other: how many the rank has of each, and among whom each is
    /// divided.
    pub(crate) fn outputs_of_parts(self, parts: &[(usize, Shard)]) -> Self {
        Self {
            share: Share::of_parts(Axis::Outputs, parts),
            ..self
        }
    }

    /// A rank's inputs of a larger matrix.
    pub(crate) fn inputs_of(self, shard: Shard) -> Self {
        Self {
            share: Share::of_parts(Axis::Inputs, &[(self.inputs, shard)]),
            ..self
        }
    }

    /// Whether it chooses experts, or weighs the one of all tokens.
    pub(crate) fn is_router(&self) -> bool {
        let names = [".gate", ".router", ".router.proj", ".shared_expert_gate"];
        names.iter().any(|name| self.module.ends_with(name))
    }

    /// The block type of GGUF's in which a GPU keeps it. There are no products of experts in one, and what chooses them is small.
    pub(crate) fn gguf(&self) -> Option<GgufFormat> {
        let is_kept = self.expert.is_none() && !self.is_router();
        self.format.gguf().filter(|_| is_kept)
    }
}

/// Projections of the same inputs, stacked along the output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Stack {
    /// At least one, all of the same inputs.
    pub(crate) parts: Vec<Matrix>,
    pub(crate) bias: bool,
    /// Names of the scales of keys and values that the checkpoint says it stores; only a KV cache of 8 bits uses them.
    pub(crate) kv_scales: Vec<String>,
}

impl Stack {
    pub(crate) fn new(parts: Vec<Matrix>) -> Self {
        Self {
            parts,
            bias: false,
            kv_scales: Vec::new(),
        }
    }

    /// The biases; none where there is no bias.
    pub(crate) fn biases(&self) -> impl Iterator<Item = Vector> + Clone {
        let parts = if self.bias { self.parts.as_slice() } else { &[] };
        parts.iter().map(|part| Vector {
            expert: part.expert.clone(),
            share: part.share.clone().filter(|share| share.axis == Axis::Outputs),
            ..Vector::plain(format!("{}.bias", part.module), part.outputs)
        })
    }
}

/// Makes the names of a part of the network, and says how its matrices are stored.
#[derive(Clone, Debug)]
pub(crate) struct Scope<'a> {
    /// In front of all names.
    prefix: String,
    quantization: &'a Quantization,
    /// Among whom its matrices are divided.
    pub(crate) shard: Shard,
}

impl<'a> Scope<'a> {
    pub(crate) fn new(prefix: impl Into<String>, quantization: &'a Quantization, shard: Shard) -> Self {
        Self {
            prefix: prefix.into(),
            quantization,
            shard,
        }
    }

    /// A part of it.
    pub(crate) fn part(&self, name: &str) -> Self {
        Self::new(format!("{}{name}.", self.prefix), self.quantization, self.shard)
    }

    pub(crate) fn name(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    pub(crate) fn matrix(&self, name: &str, outputs: usize, inputs: usize) -> Matrix {
        let module = self.name(name);
        Matrix {
            format: self.quantization.format(&module),
            module,
            outputs,
            inputs,
            order: RowOrder::Plain,
            expert: None,
            stored_as: StoredAs::Weight,
            share: None,
        }
    }

    /// A matrix that is stored as the kernel of a convolution.
    pub(crate) fn kernel(&self, name: &str, outputs: usize, kernel: Vec<usize>) -> Matrix {
        let matrix = self.matrix(name, outputs, kernel.iter().product());
        Matrix {
            stored_as: StoredAs::Kernel(kernel),
            ..matrix
        }
    }

    /// A matrix that is stored as a parameter by itself.
    pub(crate) fn parameter(&self, name: &str, outputs: usize, inputs: usize) -> Matrix {
        Matrix {
            stored_as: StoredAs::Parameter,
            ..self.matrix(name, outputs, inputs)
        }
    }

    /// A matrix whose outputs are stored group by group, each with some of each part, and are wanted part by part: `parts` are
    /// the outputs of one group.
    pub(crate) fn grouped(&self, name: &str, groups: usize, parts: [usize; 4], inputs: usize) -> Matrix {
        let of_group: usize = parts.iter().sum();
        Matrix {
            order: RowOrder::Grouped { groups, parts },
            ..self.matrix(name, groups * of_group, inputs)
        }
    }

    /// A matrix `[outputs, inputs]` of one of the experts whose scope this is.
    pub(crate) fn expert_matrix(
        &self,
        name: &str,
        [outputs, inputs]: [usize; 2],
        expert: InExperts,
    ) -> Matrix {
        let own = self.part(&expert.index.to_string());
        Matrix {
            expert: Some(expert),
            ..own.matrix(name, outputs, inputs)
        }
    }

    /// Whether scales of keys and values are stored.
    pub(crate) fn has_kv_scales(&self) -> bool {
        self.quantization.kv_scales
    }
}
