//! Models with experts: where tokens go changes neither memory nor what is allocated, and is counted.

use plimsoll_core::{BlockSize, Component, Executor, Run, Scratch, StepLimits, StepPlan};
use plimsoll_model::cuda::{GpuFootprint, GpuOptions, GpuStateShape};
use plimsoll_model::{LoadFormat, LoadOptions, Mlp, StepSize};

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
    for (turn, name) in EXPERT_MODELS.into_iter().enumerate() {
        let adversarial = adversarial(name);
        for directory in [golden_path(name), adversarial.path().to_owned()] {
            let model = load_file(&gpu, &directory);
            for setup in Setup::in_turn(turn, 1024) {
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
                            run.state = Some(in_place(index, 0, len));
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
                        runner.take_arena_high_water() <= told,
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

/// So many requests with prompts of so many tokens, in blocks of 16, which are sampled from.
fn prompts(seqs: usize, len: usize) -> StepPlan {
    let run = |index: u32| {
        let tokens: Vec<u32> = (0..len as u32).map(|i| (31 * index + 7 * i) % 160).collect();
        let table = blocks(2 * index..2 * index + len.div_ceil(16) as u32);
        Run {
            state: Some(in_place(index, 0, len)),
            sample: Some(greedy_spec(0)),
            ..run(u64::from(index), 0, &tokens, &table)
        }
    };
    plan((0..seqs as u32).map(run).collect())
}

/// Every token but padding goes to `top_k` experts of each layer, in steps of all kinds; but of the last layer only rows are computed that
/// are sampled from. Nothing counts that ran before serving.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn tokens_of_experts_are_counted() {
    let gpu = gpu();
    // Requests, and tokens of each: of one row, of few and of many, with padding and without, as graphs too.
    let steps = [
        (1, 1),
        (3, 1),
        (4, 1),
        (19, 1),
        (1, 5),
        (3, 9),
        (1, 101),
        (20, 25),
    ];
    for name in EXPERT_MODELS {
        let model = load(&gpu, name);
        let spec = model.spec();
        let loads = model.expert_loads().expect("a model with experts");
        for enforce_eager in [false, true] {
            let setup = Setup {
                block_size: 16,
                tokens: 1024,
                enforce_eager,
            };
            let mut runner = setup.build(&model);
            runner.execute(&prompts(2, 20)).unwrap();
            runner.release_canary();
            for (seqs, len) in steps {
                let output = runner.execute(&prompts(seqs, len));
                output.unwrap_or_else(|error| panic!("{name}, {seqs} x {len}: {error}"));
                runner.rest();
            }
            let tokens = |(seqs, len): (usize, usize)| (seqs * len, seqs);
            let counted = steps.map(tokens);
            let all: usize = counted.iter().map(|(all, _)| all).sum();
            let given: usize = counted.iter().map(|(_, given)| given).sum();
            let mut layers = 0;
            for (index, layer) in spec.layers.iter().enumerate() {
                let Some(counts) = loads.counts(index) else {
                    continue;
                };
                let moe = match &layer.mlp {
                    Mlp::Dense(_) => panic!("counts of layer {index} without experts"),
                    Mlp::Moe(moe) | Mlp::Both(_, moe) => moe,
                };
                let rows = if index + 1 == spec.layers.len() {
                    given
                } else {
                    all
                };
                let (sum, most) = (counts.iter().sum::<u64>(), counts.iter().max());
                let what = format!("{name}, eager {enforce_eager}, layer {index}: {counts:?}");
                assert_eq!(
                    (counts.len(), sum),
                    (moe.experts, (rows * moe.top_k) as u64),
                    "{what}"
                );
                assert!(most.is_some_and(|&most| most <= rows as u64), "{what}");
                layers += 1;
            }
            assert_eq!(layers, spec.mixtures().count(), "{name}");
            assert_eq!(loads.spread().len(), layers, "{name}");
        }
    }
}

/// Where a CPU would count them, if every token goes to the same experts.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn tokens_are_counted_for_their_experts() {
    let gpu = gpu();
    for name in ["gpt-oss", "mixtral", "qwen2-moe", "qwen3-moe"] {
        let model = load_file(&gpu, adversarial(name).path());
        let setup = Setup {
            block_size: 16,
            tokens: 256,
            enforce_eager: true,
        };
        let mut runner = setup.build(&model);
        runner.release_canary();
        for len in [1, 7, 100] {
            let tokens: Vec<u32> = (0..len).map(|i| i * 7 % 160).collect();
            let mut run = run(1, 0, &tokens, &blocks(0..8));
            run.sample = Some(greedy_spec(0));
            runner.execute(&plan(vec![run])).unwrap();
        }
        runner.rest();
        for spread in model.expert_loads().unwrap().spread() {
            let moe = model.spec().mixtures().next().unwrap();
            let most = moe.experts as f64 / moe.top_k as f64;
            assert_eq!(
                (spread.imbalance, spread.hottest),
                (most, 1.0),
                "{name}: {spread:?}"
            );
        }
    }
}
