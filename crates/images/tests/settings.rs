//! What is read from a model's files, and what is refused.

use std::time::{Duration, Instant};

use plimsoll_images::{ImageError, Overrides, Processor};
use serde_json::{Value, json};

use crate::{golden_json, processor};

fn of(name: &str) -> (Value, Value) {
    let golden = golden_json("processors.json");
    let golden = &golden["processors"][name];
    (golden["preprocessor"].clone(), golden["config"].clone())
}

#[test]
fn settings_that_are_not_understood_are_refused_by_name() {
    let cases = [
        (
            "gemma3",
            "/image_processor_type",
            json!("SomeImageProcessor"),
            "SomeImageProcessor",
        ),
        ("gemma3", "/do_pan_and_scan", json!(true), "do_pan_and_scan"),
        ("gemma3", "/do_resize", json!(false), "do_resize"),
        (
            "gemma3",
            "/size",
            json!({ "height": 448, "width": 448 }),
            "image_size",
        ),
        (
            "gemma3",
            "/size",
            json!({ "height": 896, "width": 896, "depth": 1 }),
            "depth",
        ),
        ("gemma3", "/image_seq_length", json!(250), "image_seq_length"),
        ("gemma3", "/resample", json!(1), "resample"),
        ("gemma3", "/image_std", json!([0.5, 0.0, 0.5]), "image_std"),
        ("gemma3", "/image_mean", json!([0.5]), "image_mean"),
        ("gemma3", "/sharpen", json!(3), "sharpen"),
        ("qwen3-vl", "/patch_size", json!(14), "patch_size"),
        ("qwen3-vl", "/patch_size", json!(0), "patch_size"),
        ("qwen3-vl", "/merge_size", json!("two"), "merge_size"),
        (
            "qwen3-vl",
            "/size",
            json!({ "shortest_edge": 9, "longest_edge": 8 }),
            "not possible",
        ),
        (
            "qwen3-vl",
            "/size",
            json!({ "min_pixels": 9, "max_pixels": 80000 }),
            "min_pixels",
        ),
        (
            "mistral3",
            "/size",
            json!({ "longest_edge": 1541 }),
            "longest_edge",
        ),
        (
            "mistral3",
            "/size",
            json!({ "height": 10, "width": 10 }),
            "longest_edge",
        ),
        ("mistral3", "/patch_size", json!(15), "patch_size"),
    ];
    for (name, place, value, named) in cases {
        let (mut settings, config) = of(name);
        settings[&place[1..]] = value;
        let error = Processor::new(&settings, &config).unwrap_err();
        assert!(error.to_string().contains(named), "{place}: {error}");
        assert_eq!(error.file, "preprocessor_config.json");
    }
    for (name, field) in [
        ("gemma3", "boi_token_index"),
        ("qwen3-vl", "image_token_id"),
        ("mistral3", "vision_config"),
    ] {
        let (settings, mut config) = of(name);
        config.as_object_mut().unwrap().remove(field);
        let error = Processor::new(&settings, &config).unwrap_err();
        assert!(error.to_string().contains(field), "{error}");
        assert_eq!(error.file, "config.json");
    }
}

/// Every number that settings may hold at its extremes, and values of other kinds, one field at a time and two.
#[test]
fn no_value_of_a_field_panics_or_takes_long() {
    let absurd = [
        json!(0),
        json!(-1),
        json!(1),
        json!(1_000_003),
        json!(u64::MAX),
        json!(1e300),
        json!(1e-300),
        json!(null),
        json!("x".repeat(1000)),
        json!([]),
        json!([1e38, 1e38, 1e38]),
        json!({}),
        json!({"longest_edge": u64::MAX, "shortest_edge": 1}),
        json!({"height": 65_536, "width": 65_536}),
        json!({"height": 1, "width": 1_000_000}),
    ];
    let check = |settings: &Value, config: &Value| {
        let began = Instant::now();
        match Processor::new(settings, config) {
            Ok(processor) => {
                let worst = processor.worst_image().plan;
                // Whatever is accepted can be planned.
                let same = processor.plan(worst.width, worst.height, &Overrides::default());
                assert!(same.is_ok(), "{settings} {config}: {same:?}");
            }
            Err(error) => assert!(error.to_string().len() < 2000, "{error}"),
        }
        let took = began.elapsed();
        assert!(took < Duration::from_secs(10), "{settings} {config}: {took:?}");
    };
    for name in ["gemma3", "qwen3-vl", "mistral3"] {
        let (settings, config) = of(name);
        let settings_fields = settings
            .as_object()
            .unwrap()
            .keys()
            .map(|field| format!("/0/{field}"));
        let vision = config["vision_config"].as_object().unwrap().keys();
        let vision_fields = vision.map(|field| format!("/1/vision_config/{field}"));
        let fields: Vec<String> = settings_fields.chain(vision_fields).collect();
        for (index, field) in fields.iter().enumerate() {
            for (turn, value) in absurd.iter().enumerate() {
                let mut files = json!([settings, config]);
                *files.pointer_mut(field).unwrap() = value.clone();
                check(&files[0], &files[1]);
                let other = &fields[(index + turn + 1) % fields.len()];
                *files.pointer_mut(other).unwrap() = absurd[(turn * 7 + index) % absurd.len()].clone();
                check(&files[0], &files[1]);
            }
        }
    }
}

