//! Prompts with images against Hugging Face transformers, however they are cut.

use std::sync::Arc;

use crate::common::images::{
    IMAGE_LIMITS, IMAGE_MODELS, ImageCase, chunks, come_and_go, golden_images, image_of, options,
};
use crate::common::*;
use plimsoll_core::{
    Component, EncoderLimits, Executor, Image, PartialEncode, RunInput, StepError, StepPlan, TokenId,
};
use plimsoll_device::Budget;
use plimsoll_model::{Footprint, KvCacheDtype, LoadOptions, Model, Runner};
use rand::SeedableRng;
use rand::rngs::StdRng;

fn load_with_images(name: &str) -> Arc<Model> {
    let options = options(KvCacheDtype::F32, IMAGE_LIMITS);
    Model::load(&golden_path(name), options, &budget(), &mut |_| ()).unwrap()
}

fn is_mutual(model: &Model) -> bool {
    model.config().image_input().unwrap().mutual
}

/// The logits of the last rows of a prompt.
pub(crate) fn last_logits(runner: &mut Runner, case: &ImageCase, most: usize) -> Vec<f32> {
    let first = case.prompt.len() - case.last_logits.len();
    let mut found = Vec::new();
    let mutual = is_mutual(runner.model());
    for run in chunks(&case.prompt, &case.spans(), &blocks(0..8), most, mutual) {
        let rows: Vec<usize> = (run.start.max(first)..run.end())
            .map(|row| row - run.start)
            .collect();
        found.extend(runner.logits(&plan(vec![run]), &rows).unwrap());
    }
    found
}

/// As many tokens behind a prompt as are known, each the likeliest.
pub(crate) fn greedy(runner: &mut Runner, case: &ImageCase) -> Vec<TokenId> {
    let table = blocks(0..8);
    let mut found = Vec::new();
    let mut runs = chunks(&case.prompt, &case.spans(), &table, 30, is_mutual(runner.model()));
    runs.last_mut().unwrap().sample = Some(greedy_spec(0));
    for run in runs {
        let output = runner.execute(&plan(vec![run])).unwrap();
        found.extend(output.samples[0].as_ref().map(|sampled| sampled.token));
    }
    while found.len() < case.greedy.len() {
        let last = case.next(found.len(), RunInput::LastSampled, &table);
        let output = runner.execute(&plan(vec![last])).unwrap();
        found.push(output.samples[0].as_ref().unwrap().token);
    }
    found
}

#[test]
fn rows_of_images_equal_transformers() {
    for name in IMAGE_MODELS {
        let mut runner = runner(&load_with_images(name), 16, 8);
        for case in golden_images(name).cases {
            for golden in &case.images {
                let found = runner.encode(&golden.image()).unwrap();
                let error = relative_error(&found, &golden.all_rows());
                assert!(
                    error < 1e-5,
                    "{name}, {:?}: relative error {error:e}",
                    golden.grid
                );
            }
        }
    }
}

#[test]
fn logits_of_prompts_with_images_equal_transformers_however_they_are_cut() {
    for name in IMAGE_MODELS {
        let model = load_with_images(name);
        for case in golden_images(name).cases {
            let mut whole = None;
            for most in [128, 17, 5, 1] {
                let mut runner = runner(&model, 16, 8);
                let found = last_logits(&mut runner, &case, most);
                let error = relative_error(&found, &case.last_logits.concat());
                assert!(error < 2e-5, "{name}, chunks of {most}: relative error {error:e}");
                // Not only near: the same.
                assert_eq!(
                    *whole.get_or_insert_with(|| found.clone()),
                    found,
                    "{name}, chunks of {most}"
                );
            }
            // Without its images it is another text.
            let mut runner = runner(&model, 16, 8);
            let rows: Vec<usize> = (case.prompt.len() - case.last_logits.len()..case.prompt.len()).collect();
            let text = runner
                .logits(&plan(vec![run(1, 0, &case.prompt, &blocks(0..8))]), &rows)
                .unwrap();
            assert!(relative_error(&text, &case.last_logits.concat()) > 1e-2, "{name}");
        }
    }
}

