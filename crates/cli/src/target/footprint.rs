//! The devices, as the prediction sees them: what the targets beside this file would take, without them.

use std::rc::Rc;

use plimsoll_core::{Component, KvConfig, Meters, StepLimits};
use plimsoll_model::StepSize;
use plimsoll_model::cuda::GpuFootprint;
use plimsoll_profiler::{ArenaUse, Footprint, ScenarioKind, ScenarioShape};

use super::sim::{kv_bytes, scratch_bytes};

/// Far more than any device has, and little enough that sums of it do not overflow.
const BOUNDLESS: u64 = 1 << 58;

/// The meters of a device that holds these parts too.
pub(crate) fn holding(device: &Meters, parts: &[(Component, u64)], slack: u64) -> Meters {
    let (mut meters, peers) = (*device, device.peers());
    for &(component, bytes) in parts {
        let bytes = bytes.min(BOUNDLESS);
        *meters.by_component.get_mut(component) += bytes;
        meters.used += bytes;
        meters.reserved += bytes;
    }
    meters.reserved += slack;
    meters.free = meters.total.saturating_sub(meters.reserved).saturating_sub(peers);
    meters
}

/// A model on a CPU.
pub(crate) struct CpuPlan {
    pub(crate) model: Rc<plimsoll_model::Footprint>,
    pub(crate) limits: StepLimits,
    /// Before the model is loaded.
    pub(crate) device: Meters,
}

impl Footprint for CpuPlan {
    fn idle(&self) -> Meters {
        holding(
            &self.device,
            &[(Component::Weights, self.model.weights_bytes())],
            0,
        )
    }

    fn with_state(&self, kv: KvConfig, arena: u64) -> Meters {
        let parts = [
            (Component::Kv, self.model.kv_bytes(kv)),
            (Component::Staging, self.model.staging_bytes(&self.limits)),
            (Component::Arena, arena),
        ];
        holding(&self.idle(), &parts, 0)
    }

    fn arena(&self, steps: &[ScenarioShape]) -> ArenaUse {
        let steps: Vec<_> = steps.iter().map(size).collect();
        arena_use(self.model.arena(&steps))
    }

    fn fixed_arena(&self, scratch: u64) -> u64 {
        scratch
    }

    fn for_limits(&self, limits: &StepLimits) -> Box<dyn Footprint> {
        Box::new(Self {
            model: Rc::clone(&self.model),
            limits: *limits,
            device: self.device,
        })
    }

    fn on_device_of(&self, total: u64) -> Box<dyn Footprint> {
        Box::new(Self {
            model: Rc::clone(&self.model),
            limits: self.limits,
            device: resized(&self.device, total),
        })
    }
}

/// The meters of a device of another size, with the same neighbours.
fn resized(device: &Meters, total: u64) -> Meters {
    let peers = device.peers();
    Meters {
        total,
        free: total.saturating_sub(device.reserved).saturating_sub(peers),
        ..*device
    }
}

/// A model on a GPU, which may not be there.
pub(crate) struct GpuPlan {
    pub(crate) model: Rc<GpuFootprint>,
    /// With what the runtime takes, before the model is loaded.
    pub(crate) device: Meters,
}

impl Footprint for GpuPlan {
    fn idle(&self) -> Meters {
        let parts = [(Component::Weights, self.model.weights_bytes())];
        holding(&self.device, &parts, self.model.slack_bytes(0))
    }

    fn with_state(&self, kv: KvConfig, arena: u64) -> Meters {
        let staging = self.model.staging_bytes();
        let parts = [
            (Component::Weights, self.model.weights_bytes()),
            (Component::Kv, self.model.kv_bytes(kv)),
            (Component::Staging, staging),
            (Component::Arena, arena),
            (Component::Graphs, self.model.graph_bytes()),
        ];
        holding(&self.device, &parts, self.model.slack_bytes(staging))
    }

    fn arena(&self, steps: &[ScenarioShape]) -> ArenaUse {
        // Plain decodes are the only steps that graphs have room for.
        let steps: Vec<_> = steps
            .iter()
            .map(|step| (size(step), step.kind == ScenarioKind::Decode))
            .collect();
        arena_use(self.model.arena(&steps))
    }

    fn fixed_arena(&self, scratch: u64) -> u64 {
        self.model.fixed_arena(scratch)
    }

    fn for_limits(&self, limits: &StepLimits) -> Box<dyn Footprint> {
        Box::new(Self {
            model: Rc::new(self.model.for_limits(limits)),
            device: self.device,
        })
    }

    fn on_device_of(&self, total: u64) -> Box<dyn Footprint> {
        Box::new(Self {
            model: Rc::clone(&self.model),
            device: resized(&self.device, total),
        })
    }
}

fn size(step: &ScenarioShape) -> StepSize {
    StepSize {
        tokens: step.tokens,
        samples: step.sampled(),
        scored: step.scored(),
    }
}

fn arena_use(counted: plimsoll_model::ArenaUse) -> ArenaUse {
    ArenaUse {
        scratch: counted.scratch,
        peak: counted.peak,
        held: counted.held,
    }
}

/// The simulated model.
pub(crate) struct SimPlan {
    pub(crate) device: Meters,
}

impl Footprint for SimPlan {
    fn idle(&self) -> Meters {
        self.device
    }

    fn with_state(&self, kv: KvConfig, arena: u64) -> Meters {
        let kv = kv_bytes(&kv);
        holding(&self.device, &[(Component::Kv, kv), (Component::Arena, arena)], 0)
    }

    fn arena(&self, steps: &[ScenarioShape]) -> ArenaUse {
        let scratch: Vec<u64> = steps.iter().map(|step| scratch_bytes(step.tokens)).collect();
        let (mut held, mut peak) = (0, 0);
        for &bytes in scratch.iter().filter(|&&bytes| bytes > 0) {
            if bytes > held {
                // The old memory is given back when the new one is there.
                peak = peak.max(held + bytes);
                held = bytes;
            }
        }
        ArenaUse { scratch, peak, held }
    }

    fn fixed_arena(&self, scratch: u64) -> u64 {
        scratch
    }

    fn for_limits(&self, _limits: &StepLimits) -> Box<dyn Footprint> {
        Box::new(Self { device: self.device })
    }

    fn on_device_of(&self, total: u64) -> Box<dyn Footprint> {
        Box::new(Self {
            device: resized(&self.device, total),
        })
    }
}
