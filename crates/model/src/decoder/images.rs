//! What images change in a step: embeddings of their rows, features for the first layers, positions of three dimensions.

use plimsoll_kernels::{KvElement, rope_angles, rope_angles_of_axes};

use super::{Rope, Step};
use crate::batch::Batch;
use crate::rope::RopeTable;

/// The angles of all rows of a batch.
pub(super) fn angles_of(rope: &Rope, table: &RopeTable, batch: &Batch<'_>, out: &mut [f32]) {
    let (frequencies, factor) = (&table.frequencies, table.attention_factor);
    let Some(axes) = rope.axes.as_deref().filter(|_| !batch.positions.is_empty()) else {
        return rope_angles(frequencies, factor, batch.runs(), out);
    };
    for (run, positions) in batch.runs().iter().zip(&batch.positions) {
        match positions {
            None => rope_angles(frequencies, factor, std::slice::from_ref(run), out),
            Some(positions) => {
                let own = &mut out[run.first_row * rope.spec.rotary_dim..][..run.len * rope.spec.rotary_dim];
                rope_angles_of_axes(frequencies, factor, axes, positions, own);
            }
        }
    }
}

impl<E: KvElement> Step<'_, '_, E> {
    /// Embeddings of images in place of those of their tokens.
    pub(super) fn put_image(&mut self) {
        let Some(image) = &self.batch.image else { return };
        let width = self.act.hidden.len() / self.rows;
        for &(row, of_image) in &image.rows {
            let embedding = image.embeddings.row(&image.encoded, of_image, 0);
            self.act.hidden[row * width..(row + 1) * width].copy_from_slice(embedding);
        }
    }

    /// [`Operations::add_features`](crate::blocks::Operations::add_features).
    pub(super) fn add_features_of_images(&mut self, layer: usize) {
        let Some(image) = self.batch.image.as_ref().filter(|image| layer < image.features) else {
            return;
        };
        let width = self.act.hidden.len() / self.rows;
        for &(row, of_image) in &image.rows {
            let feature = image.embeddings.row(&image.encoded, of_image, 1 + layer);
            let hidden = &mut self.act.hidden[row * width..(row + 1) * width];
            hidden.iter_mut().zip(feature).for_each(|(x, y)| *x += y);
        }
    }
}
