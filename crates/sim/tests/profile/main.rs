//! The auto-profile over the virtual device.

mod advice;
mod cases;
mod check;
mod phases;
mod plans;
mod ranks;
mod simulation;
mod timing;

use plimsoll_core::{BlockSize, CacheKind, CacheLayout, StepLimits};
use plimsoll_profiler::{Diagnostic, Observer, PhaseRecord, ProfileError, ProfileSpec, Proved, profile};
use plimsoll_sim::{DeviceModel, StepMemory, VirtualDevice, VirtualState};

const MIB: u64 = 1 << 20;
const BLOCK: u64 = 256 << 10;

fn limits(batched: usize, seqs: usize, model_len: usize) -> StepLimits {
    StepLimits {
        max_num_batched_tokens: batched,
        max_num_seqs: seqs,
        max_model_len: model_len,
    }
}

fn spec() -> ProfileSpec {
    ProfileSpec::new(limits(512, 16, 2048), 1000, BlockSize::default(), BLOCK / 16)
}

/// A model of up to three groups of layers, and a device for it.
fn grouped(groups: usize) -> (ProfileSpec, DeviceModel) {
    let (full, near, far) = (CacheKind::Full, CacheKind::Window(100), CacheKind::Window(700));
    let kinds = match groups {
        1 => vec![full],
        2 => vec![full, near, near],
        _ => vec![full, near, far, near, far],
    };
    let mut spec = spec();
    spec.groups = CacheLayout::new(&kinds, spec.limits.max_model_len)
        .unwrap()
        .groups;
    assert_eq!(spec.groups.as_slice().len(), groups);
    spec.kv_bytes_per_token = BLOCK / 16 / kinds.len() as u64 * kinds.len() as u64;
    let device = DeviceModel {
        page_bytes: spec.page_bytes(),
        ..model()
    };
    (spec, device)
}

fn step_memory() -> StepMemory {
    StepMemory {
        token: 40 << 10,
        row: 200 << 10,
        sort: 300 << 10,
        top_k: 100 << 10,
        ..Default::default()
    }
}

fn model() -> DeviceModel {
    DeviceModel {
        total: 2048 * MIB,
        missing: 0,
        weights: 300 * MIB,
        runtime: 20 * MIB,
        page_bytes: BLOCK,
        staging: MIB,
        step: step_memory(),
        granularity: 1,
        reuses_larger: false,
        slack: 0,
        lazy_runtime: 0,
        jitter: 0,
        peer_swing: 0,
        peers: 0,
        peer_steps: Vec::new(),
        leak_at: None,
        broken_step: None,
        breaks_late: false,
        seed: 1,
    }
}

fn run(model: DeviceModel, spec: &ProfileSpec) -> Result<Proved<VirtualState>, ProfileError> {
    profile(&mut VirtualDevice::new(model), spec, &mut ())
}

fn refused(result: Result<Proved<VirtualState>, ProfileError>) -> Diagnostic {
    match result {
        Err(ProfileError::DoesNotFit(diagnostic)) => *diagnostic,
        Err(other) => panic!("refused for another reason: {other}"),
        Ok(proved) => panic!("proved {:?}", proved.config()),
    }
}

/// Log lines, and how many of them warn.
#[derive(Default)]
struct Lines(Vec<String>, usize);

impl Observer for Lines {
    fn phase(&mut self, record: &PhaseRecord) {
        self.0.push(record.to_string());
        self.1 += usize::from(record.warning);
    }
}
