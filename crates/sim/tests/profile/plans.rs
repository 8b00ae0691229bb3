//! A plan of an earlier start skips the probe and nothing else; a useless one costs time, never the start.

use plimsoll_core::Component;
use plimsoll_profiler::{
    DiscardReason, KvSize, Margins, MemFraction, Origin, Plan, ProfileSpec, Report, Target, profile,
};
use plimsoll_sim::{DeviceModel, VirtualDevice};

use crate::{Lines, MIB, limits, model, run, spec};

fn plan() -> Plan {
    run(model(), &spec()).unwrap().plan().unwrap().clone()
}

fn with(plan: Plan) -> ProfileSpec {
    ProfileSpec {
        plan: Some(plan),
        ..spec()
    }
}

/// The report of a start with `plan` on `device`, and its phases.
fn start(device: DeviceModel, spec: &ProfileSpec) -> (Report, Vec<String>) {
    let mut lines = Lines::default();
    let proved = profile(&mut VirtualDevice::new(device), spec, &mut lines).unwrap();
    let phases = lines.0.iter().map(|line| {
        let phase = line.split([' ', '=']).nth(2).unwrap();
        phase.to_owned()
    });
    (proved.report().clone(), phases.collect())
}

fn drift(report: &Report) -> f64 {
    match report.origin {
        Origin::Cached { drift } => drift,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_plan_skips_the_probe_and_is_still_proved() {
    let (report, phases) = start(model(), &with(plan()));
    assert_eq!(phases, ["baseline", "skip", "compute", "rebuild", "validate"]);
    let (searched, _) = start(model(), &spec());
    assert_eq!(report.sizing.kv_pages, searched.sizing.kv_pages);
    assert_eq!(report.sizing.scratch_bytes, searched.sizing.scratch_bytes);
    assert_eq!(
        (report.arithmetic, report.probe),
        (searched.arithmetic, searched.probe)
    );
    assert_eq!(report.suggestions, searched.suggestions);
    assert_eq!(report.origin, Origin::Cached { drift: 0.0 });
    assert_eq!(report.attempts[0].scenarios.len(), 4);
    assert!(report.discarded_plan.is_none());
}

#[test]
fn a_plan_survives_its_text_and_nothing_else_does() {
    let plan = plan();
    let text = serde_json::to_string(&plan).unwrap();
    assert_eq!(serde_json::from_str::<Plan>(&text).unwrap(), plan);
    let more = text.replacen('{', "{\"more\":1,", 1);
    assert!(serde_json::from_str::<Plan>(&more).is_err());
    let deeper = text.replace("{\"peak_reserved\"", "{\"more\":1,\"peak_reserved\"");
    assert_ne!(deeper, text);
    assert!(serde_json::from_str::<Plan>(&deeper).is_err());
}

#[test]
fn a_start_from_a_plan_hands_the_same_plan_on() {
    let plan = plan();
    let proved = run(model(), &with(plan.clone())).unwrap();
    assert_eq!(proved.plan(), Some(&plan));
    let pinned = ProfileSpec {
        size: KvSize::Tokens(4096),
        ..with(plan)
    };
    let proved = run(model(), &pinned).unwrap();
    assert_eq!((proved.plan(), proved.report().origin), (None, Origin::Pinned));
}

#[test]
fn a_planned_size_is_what_todays_meters_leave() {
    let today = [
        DeviceModel {
            peers: 100 * MIB,
            ..model()
        },
        DeviceModel {
            weights: 400 * MIB,
            ..model()
        },
        DeviceModel {
            runtime: 60 * MIB,
            ..model()
        },
        DeviceModel {
            total: 2200 * MIB,
            ..model()
        },
    ];
    for device in today {
        let (searched, _) = start(device.clone(), &spec());
        let (report, _) = start(device, &with(plan()));
        assert_eq!(report.sizing.kv_pages, searched.sizing.kv_pages);
        assert_eq!(report.arithmetic, searched.arithmetic);
        assert!(drift(&report).abs() > 0.0);
    }
}

/// A first start whose size needed cuts: the next one begins where it ended.
#[test]
fn a_plan_remembers_the_cuts() {
    let device = || DeviceModel {
        missing: 300 * MIB,
        ..model()
    };
    let first = run(device(), &spec()).unwrap();
    assert!(first.report().attempts.len() > 1);
    let (report, _) = start(device(), &with(first.plan().unwrap().clone()));
    assert_eq!(report.origin, Origin::Cached { drift: 0.0 });
    assert_eq!(
        (report.sizing.kv_pages, report.attempts.len()),
        (first.config().kv.num_pages, 1)
    );
}

/// A neighbour that comes for a moment, at any allocation, costs that start its cut and no other.
#[test]
fn a_plan_forgets_the_cuts_of_a_neighbour() {
    let spec = ProfileSpec {
        mem_fraction: MemFraction::new(1.0).unwrap(),
        margins: Margins {
            min_fragmentation_bytes: 0,
            ..Margins::default()
        },
        ..spec()
    };
    let mut device = VirtualDevice::new(model());
    let undisturbed = profile(&mut device, &spec, &mut ()).unwrap();
    let full = undisturbed.config().kv.num_pages;
    let mut cut = 0;
    for n in 1..=device.meters().allocations {
        let disturbed = DeviceModel {
            peer_steps: vec![(n, 10 * MIB), (n + 1, 0)],
            ..model()
        };
        let first = run(disturbed, &spec).unwrap();
        cut += usize::from(first.report().attempts.len() > 1);
        let second = ProfileSpec {
            plan: first.plan().cloned(),
            ..spec.clone()
        };
        let (report, _) = start(model(), &second);
        assert_eq!(report.sizing.kv_pages, full, "{n}");
    }
    assert!(cut > 0, "the neighbour never mattered");
}

#[test]
fn drift_above_two_percent_is_a_warning() {
    for (peers, warned) in [(0, false), (10 * MIB, false), (100 * MIB, true)] {
        let device = DeviceModel { peers, ..model() };
        let mut lines = Lines::default();
        let proved = profile(&mut VirtualDevice::new(device), &with(plan()), &mut lines).unwrap();
        let drift = drift(proved.report());
        assert_eq!(drift.abs() > 0.02, warned, "{drift}");
        assert_eq!(lines.1, usize::from(warned));
        let skip = lines.0.iter().find(|line| line.contains("phase=skip")).unwrap();
        assert!(
            skip.contains(" reason=cached ") && skip.contains(&format!(" drift={drift:.4}")),
            "{skip}"
        );
    }
}

/// The size comes from the plan, so only the proof tells that what the plan says of memory is wrong.
#[test]
fn a_plan_is_held_against_the_proof() {
    let exact = run(model(), &with(plan())).unwrap();
    assert!(
        exact.report().plan_error.unwrap().abs() < 0.001,
        "{:?}",
        exact.report()
    );
    let mut grown = plan();
    grown.probe.measured.peak_reserved += 300 * MIB;
    grown.probe.measured.peak_used += 300 * MIB;
    let hungrier = DeviceModel {
        lazy_runtime: 100 * MIB,
        ..model()
    };
    for (device, plan, above) in [(model(), grown, false), (hungrier, plan(), true)] {
        let mut lines = Lines::default();
        let proved = profile(&mut VirtualDevice::new(device), &with(plan), &mut lines).unwrap();
        assert!(matches!(proved.report().origin, Origin::Cached { .. }));
        let error = proved.report().plan_error.unwrap();
        assert!(error.abs() > 0.02 && (error > 0.0) == above, "{error}");
        assert!(
            lines.0.iter().any(|line| line.contains("outcome=inexact")),
            "{:?}",
            lines.0
        );
        assert_eq!(
            proved.plan().is_none(),
            above,
            "what takes more than planned is not handed on"
        );
    }
}

/// The full search follows, with its result; the report says why.
#[test]
fn a_useless_plan_is_thrown_away() {
    use DiscardReason::{ArenaTooSmall, Implausible, OutOfMemory, TooSmall};
    type Damage = fn(&mut Plan);
    let damages: [(DiscardReason, Damage); 12] = [
        (Implausible, |plan| plan.kv_pages = 0),
        (Implausible, |plan| plan.cuts = u32::MAX),
        (Implausible, |plan| plan.probe.measured.kv_tokens = usize::MAX),
        (Implausible, |plan| plan.probe.measured.kv_bytes = u64::MAX),
        (Implausible, |plan| plan.probe.measured.kv_bytes = 0),
        (Implausible, |plan| plan.probe.measured.peak_reserved = 0),
        (Implausible, |plan| plan.probe.measured.scratch_bytes = u64::MAX),
        (Implausible, |plan| plan.probe.scenarios[0].rows -= 1),
        (Implausible, |plan| plan.probe.scenarios.truncate(3)),
        (TooSmall, |plan| plan.probe.measured.peak_reserved = u64::MAX),
        (ArenaTooSmall, |plan| plan.probe.measured.scratch_bytes -= 1),
        (OutOfMemory, |plan| {
            plan.probe.measured.scratch_bytes += 600 * MIB;
        }),
    ];
    let (searched, _) = start(model(), &spec());
    for (index, (reason, damage)) in damages.into_iter().enumerate() {
        let mut damaged = plan();
        damage(&mut damaged);
        let (report, phases) = start(model(), &with(damaged));
        let discarded = report.discarded_plan.unwrap();
        assert_eq!(discarded.reason, reason, "{index}");
        assert_eq!(
            discarded.attempt.is_some(),
            matches!(reason, ArenaTooSmall | OutOfMemory)
        );
        assert_eq!(
            (report.sizing.kv_pages, report.origin),
            (searched.sizing.kv_pages, Origin::Measured)
        );
        assert!(phases.contains(&"probe".to_owned()), "{phases:?}");
    }
}

#[test]
fn a_plan_of_other_limits_is_thrown_away() {
    let other = ProfileSpec {
        limits: limits(256, 16, 2048),
        ..spec()
    };
    let foreign = run(model(), &other).unwrap().plan().unwrap().clone();
    let (report, _) = start(model(), &with(foreign));
    assert_eq!(report.discarded_plan.unwrap().reason, DiscardReason::Implausible);
}

/// On the planned path the n-th allocation fails, for every n.
#[test]
fn every_allocation_of_a_planned_start_may_fail() {
    let spec = with(plan());
    let mut device = VirtualDevice::new(model());
    let undisturbed = profile(&mut device, &spec, &mut ()).unwrap();
    let allocations = device.meters().allocations;
    for n in 1..=allocations {
        let mut device = VirtualDevice::new(model());
        device.fail_allocation(n);
        let proved = profile(&mut device, &spec, &mut ()).unwrap();
        let report = proved.report();
        assert_eq!(
            (report.sizing.kv_pages, report.origin),
            (undisturbed.report().sizing.kv_pages, Origin::Measured)
        );
        assert_eq!(
            report.discarded_plan.as_ref().unwrap().reason,
            DiscardReason::OutOfMemory
        );
        drop(proved);
        device.trim();
        let meters = device.meters();
        let kept = [Component::Weights, Component::Runtime].map(|c| meters.by_component.get(c));
        assert_eq!(meters.reserved, kept.iter().sum::<u64>(), "{n}");
    }
}
