//! One test a requirement.

use plimsoll_core::{CacheGroups, Component};
use plimsoll_profiler::{
    Bound, BuildProgress, Cause, Contexts, KvSize, MemFraction, Observer, Outcome, Phase, PhaseRecord,
    ProfileError, ProfileSpec, ScenarioKind, Setting, Target, profile, scenarios,
};
use plimsoll_sim::{DeviceModel, StepMemory, VirtualDevice};

use crate::advice::assert_advice_works;
use crate::{BLOCK, Lines, MIB, grouped, limits, model, refused, run, spec, step_memory};

#[test]
fn the_size_is_the_formulas() {
    let mut device = VirtualDevice::new(model());
    let spec = spec();
    let proved = profile(&mut device, &spec, &mut ()).unwrap();
    let worst = step_memory().token * 512 + (step_memory().row + step_memory().sort) * 16;
    let non_kv = 321 * MIB + worst;
    let room = 2048 * MIB - non_kv - 256 * MIB - 150 * MIB;
    let blocks = (room as f64 * 0.95) as u64 / BLOCK;
    let report = proved.report();
    let arithmetic = report.arithmetic.as_ref().unwrap();
    assert_eq!((arithmetic.non_kv, arithmetic.room), (non_kv, i128::from(room)));
    assert_eq!(proved.config().kv.num_pages as u64, blocks);
    assert_eq!(
        (
            report.sizing.bound,
            report.sizing.scratch_bytes,
            report.attempts.len()
        ),
        (Bound::Memory, worst, 1)
    );
    // The canary is free now, and its bytes with it.
    assert_eq!(proved.config().canary_bytes, 0);
    let meters = device.meters();
    assert_eq!(meters.by_component.get(Component::Canary), 0);
    assert!(meters.free >= 256 * MIB + 150 * MIB);
    drop(proved);
    device.trim();
    assert_eq!(device.meters().reserved, 320 * MIB);
}

/// What attention to one long context takes is found by the probe, although not all of its contexts are long.
#[test]
fn the_longest_context_is_measured_before_it_is_proved() {
    let context = 100 << 10;
    let device = DeviceModel {
        step: StepMemory {
            context,
            ..step_memory()
        },
        ..model()
    };
    for limits in [
        limits(512, 16, 2048),
        limits(512, 200, 2048),
        limits(16, 16, 2048),
    ] {
        let spec = ProfileSpec { limits, ..spec() };
        let proved = run(device.clone(), &spec).unwrap();
        let report = proved.report();
        assert_eq!(report.attempts.len(), 1, "{limits:?}");
        assert!(report.sizing.scratch_bytes >= 2048 * context, "{limits:?}");
    }
}

/// The probe of a device on which contexts take no memory computes no long prefix, and finds the same size; where they do, the proof finds
/// out.
#[test]
fn what_a_short_prefix_hides_is_found_by_the_proof() {
    let probed = |prefix, contexts_take_memory| {
        let device = DeviceModel {
            step: StepMemory {
                prefix,
                ..step_memory()
            },
            ..model()
        };
        let spec = ProfileSpec {
            limits: limits(512, 16, 8192),
            contexts_take_memory,
            ..spec()
        };
        run(device, &spec).map(|proved| (proved.config(), proved.report().attempts.len()))
    };
    let [long, short] = [true, false].map(|contexts_take_memory| probed(0, contexts_take_memory).unwrap());
    assert_eq!((short, short.1), (long, 1));
    assert!(probed(2000, true).is_ok());
    let hidden = probed(2000, false);
    assert!(matches!(hidden, Err(ProfileError::DoesNotFit(_))), "{hidden:?}");
}

#[test]
fn there_is_one_line_a_phase() {
    let mut lines = Lines::default();
    let _proved = profile(&mut VirtualDevice::new(model()), &spec(), &mut lines).unwrap();
    let phases: Vec<_> = lines
        .0
        .iter()
        .map(|line| line.split(' ').take(2).collect::<Vec<_>>().join(" "))
        .collect();
    let expected = ["baseline", "probe", "compute", "rebuild", "validate"];
    assert_eq!(
        phases,
        expected.map(|phase| format!("auto-profile phase={phase}"))
    );
    for line in &lines.0 {
        assert!(
            line.split(' ').skip(1).all(|field| field
                .split_once('=')
                .is_some_and(|(k, v)| !k.is_empty() && !v.is_empty())),
            "{line}"
        );
    }
}

