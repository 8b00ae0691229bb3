//! After the proof, steps are timed: within its limits and its memory, and once.

use plimsoll_core::Pooling;
use plimsoll_profiler::{KvSize, Phase, Plan, ProfileError, ProfileSpec, Proved, StepTimes, profile};
use plimsoll_sim::{DeviceModel, VirtualDevice, VirtualState};

use crate::{Lines, limits, model, run, spec};

fn timed(steps_in_flight: usize) -> ProfileSpec {
    ProfileSpec {
        timed_in_flight: steps_in_flight,
        ..spec()
    }
}

fn times(proved: &Proved<VirtualState>) -> &StepTimes {
    proved.report().step_times.as_ref().unwrap()
}

fn rows(proved: &Proved<VirtualState>) -> (Vec<usize>, Vec<usize>) {
    let StepTimes { decode, mixed, .. } = times(proved);
    let rows = |steps: &[plimsoll_profiler::TimedStep]| steps.iter().map(|step| step.rows).collect();
    (rows(decode), rows(mixed))
}

#[test]
fn every_size_that_the_limits_allow_is_timed_beside_the_canary() {
    for (batched, seqs, decode, mixed) in [
        (512, 16, vec![1, 16], vec![32, 128, 256, 384, 512]),
        (300, 100, vec![1, 64, 100], vec![32, 128, 256, 300]),
        (
            4096,
            512,
            vec![1, 64, 128, 256, 384, 512],
            vec![32, 128, 256, 384, 512, 768, 1024, 2048],
        ),
    ] {
        for steps_in_flight in [1, 2] {
            let spec = ProfileSpec {
                limits: limits(batched, seqs, 2048),
                ..timed(steps_in_flight)
            };
            let untimed = ProfileSpec {
                timed_in_flight: 0,
                ..spec.clone()
            };
            let (proved, untimed) = (run(model(), &spec).unwrap(), run(model(), &untimed).unwrap());
            let (timed_decode, timed_mixed) = rows(&proved);
            assert_eq!(timed_decode, decode);
            // A larger one follows where rows got cheaper on this machine.
            let (known, larger) = timed_mixed.split_at(mixed.len());
            assert_eq!(known, mixed);
            let sizes = [4096];
            assert!(
                larger.len() <= sizes.len()
                    && larger == &sizes[..larger.len()]
                    && batched >= *timed_mixed.last().unwrap()
            );
            assert!(times(&proved).costs().is_some());
            let (report, without) = (proved.report(), untimed.report());
            assert_eq!(
                (report.sizing.kv_pages, &report.ready),
                (without.sizing.kv_pages, &without.ready)
            );
            let state = proved.into_parts();
            assert!(state.costs.is_some());
            let steps = state.report.attempts[0].scenarios.len();
            assert!(state.state.steps_beside_canary().len() >= steps + decode.len() + mixed.len());
        }
    }
}

/// The first round goes up, the second one down, where steps of up to 256 rows are timed twice. Larger ones are timed in the second alone
/// if steps are launched ahead.
#[test]
fn the_largest_steps_are_timed_ahead_of_the_small_ones() {
    // Decode steps of 1 and 16 rows, the latter with a long context too, and steps with prompts.
    let (small, large) = ([1, 16, 16, 32, 128, 256], [384, 512]);
    let descending = large.iter().rev().copied();
    let small_twice = small.iter().rev().flat_map(|&tokens| [tokens; 2]);
    let second_round = descending.chain(small_twice);
    for (steps_in_flight, between) in [
        // A small step ahead of the large ones hides that their first one has to be launched.
        (2, vec![256]),
        (1, large.to_vec()),
    ] {
        let proved = run(model(), &timed(steps_in_flight)).unwrap();
        let state = proved.into_parts();
        let proof = state.report.attempts[0].scenarios.len();
        let expected = small.into_iter().chain(between).chain(second_round.clone());
        assert_eq!(
            state.state.steps_beside_canary()[proof..],
            expected.collect::<Vec<_>>(),
            "{steps_in_flight} in flight"
        );
    }
}

#[test]
fn there_is_nothing_to_time_where_prompts_are_never_beside_outputs() {
    let alone = ProfileSpec {
        limits: limits(512, 1, 2048),
        ..timed(2)
    };
    let pooled = ProfileSpec {
        pooling: Some(Pooling::Last),
        ..timed(2)
    };
    for spec in [alone, pooled, timed(0)] {
        let proved = run(model(), &spec).unwrap();
        assert_eq!(proved.report().step_times, None);
        assert!(proved.into_parts().costs.is_none());
    }
}

#[test]
fn a_plan_has_the_times() {
    let first = run(model(), &timed(2)).unwrap();
    let plan = first.plan().unwrap().clone();
    assert_eq!(plan.step_times.as_ref(), Some(times(&first)));
    let text = serde_json::to_string(&plan).unwrap();
    assert_eq!(serde_json::from_str::<Plan>(&text).unwrap(), plan);
    let mut lines = Lines::default();
    let spec = ProfileSpec {
        plan: Some(plan.clone()),
        ..timed(2)
    };
    let second = profile(&mut VirtualDevice::new(model()), &spec, &mut lines).unwrap();
    assert_eq!(second.plan(), Some(&plan));
    assert_eq!(times(&second), times(&first));
    assert!(
        !lines.0.iter().any(|line| line.contains("phase=timing")),
        "{:?}",
        lines.0
    );
    // A size that somebody chose has no plan: its steps are timed.
    let pinned = ProfileSpec {
        size: KvSize::Tokens(4096),
        ..timed(2)
    };
    assert_eq!(rows(&run(model(), &pinned).unwrap()), rows(&first));
}

#[test]
fn a_device_that_fails_meanwhile_ends_the_start() {
    let steps = |spec: &ProfileSpec| {
        let proved = run(model(), spec).unwrap();
        proved.into_parts().state.steps_beside_canary().len() as u64
    };
    let (proof, all) = (steps(&timed(0)), steps(&timed(2)));
    assert!(all > proof);
    // The probe runs as many steps as the proof.
    for step in 2 * proof..2 * proof + 6 {
        // With two in flight, the one that is waited for is not the last one launched.
        for (breaks_late, steps_in_flight) in [(false, 1), (false, 2), (true, 1)] {
            let device = DeviceModel {
                broken_step: Some(step),
                breaks_late,
                ..model()
            };
            let Err(ProfileError::Device { phase, error }) = run(device, &timed(steps_in_flight)) else {
                panic!("step {step} was not missed")
            };
            assert_eq!(phase, Phase::Timing);
            assert!(error.starts_with(VirtualDevice::BROKEN), "{error}");
        }
    }
}
