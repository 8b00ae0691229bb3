//! How many tokens go to each expert: counted on the device by the kernels that send them there, and read by the host now and then.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use plimsoll_core::{Component, ExpertLoads};
use plimsoll_device::cuda::{DeviceError, Gpu, GpuError, GpuSlab, GpuSlice, PinnedSlab};

use crate::DecoderSpec;

/// While steps follow each other, counts are read this often: a copy of a few kilobytes behind a step.
const READ_EVERY: Duration = Duration::from_secs(1);

/// What a state counts; nothing where no layer has experts.
#[derive(Debug)]
pub(super) struct Loads(Option<Counts>);

#[derive(Debug)]
struct Counts {
    gpu: Gpu,
    /// Of all layers, one after the other, since the state began to count; modulo 2^32.
    device: GpuSlab,
    host: PinnedSlab,
    /// Which of them are those of each layer.
    layers: Vec<Range<usize>>,
    /// Where they were when they were read last.
    read: Vec<u32>,
    read_at: Instant,
    /// The step behind which they are being copied to the host.
    awaited: Option<usize>,
    /// Steps have been launched behind the last copy.
    is_behind: bool,
    loads: Arc<ExpertLoads>,
}

impl Loads {
    /// Of a model that has `loads` if it has experts.
    pub(super) fn new(
        gpu: &Gpu,
        spec: &DecoderSpec,
        loads: Option<&Arc<ExpertLoads>>,
    ) -> Result<Self, DeviceError> {
        let counts = loads.zip(Self::bytes(spec)).map(|(loads, bytes)| {
            let device = gpu.alloc(Component::Staging, bytes)?;
            gpu.fill(device.slice(), 0)?;
            let layers = layers(spec);
            Ok::<_, DeviceError>(Counts {
                gpu: gpu.clone(),
                device,
                host: PinnedSlab::new(gpu, bytes)?,
                read: vec![0; end(&layers)],
                layers,
                read_at: Instant::now(),
                awaited: None,
                is_behind: false,
                loads: Arc::clone(loads),
            })
        });
        counts.transpose().map(Self)
    }

    /// Bytes of device memory that it takes; `None` without experts.
    pub(super) fn bytes(spec: &DecoderSpec) -> Option<usize> {
        match end(&layers(spec)) {
            0 => None,
            counts => Some(counts * size_of::<u32>()),
        }
    }

    /// Where the kernels of a layer count: `[experts]`.
    pub(super) fn of(&self, layer: usize) -> Option<GpuSlice<'_, u32>> {
        let counts = self.0.as_ref()?;
        Some(counts.device.slice().range(counts.layers[layer].clone()))
    }

    /// Starts to copy the counts behind the launches of a step, if it is time.
    pub(super) fn fetch(&mut self, step: usize) -> Result<(), GpuError> {
        let Some(counts) = &mut self.0 else { return Ok(()) };
        counts.is_behind = true;
        match counts.awaited.is_none() && counts.read_at.elapsed() >= READ_EVERY {
            true => counts.copy(step),
            false => Ok(()),
        }
    }

    /// Reads what was copied behind a step that has ended, or behind one before it.
    pub(super) fn read(&mut self, ended: usize) {
        if let Some(counts) = &mut self.0
            && counts.awaited.is_some_and(|step| step <= ended)
        {
            counts.take();
        }
    }

    /// Reads what the last steps, up to step `last`, have counted. All of them have ended, so there is nothing to wait for but a copy.
    pub(super) fn read_all(&mut self, last: usize) {
        let Some(counts) = self.0.as_mut().filter(|counts| counts.is_behind) else {
            return;
        };
        let copied = counts.copy(last).and_then(|()| counts.gpu.synchronize());
        match copied {
            Ok(()) => counts.take(),
            Err(error) => tracing::error!(%error, "the counts of experts' tokens could not be read"),
        }
    }

    /// Counts anew. Nothing is in flight.
    pub(super) fn clear(&mut self) {
        let Some(counts) = &mut self.0 else { return };
        if let Err(error) = counts.gpu.fill(counts.device.slice(), 0) {
            tracing::error!(%error, "the counts of experts' tokens could not be cleared");
        }
        counts.read.fill(0);
        (counts.awaited, counts.is_behind) = (None, false);
        counts.loads.clear();
    }
}

impl Counts {
    fn copy(&mut self, step: usize) -> Result<(), GpuError> {
        // SAFETY: the host's side is read when the step has ended, and whoever drops this waits for the stream.
        unsafe { self.gpu.download_async(self.device.slice(), &mut self.host)? };
        self.awaited = Some(step);
        self.is_behind = false;
        self.read_at = Instant::now();
        Ok(())
    }

    /// Adds what was counted since the last time.
    fn take(&mut self) {
        self.awaited = None;
        let found = self.host.as_slice::<u32>();
        for (layer, range) in self.layers.iter().enumerate() {
            if range.is_empty() {
                continue;
            }
            let counted = self.read[range.clone()].iter_mut().zip(&found[range.clone()]);
            let counted = counted.map(|(read, &found)| found.wrapping_sub(std::mem::replace(read, found)));
            self.loads
                .count(layer, counted.map(|tokens| tokens as usize).enumerate());
        }
    }
}

/// Where each layer's counts are among those of all; none of a layer without experts.
fn layers(spec: &DecoderSpec) -> Vec<Range<usize>> {
    let mut end = 0;
    let of_layer = |experts: usize| {
        let start = end;
        end += experts;
        start..end
    };
    let experts = (spec.layers.iter()).map(|layer| layer.mixture().map_or(0, |moe| moe.experts));
    experts.map(of_layer).collect()
}

fn end(layers: &[Range<usize>]) -> usize {
    layers.last().map_or(0, |last| last.end)
}
