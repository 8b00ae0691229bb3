//! From stored tensors to charged, packed weights.

mod dummy;
mod gguf;
mod safetensors;

use std::borrow::Cow;
use std::collections::HashSet;

use half::{bf16, f16};
use plimsoll_core::Component;
use plimsoll_device::{Budget, Charge};
use plimsoll_kernels::{Embedding, Linear, Matrix, WeightError, WeightType};

use crate::{ModelError, Shape};

pub(crate) use dummy::DummyWeights;
pub(crate) use gguf::GgufWeights;
pub(crate) use safetensors::Checkpoint;

/// Where tensors come from. Names are those of Hugging Face checkpoints; a source translates.
pub(crate) trait Source {
    /// The tensor, if there is one. `expected` is for sources that make tensors up; the caller compares shapes.
    fn tensor(&self, name: &str, expected: &[usize]) -> Result<Option<Tensor<'_>>, ModelError>;

    /// Names of all tensors, as the source calls them.
    fn names(&self) -> Vec<String>;

    /// Bytes of all tensors; 0 if unknown.
    fn total_bytes(&self) -> u64;

    /// What the source calls a tensor.
    fn stored_name(&self, name: &str) -> String {
        name.to_owned()
    }
}

/// A tensor as it is stored.
#[derive(Debug)]
pub(crate) struct Tensor<'a> {
    pub(crate) name: String,
    pub(crate) dtype: WeightType,
    pub(crate) shape: Shape,
    pub(crate) data: Cow<'a, [u8]>,
}

/// How far loading has got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Bytes of stored weights dealt with.
    pub done: u64,
    /// Bytes of all stored weights; 0 for made-up ones.
    pub total: u64,
}

/// Takes tensors from a source, checks them, and turns them into weights charged to the budget.
pub(crate) struct Loader<'a> {
    source: &'a dyn Source,
    budget: &'a Budget,
    progress: &'a mut dyn FnMut(Progress),
    done: Progress,
    used: HashSet<String>,
    charges: Vec<Charge>,
    /// Every matrix so far was stored as f32.
    all_f32: bool,
}

impl<'a> Loader<'a> {
    pub(crate) fn new(
        source: &'a dyn Source,
        budget: &'a Budget,
        progress: &'a mut dyn FnMut(Progress),
    ) -> Self {
        let done = Progress {
            done: 0,
            total: source.total_bytes(),
        };
        Self {
            source,
            budget,
            progress,
            done,
            used: HashSet::new(),
            charges: Vec::new(),
            all_f32: true,
        }
    }

    /// The projections `names` stacked along the output, `(name, rows)` each.
    pub(crate) fn linear(
        &mut self,
        parts: &[(String, usize)],
        cols: usize,
        bias: bool,
    ) -> Result<Linear, ModelError> {
        let tensors = parts
            .iter()
            .map(|(name, rows)| self.tensor(&format!("{name}.weight"), &[*rows, cols]))
            .collect::<Result<Vec<_>, _>>()?;
        let matrices = tensors
            .iter()
            .map(|tensor| matrix(tensor))
            .collect::<Result<Vec<_>, _>>()?;
        let bias = match bias {
            false => None,
            true => {
                let mut all = Vec::new();
                for (name, rows) in parts {
                    all.extend(self.vector(&format!("{name}.bias"), *rows)?);
                }
                Some(all)
            }
        };
        self.all_f32 &= tensors.iter().all(|tensor| tensor.dtype == WeightType::F32);
        Linear::new(&matrices, bias.as_deref(), self.budget)
            .map_err(|error| weight_error(error, &tensors[0].name))
    }

    /// One row per token of the vocabulary.
    pub(crate) fn embedding(
        &mut self,
        name: &str,
        rows: usize,
        cols: usize,
    ) -> Result<Embedding, ModelError> {
        let tensor = self.tensor(&format!("{name}.weight"), &[rows, cols])?;
        Embedding::new(matrix(&tensor)?, self.budget).map_err(|error| weight_error(error, &tensor.name))
    }

