//! Models that several GPUs compute together: logits and text are those of one, and a rank that fails ends what has begun on all.
//!
//! Each rank's part of a sum is rounded to bf16 before it is added, so logits are a little further from transformers' than those of
//! one GPU.

mod failures;

use std::panic::resume_unwind;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use plimsoll_core::{BuildError, Component, Executor, Scratch, StepError, StepLimits, TokenId};
use plimsoll_device::cuda::Gpu;
use plimsoll_kernels::Exchange;
use plimsoll_kernels::cuda::{AllReduce, AllReducePath, communication_bytes, sent_bytes};
use plimsoll_model::cuda::{GpuFootprint, GpuModel, GpuOptions, GpuRunner, GpuStateShape, RankLink};
use plimsoll_model::{KvCacheDtype, LoadOptions, ModelError, Shard};

use crate::common::fp8::is_fp8;
use crate::common::images::IMAGE_MODELS;
use crate::common::images::{self, IMAGE_LIMITS, PATCH, chunks, golden_images, image};
use crate::common::requests::{Disturbance, Request, serve};
use crate::common::*;
use crate::golden::in_chunks;
use crate::images::{last_logits, mean};
use crate::reference::VOCAB;
use crate::setup::{LIMITS, MODELS, Setup, load, report};

const RANKS: usize = 2;

/// How long a rank waits for one that does not come to a step.
const PATIENCE: Duration = Duration::from_secs(10);

const SETUP: Setup = Setup {
    block_size: 16,
    tokens: 256,
    enforce_eager: true,
};

/// One rank with its part of a model.
struct Rank {
    rank: usize,
    gpu: Gpu,
    model: Arc<GpuModel>,
}

/// The first GPUs, where there are enough: otherwise says so.
fn gpus() -> Option<Vec<Gpu>> {
    let gpus: Result<Vec<_>, _> = (0..RANKS).map(Gpu::open).collect();
    match gpus {
        Ok(gpus) => Some(gpus),
        Err(error) => {
            report(format_args!(
                "SKIPPED, NOTHING WAS TESTED: this test needs {RANKS} GPUs ({error})"
            ));
            None
        }
    }
}

/// The first two GPUs, and the first four where there are so many.
fn groups() -> Vec<Vec<Gpu>> {
    let all: Vec<Gpu> = (0..4).map_while(|ordinal| Gpu::open(ordinal).ok()).collect();
    if all.len() < 4 {
        let there = all.len();
        report(format_args!(
            "SKIPPED, NOT TESTED: groups of more GPUs than {there}"
        ));
    }
    let sizes = [2, 4].into_iter().filter(|&ranks| ranks <= all.len());
    sizes.map(|ranks| all[..ranks].to_vec()).collect()
}

/// What all ranks come to with a golden model, or why it cannot be divided so.
fn on_ranks<T: Send>(
    gpus: &[Gpu],
    name: &str,
    work: impl Fn(&Rank) -> T + Sync,
) -> Result<Vec<T>, ModelError> {
    let options = LoadOptions::default();
    on_ranks_of(gpus, name, &options, Exchange::group(gpus.len()), work)
}

/// The same of a model that is loaded so, where threads meet at `exchanges`.
fn on_ranks_of<T: Send>(
    gpus: &[Gpu],
    name: &str,
    options: &LoadOptions,
    exchanges: Vec<Exchange>,
    work: impl Fn(&Rank) -> T + Sync,
) -> Result<Vec<T>, ModelError> {
    let group = AllReduce::group(gpus, AllReducePath::Peers).expect("GPUs that reach each other");
    thread::scope(|scope| {
        let parts = gpus.iter().zip(group).zip(exchanges).enumerate();
        let threads: Vec<_> = parts
            .map(|(rank, ((gpu, all_reduce), exchange))| {
                let work = &work;
                scope.spawn(move || {
                    let link = RankLink {
                        all_reduce: Arc::new(all_reduce),
                        exchange: Arc::new(Mutex::new(exchange)),
                    };
                    let options = LoadOptions {
                        shard: Shard {
                            rank,
                            ranks: gpus.len(),
                        },
                        ..options.clone()
                    };
                    let model =
                        GpuModel::load_rank(&golden_path(name), options, gpu, Some(link), &mut |_| ())?;
                    let gpu = gpu.clone();
                    Ok(work(&Rank { rank, gpu, model }))
                })
            })
            .collect();
        let ends = threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic)));
        let mut all = Vec::new();
        let mut why = None;
        for end in ends {
            match end {
                Ok(value) => all.push(value),
                // A rank that fails says why; the other was only told to stop.
                Err(ModelError::Cancelled) => {}
                Err(error) => why = Some(error),
            }
        }
        why.map_or(Ok(all), Err)
    })
}