/// It ends at once, wherever it comes: nothing smaller is built, no step is tried again.
#[test]
fn an_error_of_the_driver_is_no_lack_of_memory() {
    let started = |break_at: Option<u64>, model: DeviceModel, spec: &ProfileSpec| {
        let mut device = VirtualDevice::new(model);
        if let Some(n) = break_at {
            device.break_allocation(n);
        }
        let result = profile(&mut device, spec, &mut ());
        (result.map(drop), device.meters().allocations)
    };
    // One that fits, and one that does not, for which advice is computed.
    let full = DeviceModel {
        peers: 1650 * MIB,
        ..model()
    };
    let mut phases = Vec::new();
    for model in [model(), full] {
        let (_, allocations) = started(None, model.clone(), &spec());
        for n in 1..=allocations {
            let (result, made) = started(Some(n), model.clone(), &spec());
            let Err(ProfileError::Device { phase, error }) = &result else {
                panic!("call {n} of {allocations}: {result:?}")
            };
            assert!(error.starts_with(VirtualDevice::BROKEN), "{error}");
            assert_eq!(made, n, "the device was asked again");
            phases.push(*phase);
        }
    }
    for phase in [Phase::Probe, Phase::Rebuild, Phase::Validate] {
        assert!(phases.contains(&phase), "{phase} was not reached");
    }
}

/// Phases, and pieces of states, in their order.
#[derive(Default)]
struct Order(Vec<String>);

impl Observer for Order {
    fn phase(&mut self, record: &PhaseRecord) {
        self.0.push(record.phase.to_string());
    }

    fn building(&mut self, progress: BuildProgress) {
        self.0.push(format!("{progress:?}"));
    }
}

/// A long build must be told from one that hangs.
#[test]
fn each_piece_of_a_state_is_heard_of_while_it_is_built() {
    let mut order = Order::default();
    let _proved = profile(&mut VirtualDevice::new(model()), &spec(), &mut order).unwrap();
    let expected = [
        "baseline", "Memory", "probe", "compute", "Memory", "rebuild", "validate",
    ];
    assert_eq!(order.0, expected);
}

#[test]
fn the_report_adds_up_and_shows_every_byte() {
    let mut device_model = model();
    device_model.peers = 100 * MIB;
    device_model.granularity = 2 * MIB;
    let proved = run(device_model, &spec()).unwrap();
    let report = proved.report();
    let ready = &report.ready;
    let components: u64 = ready.components.iter().map(|line| line.bytes).sum();
    assert_eq!(components + ready.unattributed, ready.reserved);
    assert_eq!(ready.reserved + ready.peers + ready.free, ready.total);
    let table = report.table(None);
    for part in [
        "weights",
        "kv",
        "arena",
        "staging",
        "other processes",
        "free",
        "total",
        "2.00 GiB",
        "limited by memory",
    ] {
        assert!(table.contains(part), "{part} is missing:\n{table}");
    }
    assert_eq!(report.sizing.kv_tokens, report.sizing.kv_pages * 16);
    // This size again, and all of the device.
    let flags: Vec<_> = report.suggestions.iter().map(|s| s.flag).collect();
    let [
        Setting::KvCacheMemoryBytes(now),
        Setting::KvCacheMemoryBytes(full),
    ] = flags[..]
    else {
        panic!("{flags:?}")
    };
    assert!(
        now == report.sizing.kv_pages as u64 * BLOCK && full > now,
        "{flags:?}"
    );
    assert_eq!(
        serde_json::to_value(report).unwrap()["suggestions"][0]["flag"],
        flags[0].to_string()
    );
}

