//! What images change in a step: embeddings of their rows, and features for the first layers.

use half::bf16;
use plimsoll_device::cuda::{GpuError, GpuSlice};

use super::StepState;
use crate::cuda::encoder::EncoderState;
use crate::cuda::input::StepInput;

/// Rows of a step that are rows of an image.
#[derive(Clone, Copy)]
pub(super) struct RowsOfImage<'a> {
    state: &'a EncoderState,
    /// Of each, which of the batch, and which of those that are kept.
    pairs: GpuSlice<'a, i32>,
}

impl<'a> RowsOfImage<'a> {
    /// Of a step that has any.
    pub(super) fn of(input: &StepInput, state: &'a StepState) -> Option<Self> {
        let pairs = state.inputs.device(input.image_rows);
        let encoder = state.encoder.as_ref().filter(|_| !pairs.is_empty())?;
        Some(Self {
            state: encoder,
            pairs,
        })
    }

    /// Embeddings of images in place of those of their tokens, in `hidden` of so many rows.
    pub(super) fn put(&self, hidden: GpuSlice<'_, bf16>, rows: usize) -> Result<(), GpuError> {
        let state = self.state;
        let hidden = hidden.range(0..rows * state.width());
        state.kernels().put_rows(state.kept(0), self.pairs, hidden, rows)
    }

    /// [`Operations::add_features`](crate::blocks::Operations::add_features).
    pub(super) fn add_features(
        &self,
        layer: usize,
        hidden: GpuSlice<'_, bf16>,
        rows: usize,
    ) -> Result<(), GpuError> {
        let state = self.state;
        if layer >= state.features() {
            return Ok(());
        }
        let hidden = hidden.range(0..rows * state.width());
        state
            .kernels()
            .add_rows(state.kept(1 + layer), self.pairs, hidden, rows)
    }
}
