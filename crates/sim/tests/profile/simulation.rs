//! Thousands of random virtual devices: too small, lying, fragmenting, leaking, shared with neighbours
//! that grow and shrink. Whatever happens, it ends with a proof at the size in use or with a typed error, and frees the rest.

use plimsoll_core::{BlockSize, Component, Executor, StepError, StepLimits};
use plimsoll_profiler::{
    KvSize, Margins, MemFraction, Observer, Outcome, Phase, PhaseRecord, ProfileError, ProfileSpec, Progress,
    Report, Target, profile, scenarios,
};
use plimsoll_sim::{DeviceModel, StepMemory, VirtualDevice};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::MIB;

const SEEDS: u64 = 3000;

/// Up to one of `most`: small, middling and large values alike are common.
fn up_to(rng: &mut StdRng, most: [usize; 3]) -> usize {
    let most = most[rng.random_range(0..3)];
    rng.random_range(1..=most)
}

fn random_limits(rng: &mut StdRng) -> StepLimits {
    StepLimits {
        max_num_batched_tokens: up_to(rng, [8, 600, 9000]),
        max_num_seqs: up_to(rng, [1, 20, 200]),
        max_model_len: up_to(rng, [40, 900, 6000]),
    }
}

fn random_step(rng: &mut StdRng) -> StepMemory {
    let mut term = |most: u64| {
        if rng.random_bool(0.5) {
            rng.random_range(0..=most)
        } else {
            0
        }
    };
    StepMemory {
        token: term(20 << 10),
        row: term(200 << 10),
        sort: term(200 << 10),
        top_k: term(200 << 10),
        longest: term(20 << 10),
        prefix: term(200),
        prompt: term(20 << 10),
        greedy: term(200 << 10),
    }
}

fn random_device(rng: &mut StdRng, block_bytes: u64) -> DeviceModel {
    let total = rng.random_range(64..4096) * MIB;
    let part = |rng: &mut StdRng, odds: f64, divisor: u64| {
        if rng.random_bool(odds) {
            rng.random_range(0..=total / divisor)
        } else {
            0
        }
    };
    DeviceModel {
        total,
        missing: part(rng, 0.3, 3),
        weights: rng.random_range(0..total / 2),
        runtime: rng.random_range(0..total / 16),
        block_bytes,
        staging: rng.random_range(0..MIB),
        step: random_step(rng),
        granularity: [1, 64 << 10, 2 * MIB, 20 * MIB][rng.random_range(0..4)],
        jitter: part(rng, 0.2, 64),
        peer_swing: part(rng, 0.3, 8),
        peers: part(rng, 0.5, 4),
        leak_at: rng.random_bool(0.08).then(|| rng.random_range(0..3)),
        seed: rng.random(),
    }
}

fn random_spec(rng: &mut StdRng, total: u64) -> ProfileSpec {
    let block_size = BlockSize::new([8, 16, 32][rng.random_range(0..3)]).unwrap();
    let limits = random_limits(rng);
    let mut spec = ProfileSpec::new(
        limits,
        rng.random_range(1..500),
        block_size,
        rng.random_range(1..40 << 10),
    );
    spec.size = match rng.random_range(0..4) {
        0 => KvSize::Tokens(rng.random_range(1..200_000)),
        1 => KvSize::Bytes(rng.random_range(0..=total)),
        _ => KvSize::Auto,
    };
    spec.mem_fraction = MemFraction::new(rng.random_range(0.05..=1.0)).unwrap();
    spec.useful_tokens = rng.random_bool(0.3).then(|| rng.random_range(1..100_000));
    spec.margins = if rng.random_bool(0.5) {
        Margins::scaled_to(total)
    } else {
        Margins::default()
    };
    spec
}

/// Checks the order of phases as they pass, and bounds the work.
#[derive(Default)]
struct Watch {
    phases: Vec<Phase>,
    steps: usize,
}

impl Observer for Watch {
    fn phase(&mut self, record: &PhaseRecord) {
        self.phases.push(record.phase);
    }

    fn progress(&mut self, progress: Progress) {
        assert!(progress.done < progress.of);
        self.steps += 1;
    }
}

#[derive(Debug, Default)]
struct Tally {
    proved: usize,
    shrunk: usize,
    leaks: usize,
    refused: usize,
}

#[test]
fn any_device_ends_in_a_proof_or_a_typed_error() {
    let mut tally = Tally::default();
    for seed in 0..SEEDS {
        match std::panic::catch_unwind(|| one(seed)) {
            Ok(End::Proved { attempts }) => {
                tally.proved += 1;
                tally.shrunk += usize::from(attempts > 1);
            }
            Ok(End::Leak) => tally.leaks += 1,
            Ok(End::Refused) => tally.refused += 1,
            // The assertion that failed is printed above.
            Err(_) => panic!("failed with seed {seed}"),
        }
    }
    // The configurations are only worth something if every end is reached often.
    assert!(
        tally.proved > 800 && tally.refused > 400 && tally.leaks > 40 && tally.shrunk > 40,
        "{tally:?}"
    );
}

