//! Prompts with images against Hugging Face transformers, however they are cut. As with text (`golden.rs`), ours may be off by as
//! much as transformers' own in bf16.

use std::sync::Arc;
use std::time::Instant;

use plimsoll_core::{
    BlockSize, Component, EncoderLimits, Executor, Image, ImageGrid, ImageSpan, PartialEncode, Run, RunInput,
    StepError, StepPlan,
};
use plimsoll_device::cuda::Gpu;
use plimsoll_model::cuda::{GpuFootprint, GpuModel, GpuOptions, GpuRunner, GpuStateShape};
use plimsoll_model::{KvCacheDtype, LoadFormat, LoadOptions};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::common::images::{
    IMAGE_LIMITS, IMAGE_MODELS, ImageCase, chunks, come_and_go, golden_images, image_of, options,
};
use crate::common::*;
use crate::reference::root_mean_square;
use crate::setup::{LIMITS, Setup, gpu, report};

fn load_for(gpu: &Gpu, name: &str, limits: EncoderLimits) -> Arc<GpuModel> {
    let options = options(KvCacheDtype::Auto, limits);
    GpuModel::load(&golden_path(name), options, gpu, &mut |_| ()).unwrap()
}

fn load(gpu: &Gpu, name: &str) -> Arc<GpuModel> {
    load_for(gpu, name, IMAGE_LIMITS)
}

/// Whether rows of an image see each other.
fn is_mutual(model: &GpuModel) -> bool {
    model.config().image_input().unwrap().mutual
}

fn setup() -> Setup {
    Setup {
        block_size: 16,
        tokens: 256,
        enforce_eager: false,
    }
}