/// Whether a model was not divided for a reason that names the flag.
fn is_refused(name: &str, error: &ModelError) {
    let text = error.to_string();
    assert!(text.contains("--tensor-parallel-size"), "{name}: {text}");
    report(format_args!("{name} is not divided: {text}"));
}

/// What all ranks came to, which must be the same on each; `None` where the model is not divided, for a reason that names the flag.
fn alike<T: PartialEq>(name: &str, found: Result<Vec<T>, ModelError>) -> Option<T> {
    match found {
        Ok(found) => {
            assert!(
                found.iter().all(|rank| *rank == found[0]),
                "{name}: ranks came to different results"
            );
            found.into_iter().next()
        }
        Err(error) => {
            is_refused(name, &error);
            None
        }
    }
}

/// Whole prompts, chunks over a cached prefix, and token after token; of all formats that can be divided.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn logits_of_ranks_are_close_to_transformers() {
    for gpus in groups() {
        logits_of_ranks(&gpus);
    }
}

fn logits_of_ranks(gpus: &[Gpu]) {
    report(format_args!("{} GPUs", gpus.len()));
    let mut served = Vec::new();
    for name in MODELS.into_iter().chain(EXPERT_MODELS) {
        let cases = golden(name).cases;
        let found = on_ranks(gpus, name, |rank| {
            let of_chunks = |len| {
                let mut runner = SETUP.build(&rank.model);
                cases
                    .iter()
                    .map(|case| in_chunks(&mut runner, &SETUP, case, len))
                    .collect::<Vec<_>>()
            };
            [128, 17, 1].map(of_chunks)
        });
        let Some(found) = alike(name, found) else {
            continue;
        };
        let theirs =
            (cases.iter().map(|case| case.bf16_error.powi(2)).sum::<f64>() / cases.len() as f64).sqrt();
        let has_experts = EXPERT_MODELS.contains(&name);
        for (len, logits) in [128, 17, 1].into_iter().zip(&found) {
            let mut errors: Vec<f64> = logits
                .iter()
                .zip(&cases)
                .map(|(logits, case)| relative_error(logits, &case.last_logits.concat()))
                .collect();
            report(format_args!(
                "{name}, chunks of {len}: {errors:.4?}, transformers {theirs:.4}"
            ));
            // One prompt may go to other experts.
            errors.sort_unstable_by(f64::total_cmp);
            let middle = errors[errors.len() / 2];
            let worst = errors[errors.len() - 1];
            let (usual, most) = match (has_experts, is_fp8(name)) {
                (true, _) => (2.5, f64::INFINITY),
                (_, true) => (2.0, 4.0),
                _ => (1.6, 4.0),
            };
            assert!(
                middle < usual * theirs && worst < most * theirs,
                "{name}, chunks of {len}: {errors:?}"
            );
        }
        served.push(name);
    }
    let least = if gpus.len() == 2 { 15 } else { 8 };
    assert!(served.len() >= least, "{served:?}");
}

/// Steps of so many rows that ranks send each other one half of a sum while they compute the other; and the same once more, in the other
/// turn.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn logits_of_sums_in_halves_are_close_to_transformers() {
    for gpus in groups() {
        logits_of_halves(&gpus);
    }
}

fn logits_of_halves(gpus: &[Gpu]) {
    report(format_args!("{} GPUs", gpus.len()));
    let limits = StepLimits {
        max_num_batched_tokens: 5120,
        max_num_seqs: 512,
        ..LIMITS
    };
    let setup = Setup {
        tokens: 512 * 256,
        ..SETUP
    };
    for name in [
        "llama",
        "qwen3-f16",
        "gemma3",
        "gemma4",
        "llama-fp8-channel",
        "mixtral",
    ] {
        let cases = golden(name).cases;
        let (mut runs, mut last_rows, mut rows) = (Vec::new(), Vec::new(), 0);
        for (case, request) in cases.iter().cycle().zip(0..) {
            let (first, blocks_each) = (request * 256 / setup.block_size, 256 / setup.block_size);
            let table = blocks(first as u32..(first + blocks_each) as u32);
            runs.push(run(request as u64, 0, &case.prompt, &table));
            rows += case.prompt.len();
            last_rows.push(rows - 1);
            if rows >= 4500 {
                break;
            }
        }
        assert!(
            runs.len() <= limits.max_num_seqs && rows <= limits.max_num_batched_tokens,
            "{rows}"
        );
        let step = plan(runs);
        let found = on_ranks(gpus, name, |rank| {
            let mut runner = setup.build_for(&rank.model, &limits, Scratch::Growable);
            let held = rank
                .gpu
                .budget()
                .meters()
                .by_component
                .get(Component::Communication);
            let width = rank.model.spec().hidden_size;
            let predicted = communication_bytes(gpus.len())
                + sent_bytes(gpus.len(), limits.max_num_batched_tokens, width);
            assert_eq!(held, predicted as u64, "{name}");
            let logits = runner.logits(&step, &last_rows).unwrap();
            assert!(
                logits == runner.logits(&step, &last_rows).unwrap(),
                "{name}: other bits the second time"
            );
            logits
        });
        let Some(found) = alike(name, found) else {
            continue;
        };
        let theirs =
            (cases.iter().map(|case| case.bf16_error.powi(2)).sum::<f64>() / cases.len() as f64).sqrt();
        let vocab = found.len() / last_rows.len();
        let mut errors: Vec<f64> = (found.chunks_exact(vocab).zip(cases.iter().cycle()))
            .map(|(logits, case)| relative_error(logits, case.last_logits.last().unwrap()))
            .collect();
        errors.sort_unstable_by(f64::total_cmp);
        let middle = errors[errors.len() / 2];
        report(format_args!(
            "{name}, {rows} rows: {middle:.4}, transformers {theirs:.4}"
        ));
        assert!(middle < 2.5 * theirs, "{name}: {errors:?}");
    }
}

