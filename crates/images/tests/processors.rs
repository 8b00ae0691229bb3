use plimsoll_images::{Overrides, Processor};

use crate::{golden_json, hash, synthetic, values};

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
            assert_eq!(plan.pixel_bytes, image.pixels.len());
            let values = values(&image, processor.patch());
            if hash(&values, processor.patch(), settings) != case["sha256"] {
                wrong.push(format!("{name} {width} x {height}: other pixels"));
                continue;
            }
            let every = side("every");
            for (value, expected) in values
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