pub(crate) fn mean(errors: &[f64]) -> f64 {
    (errors.iter().map(|error| error * error).sum::<f64>() / errors.len() as f64).sqrt()
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn images_become_rows_as_close_to_transformers_as_bf16_allows() {
    let gpu = gpu();
    for name in IMAGE_MODELS {
        let mut runner = setup().build(&load(&gpu, name));
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for golden in golden_images(name).cases.iter().flat_map(|case| &case.images) {
            let found = runner.encode(&golden.image()).unwrap();
            ours.push(relative_error(&found, &golden.all_rows()));
            theirs.push(golden.bf16_error);
            let parts: Vec<f64> = (golden.features.iter().enumerate())
                .map(|(part, rows)| {
                    let width = rows[0].len();
                    let own = found
                        .chunks_exact(width)
                        .skip(part)
                        .step_by(golden.features.len());
                    relative_error(&own.flatten().copied().collect::<Vec<_>>(), &rows.concat())
                })
                .collect();
            report(format_args!("{name}, {:?}: parts {parts:.4?}", golden.grid));
        }
        report(format_args!("{name}: rows {ours:.4?}, transformers {theirs:.4?}"));
        // Few rows: as often a little more as a little less.
        assert!(mean(&ours) < 1.2 * mean(&theirs), "{name}: {ours:?}, {theirs:?}");
    }
}

/// The logits of the last rows of a prompt.
pub(crate) fn last_logits(runner: &mut GpuRunner, setup: &Setup, case: &ImageCase, most: usize) -> Vec<f32> {
    let first = case.prompt.len() - case.last_logits.len();
    let table = blocks(0..setup.num_blocks() as u32);
    let mut found = Vec::new();
    let mutual = is_mutual(runner.model());
    for run in chunks(&case.prompt, &case.spans(), &table, most, mutual) {
        let rows = (run.start.max(first)..run.end()).map(|row| row - run.start);
        let rows: Vec<usize> = rows.collect();
        found.extend(runner.logits(&plan(vec![run]), &rows).unwrap());
    }
    found
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn images_in_prompts_give_logits_as_close_to_transformers_as_bf16_allows() {
    let gpu = gpu();
    for (turn, name) in IMAGE_MODELS.into_iter().enumerate() {
        let model = load(&gpu, name);
        let cases = golden_images(name).cases;
        let theirs: Vec<f64> = cases.iter().map(|case| case.bf16_error).collect();
        let worst = theirs.iter().copied().fold(0.0, f64::max);
        for (next, most) in [128, 17, 5, 1].into_iter().enumerate() {
            let setup = Setup::eager_in_turn(turn + next, 256);
            let mut runner = setup.build(&model);
            let what = format!("{name}, {setup:?}, chunks of {most}");
            let error = |case: &ImageCase| {
                let found = last_logits(&mut runner, &setup, case, most);
                relative_error(&found, &case.last_logits.concat())
            };
            let errors: Vec<f64> = cases.iter().map(error).collect();
            report(format_args!(
                "{what}: {:.4}, transformers {:.4}; {errors:.4?}, {theirs:.4?}",
                mean(&errors),
                mean(&theirs)
            ));
            // There are three prompts.
            assert!(
                mean(&errors) < 1.2 * mean(&theirs),
                "{what}: {errors:?}, {theirs:?}"
            );
            assert!(
                errors.iter().all(|&error| error < 1.5 * worst),
                "{what}: {errors:?}"
            );
        }
    }
}

/// What is generated behind images is text, in graphs, whose positions lag behind those of the cache.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn images_are_followed_by_the_greedy_tokens_that_lead() {
    let gpu = gpu();
    for name in IMAGE_MODELS {
        let model = load(&gpu, name);
        let cases = golden_images(name).cases;
        let logits: Vec<f32> = cases.iter().flat_map(|case| case.last_logits.concat()).collect();
        let worst = cases.iter().map(|case| case.bf16_error).fold(0.0, f64::max) as f32;
        let near_tie = 5.0 * worst * root_mean_square(&logits);
        for setup in Setup::all(256) {
            let (mut decided, mut all) = (0, 0);
            for case in &cases {
                let mut runner = setup.build(&model);
                let table = blocks(0..setup.num_blocks() as u32);
                let mut runs = chunks(&case.prompt, &case.spans(), &table, 30, is_mutual(&model));
                runs.last_mut().unwrap().sample = Some(greedy_spec(0));
                let mut last = None;
                for run in runs {
                    last = runner.execute(&plan(vec![run])).unwrap().samples.swap_remove(0);
                }
                for (index, (&expected, &lead)) in case.greedy.iter().zip(&case.leads).enumerate() {
                    let token = last.as_ref().unwrap().token;
                    assert!(
                        token == expected || lead < near_tie,
                        "{name}, {setup:?}, token {index}: {token} instead of {expected}, which leads by {lead}"
                    );
                    decided += usize::from(lead >= near_tie);
                    all += 1;
                    let input = match token == expected {
                        true => RunInput::LastSampled,
                        false => RunInput::Known(vec![expected]),
                    };
                    let next = case.next(index + 1, input, &table);
                    last = runner.execute(&plan(vec![next])).unwrap().samples.swap_remove(0);
                }
            }
            report(format_args!(
                "{name}, {setup:?}: {decided} of {all} tokens lead by {near_tie:.2}"
            ));
            assert!(
                5 * decided > all,
                "{name}, {setup:?}: {decided} of {all} lead by {near_tie}"
            );
        }
    }
}

/// A request with an image beside others: of the same image, and of text.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn images_and_text_share_steps() {
    let gpu = gpu();
    for name in IMAGE_MODELS {
        let model = load(&gpu, name);
        let mut runner = setup().build(&model);
        let case = &golden_images(name).cases[0];
        let steps = case.beside_text();
        let [alone, text_alone, found] = steps.map(|(plan, rows)| runner.logits(&plan, &rows).unwrap());
        let error = relative_error(&found, &[&alone[..], &text_alone, &alone].concat());
        report(format_args!("{name}: together {error:.5} from alone"));
        // Products of other numbers of rows round otherwise: both are off, and not by the same.
        assert!(error < 1.5 * case.bf16_error, "{name}: {error}");
        let other = relative_error(&text_alone, &alone);
        assert!(other > 0.1, "{name}: text alone is another prompt, {other}");
    }
}

/// Steps in which others go on encode a part each; however many there are, the rows are the same.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn images_are_encoded_in_parts_beside_steps() {
    let gpu = gpu();
    for name in IMAGE_MODELS {
        let model = load(&gpu, name);
        let case = &golden_images(name).cases[0];
        let (steps, last) = case.in_parts();
        let found = [5, 3, 1, 0].map(|done| {
            let mut runner = setup().build(&model);
            for (index, step) in steps[..5].iter().enumerate() {
                let beside = step.encode.clone().filter(|_| index < done);
                let step = StepPlan {
                    encode: beside,
                    ..step.clone()
                };
                runner.execute(&step).unwrap();
            }
            runner.logits(&steps[5], &[last]).unwrap()
        });
        assert!(found.iter().all(|logits| *logits == found[3]), "{name}");
    }
}

