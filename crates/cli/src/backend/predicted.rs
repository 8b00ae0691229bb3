//! Meters of a device that holds what is not loaded yet.

use plimsoll_core::{Component, Meters};
use plimsoll_model::StepSize;
use plimsoll_profiler::{ArenaUse, ScenarioShape};

/// Far more than any device has, and little enough that sums of it do not overflow.
const BOUNDLESS: u64 = 1 << 58;

/// The meters of a device that holds these parts too.
pub(super) fn holding(device: &Meters, parts: &[(Component, u64)], slack: u64) -> Meters {
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

pub(super) fn step_size(step: &ScenarioShape) -> StepSize {
    StepSize {
        tokens: step.tokens,
        samples: step.sampled(),
        scored: step.scored(),
    }
}

pub(super) fn arena_use(counted: plimsoll_model::ArenaUse) -> ArenaUse {
    ArenaUse {
        scratch: counted.scratch,
        peak: counted.peak,
        held: counted.held,
    }
}
