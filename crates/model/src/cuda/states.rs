use std::ops::Range;

use plimsoll_core::Component;
use plimsoll_device::cuda::{DeviceError, Gpu, GpuSlab, GpuSlice};

use crate::DecoderSpec;
use crate::state::StateCache;

/// The states of fixed size of all slots, as [`StateCache`] has them on a CPU.
#[derive(Debug)]
pub(super) struct States {
    /// None where no layer has a state.
    slab: Option<GpuSlab>,
    /// Of each layer that has states: those of the convolution and those of the recurrence, in elements.
    layers: Vec<[Range<usize>; 2]>,
}

impl States {
    /// Zeroed.
    pub(super) fn new(gpu: &Gpu, spec: &DecoderSpec, slots: usize) -> Result<Self, DeviceError> {
        let bytes = Self::bytes(spec, slots);
        let bytes = usize::try_from(bytes)
            .ok()
            .filter(|&bytes| bytes < usize::MAX)
            .ok_or_else(|| gpu.budget().oom(Component::States, bytes))?;
        let slab = match spec.delta_nets().next() {
            None => None,
            Some(_) => {
                let slab = gpu.alloc(Component::States, bytes)?;
                gpu.fill(slab.slice(), 0)?;
                Some(slab)
            }
        };
        let mut end = 0;
        let layers = spec.delta_nets().map(|delta_net| {
            let layout = &delta_net.layout;
            [layout.conv_state(), layout.head_states()].map(|elements| {
                let start = end;
                end += slots * elements;
                start..end
            })
        });
        Ok(Self {
            layers: layers.collect(),
            slab,
        })
    }

    /// Bytes of all slots; `u64::MAX` if they fit no memory.
    pub(super) fn bytes(spec: &DecoderSpec, slots: usize) -> u64 {
        StateCache::slot_bytes(spec).saturating_mul(slots as u64)
    }

    /// Those of a layer, by its index among the layers that have any: of the convolution, and of the recurrence.
    ///
    /// # Panics
    /// If there are none.
    pub(super) fn of(&self, layer: usize) -> [GpuSlice<'_, f32>; 2] {
        let slab = self.slab.as_ref().expect("a layer with a recurrence has states");
        let [conv, heads] = self.layers[layer].clone();
        let all = slab.slice::<f32>();
        [all.range(conv), all.range(heads)]
    }
}