/// Images of so many patches that layers are cut into parts too, as the CPU encodes them, and with the same bits in one step and in many.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn large_images_are_encoded_in_parts() {
    let gpu = gpu();
    let limits = EncoderLimits {
        max_patches: 5000,
        ..IMAGE_LIMITS
    };
    for name in IMAGE_MODELS {
        let model = load_for(&gpu, name, limits);
        let cpu = {
            let options = options(KvCacheDtype::F32, limits);
            let budget = plimsoll_device::Budget::new(1 << 34);
            let model =
                plimsoll_model::Model::load(&golden_path(name), options, &budget, &mut |_| ()).unwrap();
            model
                .build_state(&state_config(16, 8), &LIMITS, &budget, &mut || {})
                .unwrap()
        };
        let (mut cpu, text) = (cpu, golden_images(name).cases.swap_remove(0).prompt);
        // One of them where a model takes one size alone.
        let one_size = model.config().image_input().unwrap().only.is_some();
        let grids = [(1, [1, 50, 90]), (2, [1, 2, 2400]), (3, [1, 32, 64])];
        for (seed, grid) in grids.into_iter().take(if one_size { 1 } else { 3 }) {
            let image = Arc::new(image_of(model.config(), seed, grid));
            let whole = setup().build(&model).encode(&image).unwrap();
            let mut runner = setup().build(&model);
            for step in 0..20 {
                let share = f64::from(step + 1) / 20.0;
                let beside = StepPlan {
                    encode: Some(PartialEncode {
                        image: Arc::clone(&image),
                        share,
                    }),
                    ..plan(vec![run(
                        2,
                        step as usize,
                        &text[step as usize % text.len()..][..1],
                        &blocks(0..3),
                    )])
                };
                runner.execute(&beside).unwrap();
            }
            assert!(runner.encode(&image).unwrap() == whole, "{name}, {grid:?}");
            let error = relative_error(&whole, &cpu.encode(&image).unwrap());
            report(format_args!("{name}, {grid:?}: {error:.4} from the CPU's"));
            assert!(error < 0.05, "{name}, {grid:?}: {error}");
        }
    }
}