#[test]
fn greedy_continuations_of_prompts_with_images_equal_transformers() {
    for name in IMAGE_MODELS {
        let model = load_with_images(name);
        for case in golden_images(name).cases {
            let found = greedy(&mut runner(&model, 16, 8), &case);
            assert_eq!(found, case.greedy, "{name}");
        }
    }
}

/// A request with an image beside others: of the same image, and of text, whose logits are as without.
#[test]
fn images_and_text_share_steps() {
    for name in IMAGE_MODELS {
        let model = load_with_images(name);
        let mut runner = runner(&model, 16, 8);
        let steps = golden_images(name).cases[0].beside_text();
        let [alone, text_alone, found] = steps.map(|(plan, rows)| runner.logits(&plan, &rows).unwrap());
        assert_eq!(found, [&alone[..], &text_alone, &alone].concat(), "{name}");
    }
}

/// Steps in which others go on encode a part each; however many there are, the rows are the same. Parts are lost where another image is
/// needed first.
#[test]
fn images_are_encoded_in_parts_beside_steps() {
    for name in IMAGE_MODELS {
        let model = load_with_images(name);
        let case = &golden_images(name).cases[0];
        let (steps, last) = case.in_parts();
        let whole = plan(vec![case.run(1, 0..case.prompt.len(), &blocks(0..3))]);
        let expected = runner(&model, 16, 8).logits(&whole, &[last - 1]).unwrap();
        for (done, other_first) in [(5, false), (5, true), (3, false), (3, true), (0, false)] {
            let mut runner = runner(&model, 16, 8);
            for step in &steps[..done] {
                runner.execute(step).unwrap();
            }
            if other_first {
                for (seed, width) in [(90, 4), (91, 12), (92, 12)] {
                    runner
                        .encode(&image_of(model.config(), seed, [1, 4, width]))
                        .unwrap();
                }
            }
            for step in &steps[done..5] {
                let without = plan(step.runs.clone());
                runner.execute(&without).unwrap();
            }
            let found = runner.logits(&steps[5], &[last]).unwrap();
            assert_eq!(
                found, expected,
                "{name}: {done} parts, another first: {other_first}"
            );
        }
    }
}

#[test]
fn embeddings_are_kept_by_content_and_encoded_again_when_they_are_gone() {
    let mut rng = StdRng::seed_from_u64(3);
    for name in IMAGE_MODELS {
        let model = load_with_images(name);
        let mut runner = runner(&model, 16, 8);
        come_and_go(name, model.config(), &mut rng, |image| {
            runner.encode(image).unwrap()
        });
    }
}

#[test]
fn the_encoder_takes_what_the_footprint_says_and_no_more_while_it_serves() {
    for name in IMAGE_MODELS {
        for max_patches in [4, 47, 48, 200, 1000] {
            if max_patches < 36 && name == "gemma3-vision" {
                continue;
            }
            let limits = EncoderLimits {
                max_patches,
                ..IMAGE_LIMITS
            };
            let footprint = Footprint::read(&golden_path(name), options(KvCacheDtype::F32, limits)).unwrap();
            let budget = Budget::new(1 << 32);
            let loading = options(KvCacheDtype::F32, limits);
            let model = Model::load(&golden_path(name), loading, &budget, &mut |_| ()).unwrap();
            let held = |component| budget.meters().by_component.get(component);
            assert_eq!(held(Component::Weights), footprint.weights_bytes(), "{name}");
            let mut runner = model
                .build_state(&state_config(16, 8), &LIMITS, &budget, &mut || {})
                .unwrap();
            let bytes = held(Component::Encoder);
            assert_eq!(bytes, footprint.encoder_bytes(), "{name}, {max_patches} patches");
            let allocations = budget.meters().allocations;
            // As long or as wide as can be.
            let most = max_patches / 4;
            for (seed, grid) in [[1, 2, 2 * most], [1, 2 * most, 2], [1, 2, 2]]
                .into_iter()
                .enumerate()
            {
                runner.encode(&image_of(model.config(), seed, grid)).unwrap();
            }
            let meters = budget.meters();
            assert_eq!(
                (held(Component::Encoder), meters.allocations),
                (bytes, allocations)
            );
            drop(runner);
            assert_eq!(held(Component::Encoder), 0);
        }
    }
}

