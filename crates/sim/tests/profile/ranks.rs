//! Several ranks, one size, one end.

use plimsoll_profiler::{Bound, KvSize, Outcome, Plan, ProfileError, ProfileSpec, Ranks, profile_rank};
use plimsoll_sim::{DeviceModel, VirtualDevice, VirtualState, World};

use crate::cases::{Case, Plans, RankCase};
use crate::check::{Reduction, check, plans};
use crate::{MIB, model, spec};

type Ended = Result<plimsoll_profiler::Proved<VirtualState>, ProfileError>;

/// Starts a rank for each device, with the spec it is given.
fn start(ranks: &[(DeviceModel, ProfileSpec)]) -> Vec<Ended> {
    std::thread::scope(|scope| {
        let members = World::of(ranks.len());
        let threads = members.into_iter().zip(ranks).map(|(mut member, (model, spec))| {
            scope.spawn(move || {
                let mut device = VirtualDevice::new(model.clone());
                device.join(&member);
                profile_rank(&mut device, spec, &mut member, &mut ())
            })
        });
        let threads: Vec<_> = threads.collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn with_peers(peers: u64) -> DeviceModel {
    DeviceModel { peers, ..model() }
}

fn same(devices: impl IntoIterator<Item = DeviceModel>) -> Vec<(DeviceModel, ProfileSpec)> {
    devices.into_iter().map(|device| (device, spec())).collect()
}

#[test]
fn all_ranks_serve_what_the_smallest_holds() {
    let alone = crate::run(with_peers(300 * MIB), &spec()).unwrap().config().kv;
    let ends = start(&same([0, 300 * MIB, 100 * MIB].map(with_peers)));
    for (rank, end) in ends.into_iter().enumerate() {
        let proved = end.unwrap();
        let report = proved.report();
        assert_eq!(proved.config().kv, alone);
        assert_eq!((report.rank, report.ranks), (rank, 3));
        // Each computed from its own device; only the target was reduced.
        let arithmetic = report.arithmetic.as_ref().unwrap();
        assert_eq!(arithmetic.peers, [0, 300 * MIB, 100 * MIB][rank]);
        let bound = if rank == 1 {
            Bound::Memory
        } else {
            Bound::OtherRank
        };
        assert_eq!(report.sizing.bound, bound);
    }
}

#[test]
fn one_ranks_shortage_makes_all_retry() {
    let lying = DeviceModel {
        missing: 300 * MIB,
        ..model()
    };
    let ends = start(&same([model(), lying]));
    let reports: Vec<_> = ends
        .into_iter()
        .map(|end| end.unwrap().report().clone())
        .collect();
    let sizes = |rank: usize| -> Vec<_> { reports[rank].attempts.iter().map(|a| a.kv_tokens).collect() };
    assert_eq!(sizes(0), sizes(1));
    assert!(sizes(0).len() > 1);
    for (here, there) in reports[0].attempts.iter().zip(&reports[1].attempts) {
        match there.outcome {
            Outcome::Proved => assert_eq!(here.outcome, Outcome::Proved),
            _ => assert_eq!(here.outcome, Outcome::OtherRank { rank: 1 }),
        }
    }
}

#[test]
fn a_failure_ends_all_and_names_the_rank() {
    let broken = |step| DeviceModel {
        broken_step: Some(step),
        ..model()
    };
    let leaking = DeviceModel {
        leak_at: Some(0),
        ..model()
    };
    let small = DeviceModel {
        total: 400 * MIB,
        ..model()
    };
    let late = DeviceModel {
        breaks_late: true,
        ..broken(3)
    };
    // In the probe, in validation, at a teardown, and for want of room.
    for bad in [broken(2), late, broken(6), leaking, small] {
        let ends = start(&same([model(), model(), bad, model()]));
        for (rank, end) in ends.into_iter().enumerate() {
            match end.unwrap_err() {
                ProfileError::OtherRank { rank: named, .. } => assert!(named == 2 && rank != 2),
                error => assert_eq!(rank, 2, "{error}"),
            }
        }
    }
}

#[test]
fn ranks_of_different_flags_do_not_start() {
    let other = ProfileSpec {
        size: KvSize::Tokens(4096),
        ..spec()
    };
    for end in start(&[(model(), spec()), (model(), other)]) {
        let error = end.unwrap_err();
        assert!(
            matches!(error, ProfileError::InvalidSpec(_)) && error.to_string().contains("same flags"),
            "{error}"
        );
    }
}

#[test]
fn a_pinned_size_is_refused_by_all_with_the_least_that_fits() {
    let pinned = ProfileSpec {
        size: KvSize::Tokens(80_000),
        ..spec()
    };
    let ends = start(&[(model(), pinned.clone()), (with_peers(700 * MIB), pinned.clone())]);
    let refusals: Vec<_> = ends.into_iter().map(crate::refused).collect();
    assert_eq!(refusals[0].cause, refusals[1].cause);
    assert_eq!(refusals[0].knobs[0], refusals[1].knobs[0]);
    let advised = pinned.with(&refusals[0].knobs[0].settings);
    assert!(advised.size != pinned.size, "{}", refusals[0]);
    let again = [(model(), advised.clone()), (with_peers(700 * MIB), advised)];
    assert!(start(&again).iter().all(Result::is_ok));
}

/// A server of the same devices, small enough for every fault there is.
fn small(count: usize, size: KvSize, planned: bool) -> Case {
    let rank = RankCase {
        device: model(),
        fault: None,
        plan: None,
    };
    let mut case = Case {
        spec: ProfileSpec { size, ..spec() },
        ranks: vec![rank; count],
        plans: Plans::None,
    };
    if planned {
        let plans: Vec<Plan> = plans(&case);
        for (rank, plan) in case.ranks.iter_mut().zip(plans) {
            rank.plan = Some(plan);
        }
        case.plans = Plans::Fresh;
    }
    case
}

/// Over ranks, the n-th allocation fails, for every n on every rank.
#[test]
fn every_allocation_of_every_rank_may_fail() {
    for count in [2, 4] {
        for (size, planned) in [
            (KvSize::Auto, false),
            (KvSize::Auto, true),
            (KvSize::Tokens(4096), false),
            (KvSize::Tokens(4096), true),
        ] {
            let case = small(count, size, planned);
            let undisturbed = check(&case, Reduction::Sound).unwrap();
            for rank in 0..count {
                let mut quiet = 0;
                for n in 1.. {
                    let mut case = case.clone();
                    case.ranks[rank].fault = Some(n);
                    let end = check(&case, Reduction::Sound)
                        .unwrap_or_else(|what| panic!("allocation {n} of rank {rank} of {count}: {what}"));
                    // A fault after the last allocation of a start is no fault.
                    quiet = if end == undisturbed { quiet + 1 } else { 0 };
                    if quiet > 30 {
                        assert!(n > 35, "only {n} allocations");
                        break;
                    }
                }
            }
        }
    }
}

/// The collective of the simulation finds out that it can only wait for ever, at once.
#[test]
fn a_hang_is_noticed() {
    let members = World::of(3);
    std::thread::scope(|scope| {
        let [mut first, mut second, third] = members.try_into().unwrap();
        let waits = scope.spawn(move || first.min(7));
        let waits_too = scope.spawn(move || second.min(5));
        scope.spawn(move || drop(third));
        for end in [waits.join(), waits_too.join()] {
            let lost = end.unwrap().unwrap_err().to_string();
            assert!(lost.contains("rank 2 has left"), "{lost}");
        }
    });
}
