//! Images of steps, and alone.

use std::sync::Arc;

use plimsoll_core::{Image, StepError, StepPlan};
use plimsoll_device::cuda::DeviceError;

use super::{GpuRunner, failed};
use crate::cuda::encoder::PlacedImage;
use crate::cuda::link::Abandon;
use crate::images;

impl GpuRunner {
    /// As [`crate::Runner::encode`].
    ///
    /// # Errors
    /// [`StepError`] where the model takes no images, steps are in flight, or the GPU fails.
    pub fn encode(&mut self, image: &Image) -> Result<Vec<f32>, StepError> {
        if !self.in_flight.is_empty() {
            return Err(StepError::Failed(
                "an encode while steps are in flight".to_owned(),
            ));
        }
        self.on_all_ranks(|runner, guard| runner.compute_rows(image, guard))
    }

    fn compute_rows(&mut self, image: &Image, guard: &mut Abandon<'_>) -> Result<Vec<f32>, StepError> {
        let model = Arc::clone(&self.model);
        let (input, products) = (self.bounds.images, model.decoder().encoder());
        let (Some(input), Some(products)) = (input, products) else {
            return Err(StepError::Failed("the model is served without images".to_owned()));
        };
        let (patches, most) = (image.grid.patches(), input.limits.max_patches);
        let rows = input.rows(image.grid).filter(|_| patches <= most);
        let rows = rows.ok_or_else(|| StepError::Failed(format!("an image of {patches} patches")))?;
        self.agree(None, guard)?;
        let state = self.state.encoder.as_mut();
        let state = state.expect("a model that has an encoder has a state of it");
        let encoded = state.encode(products, state.look_up(image, 1.0), 0)?;
        let rows = state.download(&encoded, rows).map_err(failed)?;
        self.check_ranks()?;
        Ok(rows)
    }

    /// Where the rows of the image of a checked plan are or will be, if it has one, and the rows of the plan that are its, none if the step
    /// only encodes a part of it: of each, which of the batch, and which of those that are kept.
    pub(super) fn look_up_image<'a>(&self, plan: &'a StepPlan) -> (Option<PlacedImage<'a>>, Vec<[i32; 2]>) {
        let Some(state) = &self.state.encoder else {
            return (None, Vec::new());
        };
        let Some((image, rows)) = images::rows_of(plan) else {
            let encode = plan.encode.as_ref();
            let placed = encode.map(|encode| state.look_up(&encode.image, encode.share));
            return (placed, Vec::new());
        };
        let placed = state.look_up(image, 1.0);
        let place = |(row, of_image)| [row as i32, placed.place(of_image)];
        let rows = rows.into_iter().map(place).collect();
        (Some(placed), rows)
    }

    /// Launches what is to be encoded of a step's image, if it has one.
    pub(super) fn encode_image(
        &mut self,
        slot: usize,
        image: Option<PlacedImage<'_>>,
    ) -> Result<(), DeviceError> {
        let (state, products) = (self.state.encoder.as_mut(), self.model.decoder().encoder());
        if let (Some(image), Some(state), Some(products)) = (image, state, products) {
            state.encode(products, image, slot)?;
        }
        Ok(())
    }
}
