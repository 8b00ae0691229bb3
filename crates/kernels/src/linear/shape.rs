//! What a linear layer takes, from its shape alone.

use plimsoll_device::DryArena;

use super::PANEL;
use crate::dtype::WeightType;
use crate::format::{Format, panel_bytes};
use crate::quantize::quantize_scratch;

/// A [`Linear`](super::Linear) without weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinearShape {
    /// Width of the input.
    pub inputs: usize,
    /// How each stacked matrix is stored, and its outputs.
    pub parts: Vec<(WeightType, usize)>,
}

impl LinearShape {
    /// Bytes of the packed weights, without the bias; `None` if they fit no memory.
    pub fn bytes(&self) -> Option<u64> {
        self.parts.iter().try_fold(0_u64, |sum, &(dtype, outputs)| {
            let bytes = panel_bytes(dtype, self.inputs)?.checked_mul(outputs.div_ceil(PANEL))?;
            sum.checked_add(bytes as u64)
        })
    }

    /// Counts what [`Linear::forward_in_room`](super::Linear::forward_in_room) takes in room for `rows` rows, in a frame of its
    /// own.
    pub fn scratch(&self, rows: usize, arena: &mut DryArena) -> Option<()> {
        let formats = self.parts.iter().filter_map(|&(dtype, _)| Format::of(dtype));
        match quantised_input(formats) {
            Some(halves) => arena.frame(|frame| quantize_scratch(rows, self.inputs, halves, frame)),
            None => Some(()),
        }
    }
}

/// Whether parts of these formats need their input quantised, and then whether with sums of half groups.
pub(super) fn quantised_input(formats: impl Iterator<Item = Format>) -> Option<bool> {
    formats.fold(None, |halves, format| {
        Some(halves.unwrap_or(false) || format.group() == 16)
    })
}