/// A last token that is a row of an image is sampled from, which no graph does.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn images_may_end_a_prompt() {
    let gpu = gpu();
    for name in IMAGE_MODELS {
        let model = load(&gpu, name);
        let case = &golden_images(name).cases[0];
        let table = blocks(0..3);
        let span = &case.spans()[0];
        let end = span.end();
        let last = if is_mutual(&model) { span.start } else { end - 1 };
        let mut sampled = [true, false].map(|at_once| {
            let mut runner = setup().build(&model);
            let cut = if at_once { 0 } else { last };
            if cut > 0 {
                runner.execute(&plan(vec![case.run(1, 0..cut, &table)])).unwrap();
            }
            let rest = Run {
                sample: Some(greedy_spec(0)),
                ..case.run(1, cut..end, &table)
            };
            runner.execute(&plan(vec![rest])).unwrap().samples.swap_remove(0)
        });
        let [whole, cut] = [sampled[0].take(), sampled[1].take()].map(|sample| sample.unwrap().token);
        assert_eq!(whole, cut, "{name}");
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn images_are_kept_by_content_and_encoded_again_when_they_are_gone() {
    let gpu = gpu();
    let mut rng = StdRng::seed_from_u64(3);
    for name in IMAGE_MODELS {
        let model = load(&gpu, name);
        let mut runner = setup().build(&model);
        come_and_go(name, model.config(), &mut rng, |image| {
            runner.encode(image).unwrap()
        });
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn images_take_what_the_footprint_says_and_nothing_more_while_they_are_served() {
    let gpu = gpu();
    for name in IMAGE_MODELS {
        for max_patches in [4, 48, 200, 1000, 4096] {
            if max_patches < 36 && name == "gemma3-vision" {
                continue;
            }
            let limits = EncoderLimits {
                max_patches,
                ..IMAGE_LIMITS
            };
            let shape = GpuStateShape {
                limits: LIMITS,
                block_size: BlockSize::new(16).unwrap(),
                kv_cache_dtype: KvCacheDtype::Auto,
                options: GpuOptions::default(),
                serve_as: options(KvCacheDtype::Auto, limits).serve_as,
                shard: plimsoll_model::Shard::WHOLE,
            };
            let footprint = GpuFootprint::assumed(&golden_path(name), shape).unwrap();
            let held = |component| gpu.budget().meters().by_component.get(component);
            let model = load_for(&gpu, name, limits);
            assert_eq!(held(Component::Weights), footprint.weights_bytes(), "{name}");
            let mut runner = setup().build(&model);
            let bytes = held(Component::Encoder);
            assert_eq!(bytes, footprint.encoder_bytes(), "{name}, {max_patches} patches");
            gpu.synchronize().unwrap();
            let before = (gpu.allocations(), gpu.budget().meters().reserved);
            // As long or as wide as can be.
            let most = max_patches / 4;
            for (seed, grid) in [[1, 2, 2 * most], [1, 2 * most, 2], [1, 2, 2]]
                .into_iter()
                .enumerate()
            {
                runner.encode(&image_of(model.config(), seed, grid)).unwrap();
            }
            assert_eq!(
                (gpu.allocations(), gpu.budget().meters().reserved),
                before,
                "{name}"
            );
            let slowest = model.slowest_encode();
            report(format_args!(
                "{name}: {max_patches} patches, {bytes} bytes, {slowest:?} at most"
            ));
            drop(runner);
            assert_eq!(held(Component::Encoder), 0);
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn images_that_no_scheduler_plans_are_refused() {
    let gpu = gpu();
    let case = &golden_images("qwen3-vl").cases[1];
    let table = blocks(0..8);
    let both = || plan(vec![case.run(1, 0..case.prompt.len(), &table)]);
    let refused = |model: &Arc<GpuModel>, plan, said: &str| {
        let error = setup().build(model).logits(&plan, &[0]).unwrap_err();
        assert!(
            matches!(&error, StepError::Failed(message) if message.contains(said)),
            "{error}"
        );
    };
    let model = load(&gpu, "qwen3-vl");
    refused(&model, both(), "two images in a step");
    refused(&crate::setup::load(&gpu, "qwen3-vl"), both(), "without images");
    let (large, too_large) = case.too_large(&table);
    refused(&model, plan(vec![too_large]), "for 13 tokens");
    let error = setup().build(&model).encode(&large).unwrap_err();
    assert!(
        matches!(&error, StepError::Failed(message) if message.contains("52 patches")),
        "{error}"
    );
}

/// Of published shapes, 64 x 64 patches; Qwen2.5-VL's and Pixtral's have widths that are no multiples of 8. Random weights.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn images_of_a_published_size_are_encoded() {
    let gpu = gpu();
    // Elements of a row, of all its parts.
    for (name, row) in [
        ("Qwen3-VL-8B-Instruct", 4096 * 4),
        ("Qwen2.5-VL-7B-Instruct", 3584),
        ("Ministral-3-3B-Instruct-2512-BF16", 3072),
    ] {
        encode_published(&gpu, name, row);
    }
}

fn encode_published(gpu: &Gpu, name: &str, row: usize) {
    let directory = tempfile::tempdir().unwrap();
    let published = repository().join(format!("crates/model/tests/configs/{name}.json"));
    std::fs::copy(published, directory.path().join("config.json")).unwrap();
    let limits = EncoderLimits {
        max_patches: 4096,
        max_images_per_prompt: 3,
    };
    let options = LoadOptions {
        format: LoadFormat::Dummy { seed: 1 },
        ..options(KvCacheDtype::Auto, limits)
    };
    let model = GpuModel::load(directory.path(), options, gpu, &mut |_| ()).unwrap();
    let mut runner = setup().build(&model);
    report(format_args!("{name}, first: {:?}", model.slowest_encode()));
    let mut rng = StdRng::seed_from_u64(1);
    let input = model.config().image_input().unwrap();
    let pixels = 4096 * input.patch.bytes();
    for round in 0..4 {
        let image = Image {
            hash: [round; 32],
            grid: ImageGrid {
                frames: 1,
                height: 64,
                width: 64,
            },
            pixels: (0..pixels).map(|_| rng.random()).collect(),
            levels: Arc::new([std::array::from_fn(|byte| byte as f32 / 127.5 - 1.0); 3]),
        };
        let span = ImageSpan {
            start: 0,
            len: 1024,
            first: 0,
            image: Arc::new(image),
        };
        // A step of few rows, with the encode and without: until it is launched, and until it is done.
        let took = [0, 1].map(|_| {
            let part = Run {
                images: Some([span.clone()].into()),
                ..run(1, 0, &[input.placeholder; 8], &blocks(0..1))
            };
            let begun = Instant::now();
            runner.launch(&plan(vec![part])).unwrap();
            let launched = begun.elapsed();
            runner.finish().unwrap();
            [launched, begun.elapsed()]
        });
        let rows = runner.encode(&span.image).unwrap();
        assert_eq!(rows.len(), 1024 * row);
        assert!(rows.iter().all(|x| x.is_finite()));
        report(format_args!(
            "{name}, 64 x 64 patches: {:?} and {:?}",
            took[0], took[1]
        ));
    }
}
