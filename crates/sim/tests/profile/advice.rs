//! What the profile advises works: every flag of a diagnostic, every suggestion for the next run, the
//! largest size that a refused pin is told.

use std::collections::BTreeMap;

use plimsoll_core::{BlockSize, KvConfig};
use plimsoll_profiler::{
    Bound, Cause, Diagnostic, Knob, KvSize, Margins, MemFraction, Origin, ProfileError, ProfileSpec, Report,
    Setting, Target, profile,
};
use plimsoll_sim::{DeviceModel, StepMemory, VirtualDevice};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::cases::random_layers;
use crate::{BLOCK, MIB, limits, model, refused, run, spec, step_memory};

/// Every knob of a diagnostic, turned alone, leads to a proof.
pub(crate) fn assert_advice_works(diagnostic: &Diagnostic, device: DeviceModel, spec: &ProfileSpec) {
    for knob in &diagnostic.knobs {
        // More of a device that gives less than it promises: nobody can know.
        if device.missing > 0 && matches!(knob.settings[..], [Setting::DeviceMemory(_), ..]) {
            continue;
        }
        let (mut device, mut spec) = (device.clone(), spec.with(&knob.settings));
        for setting in &knob.settings {
            if let Setting::DeviceMemory(bytes) = *setting {
                assert!(bytes > device.total, "{diagnostic}");
                device.total = bytes;
                // As a real start does: small devices have small margins.
                if spec.margins != Margins::default() {
                    spec.margins = Margins::scaled_to(bytes);
                }
            }
        }
        assert!(
            spec.limits.max_num_batched_tokens >= spec.limits.max_num_seqs,
            "the command line refuses this: {diagnostic}"
        );
        if let Err(error) = run(device, &spec) {
            panic!(
                "{} does not help: {error}\nwas advised by: {diagnostic}",
                knob.flags()
            );
        }
    }
}

/// Every size that is suggested is proved, without a probe; the larger one only where the device has what it promises.
fn assert_suggestions_work(report: &Report, device: &DeviceModel, spec: &ProfileSpec) -> usize {
    let suggestions = &report.suggestions[..if device.missing == 0 {
        report.suggestions.len()
    } else {
        0
    }];
    for suggestion in suggestions {
        let pinned = match run(device.clone(), &spec.with(&[suggestion.flag])) {
            Ok(proved) => proved.report().clone(),
            Err(error) => panic!("{} is refused: {error}", suggestion.flag),
        };
        assert_eq!(
            (pinned.origin, pinned.sizing.bound, pinned.probe),
            (Origin::Pinned, Bound::PinnedBytes, None),
            "{}",
            suggestion.flag
        );
        assert_eq!(pinned.attempts.len(), 1, "{}", suggestion.flag);
    }
    suggestions.len()
}

#[test]
fn what_is_suggested_is_accepted() {
    let proved = run(model(), &spec()).unwrap();
    let report = proved.report();
    assert_eq!(assert_suggestions_work(report, &model(), &spec()), 2);
    let Setting::KvCacheMemoryBytes(full) = report.suggestions[1].flag else {
        panic!("{:?}", report.suggestions)
    };
    // The device is full then: what is free are the margins.
    let pinned = run(model(), &spec().with(&[Setting::KvCacheMemoryBytes(full)])).unwrap();
    let ready = &pinned.report().ready;
    let margins = pinned.report().sizing.margins;
    let kept = margins.canary_bytes + margins.min_fragmentation_bytes;
    assert!(
        (kept..kept + 2 * BLOCK + MIB).contains(&ready.free),
        "{}",
        ready.free
    );
    // From a smaller pin, the proof itself says how much more would fit.
    let small = run(model(), &spec().with(&[Setting::MaxTotalTokenNum(8192)])).unwrap();
    assert_eq!(small.report().suggestions.len(), 1);
    assert_eq!(
        small.report().suggestions[0].flag,
        Setting::KvCacheMemoryBytes(full)
    );
}