#[test]
fn requests_may_change_the_bounds_within_the_models() {
    let qwen = processor("qwen2.5-vl");
    let plan = |min_pixels, max_pixels| {
        let overrides = Overrides {
            min_pixels,
            max_pixels,
        };
        qwen.plan(1000, 700, &overrides)
            .map(|plan| (plan.width, plan.height, plan.rows))
    };
    assert_eq!(plan(None, None), Ok((1008, 700, 900)));
    assert_eq!(plan(None, Some(28 * 28 * 100)), Ok((308, 224, 88)));
    assert_eq!(plan(Some(1_500_000), None), Ok((1484, 1036, 1961)));
    assert_eq!(
        plan(None, Some(3000)),
        Ok((56, 28, 2)),
        "the model's own minimum gives way"
    );
    for (min, max, field) in [
        (None, Some(12_845_057), "max_pixels"),
        (None, Some(0), "max_pixels"),
        (Some(0), None, "min_pixels"),
        (Some(5000), Some(4000), "min_pixels"),
    ] {
        assert!(matches!(plan(min, max), Err(ImageError::Override { field: f, .. }) if f == field));
    }
    let asked = Overrides {
        min_pixels: None,
        max_pixels: Some(4000),
    };
    for name in ["gemma3", "mistral3"] {
        let error = processor(name).plan(100, 100, &asked).unwrap_err();
        assert!(
            matches!(
                error,
                ImageError::Override {
                    field: "max_pixels",
                    ..
                }
            ),
            "{error}"
        );
    }
}

#[test]
fn tokens_lie_as_the_family_has_them() {
    let of = |name: &str, width, height| {
        let plan = processor(name)
            .plan(width, height, &Overrides::default())
            .unwrap();
        (plan.rows, plan.layout.lines, plan.layout.per_line)
    };
    assert_eq!(of("qwen2.5-vl", 280, 560), (200, 1, 200));
    assert_eq!(of("gemma3", 280, 560), (256, 1, 256));
    assert_eq!(of("mistral3", 280, 560), (200, 20, 10));
    assert_eq!(of("pixtral-small", 1024, 512), (128, 8, 16));
    let pixtral = processor("pixtral-small");
    assert_eq!(pixtral.markers().placeholder, 10);
    assert_eq!(pixtral.markers().line_end, Some("[IMG_BREAK]"));
    let error = processor("qwen3-vl")
        .plan(2001, 10, &Overrides::default())
        .unwrap_err();
    assert!(error.to_string().contains("200 times"), "{error}");
    assert!(processor("qwen3-vl").plan(0, 10, &Overrides::default()).is_err());
}

#[test]
fn the_hash_is_that_of_the_content() {
    let qwen = processor("qwen-small");
    let image = |width, height| {
        let picture = crate::synthetic(width, height);
        qwen.process(&picture, &Overrides::default()).unwrap()
    };
    assert_eq!(image(60, 80).hash, image(60, 80).hash);
    assert_ne!(image(60, 80).hash, image(80, 60).hash);
    // The same values in another grid.
    let plain = |width, height| {
        let rgb = vec![9; width * height * 3];
        let pixels = plimsoll_images::Pixels { width, height, rgb };
        qwen.process(&pixels, &Overrides::default()).unwrap()
    };
    let (flat, tall) = (plain(112, 56), plain(56, 112));
    assert_eq!(flat.pixels, tall.pixels);
    assert_ne!(flat.hash, tall.hash);
}