enum End {
    Proved { attempts: usize },
    Leak,
    Refused,
}

fn one(seed: u64) -> End {
    let mut rng = StdRng::seed_from_u64(seed);
    let total_hint = rng.random_range(64 << 20..4096 << 20);
    let spec = random_spec(&mut rng, total_hint);
    let mut model = random_device(
        &mut rng,
        spec.kv_bytes_per_token * spec.block_size.tokens() as u64,
    );
    // Room for the fixed part must be there, or nothing could be loaded at all.
    model.missing = model.missing.min(model.total - model.weights - model.runtime);
    let mut device = VirtualDevice::new(model.clone());
    let before = device.meters();
    if rng.random_bool(0.3) {
        device.fail_allocation(rng.random_range(1..60));
    }
    let mut watch = Watch::default();
    let result = profile(&mut device, &spec, &mut watch);
    // Never hangs: the probe, its five parts, a second probe for a refusal, four attempts of at most six steps twice; and for
    // the advice at most four tries each of three limits, and twenty sizes beside the step and each of its parts.
    let tries = 4 * 3 + 20 * (1 + 5);
    assert!(
        watch.steps <= 6 * (1 + 5 + 1 + 2 * (4 + tries)),
        "{} steps",
        watch.steps
    );
    let end = match result {
        Ok(proved) => {
            assert_eq!(watch.phases.last(), Some(&Phase::Validate));
            check_report(proved.report(), &spec);
            let config = proved.config();
            assert!(config.kv.capacity_tokens() >= spec.limits.max_model_len);
            let meters = device.meters();
            assert_eq!(meters.by_component.get(Component::Canary), 0);
            assert!(
                meters.by_component.get(Component::Kv) >= config.kv.num_blocks as u64 * model.block_bytes
            );
            let attempts = proved.report().attempts.len();
            // The proof holds for the size in use: every worst step runs again, and takes nothing from the arena's owner.
            let (steps, _) = scenarios(&spec.limits, spec.vocab_size, config.kv);
            let arena = meters.by_component.get(Component::Arena);
            let mut state = proved.into_parts().state;
            for step in steps {
                match state.execute(&step.plan) {
                    Ok(_) => {}
                    // A planned fault that did not come before, or a neighbour or jitter beyond the margins.
                    Err(StepError::Oom(oom)) => assert_eq!(oom.component, Component::Graphs),
                    Err(error) => panic!("{error}"),
                }
            }
            assert_eq!(device.meters().by_component.get(Component::Arena), arena);
            drop(state);
            End::Proved { attempts }
        }
        Err(ProfileError::TeardownLeak { .. }) => {
            assert!(model.leak_at.is_some(), "a leak was found where there is none");
            End::Leak
        }
        Err(ProfileError::DoesNotFit(diagnostic)) => {
            assert!(
                diagnostic.knobs.iter().all(|knob| !knob.settings.is_empty()),
                "{diagnostic}"
            );
            End::Refused
        }
        Err(other) => panic!("{other}"),
    };
    if model.leak_at.is_none() {
        device.trim();
        assert_eq!(device.meters().reserved, before.reserved, "something leaked");
    }
    end
}

fn check_report(report: &Report, spec: &ProfileSpec) {
    let ready = &report.ready;
    let parts = ready.components.iter().map(|line| line.bytes).sum::<u64>() + ready.unattributed;
    assert_eq!(parts, ready.reserved);
    assert_eq!(ready.reserved + ready.peers + ready.free, ready.total);
    assert!((1..=4).contains(&report.attempts.len()));
    let (last, failed) = report.attempts.split_last().unwrap();
    assert_eq!(
        (last.outcome.clone(), last.kv_tokens),
        (Outcome::Proved, report.kv_tokens)
    );
    assert_eq!(last.scenarios.len() + report.left_out.len(), 6);
    assert!(failed.iter().all(|attempt| attempt.outcome != Outcome::Proved));
    assert!(
        report
            .attempts
            .windows(2)
            .all(|pair| (pair[1].kv_tokens < pair[0].kv_tokens) == (spec.size == KvSize::Auto))
    );
    if let (KvSize::Auto, Some(useful)) = (spec.size, spec.useful_tokens) {
        // One request of full length is always of use.
        let useful = useful.max(spec.limits.max_model_len);
        assert!(report.kv_tokens < useful + spec.block_size.tokens());
    }
    assert!(report.table().lines().count() > 3);
}