#[test]
fn the_fraction_multiplies_the_room_alone() {
    let blocks = |fraction: f64| {
        let spec = ProfileSpec {
            mem_fraction: MemFraction::new(fraction).unwrap(),
            ..spec()
        };
        run(model(), &spec).unwrap().config().kv.num_pages as f64
    };
    assert!((blocks(0.5) / blocks(1.0) - 0.5).abs() < 0.001);
}

#[test]
fn no_more_than_is_useful() {
    let useful = ProfileSpec {
        useful_tokens: Some(4000),
        ..spec()
    };
    let proved = run(model(), &useful).unwrap();
    assert_eq!(
        (proved.config().kv.capacity_tokens(), proved.report().sizing.bound),
        (4000, Bound::Useful)
    );
    let plenty = ProfileSpec {
        useful_tokens: Some(1 << 40),
        ..spec()
    };
    assert_eq!(
        run(model(), &plenty).unwrap().report().sizing.bound,
        Bound::Memory
    );
}

#[test]
fn a_device_that_has_less_than_it_says_gets_a_smaller_cache() {
    // The margins are 406 MiB, so a device that lacks a little more still serves, smaller.
    let (mut seen, mut advised) = (Vec::new(), 0);
    for missing in (150..700).step_by(25) {
        let device = DeviceModel {
            missing: missing * MIB,
            ..model()
        };
        match run(device, &spec()) {
            Ok(proved) => seen.push(proved.report().attempts.len()),
            Err(error) => {
                let Err(ProfileError::DoesNotFit(diagnostic)) = Err::<(), _>(error) else {
                    panic!("wrong error")
                };
                assert_eq!(diagnostic.cause, Cause::Exhausted { attempts: 4 });
                // One advice at most, with a number that works; none where the device hardly gave anything.
                match &*diagnostic.knobs {
                    [] => assert!(missing > 500, "{diagnostic}"),
                    [knob] => {
                        assert!(
                            matches!(knob.settings[0], Setting::MaxTotalTokenNum(_)),
                            "{diagnostic}"
                        );
                        let device = DeviceModel {
                            missing: missing * MIB,
                            ..model()
                        };
                        drop(run(device, &spec().with(&knob.settings)).unwrap());
                        advised += 1;
                    }
                    _ => panic!("{diagnostic}"),
                }
                seen.push(5);
            }
        }
    }
    assert!(seen.is_sorted() && advised > 0, "{seen:?}, {advised}");
    for attempts in 1..=5 {
        assert!(seen.contains(&attempts), "{seen:?}");
    }
}

#[test]
fn targets_shrink_by_five_percent() {
    let proved = run(
        DeviceModel {
            missing: 300 * MIB,
            ..model()
        },
        &spec(),
    )
    .unwrap();
    let report = proved.report();
    let first = report.attempts[0].kv_tokens as f64;
    assert!(report.attempts.len() > 1);
    for (retry, attempt) in report.attempts.iter().enumerate() {
        assert!((attempt.kv_tokens as f64 / first - 0.95_f64.powi(retry as i32)).abs() < 0.005);
        let last = retry + 1 == report.attempts.len();
        assert_eq!(matches!(attempt.outcome, Outcome::Proved), last);
    }
}

#[test]
fn a_leak_is_fatal_at_every_teardown() {
    let leak = |leak_at, missing| {
        let device = DeviceModel {
            leak_at: Some(leak_at),
            missing: missing * MIB,
            ..model()
        };
        run(device, &spec()).unwrap_err()
    };
    // The first teardown is the probe's, later ones are those of attempts that failed in validation.
    assert!(
        matches!(leak(0, 0), ProfileError::TeardownLeak { expected, .. } if expected == 8192 / 16 * BLOCK)
    );
    assert!(leak(0, 0).to_string().starts_with("TEARDOWN LEAK"));
}

