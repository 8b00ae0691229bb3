//! Models with experts: where tokens go changes neither memory nor what is allocated.

use plimsoll_core::{BlockSize, Component, Executor, Scratch, StepLimits};
use plimsoll_model::cuda::{GpuFootprint, GpuOptions, GpuStateShape};
use plimsoll_model::{LoadFormat, LoadOptions, StepSize};

use crate::common::experts::{adversarial, adversarial_with};
use crate::common::*;
use crate::setup::{LIMITS, Setup, gpu, load, load_file};

fn shape(setup: &Setup) -> GpuStateShape {
    GpuStateShape {
        limits: LIMITS,
        block_size: BlockSize::new(setup.block_size).unwrap(),
        kv_cache_dtype: Default::default(),
        options: GpuOptions {
            enforce_eager: setup.enforce_eager,
        },
        serve_as: Default::default(),
        shard: plimsoll_model::Shard::WHOLE,
    }
}

/// As much as was told before the weights were read, to the byte, whether tokens go anywhere or all to the same experts, of
/// which no others are numbers.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn memory_does_not_depend_on_where_tokens_go() {
    let gpu = gpu();
    for name in EXPERT_MODELS {
        let adversarial = adversarial(name);
        for directory in [golden_path(name), adversarial.path().to_owned()] {
            let model = load_file(&gpu, &directory);
            for setup in Setup::all(1024) {
                let footprint = GpuFootprint::on(&gpu, &golden_path(name), shape(&setup)).unwrap();
                let StepLimits {
                    max_num_batched_tokens,
                    max_num_seqs,
                    ..
                } = LIMITS;
                let len = max_num_batched_tokens / max_num_seqs;
                for (seqs, len) in [(max_num_seqs, len), (1, 1), (max_num_seqs, 1)] {
                    let size = StepSize {
                        tokens: seqs * len,
                        samples: seqs,
                        scored: 0,
                    };
                    // Graphs run in memory that they were captured with.
                    let is_graph = !setup.enforce_eager && len == 1;
                    let told = footprint.arena(&[(size, is_graph)]).scratch[0];
                    let mut runner = setup.build_for(&model, &LIMITS, Scratch::Fixed(told));
                    let blocks_each = (setup.num_blocks() / max_num_seqs) as u32;
                    let runs = |seed: u32| {
                        (0..seqs as u32).map(move |index| {
                            let tokens: Vec<u32> = (0..len as u32)
                                .map(|i| (seed + 31 * index + 7 * i) % 160)
                                .collect();
                            let table = blocks(index * blocks_each..(index + 1) * blocks_each);
                            let mut run = run(u64::from(index), 0, &tokens, &table);
                            run.sample = Some(greedy_spec(0));
                            run
                        })
                    };
                    gpu.synchronize().unwrap();
                    let before = gpu.allocations();
                    for seed in 0..5 {
                        let output = runner.execute(&plan(runs(seed).collect()));
                        output.unwrap_or_else(|error| panic!("{name}, {setup:?}, {seqs} x {len}: {error}"));
                    }
                    assert_eq!(gpu.allocations(), before, "{name}, {setup:?}: a step allocated");
                    assert!(
                        runner.arena_high_water() <= told,
                        "{name}, {setup:?}, {seqs} x {len}"
                    );
                }
            }
        }
    }
}

/// Experts to which no row goes are not read: those that are not numbers change nothing.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn only_experts_that_are_hit_are_read() {
    let gpu = gpu();
    let setup = Setup {
        block_size: 16,
        tokens: 256,
        enforce_eager: true,
    };
    for name in EXPERT_MODELS {
        let directory = adversarial(name);
        let model = load_file(&gpu, directory.path());
        for len in [3, 100] {
            let tokens: Vec<u32> = (0..len).map(|i| i * 7 % 160).collect();
            let step = plan(vec![run(1, 0, &tokens, &blocks(0..8))]);
            let last = [len as usize - 1];
            let logits = setup.build(&model).logits(&step, &last).unwrap();
            assert!(
                logits.iter().all(|logit| logit.is_finite()),
                "{name}, {len} tokens"
            );
            if name.ends_with("mxfp4") || name.ends_with("awq") {
                let other = load_file(&gpu, adversarial_with(name, 100).path());
                let others = setup.build(&other).logits(&step, &last).unwrap();
                assert_eq!(logits, others, "{name}, {len} tokens");
            }
        }
    }
}

/// What was told before weights were read, stored or made up.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn weights_take_what_was_told() {
    let gpu = gpu();
    let setup = Setup {
        block_size: 16,
        tokens: 256,
        enforce_eager: true,
    };
    for name in EXPERT_MODELS {
        let told = GpuFootprint::assumed(&golden_path(name), shape(&setup))
            .unwrap()
            .weights_bytes();
        let weights = || gpu.budget().meters().by_component.get(Component::Weights);
        let stored = load(&gpu, name);
        assert_eq!(weights(), told, "{name}");
        drop(stored);
        let options = LoadOptions {
            format: LoadFormat::Dummy { seed: 3 },
            ..Default::default()
        };
        let path = golden_path(name);
        let made_up = plimsoll_model::cuda::GpuModel::load(&path, options, &gpu, &mut |_| ()).unwrap();
        assert_eq!(weights(), told, "{name}, made up");
        let step = plan(vec![run(1, 0, &[5, 9, 40], &blocks(0..1))]);
        let logits = setup.build(&made_up).logits(&step, &[2]).unwrap();
        assert!(logits.iter().all(|logit| logit.is_finite()), "{name}, made up");
    }
}
