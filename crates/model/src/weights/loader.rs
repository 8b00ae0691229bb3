use std::sync::Arc;

use plimsoll_core::Component;
use plimsoll_device::{Budget, Charge};
use plimsoll_kernels::{Embedding, Linear, WeightType};

use super::{Checked, LoadProgress, Source, Tensor, weight_error};
use crate::blocks::{Matrix, Stack, Vector, Visitor};
use crate::{Cancel, ModelError};

/// Turns tensors into weights of the CPU, charged to the budget.
pub(crate) struct Loader<'a> {
    tensors: Checked<'a>,
    budget: &'a Budget,
    cancel: &'a Cancel,
    progress: &'a mut dyn FnMut(LoadProgress),
    done: LoadProgress,
    charges: Vec<Charge>,
    /// Every matrix so far was stored as f32.
    all_f32: bool,
}

impl<'a> Loader<'a> {
    pub(crate) fn new(
        source: &'a dyn Source,
        budget: &'a Budget,
        cancel: &'a Cancel,
        progress: &'a mut dyn FnMut(LoadProgress),
    ) -> Self {
        let tensors = Checked::new(source);
        let done = LoadProgress {
            done: 0,
            total: tensors.total_bytes(),
        };
        Self {
            tensors,
            budget,
            cancel,
            progress,
            done,
            charges: Vec::new(),
            all_f32: true,
        }
    }

    /// True if every matrix was stored as f32.
    pub(crate) fn all_f32(&self) -> bool {
        self.all_f32
    }

    /// Checks that no tensor was left that would have changed the output. Returns the account of all vectors; matrices
    /// keep their own.
    pub(crate) fn finish(self) -> Result<Vec<Charge>, ModelError> {
        self.tensors.finish()?;
        // What is not part of the model was counted, and is not loaded.
        let total = self.done.total;
        (self.progress)(LoadProgress { done: total, total });
        Ok(self.charges)
    }

    fn matrix(&mut self, matrix: &Matrix) -> Result<Tensor<'a>, ModelError> {
        let stored = self.tensors.matrix(matrix)?;
        self.advance(&stored.tensor)?;
        stored.dequantised()
    }

    fn advance(&mut self, tensor: &Tensor<'_>) -> Result<(), ModelError> {
        self.cancel.check()?;
        self.done.done += tensor.bytes() as u64;
        (self.progress)(self.done);
        Ok(())
    }

    fn keep(&mut self, tensor: &Tensor<'_>) -> Result<Vec<f32>, ModelError> {
        self.advance(tensor)?;
        let bytes = tensor.shape.0.iter().product::<usize>() * size_of::<f32>();
        self.charges
            .push(self.budget.charge(Component::Weights, bytes as u64)?);
        tensor.widen()
    }
}

impl Visitor for Loader<'_> {
    type Vector = Vec<f32>;
    type Linear = Arc<Linear>;
    type Embedding = Embedding;
    type Error = ModelError;

    fn vector(&mut self, vector: &Vector) -> Result<Vec<f32>, ModelError> {
        let tensor = self.tensors.vector(vector)?;
        self.keep(&tensor)
    }

    fn optional_vector(&mut self, vector: &Vector) -> Result<Option<Vec<f32>>, ModelError> {
        let tensor = self.tensors.optional_vector(vector)?;
        tensor.map(|tensor| self.keep(&tensor)).transpose()
    }

    fn linear(&mut self, stack: &Stack) -> Result<Arc<Linear>, ModelError> {
        self.tensors.kv_scales(&stack.kv_scales)?;
        let tensors = (stack.parts.iter())
            .map(|part| self.matrix(part))
            .collect::<Result<Vec<_>, _>>()?;
        let matrices = tensors
            .iter()
            .map(Tensor::matrix)
            .collect::<Result<Vec<_>, _>>()?;
        let mut bias = Vec::new();
        for part in stack.biases() {
            bias.extend(self.vector(&part)?);
        }
        self.all_f32 &= tensors.iter().all(|tensor| tensor.dtype == WeightType::F32);
        Linear::new(&matrices, stack.bias.then_some(&bias), self.budget)
            .map(Arc::new)
            .map_err(|error| weight_error(error, &tensors[0].name))
    }

    fn embedding(&mut self, table: &Matrix) -> Result<Embedding, ModelError> {
        let tensor = self.matrix(table)?;
        Embedding::new(tensor.matrix()?, self.budget).map_err(|error| weight_error(error, &tensor.name))
    }

    fn idle(&mut self, name: String) {
        self.tensors.idle(&name);
    }

    /// Shares the embedding's memory.
    fn tied(&mut self, embedding: &Embedding) -> Arc<Linear> {
        embedding.tied()
    }
}
