//! Vectors against transformers, and what may change them. Expected are those in f32; transformers' own in bf16 are off by as
//! much as its logits, and ours may not be worse.

use std::sync::Arc;

use plimsoll_core::{Component, Executor, Pooling};
use plimsoll_device::cuda::Gpu;
use plimsoll_model::LoadOptions;
use plimsoll_model::cuda::GpuModel;

use crate::common::embeddings::{EMBEDDER, POOLINGS, golden_vectors, pooled_run, serve_as, vector};
use crate::common::{VECTOR_MODELS, blocks, golden_path, plan, relative_error, run};
use crate::setup::{MODELS, Setup, gpu, report};

/// Against transformers in bf16: over all prompts of a model.
const WORSE: f64 = 1.2;

/// What other orders of summation make of a model in bf16: see `rows`.
const ROUNDING: f64 = 0.015;

const SETUP: Setup = Setup {
    block_size: 16,
    tokens: 512,
    enforce_eager: false,
};

fn load(gpu: &Gpu, name: &str, pooling: Pooling) -> Arc<GpuModel> {
    let options = LoadOptions {
        serve_as: serve_as(pooling),
        ..Default::default()
    };
    GpuModel::load(&golden_path(name), options, gpu, &mut |_| ()).unwrap()
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn vectors_are_as_close_to_transformers_as_bf16_allows() {
    let gpu = gpu();
    let has_vectors = |name: &&str| VECTOR_MODELS.contains(name);
    for name in MODELS.into_iter().filter(has_vectors).chain([EMBEDDER]) {
        for pooling in POOLINGS {
            let model = load(&gpu, name, pooling);
            let cases = golden_vectors(name);
            for len in [128, 17, 1] {
                let mut runner = SETUP.build(&model);
                let (mut ours, mut theirs) = (0.0, 0.0);
                for case in &cases {
                    let cuts: Vec<usize> = (len..case.prompt.len()).step_by(len).collect();
                    let found = vector(&mut runner, &case.prompt, pooling, &cuts, [&[], &[]]);
                    ours += relative_error(&found, case.expected(pooling)).powi(2);
                    theirs += case.bf16_error(pooling).powi(2);
                }
                let [ours, theirs] = [ours, theirs].map(|sum: f64| (sum / cases.len() as f64).sqrt());
                let what = format!("{name}, {pooling:?}, chunks of {len}");
                report(format_args!("{what}: {ours:.4}, transformers {theirs:.4}"));
                assert!(ours < WORSE * theirs, "{what}: relative error {ours}");
            }
        }
    }
}

/// The same shapes give the same bits; other batches and chunks change no more than they do of logits.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn others_and_chunks_change_nothing_but_rounding() {
    let gpu = gpu();
    for pooling in POOLINGS {
        let model = load(&gpu, EMBEDDER, pooling);
        let prompt: Vec<u32> = (0..75).map(|i| (i * 7 + 3) % 160).collect();
        let other: Vec<u32> = (0..30).map(|i| (i * 11 + 5) % 160).collect();
        let neighbour = pooled_run(2, &other, (0, 30), &blocks(8..10), pooling);
        let alone = vector(&mut SETUP.build(&model), &prompt, pooling, &[], [&[], &[]]);
        let again = vector(&mut SETUP.build(&model), &prompt, pooling, &[], [&[], &[]]);
        assert!(alone == again, "{pooling:?}: not even the same step again");
        for cuts in [vec![], vec![1], vec![16, 17, 40]] {
            let mut runner = SETUP.build(&model);
            let among = [&[][..], &[neighbour.clone()][..]];
            let found = vector(&mut runner, &prompt, pooling, &cuts, among);
            let error = relative_error(&found, &alone);
            report(format_args!("{pooling:?}, cut at {cuts:?}: {error:.6}"));
            assert!(error < ROUNDING, "{pooling:?}, cut at {cuts:?}: {error}");
        }
    }
}

/// Two steps in flight: the vectors of the first are read while the second is computed.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn vectors_outlive_the_next_step() {
    let gpu = gpu();
    for pooling in POOLINGS {
        let model = load(&gpu, EMBEDDER, pooling);
        let prompts: [Vec<u32>; 2] = [(5..60).collect(), (9..90).collect()];
        let step = |index: usize| {
            let (prompt, first) = (&prompts[index], 8 * index as u32);
            let own = pooled_run(
                index as u64,
                prompt,
                (0, prompt.len()),
                &blocks(first..first + 8),
                pooling,
            );
            plan(vec![own])
        };
        let mut runner = SETUP.build(&model);
        let expected = [0, 1].map(|index| runner.execute(&step(index)).unwrap().pooled);
        for _ in 0..20 {
            runner.launch(&step(0)).unwrap();
            runner.launch(&step(1)).unwrap();
            assert_eq!([(); 2].map(|()| runner.finish().unwrap().pooled), expected);
        }
    }
}

/// No head, no sampler, no graphs.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn what_embeddings_do_not_need_takes_no_memory() {
    let gpu = gpu();
    let bytes = |component| gpu.meters().by_component.get(component);
    let generator = crate::setup::load(&gpu, "llama");
    let with_head = bytes(Component::Weights);
    drop(generator);
    let model = load(&gpu, "llama", Pooling::Last);
    assert_eq!(with_head - bytes(Component::Weights), 160 * 64 * 2);
    let mut runner = SETUP.build(&model);
    assert_eq!(bytes(Component::Graphs), 0);
    let mut sampled = run(1, 0, &[5], &blocks(0..1));
    sampled.sample = Some(crate::common::greedy_spec(0));
    assert!(runner.execute(&plan(vec![sampled])).is_err());
    assert!(
        runner
            .logits(&plan(vec![run(1, 0, &[5], &blocks(0..1))]), &[0])
            .is_err()
    );
}
