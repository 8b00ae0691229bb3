//! Decoding and processing against Pillow and transformers, bounds, and hostile files.

#![allow(missing_docs, reason = "tests")]

mod decoded;
mod hostile;
mod pictures;
mod processors;
mod settings;
mod worst;

use std::fs;

use decoded::golden;
use plimsoll_core::{Image, PatchShape};
use serde_json::Value;
use sha2::{Digest, Sha256};

fn golden_json(name: &str) -> Value {
    serde_json::from_slice(&fs::read(golden(name)).unwrap()).unwrap()
}

/// A picture of squares of smooth colours and of noise, as `scripts/make-image-goldens` makes it.
fn synthetic(width: usize, height: usize) -> plimsoll_images::Pixels {
    let mut rgb = Vec::with_capacity(width * height * 3);
    for y in 0..height {
        for x in 0..width {
            for c in 0..3 {
                let index = ((y * width + x) * 3 + c) as u64;
                let noise = (index * 2_654_435_761 % (1 << 32)) >> 24;
                rgb.push(match (x / 8 + y / 8) % 2 {
                    0 => (x * 3 + y * 5 + c * 40) as u8,
                    _ => noise as u8,
                });
            }
        }
    }
    plimsoll_images::Pixels { width, height, rgb }
}

/// The processor called `name` of the golden file.
fn processor(name: &str) -> plimsoll_images::Processor {
    let golden = golden_json("processors.json");
    let golden = &golden["processors"][name];
    plimsoll_images::Processor::new(&golden["preprocessor"], &golden["config"]).unwrap()
}

/// What the encoder reads of all patches.
fn values(image: &Image, shape: PatchShape) -> Vec<f32> {
    let mut values = vec![f32::NAN; image.grid.patches() * shape.values()];
    for (patch, to) in values.chunks_exact_mut(shape.values()).enumerate() {
        image.read_patch(patch, shape, to);
    }
    values
}

/// The bytes from which normalised values were made.
fn before(values: &[f32], shape: PatchShape, settings: &Value) -> Vec<u8> {
    let number = |name: &str, colour: usize| settings[name][colour].as_f64().unwrap();
    let one = |(index, value): (usize, &f32)| {
        let colour = index % shape.values() / (shape.values() / 3);
        let (mean, std) = (number("image_mean", colour), number("image_std", colour));
        ((f64::from(*value) * std + mean) * 255.0).round() as u8
    };
    values.iter().enumerate().map(one).collect()
}

/// A hash of the same.
fn hash(values: &[f32], shape: PatchShape, settings: &Value) -> String {
    let bytes = before(values, shape, settings);
    Sha256::digest(&bytes)
        .iter()
        .map(|b| format!("{b:02x}"))
        .collect()
}
