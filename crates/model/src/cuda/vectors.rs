use plimsoll_core::StepLimits;
use plimsoll_device::cuda::{Gpu, GpuError, GpuSlice, PinnedSlab};
use plimsoll_kernels::SampleError;

use super::staging::STEPS_IN_FLIGHT;

/// What steps of a model for embeddings pool: copies on the host, one per step in flight.
#[derive(Debug)]
pub(super) struct Vectors {
    gpu: Gpu,
    host: Vec<PinnedSlab>,
    width: usize,
}

impl Vectors {
    pub(super) fn new(gpu: &Gpu, limits: &StepLimits, width: usize) -> Result<Self, GpuError> {
        let bytes = limits.max_num_seqs * width * size_of::<f32>();
        Ok(Self {
            gpu: gpu.clone(),
            host: (0..STEPS_IN_FLIGHT)
                .map(|_| PinnedSlab::new(gpu, bytes))
                .collect::<Result<_, _>>()?,
            width,
        })
    }

    /// Starts to copy what step slot `slot` pooled, which nobody reads until the step has ended.
    pub(super) fn fetch(&mut self, slot: usize, pooled: GpuSlice<'_, f32>) -> Result<(), GpuError> {
        // SAFETY: the slot's last step has ended and was read; the next step, which may overwrite the source, follows in the
        // same stream; whoever drops this waits for that.
        unsafe { self.gpu.download_async(pooled.cast(), &mut self.host[slot]) }
    }

    /// Vector `index` of the ended step in slot `slot`.
    ///
    /// # Errors
    /// One of its numbers is NaN or infinite.
    pub(super) fn pooled_at(&self, slot: usize, index: usize) -> Result<Vec<f64>, SampleError> {
        let all = self.host[slot].as_slice::<f32>();
        let own = &all[index * self.width..(index + 1) * self.width];
        match own.iter().all(|x| x.is_finite()) {
            true => Ok(own.iter().map(|&x| f64::from(x)).collect()),
            false => Err(SampleError::NotFinite),
        }
    }
}