/// The largest size starts. What is above it by no more than the fragmentation buffer passes its proof too: a pin
/// may use that margin, the canary it may not.
#[test]
fn the_largest_pin_is_the_largest_but_for_the_margin() {
    let pin = |blocks: u64| spec().with(&[Setting::KvCacheMemoryBytes(blocks * BLOCK)]);
    let diagnostic = refused(run(model(), &pin(1 << 30)));
    let Cause::PinnedTooLarge { largest_tokens, .. } = diagnostic.cause else {
        panic!("{diagnostic}")
    };
    let largest = largest_tokens as u64 / 16;
    let margin = Margins::default().min_fragmentation_bytes / BLOCK;
    drop(run(model(), &pin(largest)).unwrap());
    drop(run(model(), &pin(largest + margin)).unwrap());
    let again = refused(run(model(), &pin(largest + margin + 1)));
    assert_eq!(
        again.cause,
        Cause::PinnedTooLarge {
            bound: Bound::PinnedBytes,
            asked_tokens: (largest + margin + 1) as usize * 16,
            largest_tokens,
        }
    );
}

#[test]
fn a_step_that_does_not_fit_names_values_that_do() {
    for total in [500, 560, 600, 640] {
        let device = || DeviceModel {
            total: total * MIB,
            ..model()
        };
        let spec = ProfileSpec {
            margins: Margins::scaled_to(total * MIB),
            limits: limits(8192, 128, 2048),
            ..spec()
        };
        let diagnostic = refused(run(device(), &spec));
        assert!(!diagnostic.knobs.is_empty(), "{total}: {diagnostic}");
        assert_advice_works(&diagnostic, device(), &spec);
    }
}

/// A device that is as large as it gets is not told to grow, but how much would be enough.
#[test]
fn what_cannot_be_had_is_no_advice() {
    let limited = ProfileSpec {
        largest_device: Some(model().total),
        limits: limits(512, 16, 200_000),
        ..spec()
    };
    let diagnostic = refused(run(model(), &limited));
    let larger = |setting: &Setting| matches!(setting, Setting::DeviceMemory(_));
    assert!(
        !diagnostic
            .knobs
            .iter()
            .any(|knob| knob.settings.iter().any(larger))
    );
    let enough = diagnostic.out_of_reach.unwrap();
    let device = DeviceModel {
        total: enough,
        ..model()
    };
    drop(run(device, &limited).unwrap());
    assert!(diagnostic.to_string().contains("would be enough"), "{diagnostic}");
}

#[test]
fn a_device_that_gives_less_than_it_promises_is_told_a_size_it_gives() {
    // The canary, the buffer and 400 MiB of nothing.
    let device = DeviceModel {
        missing: 1200 * MIB,
        ..model()
    };
    let spec = ProfileSpec {
        limits: limits(512, 16, 8192),
        ..spec()
    };
    let diagnostic = refused(run(device.clone(), &spec));
    assert_eq!(diagnostic.cause, Cause::Exhausted { attempts: 4 });
    assert_eq!(diagnostic.knobs.len(), 1, "{diagnostic}");
    assert_advice_works(&diagnostic, device, &spec);
}

fn random_device(rng: &mut StdRng, page_bytes: u64) -> DeviceModel {
    let total = rng.random_range(64..4096) * MIB;
    let mut term = |most: u64| {
        let present = rng.random_bool(0.5);
        if present { rng.random_range(0..=most) } else { 0 }
    };
    let step = StepMemory {
        token: term(20 << 10),
        row: term(200 << 10),
        sort: term(200 << 10),
        top_k: term(200 << 10),
        longest: term(20 << 10),
        prompt: term(20 << 10),
        greedy: term(200 << 10),
        ..step_memory()
    };
    let weights = rng.random_range(0..total / 2);
    let runtime = rng.random_range(0..total / 16);
    let lies = rng.random_bool(0.25);
    DeviceModel {
        total,
        missing: if lies {
            rng.random_range(0..=(total - weights - runtime) / 2)
        } else {
            0
        },
        weights,
        runtime,
        page_bytes,
        staging: rng.random_range(0..MIB),
        step,
        granularity: [1, 64 << 10, 2 * MIB][rng.random_range(0..3)],
        peers: if rng.random_bool(0.5) {
            rng.random_range(0..=total / 4)
        } else {
            0
        },
        ..model()
    }
}

