//! The worst image bounds all that are admitted.

use plimsoll_images::{ImageError, Overrides, Processor};
use proptest::prelude::*;
use serde_json::json;

use crate::processor;

/// Sizes of every ratio up to 200 and beyond, and of every magnitude.
fn sizes() -> impl Strategy<Value = (usize, usize)> {
    let side = prop_oneof![1usize..300, 1usize..3000, 1usize..20_000];
    let ratio = prop_oneof![1.0f64..210.0, Just(200.0), Just(1.0)];
    (side, ratio, any::<bool>()).prop_map(|(side, ratio, turned)| {
        let other = ((side as f64 * ratio) as usize).max(1);
        if turned { (other, side) } else { (side, other) }
    })
}

fn check(
    processor: &Processor,
    (width, height): (usize, usize),
    asked: &Overrides,
) -> Result<(), TestCaseError> {
    let worst = processor.worst_image().plan;
    match processor.plan(width, height, asked) {
        Ok(plan) => {
            prop_assert!(plan.grid.patches() <= worst.grid.patches(), "{plan:?}");
            prop_assert!(plan.rows <= worst.rows, "{plan:?}");
            prop_assert!(plan.pixel_bytes <= worst.pixel_bytes, "{plan:?}");
        }
        // Only what the reference refuses too.
        Err(ImageError::AspectRatio { .. }) => {}
        Err(error) => prop_assert!(!asked.is_empty(), "{width} x {height}: {error}"),
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(4000) })]

    #[test]
    fn no_admitted_image_has_more_patches_than_the_worst(
        size in sizes(), asked in proptest::option::of((1usize..2_000_000, 1usize..20_000_000)),
    ) {
        thread_local! {
            static ALL: Vec<Processor> = ["qwen2.5-vl", "qwen3-vl", "qwen-small", "gemma3", "mistral3", "pixtral-small"]
                .map(processor).into();
        }
        let asked = asked.map_or_else(Overrides::default, |(min, max)| Overrides {
            min_pixels: Some(min),
            max_pixels: Some(max),
        });
        ALL.with(|all| all.iter().try_for_each(|processor| check(processor, size, &asked)))?;
    }

    /// Bounds that are tiny, or so near each other that rounding leaves them: what is admitted is bounded all the same.
    #[test]
    fn odd_bounds_bound_too(min in 1usize..200_000, more in 0usize..200_000, size in sizes()) {
        let max = (min + more).max(28 * 28);
        let settings = json!({
            "image_processor_type": "Qwen2VLImageProcessor", "min_pixels": min, "max_pixels": max,
        });
        let config = json!({ "image_token_id": 5, "vision_config": {} });
        let processor = Processor::new(&settings, &config).unwrap();
        let worst = processor.worst_image().plan;
        if let Ok(plan) = processor.plan(size.0, size.1, &Overrides::default()) {
            prop_assert!(plan.grid.patches() <= worst.grid.patches());
        }
    }
}

#[test]
fn the_worst_image_is_one_that_is_admitted() {
    for (name, patches, pixels) in [
        ("qwen2.5-vl", 65_536, (3584, 3584)),
        ("qwen3-vl", 65_536, (4096, 4096)),
        // More than 60 squares of 2 x 2: at 200 : 1 the shorter side cannot shrink further.
        ("qwen-small", 436, (5600, 28)),
        ("gemma3", 4096, (896, 896)),
        ("mistral3", 12_100, (1540, 1540)),
        ("pixtral-small", 256, (256, 256)),
    ] {
        let processor = processor(name);
        let worst = *processor.worst_image();
        assert_eq!(worst.plan.grid.patches(), patches, "{name}");
        assert_eq!((worst.width, worst.height), pixels, "{name}");
        let plan = processor.plan(worst.width, worst.height, &Overrides::default());
        assert_eq!(plan, Ok(worst.plan), "{name}");
    }
}
