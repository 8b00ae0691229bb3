//! What a step's images are to its batch.

use plimsoll_core::{Image, Oom, PartialEncode, Run, StepPlan};

use crate::batch::{Batch, BatchImage};
use crate::encoder::{Encoder, EncoderState};
use crate::positions::positions;

/// Encodes the image of a checked plan, if it has one and its rows are not kept, or the part of one that the plan names, and tells the batch of it, of positions if they
/// have three dimensions, and of what tokens see.
pub(crate) fn prepare<'a>(
    state: &'a mut EncoderState,
    encoder: &Encoder,
    plan: &StepPlan,
    has_axes: bool,
    batch: &mut Batch<'a>,
) -> Result<(), Oom> {
    let read = rows_of(plan);
    if let (None, Some(PartialEncode { image, share })) = (&read, &plan.encode) {
        state.advance(encoder, image, *share)?;
    }
    if plan.runs.iter().all(|run| run.images.is_none()) {
        return Ok(());
    }
    let input = encoder.spec.input;
    if has_axes {
        let of_run = |run: &Run| {
            Some(positions(
                run.images.as_deref()?,
                input.merge,
                run.start..run.end(),
            ))
        };
        batch.positions = plan.runs.iter().map(of_run).collect();
    }
    if input.mutual {
        batch.ends = Some(plan.runs.iter().flat_map(ends_of).collect());
    }
    if let Some((image, rows)) = read {
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

/// The end of what each token of a run sees, where those of an image's span see each other.
pub(crate) fn ends_of(run: &Run) -> Vec<usize> {
    let mut ends: Vec<usize> = (run.start + 1..=run.end()).collect();
    for (span, rows) in run.image_rows() {
        let own = span.token_of(rows.start) - run.start..span.token_of(rows.end) - run.start;
        ends[own].fill(span.end());
    }
    ends
}

/// The image of a checked plan, if it has rows of one: each row of the batch that is, and which of the image's.
pub(crate) fn rows_of(plan: &StepPlan) -> Option<(&Image, Vec<(usize, usize)>)> {
    let (mut rows, mut first_row, mut image) = (Vec::new(), 0, None);
    for run in &plan.runs {
        for (span, of_image) in run.image_rows() {
            let first = first_row + (span.token_of(of_image.start) - run.start);
            rows.extend((first..).zip(of_image));
            image = Some(&*span.image);
        }
        first_row += run.input.len();
    }
    image.map(|image| (image, rows))
}
