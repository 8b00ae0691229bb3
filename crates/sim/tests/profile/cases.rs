//! Random servers: too small, lying, fragmenting, leaking, broken, shared with neighbours that come, grow and go; alone or of
//! several ranks that differ; started afresh or from plans that are right, stale or nonsense.

use plimsoll_core::{BlockSize, CacheGroups, StepLimits};
use plimsoll_profiler::{KvSize, Margins, MemFraction, Plan, ProfileSpec};
use plimsoll_sim::{DeviceModel, StepMemory, random_groups};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

use crate::MIB;
use crate::check::plans;

/// A server to start.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    /// The same on every rank but for the plan and the bytes of a page.
    pub(crate) spec: ProfileSpec,
    pub(crate) ranks: Vec<RankCase>,
    /// What the plans are worth, if there are any.
    pub(crate) plans: Plans,
}

/// One rank of it.
#[derive(Clone, Debug)]
pub(crate) struct RankCase {
    pub(crate) device: DeviceModel,
    /// The allocation that fails, from 1.
    pub(crate) fault: Option<u64>,
    pub(crate) plan: Option<Plan>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Plans {
    None,
    /// Of these very devices.
    Fresh,
    /// Of other devices, damaged, or not on every rank.
    Doubtful,
}

impl Case {
    /// Nothing happens by chance or from outside.
    pub(crate) fn is_calm(&self) -> bool {
        self.ranks.iter().all(|rank| {
            let device = &rank.device;
            let quiet = (device.jitter, device.peer_swing, device.peer_steps.len()) == (0, 0, 0);
            quiet && rank.fault.is_none() && device.leak_at.is_none() && device.broken_step.is_none()
        })
    }

    /// Every byte that is promised can be had, in pieces so small that rounding is no matter.
    pub(crate) fn is_honest(&self) -> bool {
        let mut devices = self.ranks.iter().map(|rank| &rank.device);
        devices.all(|device| device.missing == 0 && device.granularity <= 64 << 10)
    }

    pub(crate) fn without_plans(&self) -> Self {
        let mut case = self.clone();
        case.plans = Plans::None;
        case.ranks.iter_mut().for_each(|rank| rank.plan = None);
        case
    }

    /// The same servers on a quiet day.
    fn calmed(&self) -> Self {
        let mut case = self.without_plans();
        for rank in &mut case.ranks {
            rank.fault = None;
            let device = &mut rank.device;
            (device.jitter, device.peer_swing) = (0, 0);
            device.peer_steps.clear();
            (device.leak_at, device.broken_step) = (None, None);
        }
        case
    }

    /// The case of a seed, of one rank or of more than one.
    pub(crate) fn random(seed: u64, several: bool) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let rng = &mut rng;
        let count = match several {
            true => *[2, 2, 3, 4].choose(rng).unwrap(),
            false => 1,
        };
        let total = rng.random_range(64..4096) * MIB;
        let spec = random_spec(rng, total);
        let first = random_device(rng, total, spec.page_bytes());
        let calm = rng.random_bool(0.4);
        let ranks = (0..count).map(|rank| RankCase {
            device: match rank {
                0 => first.clone(),
                _ => vary(rng, &first),
            },
            fault: rng.random_bool(0.3).then(|| rng.random_range(1..60)),
            plan: None,
        });
        let mut case = Self {
            spec,
            ranks: ranks.collect(),
            plans: Plans::None,
        };
        if calm {
            case = case.calmed();
        }
        if rng.random_bool(0.4) {
            case.add_plans(rng);
        }
        case
    }

    fn add_plans(&mut self, rng: &mut StdRng) {
        let fresh = plans(&self.calmed());
        if fresh.is_empty() {
            return;
        }
        self.plans = Plans::Fresh;
        for (rank, plan) in self.ranks.iter_mut().zip(fresh) {
            rank.plan = Some(plan);
        }
        if rng.random_bool(0.4) {
            return;
        }
        self.plans = Plans::Doubtful;
        let all = rng.random_bool(0.5);
        for rank in &mut self.ranks {
            if all || rng.random_bool(0.5) {
                match rng.random_range(0..4) {
                    0 => rank.plan = None,
                    1 => rank.device = vary(rng, &rank.device),
                    _ => damage(rng, rank.plan.as_mut().expect("every rank has one")),
                }
            }
        }
    }
}

/// Up to one of `most`: small, middling and large values alike are common.
fn up_to(rng: &mut StdRng, most: [usize; 3]) -> usize {
    let most = *most.choose(rng).unwrap();
    rng.random_range(1..=most)
}

fn random_spec(rng: &mut StdRng, total: u64) -> ProfileSpec {
    let block_size = BlockSize::new(*[8, 16, 32].choose(rng).unwrap()).unwrap();
    let limits = StepLimits {
        max_num_batched_tokens: up_to(rng, [8, 600, 9000]),
        max_num_seqs: up_to(rng, [1, 20, 200]),
        max_model_len: up_to(rng, [40, 900, 6000]),
    };
    let vocab = rng.random_range(1..500);
    let (groups, token_bytes) = random_layers(rng);
    let mut spec = ProfileSpec::new(limits, vocab, block_size, token_bytes);
    spec.groups = groups;
    spec.size = match rng.random_range(0..5) {
        0 => KvSize::Tokens(rng.random_range(1..200_000)),
        1 => KvSize::Bytes(rng.random_range(0..=total)),
        _ => KvSize::Auto,
    };
    spec.mem_fraction = MemFraction::new(rng.random_range(0.05..=1.0)).unwrap();
    spec.useful_tokens = rng.random_bool(0.3).then(|| rng.random_range(1..100_000));
    if rng.random_bool(0.5) {
        spec.margins = Margins::scaled_to(total);
    }
    spec
}