/// Text is the same with graphs and without, alone and in batches that are disturbed, on both ranks; and mostly that of one GPU.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn text_of_ranks_does_not_depend_on_scheduling() {
    for gpus in groups() {
        text_of_ranks(&gpus);
    }
}

fn text_of_ranks(gpus: &[Gpu]) {
    report(format_args!("{} GPUs", gpus.len()));
    for name in ["llama", "qwen3-f16", "gemma3", "gemma4", "mistral-window"] {
        let cases = golden(name).cases;
        let table = blocks(0..SETUP.num_blocks() as u32);
        let alone = |model: &Arc<GpuModel>, enforce_eager| {
            let setup = Setup {
                enforce_eager,
                ..SETUP
            };
            let mut runner = setup.build(model);
            let text = |case: &Case| greedy_alone(&mut runner, &case.prompt, &table, case.greedy.len());
            cases.iter().map(text).collect::<Vec<_>>()
        };
        let served = |model: &Arc<GpuModel>, depth| {
            let mut requests = Request::random(8, 11, VOCAB, 60);
            let how = Disturbance {
                block_size: 16,
                num_blocks: 64,
                limits: LIMITS,
                seed: 5,
                depth,
            };
            let setup = Setup {
                tokens: 1024,
                enforce_eager: false,
                ..SETUP
            };
            let mut runner = setup.build_for(model, &LIMITS, Scratch::Growable);
            serve(&mut runner, &mut requests, how, &mut |_, sampled| sampled.token);
            requests
                .into_iter()
                .map(|request| request.output)
                .collect::<Vec<_>>()
        };
        let found = on_ranks(gpus, name, |rank| {
            let model = &rank.model;
            let texts = [alone(model, true), alone(model, false)];
            (texts, [1, 2].map(|depth| served(model, depth)))
        });
        let Some(found) = alike(name, found) else {
            continue;
        };
        let (texts, _) = found;
        let whole = alone(&load(&gpus[0], name), false);
        let same = |a: &[Vec<TokenId>], b: &[Vec<TokenId>]| {
            let pairs = a.iter().zip(b);
            pairs.filter(|(a, b)| a == b).count()
        };
        report(format_args!(
            "{name}: of {} texts {} are the same with graphs, {} those of one GPU",
            cases.len(),
            same(&texts[0], &texts[1]),
            same(&texts[1], &whole),
        ));
        assert!(
            2 * same(&texts[1], &whole) >= cases.len(),
            "{name}: {texts:?}, {whole:?}"
        );
    }
}

/// Each rank holds what is predicted for it: its part of the weights, and what sums are exchanged in.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn ranks_hold_what_is_predicted() {
    for gpus in groups() {
        held_is_predicted(&gpus);
    }
}

fn held_is_predicted(gpus: &[Gpu]) {
    for name in ["llama", "qwen3-f16", "mixtral", "llama-fp8-channel"] {
        let whole = load(&gpus[0], name).kv_bytes_per_token();
        let found = on_ranks(gpus, name, |rank| {
            let shape = GpuStateShape {
                limits: LIMITS,
                block_size: state_config(16, 16).kv.block_size,
                kv_cache_dtype: KvCacheDtype::Auto,
                options: GpuOptions::default(),
                serve_as: Default::default(),
                shard: Shard {
                    rank: rank.rank,
                    ranks: gpus.len(),
                },
            };
            let told = GpuFootprint::assumed(&golden_path(name), shape).unwrap();
            let held = rank.gpu.budget().meters().by_component;
            assert_eq!(told.weights_bytes(), held.get(Component::Weights), "{name}");
            assert_eq!(
                told.communication_bytes(),
                held.get(Component::Communication),
                "{name}"
            );
            assert_eq!(told.communication_bytes(), communication_bytes(gpus.len()) as u64);
            assert_eq!(told.kv_bytes_per_token(), rank.model.kv_bytes_per_token());
            assert!(rank.model.kv_bytes_per_token() <= whole);
        });
        if let Err(error) = found {
            is_refused(name, &error);
        }
    }
}