#[test]
fn a_leak_after_a_failed_validation_is_fatal_too() {
    // Jitter makes validation fail after the state was built.
    let mut leaks = 0;
    for seed in 0..40 {
        let device = DeviceModel {
            leak_at: Some(1),
            missing: 380 * MIB,
            jitter: 80 * MIB,
            seed,
            ..model()
        };
        match run(device, &spec()) {
            Err(ProfileError::TeardownLeak { expected, .. }) => {
                assert!(expected > 256 * MIB, "the canary is held during validation");
                leaks += 1;
            }
            Ok(proved) => assert!(proved.report().attempts.iter().all(|attempt| {
                !matches!(
                    attempt.outcome,
                    Outcome::OutOfMemory {
                        scenario: Some(_),
                        ..
                    }
                )
            })),
            Err(ProfileError::DoesNotFit(_)) => {}
            Err(other) => panic!("{other}"),
        }
    }
    assert!(leaks > 0);
}

#[test]
fn one_full_length_request_must_fit() {
    let long = |model_len| ProfileSpec {
        limits: limits(512, 16, model_len),
        ..spec()
    };
    let fits = run(model(), &spec()).unwrap().config().kv.capacity_tokens();
    drop(run(model(), &long(fits)).unwrap());
    let diagnostic = refused(run(model(), &long(fits + 1)));
    assert_eq!(diagnostic.cause, Cause::ContextDoesNotFit);
    assert_advice_works(&diagnostic, model(), &long(fits + 1));
    let names: Vec<_> = diagnostic
        .knobs
        .iter()
        .map(|knob| knob.settings[0].name())
        .collect();
    for flag in ["max-model-len", "device-memory", "mem-fraction"] {
        assert!(names.contains(&flag), "{names:?}");
    }
}

#[test]
fn a_pinned_size_is_validated_or_refused_with_the_largest() {
    let largest = run(
        model(),
        &ProfileSpec {
            mem_fraction: MemFraction::new(1.0).unwrap(),
            ..spec()
        },
    );
    let largest = largest.unwrap().config().kv;
    let pin = |size| ProfileSpec { size, ..spec() };
    let mut lines = Lines::default();
    let spec_pinned = pin(KvSize::Tokens(3000));
    let proved = profile(&mut VirtualDevice::new(model()), &spec_pinned, &mut lines).unwrap();
    assert_eq!(
        (proved.config().kv.num_pages, proved.report().sizing.bound),
        (188, Bound::PinnedTokens)
    );
    assert_eq!(proved.report().attempts[0].scenarios.len(), 4);
    let phases: Vec<_> = lines
        .0
        .iter()
        .map(|line| line.split([' ', '=']).nth(2).unwrap())
        .collect();
    assert_eq!(phases, ["baseline", "skip", "rebuild", "validate"]);

    let bytes = proved.report().sizing.kv_bytes;
    assert_eq!(
        run(model(), &pin(KvSize::Bytes(bytes)))
            .unwrap()
            .report()
            .sizing
            .bound,
        Bound::PinnedBytes
    );
    for size in [
        KvSize::Tokens(1 << 20),
        KvSize::Tokens(usize::MAX),
        KvSize::Bytes(1 << 40),
        KvSize::Bytes(u64::MAX),
    ] {
        let diagnostic = refused(run(model(), &pin(size)));
        let Cause::PinnedTooLarge { largest_tokens, .. } = diagnostic.cause else {
            panic!("{diagnostic}")
        };
        assert_eq!(largest_tokens, largest.capacity_tokens());
        assert_advice_works(&diagnostic, model(), &pin(size));
    }
    for size in [KvSize::Tokens(2047 - 15), KvSize::Tokens(1), KvSize::Bytes(BLOCK)] {
        let diagnostic = refused(run(model(), &pin(size)));
        assert!(
            matches!(diagnostic.cause, Cause::PinnedTooSmall { .. }),
            "{diagnostic}"
        );
        assert_advice_works(&diagnostic, model(), &pin(size));
    }
}

#[test]
fn neighbours_do_not_corrupt_the_measurement() {
    let alone = run(model(), &spec())
        .unwrap()
        .report()
        .arithmetic
        .clone()
        .unwrap();
    let peers = DeviceModel {
        peers: 500 * MIB,
        ..model()
    };
    let beside = run(peers, &spec()).unwrap().report().arithmetic.clone().unwrap();
    assert_eq!((alone.non_kv, beside.peers), (beside.non_kv, 500 * MIB));
    assert_eq!(alone.room - beside.room, i128::from(500 * MIB));
}

