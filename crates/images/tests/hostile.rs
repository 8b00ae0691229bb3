//! Files that anybody may have sent: mutated ones, cut ones, and those whose headers lie.

use std::fs;

use plimsoll_images::{DecodeLimits, Format, ImageError, Overrides, Pixels, Processor, decode, inspect};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

use crate::decoded::{LIMITS, check, files};
use crate::{golden, processor};

const CASES: u64 = 2000;

/// Writes numbers, cuts, removes, repeats or exchanges bytes.
fn disturb(bytes: &mut Vec<u8>, rng: &mut StdRng) {
    const NUMBERS: [u32; 10] = [0, 1, 2, 7, 255, 256, 65_535, 65_536, i32::MAX as u32, u32::MAX];
    for _ in 0..rng.random_range(1..5) {
        let length = bytes.len().max(1);
        // Headers are at the beginning.
        let at = match rng.random_bool(0.6) {
            true => rng.random_range(0..length.min(64)),
            false => rng.random_range(0..length),
        };
        let end = |count: usize| (at + count).min(bytes.len());
        match rng.random_range(0..6) {
            0 => bytes.truncate(at),
            1 => {
                let number = *NUMBERS.choose(rng).unwrap();
                let number = match rng.random_bool(0.5) {
                    true => number.to_le_bytes(),
                    false => number.to_be_bytes(),
                };
                let place = at..end(*[1, 2, 4].choose(rng).unwrap());
                let count = place.len();
                bytes[place].copy_from_slice(&number[..count]);
            }
            2 => drop(bytes.drain(at..end(rng.random_range(1..32)))),
            3 => {
                let copied = bytes[at..end(rng.random_range(1..128))].to_vec();
                bytes.splice(at..at, copied);
            }
            _ => {
                let byte = rng.random();
                if let Some(place) = bytes.get_mut(at) {
                    *place = byte;
                }
            }
        }
    }
}

/// What a family makes of a picture is within what its encoder has memory for, or the shape is refused.
fn check_patches(processor: &Processor, pixels: &Pixels, what: &str) {
    let worst = processor.worst_image().plan;
    match processor.process(pixels, &Overrides::default()) {
        Ok(image) => {
            assert!(image.grid.patches() <= worst.grid.patches(), "{what}");
            let bytes = image.grid.patches() * processor.patch().bytes();
            assert_eq!(image.pixels.len(), bytes, "{what}");
            let levels = image.levels.as_flattened();
            assert!(levels.iter().all(|level| level.is_finite()), "{what}");
        }
        Err(error) => assert!(matches!(error, ImageError::AspectRatio { .. }), "{what}: {error}"),
    }
}

/// Each file is for one of the families in turn.
#[test]
fn mutated_files_are_read_or_refused() {
    let files = files();
    let families = ["qwen-small", "gemma-small", "pixtral-small"].map(processor);
    let mut read = 0;
    for case in 0..CASES {
        let mut rng = StdRng::seed_from_u64(case);
        let (name, bytes) = files.choose(&mut rng).unwrap();
        let mut bytes = bytes.clone();
        disturb(&mut bytes, &mut rng);
        let what = format!("case {case} of {name}");
        if let Some(pixels) = check(&bytes, &what) {
            check_patches(&families[case as usize % families.len()], &pixels, &what);
            read += 1;
        }
    }
    // Neither were all refused, nor was nothing disturbed.
    assert!((CASES / 50..CASES * 19 / 20).contains(&read), "{read}");
}

#[test]
fn every_beginning_of_a_file_is_read_or_refused() {
    for (name, bytes) in files() {
        let step = (bytes.len() / 40).max(1);
        for end in (0..bytes.len()).step_by(step) {
            check(&bytes[..end], &format!("the first {end} bytes of {name}"));
        }
    }
}

#[test]
fn sizes_are_checked_before_anything_is_decoded() {
    let huge = |name: &str, at: usize, size: &[u8]| {
        let mut bytes = fs::read(golden(name)).unwrap();
        bytes[at..at + size.len()].copy_from_slice(size);
        // PNG: the header's checksum.
        if name.ends_with(".png") {
            let sum = crc(&bytes[12..29]);
            bytes[29..33].copy_from_slice(&sum.to_be_bytes());
        }
        bytes
    };
    let jpeg = fs::read(golden("420.jpg")).unwrap();
    let frame = jpeg.windows(2).position(|pair| pair == [0xff, 0xc0]).unwrap();
    let cases = [
        (Format::Png, huge("rgb.png", 16, &[0, 1, 0, 0, 0, 1, 0, 0])),
        (Format::Gif, huge("plain.gif", 6, &[0xff, 0xff, 0xff, 0xff])),
        (
            Format::Jpeg,
            huge("420.jpg", frame + 5, &[0xff, 0xf0, 0xff, 0xf0]),
        ),
        (
            Format::Bmp,
            huge("rgb.bmp", 18, &[0x60, 0xea, 0, 0, 0x60, 0xea, 0, 0]),
        ),
    ];
    for (format, bytes) in cases {
        let error = inspect(&bytes, &DecodeLimits::default()).unwrap_err();
        assert!(
            matches!(error, ImageError::TooManyPixels { .. }),
            "{format}: {error}"
        );
        assert_eq!(decode(&bytes, &DecodeLimits::default()), Err(error));
    }
    let file = fs::read(golden("rgb.png")).unwrap();
    let most = |max_bytes, max_pixels| DecodeLimits {
        max_bytes,
        max_pixels,
    };
    assert!(decode(&file, &most(file.len(), 23 * 17)).is_ok());
    let error = decode(&file, &most(file.len() - 1, 23 * 17)).unwrap_err();
    assert!(matches!(error, ImageError::TooManyBytes { .. }), "{error}");
    let error = decode(&file, &most(file.len(), 23 * 17 - 1)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the image has 23 x 17 pixels; at most 390 pixels are allowed: scale it down before sending it"
    );
}

#[test]
fn errors_say_what_a_file_is() {
    let error = |bytes: &[u8]| decode(bytes, &LIMITS).unwrap_err().to_string();
    assert!(error(b"").contains("an empty file"));
    assert!(error(b"%PDF-1.7").contains("a PDF document"));
    assert!(error(b"II*\0....").contains("TIFF"));
    assert!(error(b"\0\0\0\x18ftypmp42").contains("a video"));
    assert!(error(b"hello").contains("not an image in a known format: send PNG"));
    let cut = fs::read(golden("cut-420.jpg")).unwrap();
    assert!(
        error(&cut).starts_with("the JPEG image cannot be decoded: "),
        "{}",
        error(&cut)
    );
}

/// The checksum of a PNG chunk.
fn crc(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0u32, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| match crc & 1 {
            1 => crc >> 1 ^ 0xedb8_8320,
            _ => crc >> 1,
        })
    })
}
