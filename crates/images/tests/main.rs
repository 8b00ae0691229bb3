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
use serde_json::Value;

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
