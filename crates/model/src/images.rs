//! What a step's images are to its batch.

use plimsoll_core::{Image, Oom, Run, StepPlan};

use crate::batch::{Batch, BatchImage};
use crate::encoder::{Encoder, EncoderState};
use crate::positions::positions;

/// Encodes the image of a checked plan, if it has one and its rows are not kept, and tells the batch of it, and of positions.
pub(crate) fn prepare<'a>(
    state: &'a mut EncoderState,
    encoder: &Encoder,
    plan: &StepPlan,
    batch: &mut Batch<'a>,
) -> Result<(), Oom> {
    if plan.runs.iter().all(|run| run.images.is_none()) {
        return Ok(());
    }
    let merge = encoder.spec.input.merge;
    let of_run = |run: &Run| Some(positions(run.images.as_deref()?, merge, run.start..run.end()));
    batch.positions = plan.runs.iter().map(of_run).collect();
    if let Some((image, rows)) = rows_of(plan) {
        let encoded = state.encode(encoder, image)?;
        batch.image = Some(BatchImage {
            rows,
            encoded,
            embeddings: &state.embeddings,
            features: encoder.spec.features.len(),
        });
    }
    Ok(())
}

/// The image of a checked plan, if it has rows of one: each row of the batch that is, and which of the image's.
pub(crate) fn rows_of(plan: &StepPlan) -> Option<(&Image, Vec<(usize, usize)>)> {
    let (mut rows, mut first_row, mut image) = (Vec::new(), 0, None);
    for run in &plan.runs {
        for (span, of_image) in run.image_rows() {
            let first = first_row + (span.start + of_image.start - run.start);
            rows.extend((first..).zip(of_image));
            image = Some(&*span.image);
        }
        first_row += run.input.len();
    }
    image.map(|image| (image, rows))
}