fn random_spec(rng: &mut StdRng, total: u64) -> ProfileSpec {
    let mut up_to = |most: [usize; 3]| {
        let most = most[rng.random_range(0..3)];
        rng.random_range(1..=most)
    };
    let seqs = up_to([1, 20, 200]);
    let limits = limits(up_to([8, 600, 9000]).max(seqs), seqs, up_to([40, 900, 20_000]));
    let block_size = BlockSize::new([8, 16, 32][rng.random_range(0..3)]).unwrap();
    let (groups, per_token) = random_layers(rng);
    let mut spec = ProfileSpec::new(limits, rng.random_range(1..500), block_size, per_token);
    spec.groups = groups;
    let largest_pin = [400, 200_000][rng.random_range(0..2)];
    let pin = rng.random_range(1..largest_pin);
    spec.size = match rng.random_range(0..5) {
        0 => KvSize::Tokens(pin),
        1 => KvSize::Bytes(rng.random_range(0..=2 * total)),
        _ => KvSize::Auto,
    };
    spec.mem_fraction = MemFraction::new(rng.random_range(0.05..=1.0)).unwrap();
    spec.useful_tokens = rng.random_bool(0.3).then(|| rng.random_range(1..100_000));
    if rng.random_bool(0.5) {
        spec.margins = Margins::scaled_to(total);
    }
    spec
}

/// Starts that ask for a little more than a knob says, 2 % or a block, where that is worth asking: a pin may use the
/// fragmentation buffer, so there the device lacks it; what only a part of the step was measured for is a bound.
fn a_little_more(knob: &Knob, device: &DeviceModel, spec: &ProfileSpec) -> Vec<(DeviceModel, ProfileSpec)> {
    let limits = spec.limits;
    let block = spec.block_size.tokens();
    let more = |value: usize, least: usize| value + value.div_ceil(50).max(least);
    let with = |settings: &[Setting]| {
        let (mut device, spec) = (device.clone(), spec.with(&[&knob.settings, settings].concat()));
        if spec.size != KvSize::Auto {
            device.total -= spec.margins.min_fragmentation_bytes;
        }
        (device, spec)
    };
    let written = limits.max_num_batched_tokens + (2 * limits.max_num_seqs + 1) * block;
    let kv = KvConfig {
        block_size: spec.block_size,
        num_pages: 0,
        groups: spec.groups,
        state_slots: 0,
    };
    let pin_tokens = |pin: Setting| match pin {
        Setting::MaxTotalTokenNum(tokens) => tokens,
        Setting::KvCacheMemoryBytes(bytes) => KvConfig {
            num_pages: (bytes / spec.page_bytes()) as usize,
            ..kv
        }
        .capacity_tokens(),
        _ => 0,
    };
    let larger_pin = |pin: Setting| match pin {
        Setting::KvCacheMemoryBytes(bytes) => {
            let pages = spec.groups.pages_per_block() as u64;
            Setting::KvCacheMemoryBytes(bytes + (bytes / 50).max(pages * spec.page_bytes()))
        }
        pin => Setting::MaxTotalTokenNum(more(pin_tokens(pin), block)),
    };
    match knob.settings[..] {
        [Setting::DeviceMemory(bytes)] => {
            let (mut smaller, mut spec) = (device.clone(), spec.with(&knob.settings));
            smaller.total = bytes - bytes / 50;
            if spec.margins != Margins::default() {
                spec.margins = Margins::scaled_to(smaller.total);
            }
            if spec.size != KvSize::Auto {
                smaller.total -= spec.margins.min_fragmentation_bytes;
            }
            let held = device.weights + device.runtime + device.peers + device.staging;
            let kv = kv.pages_for(written) as u64 * spec.page_bytes();
            let (tokens, rows) = (limits.max_num_batched_tokens as u64, limits.max_num_seqs as u64);
            let step = device.step;
            let worst = (step.token + step.score) * tokens + (step.row + step.sort) * rows;
            let whole = held + kv + worst <= device.total;
            match whole && smaller.total > device.total {
                true => vec![(smaller, spec)],
                false => Vec::new(),
            }
        }
        [Setting::MemFraction(fraction)] => {
            let less = fraction - 0.001;
            let worth_it = less > spec.mem_fraction.get();
            worth_it
                .then(|| with(&[Setting::MemFraction(less)]))
                .into_iter()
                .collect()
        }
        // Where a few short requests do not fill a step, a shorter context makes the steps smaller too: advice does not count on it.
        [Setting::MaxModelLen(len)] if limits.max_num_seqs * len < limits.max_num_batched_tokens => {
            Vec::new()
        }
        [Setting::MaxModelLen(len)] => vec![with(&[Setting::MaxModelLen(more(len, block))])],
        [Setting::MaxTotalTokenNum(tokens)] if knob.effect == "one request of full length" => {
            vec![with(&[Setting::MaxTotalTokenNum(tokens - block)])]
        }
        [_] if knob.effect == "one request of full length" => Vec::new(),
        [pin] if pin_tokens(pin) > written => vec![with(&[larger_pin(pin)])],
        [pin, Setting::MaxModelLen(len)] if pin_tokens(pin) > written => {
            vec![
                with(&[larger_pin(pin)]),
                with(&[Setting::MaxModelLen(more(len, block))]),
            ]
        }
        [Setting::MaxNumSeqs(seqs), Setting::MaxNumBatchedTokens(tokens)] => vec![with(&[
            Setting::MaxNumSeqs(more(seqs, 1)),
            Setting::MaxNumBatchedTokens(more(
                tokens,
                1 + limits.max_num_batched_tokens / limits.max_num_seqs,
            )),
        ])],
        [Setting::MaxNumSeqs(seqs)] => vec![with(&[Setting::MaxNumSeqs(more(seqs, 1))])],
        [Setting::MaxNumBatchedTokens(tokens)] => {
            vec![with(&[Setting::MaxNumBatchedTokens(more(tokens, 1))])]
        }
        _ => Vec::new(),
    }
}