/// What both ranks come to with a golden model and images; `None` where it is not divided.
fn on_ranks_with_images<T: Send>(
    gpus: &[Gpu],
    name: &str,
    work: impl Fn(&Rank) -> T + Sync,
) -> Option<Vec<T>> {
    let options = images::options(KvCacheDtype::Auto, IMAGE_LIMITS);
    let found = on_ranks_of(gpus, name, &options, Exchange::group(RANKS), work);
    found.inspect_err(|error| is_refused(name, error)).ok()
}

/// Both ranks encode an image, and have the same rows of it: as close to transformers' as those of one GPU.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn images_of_ranks_are_close_to_transformers() {
    let Some(gpus) = gpus() else { return };
    let mut divided = Vec::new();
    for name in IMAGE_MODELS {
        let cases = golden_images(name).cases;
        let known: Vec<_> = cases.iter().flat_map(|case| &case.images).collect();
        let found = on_ranks_with_images(&gpus, name, |rank| {
            let mut runner = SETUP.build(&rank.model);
            let rows = known.iter().map(|image| runner.encode(&image.image()).unwrap());
            let rows: Vec<_> = rows.collect();
            // Of images that are encoded again, and in the last case of those that are kept.
            let logits = [128, 5, 5].map(|most| {
                let logits = cases
                    .iter()
                    .map(|case| last_logits(&mut runner, &SETUP, case, most));
                logits.collect::<Vec<_>>()
            });
            (rows, logits)
        });
        let Some(found) = found else { continue };
        divided.push(name);
        assert!(
            found[0] == found[1],
            "{name}: ranks came to different rows or logits"
        );
        let (rows, logits) = &found[0];
        let ours = rows.iter().zip(&known);
        let ours: Vec<f64> = ours
            .map(|(rows, golden)| relative_error(rows, &golden.all_rows()))
            .collect();
        let theirs: Vec<f64> = known.iter().map(|golden| golden.bf16_error).collect();
        report(format_args!("{name}: rows {ours:.4?}, transformers {theirs:.4?}"));
        assert!(mean(&ours) < 1.2 * mean(&theirs), "{name}: {ours:?}, {theirs:?}");
        let theirs: Vec<f64> = cases.iter().map(|case| case.bf16_error).collect();
        for logits in logits {
            let errors = logits.iter().zip(&cases);
            let errors: Vec<f64> = errors
                .map(|(logits, case)| relative_error(logits, &case.last_logits.concat()))
                .collect();
            report(format_args!("{name}: {errors:.4?}, transformers {theirs:.4?}"));
            assert!(
                mean(&errors) < 1.6 * mean(&theirs),
                "{name}: {errors:?}, {theirs:?}"
            );
        }
    }
    assert_eq!(
        divided,
        ["gemma3-vision", "mistral3-vision", "qwen2_5-vl", "qwen3-vl"]
    );
}

/// A step with a new image that one rank cannot begin costs neither rank the images that it has: who encodes again waits for a rank
/// that does not.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn ranks_keep_the_same_images_behind_a_step_that_fails() {
    let Some(gpus) = gpus() else { return };
    let case = &golden_images("qwen3-vl").cases[0];
    let found = on_ranks_with_images(&gpus, "qwen3-vl", |rank| {
        let mut runner = SETUP.build(&rank.model);
        // As many as there is room for.
        let kept = [101, 102].map(|seed| {
            let image = image(seed, [1, 4, 12], PATCH);
            let rows = runner.encode(&image).unwrap();
            (image, rows)
        });
        let step = || plan(chunks(&case.prompt, &case.spans(), &blocks(0..8), 128, false)[..1].to_vec());
        for bad in 0..RANKS {
            if rank.rank == bad {
                rank.gpu.budget().fail_step(1);
            }
            match runner.launch(&step()).unwrap_err() {
                StepError::Oom(_) => assert_eq!(rank.rank, bad),
                error => assert_eq!(error, StepError::OtherRank(bad), "rank {}", rank.rank),
            }
            for (image, rows) in &kept {
                assert_eq!(&runner.encode(image).unwrap(), rows, "rank {}", rank.rank);
            }
        }
        runner.launch(&step()).unwrap();
        runner.finish().unwrap();
        for (image, rows) in &kept {
            assert_eq!(&runner.encode(image).unwrap(), rows, "rank {}", rank.rank);
        }
    });
    assert_eq!(found.map(|found| found.len()), Some(RANKS));
}