#[test]
fn a_state_without_room_for_the_largest_image_is_not_built() {
    let model = load_with_images("qwen3-vl");
    let room = {
        let budget = Budget::new(1 << 32);
        let runner = model.build_state(&state_config(16, 8), &LIMITS, &budget, &mut || {});
        drop(runner.unwrap());
        budget.meters().used_high
    };
    let budget = Budget::new(room / 2);
    let error = model
        .build_state(&state_config(16, 8), &LIMITS, &budget, &mut || {})
        .unwrap_err();
    assert_eq!(error.component, Component::Encoder);
    assert_eq!(budget.meters().used, 0);
}

#[test]
fn plans_that_no_scheduler_makes_are_refused() {
    let case = &golden_images("qwen3-vl").cases[1];
    let table = blocks(0..8);
    let both = || plan(vec![case.run(1, 0..case.prompt.len(), &table)]);
    let refused = |model: &Arc<Model>, plan, said: &str| {
        let error = runner(model, 16, 8).logits(&plan, &[0]).unwrap_err();
        assert!(
            matches!(&error, StepError::Failed(message) if message.contains(said)),
            "{error}"
        );
    };
    let model = load_with_images("qwen3-vl");
    refused(&model, both(), "two images in a step");
    refused(&load("qwen3-vl", KvCacheDtype::F32), both(), "without images");
    let (large, too_large) = case.too_large(&table);
    refused(&model, plan(vec![too_large]), "for 13 tokens");
    let beside = |image: &Arc<Image>, run| StepPlan {
        encode: Some(PartialEncode {
            image: Arc::clone(image),
            share: 0.5,
        }),
        ..plan(vec![run])
    };
    let text = || run(1, 0, &case.prompt[..1], &table);
    refused(&model, beside(&large, text()), "an image of");
    let first = case.run(1, 0..case.spans()[0].end(), &table);
    let other = &case.spans().last().unwrap().image.clone();
    refused(&model, beside(other, first), "two images in a step");
    refused(
        &load("qwen3-vl", KvCacheDtype::F32),
        beside(other, text()),
        "without images",
    );
}

/// Tokens that see each other are computed at once, or what the first of them are would depend on how a prompt is cut.
#[test]
fn a_run_that_ends_among_tokens_that_see_each_other_is_refused() {
    let model = load_with_images("gemma3-vision");
    let case = &golden_images("gemma3-vision").cases[0];
    let span = case.spans()[0].clone();
    let cut = |end: usize| plan(vec![case.run(1, 0..end, &blocks(0..8))]);
    for end in span.start..=span.end() {
        let found = runner(&model, 16, 8).logits(&cut(end), &[0]);
        match span.is_cut_at(end) {
            false => drop(found.unwrap()),
            true => assert!(found.unwrap_err().to_string().contains("see each other")),
        }
    }
}