/// The advice is the most that fits, within 2 % and a block: on devices that give every byte, in steps that take memory for
/// tokens and rows.
#[test]
fn a_little_more_than_is_advised_does_not_fit() {
    let mut tried = BTreeMap::<String, usize>::new();
    // A bound on how far advice is off is no promise: these seeds, and none that nobody has seen.
    for seed in 0..1000 {
        let mut rng = StdRng::seed_from_u64(seed);
        let mut spec = random_spec(&mut rng, 2048 * MIB);
        let limits = &mut spec.limits;
        limits.max_num_seqs = limits.max_num_seqs.max(2);
        limits.max_num_batched_tokens = limits.max_num_batched_tokens.max(2 * limits.max_num_seqs);
        let random = random_device(&mut rng, spec.page_bytes());
        let device = DeviceModel {
            missing: 0,
            granularity: 1,
            step: StepMemory {
                token: random.step.token,
                row: random.step.row,
                sort: random.step.sort,
                // A row that samples with everything takes no less than a token that is scored.
                score: rng.random_range(0..=random.step.row + random.step.sort),
                ..StepMemory::default()
            },
            ..random
        };
        if spec.margins != Margins::default() {
            spec.margins = Margins::scaled_to(device.total);
        }
        let Err(ProfileError::DoesNotFit(diagnostic)) = run(device.clone(), &spec) else {
            continue;
        };
        assert_advice_works(&diagnostic, device.clone(), &spec);
        for knob in &diagnostic.knobs {
            for (device, spec) in a_little_more(knob, &device, &spec) {
                if let Ok(proved) = run(device, &spec) {
                    panic!(
                        "seed {seed}: {} is advised, but {:?} and {:?} are proved too: {diagnostic}",
                        knob.flags(),
                        spec.limits,
                        proved.config().kv
                    );
                }
                let name = knob.settings[0].name();
                *tried
                    .entry(format!("{name} of {}", knob.settings.len()))
                    .or_default() += 1;
            }
        }
    }
    let often = tried.values().filter(|&&count| count >= 5).count();
    assert!(often >= 8, "{tried:?}");
}