#[test]
fn fragmentation_is_measured_and_doubled() {
    let device = DeviceModel {
        granularity: 128 * MIB,
        total: 8192 * MIB,
        ..model()
    };
    let proved = run(device, &spec()).unwrap();
    let report = proved.report();
    let fragmentation = report.probe.as_ref().unwrap().fragmentation();
    assert!(fragmentation > 150 * MIB);
    assert_eq!(
        report.arithmetic.as_ref().unwrap().fragmentation_buffer,
        2 * fragmentation
    );
}

/// The n-th allocation fails, for every n of a start.
#[test]
fn every_allocation_of_a_start_may_fail() {
    let sizes = [KvSize::Auto, KvSize::Tokens(4096)].into_iter();
    for (size, groups) in sizes.flat_map(|size| (1..=3).map(move |groups| (size, groups))) {
        let (spec, model) = grouped(groups);
        let spec = ProfileSpec { size, ..spec };
        let mut device = VirtualDevice::new(model.clone());
        let undisturbed = profile(&mut device, &spec, &mut ()).unwrap();
        let allocations = device.meters().allocations;
        assert!(allocations > 10);
        let (mut second, mut refused) = (0, 0);
        for n in 1..=allocations {
            let mut device = VirtualDevice::new(model.clone());
            device.fail_allocation(n);
            match profile(&mut device, &spec, &mut ()) {
                Ok(proved) => {
                    let (blocks, full) = (proved.config().kv.num_pages, undisturbed.config().kv.num_pages);
                    // A pinned size is proved once more with an arena that need not grow, and never made smaller.
                    assert_eq!(blocks < full, size == KvSize::Auto, "{n}");
                    assert_eq!(proved.report().attempts.len(), 2, "{n}");
                    second += 1;
                    drop(proved);
                }
                Err(ProfileError::DoesNotFit(diagnostic)) => {
                    assert!(diagnostic.oom.is_some(), "{n}: {diagnostic}");
                    refused += 1;
                }
                Err(other) => panic!("{n}: {other}"),
            }
            device.trim();
            assert_eq!(
                device.meters().reserved,
                320 * MIB,
                "allocation {n}: something leaked"
            );
        }
        assert!(second > 0 && (refused > 0) == (size == KvSize::Auto));
    }
}

/// What each worst case is for. Without it, some device would have been measured too small.
#[test]
fn removing_any_scenario_lowers_the_peak_somewhere() {
    let devices = [
        step_memory(),
        StepMemory {
            prompt: 1000,
            ..Default::default()
        },
        StepMemory {
            prefix: 10,
            ..Default::default()
        },
        StepMemory {
            greedy: 1000,
            ..Default::default()
        },
        StepMemory {
            score: 1000,
            ..Default::default()
        },
        StepMemory {
            top_k: 1000,
            ..Default::default()
        },
        StepMemory {
            sort: 1000,
            ..Default::default()
        },
    ];
    let shapes = [
        limits(512, 16, 2048),
        limits(512, 16, 512),
        limits(16, 16, 2048),
        limits(512, 1, 300),
        limits(8, 64, 4096),
    ];
    for removed in ScenarioKind::ALL {
        let lowers = shapes.iter().any(|limits| {
            let probe = ProfileSpec {
                limits: *limits,
                ..spec()
            };
            let kv = plimsoll_core::KvConfig {
                block_size: probe.block_size,
                num_pages: probe.probe_tokens().div_ceil(16),
                groups: CacheGroups::default(),
                state_slots: 0,
            };
            let (all, _) = scenarios(Contexts::All, limits, 1000, kv, None);
            devices.iter().any(|device| {
                let peak = |keep: &dyn Fn(ScenarioKind) -> bool| {
                    all.iter()
                        .filter(|s| keep(s.kind))
                        .map(|s| device.bytes(&s.plan))
                        .max()
                };
                peak(&|kind| kind != removed) < peak(&|_| true)
            })
        });
        assert!(lowers, "{removed} is never the worst");
    }
}