#[test]
fn towers_that_are_not_known_are_refused_where_images_are_asked_for() {
    let refused_of = |name: &str, change: fn(&mut serde_json::Value), said: &str| {
        let path = golden_path(name).join("config.json");
        let mut config: serde_json::Value =
            serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        change(&mut config);
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("config.json"), config.to_string()).unwrap();
        let text = Footprint::read(directory.path(), LoadOptions::default());
        text.expect("the text part does not depend on the tower");
        let error = Footprint::read(directory.path(), options(KvCacheDtype::Auto, IMAGE_LIMITS));
        let error = error.expect_err("refused").to_string();
        assert!(error.contains(said), "{error} does not say {said}");
    };
    let refused = |change, said| refused_of("qwen3-vl", change, said);
    refused(
        |c| c["vision_config"]["window_size"] = 112.into(),
        "vision_config.window_size",
    );
    refused(
        |c| c["vision_config"]["hidden_act"] = "relu".into(),
        "vision_config.hidden_act",
    );
    refused(
        |c| c["vision_config"]["num_heads"] = 5.into(),
        "vision_config.num_heads",
    );
    refused(
        |c| c["vision_config"]["out_hidden_size"] = 32.into(),
        "vision_config.out_hidden_size",
    );
    refused(
        |c| c["vision_config"]["deepstack_visual_indexes"] = vec![2, 0].into(),
        "vision_config.deepstack_visual_indexes",
    );
    refused(
        |c| c["vision_config"]["deepstack_visual_indexes"] = vec![3].into(),
        "vision_config.deepstack_visual_indexes",
    );
    refused(|c| c["vision_config"]["depth"] = 0.into(), "vision_config.depth");
    refused(|c| c["image_token_id"] = 1000.into(), "image_token_id");
    let refused = |change, said| refused_of("qwen2_5-vl", change, said);
    refused(
        |c| c["vision_config"]["deepstack_visual_indexes"] = vec![0].into(),
        "vision_config.deepstack_visual_indexes",
    );
    refused(
        |c| c["vision_config"]["window_size"] = 4.into(),
        "vision_config.window_size",
    );
    refused(
        |c| c["vision_config"]["hidden_act"] = "gelu".into(),
        "vision_config.hidden_act",
    );
    refused(
        |c| c["vision_config"]["spatial_patch_size"] = 8.into(),
        "vision_config.spatial_patch_size",
    );
    refused(
        |c| c["vision_config"]["in_chans"] = 1.into(),
        "vision_config.in_chans",
    );
    let refused = |change, said| refused_of("mistral3-vision", change, said);
    refused(|c| c["vision_feature_layer"] = 1.into(), "vision_feature_layer");
    refused(
        |c| c["multimodal_projector_bias"] = true.into(),
        "multimodal_projector_bias",
    );
    refused(
        |c| c["projector_hidden_act"] = "silu".into(),
        "projector_hidden_act",
    );
    refused(|c| c["spatial_merge_size"] = 0.into(), "spatial_merge_size");
    refused(
        |c| c["vision_config"]["head_dim"] = 8.into(),
        "vision_config.head_dim",
    );
    refused(
        |c| c["vision_config"]["hidden_act"] = "gelu".into(),
        "vision_config.hidden_act",
    );
    let refused = |change, said| refused_of("gemma3-vision", change, said);
    refused(|c| c["vision_config"]["depth"] = 2.into(), "vision_config.depth");
    refused(
        |c| c["vision_config"]["vision_use_head"] = true.into(),
        "vision_config.vision_use_head",
    );
    refused(
        |c| c["vision_config"]["hidden_act"] = "silu".into(),
        "vision_config.hidden_act",
    );
    refused(
        |c| c["vision_config"]["num_attention_heads"] = 5.into(),
        "vision_config.num_attention_heads",
    );
    refused(
        |c| c["vision_config"]["layer_norm_eps"] = 0.into(),
        "vision_config.layer_norm_eps",
    );
    refused(
        |c| c["vision_config"]["image_size"] = 36.into(),
        "vision_config.image_size",
    );
    refused(|c| c["mm_tokens_per_image"] = 8.into(), "mm_tokens_per_image");
    refused(|c| c["mm_tokens_per_image"] = 16.into(), "mm_tokens_per_image");
    refused(|c| c["image_token_index"] = 1000.into(), "image_token_index");
}

