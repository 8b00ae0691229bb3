//! A rank that cannot go on ends what has begun on both.

use std::process::Command;

use plimsoll_device::cuda::Launch;

use super::*;

/// Whichever rank finds no memory for a step, nothing of it is launched on either; a step in flight ends well, and so does the next.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn a_step_that_fails_on_one_gpu_ends_on_both() {
    let Some(gpus) = gpus() else { return };
    let case = &golden("llama").cases[0];
    let begun = Instant::now();
    for bad in 0..RANKS {
        on_ranks(&gpus, "llama", |rank| {
            let mut runner = Setup {
                enforce_eager: false,
                ..SETUP
            }
            .build(&rank.model);
            let table = blocks(0..8);
            let prompt = || {
                let mut run = run(1, 0, &case.prompt, &table);
                run.sample = Some(greedy_spec(0));
                plan(vec![run])
            };
            let sampled = |runner: &mut GpuRunner| {
                let output = runner.finish().unwrap();
                output.samples[0].as_ref().unwrap().token
            };
            runner.launch(&prompt()).unwrap();
            let expected = sampled(&mut runner);
            for _ in 0..3 {
                runner.launch(&prompt()).unwrap();
                if rank.rank == bad {
                    rank.gpu.budget().fail_step(1);
                }
                match runner.launch(&prompt()).unwrap_err() {
                    StepError::Oom(_) => assert_eq!(rank.rank, bad),
                    error => assert_eq!(error, StepError::OtherRank(bad), "rank {}", rank.rank),
                }
                assert_eq!(sampled(&mut runner), expected, "rank {}", rank.rank);
            }
        })
        .unwrap();
    }
    assert!(begun.elapsed() < Duration::from_secs(60), "nobody waits in vain");
}

/// Tells the test below that it runs in a process of its own, and which rank loses its GPU there.
const LOST_RANK: &str = "PLIMSOLL_TEST_LOST_RANK";

/// A kernel that ends its context, as a GPU does that fell off the bus: every later call to it fails.
const LOST: &[u8] = b".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry lost() { trap; }\n\0";

/// A GPU is lost between two steps: its rank says in the driver's words what happened, the other one names it or says the same, at once, and
/// neither begins another step.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn a_gpu_that_is_lost_ends_the_step_on_both() {
    let Ok(lost) = std::env::var(LOST_RANK) else {
        // Nothing in a process survives its GPU.
        for rank in 0..RANKS {
            let test = "ranks::failures::a_gpu_that_is_lost_ends_the_step_on_both";
            let child = Command::new(std::env::current_exe().unwrap())
                .args(["--ignored", "--exact", test, "--nocapture"])
                .env(LOST_RANK, rank.to_string())
                .output()
                .unwrap();
            let said = [child.stdout, child.stderr].map(|said| String::from_utf8_lossy(&said).into_owned());
            assert!(child.status.success(), "{}", said.concat());
        }
        return;
    };
    let Some(gpus) = gpus() else { return };
    let lost: usize = lost.parse().unwrap();
    let case = &golden("llama").cases[0];
    on_ranks(&gpus, "llama", |rank| {
        let mut runner = SETUP.build(&rank.model);
        let table = blocks(0..8);
        let mut prompt = run(1, 0, &case.prompt, &table);
        prompt.sample = Some(greedy_spec(0));
        let prompt = plan(vec![prompt]);
        let step = |runner: &mut GpuRunner| runner.launch(&prompt).and_then(|()| runner.finish().map(drop));
        step(&mut runner).unwrap();
        if rank.rank == lost {
            let module = rank.gpu.load_module(LOST).unwrap();
            let kernel = module.function("lost").unwrap();
            // SAFETY: it takes no arguments and touches no memory.
            unsafe { rank.gpu.launch(&kernel, Launch::new([1, 1, 1], 1), &[]).unwrap() };
            rank.gpu.synchronize().unwrap_err();
        }
        let begun = Instant::now();
        match step(&mut runner).unwrap_err() {
            // The driver may end the contexts of GPUs that map its memory with it.
            StepError::Device(why) => assert!(why.contains("CUDA_ERROR"), "{why}"),
            StepError::OtherRank(other) if rank.rank != lost => assert_eq!(other, lost),
            error => panic!("rank {}: {error:?}", rank.rank),
        }
        assert!(begun.elapsed() < PATIENCE, "nobody waits in vain");
        match step(&mut runner).unwrap_err() {
            StepError::Device(_) | StepError::RankLost(_) | StepError::OtherRank(_) => {}
            error => panic!("rank {}: {error:?}", rank.rank),
        }
    })
    .unwrap();
}

/// Whichever allocation of a state fails on one rank, the other ends too, and the next state serves.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn any_allocation_of_a_state_may_fail_on_one_gpu() {
    let Some(gpus) = gpus() else { return };
    let begun = Instant::now();
    let case = &golden("llama").cases[0];
    on_ranks(&gpus, "llama", |rank| {
        let build = || {
            let config = state_config(16, 16);
            rank.model
                .build_state(&config, &LIMITS, GpuOptions::default(), &mut |_, _| {})
        };
        let count = || rank.gpu.budget().meters().allocations;
        let text = |mut runner: GpuRunner| {
            greedy_alone(&mut runner, &case.prompt, &blocks(0..16), case.greedy.len())
        };
        let expected = text(build().unwrap());
        let before = count();
        drop(build().unwrap());
        let allocations = count() - before;
        for bad in 0..RANKS {
            for n in 1..=allocations {
                if rank.rank == bad {
                    rank.gpu.budget().fail_allocation(n);
                }
                match build() {
                    // What fails behind the last agreement is for the profile to tell the others.
                    Ok(_) => assert_ne!(rank.rank, bad, "allocation {n}"),
                    Err(BuildError::Oom(_)) => assert_eq!(rank.rank, bad, "allocation {n}"),
                    Err(error) => assert_eq!(error, BuildError::OtherRank(bad), "allocation {n}"),
                }
                rank.gpu.budget().fail_allocation(0);
            }
        }
        assert_eq!(text(build().unwrap()), expected);
    })
    .unwrap();
    report(format_args!("{:?}", begun.elapsed()));
}

/// A rank whose steps never come: the other gives up, and says who is missing.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn a_gpu_whose_step_never_comes_is_named() {
    let Some(gpus) = gpus() else { return };
    let case = &golden("llama").cases[0];
    let begun = Instant::now();
    // Loads and builds are waited for as long as ever.
    let exchanges = Exchange::group_with(RANKS, PATIENCE, 10 * PATIENCE);
    on_ranks_of(&gpus, "llama", &LoadOptions::default(), exchanges, |rank| {
        let mut runner = SETUP.build(&rank.model);
        let mut step = run(1, 0, &case.prompt, &blocks(0..8));
        step.sample = Some(greedy_spec(0));
        if rank.rank == 1 {
            // Longer than anybody waits on the host.
            thread::sleep(2 * PATIENCE);
            return;
        }
        match runner.launch(&plan(vec![step])).unwrap_err() {
            StepError::RankLost(why) => assert!(why.contains("rank 1 did not come"), "{why}"),
            error => panic!("{error:?}"),
        }
    })
    .unwrap();
    assert!(begun.elapsed() < 6 * PATIENCE);
}
