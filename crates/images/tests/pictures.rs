use std::fs;

use base64::prelude::{BASE64_STANDARD, Engine};
use plimsoll_images::{DecodeLimits, Overrides, decode, inspect};
use serde_json::json;

use crate::{golden, golden_json, hash, processor, values};

/// Most that one value may differ from Pillow's, and on average: the standard leaves rounding to decoders of JPEG.
fn tolerance(name: &str) -> (u8, f64) {
    match name.ends_with(".jpg") {
        true => (3, 0.5),
        false => (0, 0.0),
    }
}

#[test]
fn pictures_are_those_of_pillow() {
    let golden_file = golden_json("pictures.json");
    let limits = DecodeLimits::default();
    let mut wrong = Vec::new();
    for (name, expected) in golden_file["pictures"].as_object().unwrap() {
        let bytes = fs::read(golden(name)).unwrap();
        let decoded = decode(&bytes, &limits);
        let (pixels, rgb) = match (decoded, expected["rgb"].as_str()) {
            (Ok(pixels), Some(rgb)) => (pixels, BASE64_STANDARD.decode(rgb).unwrap()),
            (Err(_), None) => continue,
            (Ok(_), None) => {
                wrong.push(format!("{name}: decoded, but Pillow refuses it"));
                continue;
            }
            (Err(error), Some(_)) => {
                wrong.push(format!("{name}: {error}"));
                continue;
            }
        };
        let header = inspect(&bytes, &limits).unwrap();
        let size = (pixels.width as u64, pixels.height as u64);
        assert_eq!((header.width as u64, header.height as u64), size, "{name}");
        if (Some(size.0), Some(size.1)) != (expected["width"].as_u64(), expected["height"].as_u64()) {
            wrong.push(format!("{name}: {size:?}"));
            continue;
        }
        let off = pixels.rgb.iter().zip(&rgb).map(|(a, b)| a.abs_diff(*b));
        let (largest, sum) = off.fold((0, 0.0), |(most, sum), d| (d.max(most), sum + f64::from(d)));
        let mean = sum / rgb.len() as f64;
        let (most, most_mean) = tolerance(name);
        if largest > most || mean > most_mean {
            wrong.push(format!("{name}: off by up to {largest}, {mean:.3} on average"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Of every mode and orientation, and of the first frame of an animation.
#[test]
fn patches_of_files_are_those_of_transformers() {
    let (pictures, processors) = (golden_json("pictures.json"), golden_json("processors.json"));
    let mut seen = 0;
    for (name, expected) in pictures["pictures"].as_object().unwrap() {
        let Some(of_processors) = expected["patches"].as_object() else {
            assert_eq!(expected["error"], true, "{name}");
            continue;
        };
        let pixels = decode(&fs::read(golden(name)).unwrap(), &DecodeLimits::default()).unwrap();
        for (of, expected) in of_processors {
            let (processor, what) = (processor(of), format!("{name} for {of}"));
            let image = processor.process(&pixels, &Overrides::default()).unwrap();
            let grid = [image.grid.frames, image.grid.height, image.grid.width];
            assert_eq!(json!(grid), expected["grid"], "{what}");
            // Decoders of JPEG round differently.
            if !name.ends_with(".jpg") {
                let settings = &processors["processors"][of]["preprocessor"];
                assert_eq!(
                    hash(&values(&image, processor.patch()), processor.patch(), settings),
                    expected["sha256"],
                    "{what}"
                );
            }
            seen += 1;
        }
    }
    assert!(seen >= 3 * 50, "{seen}");
}