    /// A vector that scales activations.
    pub(crate) fn vector(&mut self, name: &str, len: usize) -> Result<Vec<f32>, ModelError> {
        let tensor = self.tensor(name, &[len])?;
        self.charges.push(
            self.budget
                .charge(Component::Weights, (len * size_of::<f32>()) as u64)?,
        );
        widen(&tensor)
    }

    /// A vector that a model may do without.
    pub(crate) fn optional_vector(&mut self, name: &str, len: usize) -> Result<Option<Vec<f32>>, ModelError> {
        match self.source.names().contains(&self.source.stored_name(name)) {
            true => self.vector(name, len).map(Some),
            false => Ok(None),
        }
    }

    /// True if every matrix was stored as f32.
    pub(crate) fn all_f32(&self) -> bool {
        self.all_f32
    }

    /// Checks that no tensor was left that would have changed the output. Returns the account of all vectors; matrices
    /// keep their own.
    pub(crate) fn finish(self) -> Result<Vec<Charge>, ModelError> {
        let mut left: Vec<_> = self
            .source
            .names()
            .into_iter()
            .filter(|name| !self.used.contains(name))
            .collect();
        left.sort_unstable();
        let (in_decoder, others): (Vec<_>, Vec<_>) = left
            .into_iter()
            // Tables that old checkpoints store and everybody computes.
            .filter(|name| !name.ends_with("rotary_emb.inv_freq"))
            .partition(|name| name.starts_with("model.layers.") || name.starts_with("blk."));
        if !others.is_empty() {
            tracing::info!(tensors = ?others, "the weights hold tensors outside the decoder; they are not loaded");
        }
        if in_decoder.is_empty() {
            return Ok(self.charges);
        }
        let names = match in_decoder.as_slice() {
            [a, b, c, _, ..] => format!("{a}, {b}, {c} and {} more", in_decoder.len() - 3),
            names => names.join(", "),
        };
        Err(ModelError::UnusedTensors { names })
    }

    fn tensor(&mut self, name: &str, expected: &[usize]) -> Result<Tensor<'a>, ModelError> {
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
        self.used.insert(tensor.name.clone());
        self.done.done += tensor.data.len() as u64;
        (self.progress)(self.done);
        Ok(tensor)
    }
}

fn matrix<'t>(tensor: &'t Tensor<'_>) -> Result<Matrix<'t>, ModelError> {
    let (rows, cols) = (tensor.shape.0[0], tensor.shape.0[1]);
    Matrix::new(tensor.dtype, rows, cols, &tensor.data).map_err(|error| weight_error(error, &tensor.name))
}

fn weight_error(error: WeightError, name: &str) -> ModelError {
    match error {
        WeightError::Oom(oom) => ModelError::Oom(oom),
        other => ModelError::Weights {
            name: name.to_owned(),
            message: other.to_string(),
        },
    }
}

/// Elements of a float tensor.
fn widen(tensor: &Tensor<'_>) -> Result<Vec<f32>, ModelError> {
    let data = &tensor.data;
    Ok(match tensor.dtype {
        WeightType::F32 => data
            .as_chunks()
            .0
            .iter()
            .map(|&bytes| f32::from_le_bytes(bytes))
            .collect(),
        WeightType::F16 => data
            .as_chunks()
            .0
            .iter()
            .map(|&bytes| f16::from_le_bytes(bytes).to_f32())
            .collect(),
        WeightType::Bf16 => data
            .as_chunks()
            .0
            .iter()
            .map(|&bytes| bf16::from_le_bytes(bytes).to_f32())
            .collect(),
        other => {
            return Err(ModelError::TensorType {
                name: tensor.name.clone(),
                found: format!("{other:?}"),
                supported: "F32, F16 and BF16, as this is a vector",
            });
        }
    })
}