/// One to three groups, and the bytes of a token in all their layers.
pub(crate) fn random_layers(rng: &mut StdRng) -> (CacheGroups, u64) {
    let groups = random_groups(rng);
    let layers = groups.iter().map(|group| group.layers as u64).sum::<u64>();
    (groups, layers * rng.random_range(1..=(40 << 10) / layers))
}

fn random_step(rng: &mut StdRng) -> StepMemory {
    let mut term = |most: u64| match rng.random_bool(0.5) {
        true => rng.random_range(0..=most),
        false => 0,
    };
    StepMemory {
        token: term(20 << 10),
        row: term(200 << 10),
        score: term(20 << 10),
        sort: term(200 << 10),
        top_k: term(200 << 10),
        longest: term(20 << 10),
        prefix: term(200),
        prompt: term(20 << 10),
        greedy: term(200 << 10),
        context: term(20 << 10),
    }
}

fn random_device(rng: &mut StdRng, total: u64, page_bytes: u64) -> DeviceModel {
    let part = |rng: &mut StdRng, odds: f64, divisor: u64| match rng.random_bool(odds) {
        true => rng.random_range(0..=total / divisor),
        false => 0,
    };
    let steps = match rng.random_bool(0.3) {
        true => rng.random_range(1..5),
        false => 0,
    };
    // Often no more than the margins and a few cuts make up for.
    let divisor = *[3, 8].choose(rng).unwrap();
    let missing = part(rng, 0.3, divisor);
    // Before, during and after the probe: a start makes some 20 to 70 allocations.
    let peer_steps = (0..steps).map(|_| (rng.random_range(1..60), rng.random_range(0..=total / 3)));
    let device = DeviceModel {
        total,
        peer_steps: peer_steps.collect(),
        missing,
        weights: rng.random_range(0..total / 2),
        runtime: rng.random_range(0..total / 16),
        lazy_runtime: part(rng, 0.3, 16),
        slack: part(rng, 0.3, 32),
        page_bytes,
        staging: rng.random_range(0..MIB),
        step: random_step(rng),
        granularity: *[1, 64 << 10, 2 * MIB, 20 * MIB].choose(rng).unwrap(),
        reuses_larger: rng.random_bool(0.3),
        jitter: part(rng, 0.2, 64),
        peer_swing: part(rng, 0.3, 8),
        peers: part(rng, 0.5, 4),
        leak_at: rng.random_bool(0.08).then(|| rng.random_range(0..3)),
        broken_step: rng.random_bool(0.08).then(|| rng.random_range(0..20)),
        breaks_late: rng.random_bool(0.5),
        seed: rng.random(),
    };
    loadable(device)
}

/// Room for the fixed part must be there, or nothing could be loaded at all.
fn loadable(mut device: DeviceModel) -> DeviceModel {
    let fixed = device.weights + device.runtime + device.slack;
    device.total = device.total.max(fixed);
    device.missing = device.missing.min(device.total - fixed);
    device
}

/// Much the same device, with other neighbours, faults and luck.
fn vary(rng: &mut StdRng, device: &DeviceModel) -> DeviceModel {
    let around = |rng: &mut StdRng, bytes: u64| (bytes as f64 * rng.random_range(0.7..1.3)) as u64;
    let mut other = DeviceModel {
        seed: rng.random(),
        ..device.clone()
    };
    match rng.random_range(0..6) {
        0 => other.total = around(rng, device.total),
        1 => other.weights = around(rng, device.weights),
        2 => other.peers = rng.random_range(0..=device.total / 4),
        3 => other.missing = rng.random_range(0..=device.total / 4),
        // Another share of the layers.
        4 => other.page_bytes = device.page_bytes * 2,
        _ => {}
    }
    if device.leak_at.is_some() || device.broken_step.is_some() {
        (other.leak_at, other.broken_step) = (None, None);
    }
    loadable(other)
}

/// One number becomes nonsense: none, a little or much too small or large, absurd.
fn damage(rng: &mut StdRng, plan: &mut Plan) {
    let wrong = |rng: &mut StdRng, value: u64| match rng.random_range(0..6) {
        0 => 0,
        1 => u64::MAX,
        2 => value.saturating_add(1),
        3 => value.saturating_sub(1),
        4 => value / rng.random_range(2..100),
        _ => value.saturating_mul(rng.random_range(2..100)),
    };
    let measured = &mut plan.probe.measured;
    match rng.random_range(0..10) {
        0 => plan.kv_pages = wrong(rng, plan.kv_pages as u64) as usize,
        1 => plan.cuts = wrong(rng, u64::from(plan.cuts)) as u32,
        2 => plan.probe.weights = wrong(rng, plan.probe.weights),
        3 => plan.probe.runtime = wrong(rng, plan.probe.runtime),
        4 => measured.peak_reserved = wrong(rng, measured.peak_reserved),
        5 => measured.peak_used = wrong(rng, measured.peak_used),
        6 => measured.kv_bytes = wrong(rng, measured.kv_bytes),
        7 => measured.kv_tokens = wrong(rng, measured.kv_tokens as u64) as usize,
        8 => measured.scratch_bytes = wrong(rng, measured.scratch_bytes),
        _ => plan.probe.scenarios[0].tokens = wrong(rng, plan.probe.scenarios[0].tokens as u64) as usize,
    }
}