#[derive(Debug, Default)]
struct Tally {
    suggestions: usize,
    knobs: usize,
    silent: usize,
    causes: [usize; 5],
}

/// Advice and suggestions over random devices: with less than they promise, with neighbours, fragmenting.
#[test]
fn whatever_is_advised_works() {
    let mut tally = Tally::default();
    for seed in (0..1500).chain([rand::random()]) {
        let mut rng = StdRng::seed_from_u64(seed);
        let (per_total, mut spec) = {
            let hint = rng.random_range(64..4096) * MIB;
            (hint, random_spec(&mut rng, hint))
        };
        let device = random_device(&mut rng, spec.page_bytes());
        if spec.margins == Margins::scaled_to(per_total) {
            spec.margins = Margins::scaled_to(device.total);
        }
        let outcome = std::panic::catch_unwind(|| {
            match profile(&mut VirtualDevice::new(device.clone()), &spec, &mut ()) {
                Ok(proved) => Ok(assert_suggestions_work(proved.report(), &device, &spec)),
                Err(ProfileError::DoesNotFit(diagnostic)) => {
                    assert_advice_works(&diagnostic, device.clone(), &spec);
                    Err(diagnostic)
                }
                Err(other) => panic!("{other}"),
            }
        });
        match outcome {
            Ok(Ok(suggestions)) => tally.suggestions += suggestions,
            Ok(Err(diagnostic)) => {
                tally.knobs += diagnostic.knobs.len();
                tally.silent += usize::from(diagnostic.knobs.is_empty());
                let cause = match diagnostic.cause {
                    Cause::ProbeDoesNotFit => 0,
                    Cause::ContextDoesNotFit => 1,
                    Cause::Exhausted { .. } => 2,
                    Cause::PinnedTooLarge { .. } => 3,
                    Cause::PinnedTooSmall { .. } => 4,
                };
                tally.causes[cause] += 1;
            }
            // The assertion that failed is printed above.
            Err(_) => panic!("failed with seed {seed}"),
        }
    }
    assert!(tally.causes.iter().all(|&count| count > 10), "{tally:?}");
    assert!(tally.suggestions > 500 && tally.knobs > 500, "{tally:?}");
    // Where not one token of one row fits beside the weights there is nothing to measure.
    assert!(tally.silent * 20 < tally.causes.iter().sum(), "{tally:?}");
}

/// A server that wants its state back fails as soon as it knows, with the same facts.
#[test]
fn without_advice_a_profile_that_fails_tries_nothing_more() {
    let cases = [
        (limits(8192, 128, 2048), KvSize::Auto, 400 * MIB),
        (limits(512, 16, 200_000), KvSize::Auto, model().total),
        (limits(512, 16, 2048), KvSize::Tokens(1 << 24), model().total),
    ];
    for (limits, size, total) in cases {
        let end = |gives_advice: bool| {
            let spec = ProfileSpec {
                limits,
                size,
                gives_advice,
                ..spec()
            };
            let device = VirtualDevice::new(DeviceModel { total, ..model() });
            let diagnostic = refused(profile(&mut device.clone(), &spec, &mut ()));
            (diagnostic, device.meters().allocations)
        };
        let ((advised, with), (plain, without)) = (end(true), end(false));
        assert!(!advised.knobs.is_empty(), "{advised}");
        assert!(plain.knobs.is_empty() && plain.out_of_reach.is_none(), "{plain}");
        assert_eq!(
            std::mem::discriminant(&plain.cause),
            std::mem::discriminant(&advised.cause)
        );
        assert!(
            without < with,
            "{without} allocations, and {with} with advice: {plain}"
        );
    }
}
