use plimsoll_images::{Overrides, Processor};
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::{golden_json, synthetic};

/// The bytes from which normalised patches were made.
fn before(patches: &[f32], patch_values: usize, settings: &Value) -> Vec<u8> {
    let number = |name: &str, colour: usize| settings[name][colour].as_f64().unwrap();
    let colour_values = patch_values / 3;
    let one = |(index, value): (usize, &f32)| {
        let colour = index % patch_values / colour_values;
        let (mean, std) = (number("image_mean", colour), number("image_std", colour));
        ((f64::from(*value) * std + mean) * 255.0).round() as u8
    };
    patches.iter().enumerate().map(one).collect()
}

#[test]
fn patches_are_those_of_transformers() {
    let golden = golden_json("processors.json");
    let mut wrong = Vec::new();
    for (name, golden) in golden["processors"].as_object().unwrap() {
        let settings = &golden["preprocessor"];
        let processor = Processor::new(settings, &golden["config"]).unwrap();
        for case in golden["cases"].as_array().unwrap() {
            let side = |name: &str| case[name].as_u64().unwrap() as usize;
            let (width, height) = (side("width"), side("height"));
            let image = processor.process(&synthetic(width, height), &Overrides::default());
            let image = match (image, case["grid"].as_array()) {
                (Ok(image), Some(_)) => image,
                (Err(_), None) => continue,
                (image, _) => {
                    wrong.push(format!("{name} {width} x {height}: {:?}", image.map(|i| i.grid)));
                    continue;
                }
            };
            let grid = [image.grid.frames, image.grid.height, image.grid.width];
            assert_eq!(serde_json::json!(grid), case["grid"], "{name} {width} x {height}");
            let plan = processor.plan(width, height, &Overrides::default()).unwrap();
            assert_eq!(plan.grid, image.grid);
            assert_eq!(plan.patch_bytes, image.patches.len() * 4);
            let bytes = before(&image.patches, processor.patch_values(), settings);
            let hash: String = Sha256::digest(&bytes)
                .iter()
                .map(|b| format!("{b:02x}"))
                .collect();
            if hash != case["sha256"] {
                wrong.push(format!("{name} {width} x {height}: other pixels"));
                continue;
            }
            let every = side("every");
            for (value, expected) in image
                .patches
                .iter()
                .step_by(every)
                .zip(case["values"].as_array().unwrap())
            {
                let off = (f64::from(*value) - expected.as_f64().unwrap()).abs();
                assert!(
                    off <= 1e-6,
                    "{name} {width} x {height}: {value} is not {expected}"
                );
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
