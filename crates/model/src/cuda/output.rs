use plimsoll_core::{Component, Logprobs, Sampled};
use plimsoll_device::cuda::{DeviceError, Gpu, GpuError, GpuSlab, GpuSlice, PinnedSlab};
use plimsoll_kernels::SampleError;
use plimsoll_kernels::cuda::{HostCopies, RowLogprobs};

use super::staging::STEPS_IN_FLIGHT;
use super::staging::{Layout, Section};

/// What steps sample: on the device, where the next step reads it, and copies on the host, one per step in flight.
#[derive(Debug)]
pub(super) struct Outputs {
    device: GpuSlab,
    host: Vec<[PinnedSlab; 2]>,
    tokens: Section<i32>,
    logprobs: Section<RowLogprobs>,
}

impl Outputs {
    /// Room for `rows` sampled rows.
    pub(super) fn new(gpu: &Gpu, rows: usize) -> Result<Self, DeviceError> {
        let (tokens, logprobs, bytes) = Self::layout(rows);
        let host = (0..STEPS_IN_FLIGHT).map(|_| {
            Ok([
                PinnedSlab::new(gpu, tokens.bytes())?,
                PinnedSlab::new(gpu, logprobs.bytes())?,
            ])
        });
        Ok(Self {
            host: host.collect::<Result<_, DeviceError>>()?,
            device: gpu.alloc(Component::Staging, bytes)?,
            tokens,
            logprobs,
        })
    }

    /// Where tokens and log-probabilities lie, and the bytes of both.
    fn layout(rows: usize) -> (Section<i32>, Section<RowLogprobs>, usize) {
        let mut layout = Layout::default();
        let tokens = layout.section(rows);
        let logprobs = layout.section(rows);
        (tokens, logprobs, layout.bytes())
    }

    /// Bytes of device memory that it takes.
    pub(super) fn bytes(rows: usize) -> usize {
        Self::layout(rows).2
    }

    /// The token of each sampled row, or -1: no logit was a number.
    pub(super) fn sampled(&self) -> GpuSlice<'_, i32> {
        self.tokens.of(&self.device)
    }

    /// Of each sampled row that asks for them.
    pub(super) fn logprobs(&self) -> GpuSlice<'_, RowLogprobs> {
        self.logprobs.of(&self.device)
    }

    /// Starts to copy the first `samples` rows for step slot `slot`, which nobody reads until the step has ended.
    pub(super) fn fetch(
        &mut self,
        copies: &HostCopies,
        slot: usize,
        samples: usize,
        logprobs: bool,
    ) -> Result<(), GpuError> {
        let tokens = self.tokens.of(&self.device).range(0..samples).cast();
        let rows = self.logprobs.of(&self.device).range(0..samples).cast();
        let [host_tokens, host_rows] = &mut self.host[slot];
        // SAFETY: the slot's last step has ended and was read; whoever drops this waits for the stream.
        unsafe {
            copies.download(tokens, host_tokens)?;
            if logprobs {
                copies.download(rows, host_rows)?;
            }
        }
        Ok(())
    }

    /// What row `row` of the ended step in slot `slot` sampled, with log-probabilities if it asked for them.
    pub(super) fn sampled_at(&self, slot: usize, row: usize, logprobs: bool) -> Result<Sampled, SampleError> {
        let [tokens, rows] = &self.host[slot];
        let token = u32::try_from(tokens.as_slice::<i32>()[row]).map_err(|_| SampleError::NotFinite)?;
        let logprobs = logprobs.then(|| Logprobs::from(&rows.as_slice::<RowLogprobs>()[row]));
        Ok(Sampled { token, logprobs })
    }
}