/// Of a file with the fields and numbers of the published one: 27 layers of 1152, of which three give features, and a first projection of 16 x 16 pixels of two frames.
#[test]
fn a_published_encoder_means_what_it_says() {
    let directory = tempfile::tempdir().unwrap();
    let published = repository().join("crates/model/tests/configs/Qwen3-VL-8B-Instruct.json");
    std::fs::copy(published, directory.path().join("config.json")).unwrap();
    let limits = EncoderLimits {
        max_patches: 4096,
        max_images_per_prompt: 3,
    };
    let footprint = Footprint::read(directory.path(), options(KvCacheDtype::Auto, limits)).unwrap();
    let encoder = footprint.config().encoder.as_ref().unwrap();
    assert_eq!(
        (encoder.layers, encoder.hidden_size, encoder.head_dim()),
        (27, 1152, 72)
    );
    assert_eq!((encoder.positions_per_side, encoder.out_size), (Some(48), 4096));
    assert_eq!(encoder.features, [8, 16, 24]);
    let input = footprint.config().image_input().unwrap();
    assert_eq!(
        (input.placeholder, input.patch.values(), input.merge),
        (151_655, 1536, 2)
    );
    assert_eq!(input.limits, limits);
    // 8.77 billion parameters, all of which are loaded, in 16 bits but for vectors and biases.
    let bytes = footprint.weights_bytes() as f64;
    assert!((17.5e9..17.6e9).contains(&bytes), "{bytes}");
    let none = EncoderLimits {
        max_images_per_prompt: 0,
        ..limits
    };
    let text = Footprint::read(directory.path(), options(KvCacheDtype::Auto, none)).unwrap();
    assert_eq!((text.config().image_input(), text.encoder_bytes()), (None, 0));
    assert!(bytes - text.weights_bytes() as f64 > 1.1e9);
}

/// Of files with the fields and numbers of the published ones.
#[test]
fn published_encoders_of_other_families_mean_what_they_say() {
    let read = |name: &str, max_patches: usize| {
        let directory = tempfile::tempdir().unwrap();
        let published = repository().join(format!("crates/model/tests/configs/{name}.json"));
        std::fs::copy(published, directory.path().join("config.json")).unwrap();
        let limits = EncoderLimits {
            max_patches,
            max_images_per_prompt: 1,
        };
        let footprint = Footprint::read(directory.path(), options(KvCacheDtype::Auto, limits)).unwrap();
        let encoder = footprint.config().encoder.clone().unwrap();
        (encoder, footprint.weights_bytes() as f64)
    };
    let (qwen, bytes) = read("Qwen2.5-VL-7B-Instruct", 1344);
    assert_eq!(
        (qwen.family.name, qwen.layers, qwen.head_dim()),
        ("Qwen2.5-VL", 32, 80)
    );
    let windows = qwen.windows.unwrap();
    assert_eq!(
        (windows.side, &windows.full_layers[..]),
        (4, &[7, 15, 23, 31][..])
    );
    assert_eq!(
        (qwen.input.patch.values(), qwen.input.merge, qwen.out_size),
        (1176, 2, 3584)
    );
    // 8.29 billion parameters, 16 bits each.
    assert!((16.5e9..16.7e9).contains(&bytes), "{bytes}");
    for name in [
        "Mistral-Small-3.1-24B-Instruct-2503",
        "Ministral-3-3B-Instruct-2512-BF16",
    ] {
        let (pixtral, _) = read(name, 5329);
        assert_eq!(
            (pixtral.family.name, pixtral.layers, pixtral.head_dim()),
            ("Pixtral", 24, 64)
        );
        let input = pixtral.input;
        assert_eq!(
            (input.placeholder, input.patch.values(), input.merge),
            (10, 588, 2)
        );
    }
    for name in ["gemma-3-4b-it", "gemma-3-27b-it"] {
        let (gemma, bytes) = read(name, 4096);
        assert_eq!(
            (gemma.family.name, gemma.layers, gemma.head_dim()),
            ("SigLIP", 27, 72)
        );
        let input = gemma.input;
        assert_eq!(
            (input.placeholder, input.patch.values(), input.merge),
            (262_144, 588, 4)
        );
        assert_eq!(
            (input.tokens_at_once(), input.only.unwrap().patches()),
            (256, 4096)
        );
        if name == "gemma-3-4b-it" {
            // 4.30 billion parameters, 16 bits each.
            assert!((8.59e9..8.62e9).contains(&bytes), "{bytes}");
        }
    }
}
