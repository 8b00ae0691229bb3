//! What holds of every image file, whoever wrote it. The fuzz target runs it too.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use plimsoll_images::{DecodeLimits, Pixels, decode, inspect};
use serde_json::Value;

pub(crate) const LIMITS: DecodeLimits = DecodeLimits {
    max_bytes: 1 << 20,
    max_pixels: 1 << 18,
};
/// What one file may take in a test's build, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(5);

/// Pictures of all formats, by name.
pub(crate) fn files() -> Vec<(String, Vec<u8>)> {
    let golden_file = serde_json::from_slice::<Value>(&fs::read(golden("pictures.json")).unwrap()).unwrap();
    let names = golden_file["pictures"].as_object().unwrap().keys();
    names
        .map(|name| (name.clone(), fs::read(golden(name)).unwrap()))
        .collect()
}

/// A file that scripts/make-image-goldens made.
pub(crate) fn golden(name: &str) -> PathBuf {
    let mut parents = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
    let repository = parents.find(|directory| directory.join("tests/golden").is_dir());
    repository
        .expect("the repository")
        .join("tests/golden/images")
        .join(name)
}

/// Whatever a file holds, it is decoded within its announced size or refused.
pub(crate) fn check(bytes: &[u8], what: &str) -> Option<Pixels> {
    let began = Instant::now();
    let header = inspect(bytes, &LIMITS);
    let pixels = decode(bytes, &LIMITS);
    assert!(began.elapsed() < PATIENCE, "{what}: {:?}", began.elapsed());
    match (header, pixels) {
        (Ok(header), Ok(pixels)) => {
            assert_eq!(
                (header.width, header.height),
                (pixels.width, pixels.height),
                "{what}"
            );
            assert_eq!(pixels.rgb.len(), pixels.width * pixels.height * 3, "{what}");
            assert!(header.memory >= pixels.rgb.len(), "{what}");
            Some(pixels)
        }
        (Err(_), Ok(_)) => panic!("{what}: decoded, but its header is refused"),
        (_, Err(error)) => {
            assert!(error.to_string().len() < 1000, "{what}: {error}");
            None
        }
    }
}
