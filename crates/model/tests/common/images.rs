//! Prompts with images of the tiny models.

use std::sync::Arc;

use plimsoll_core::{EncoderLimits, Image, ImageGrid, ImageSpan, PageId, Run, TokenId};
use plimsoll_model::{KvCacheDtype, LoadOptions, ServeAs};
use serde::Deserialize;

use super::{golden_path, run};

/// Those of which images are served.
pub const IMAGE_MODELS: [&str; 2] = ["qwen3-vl", "qwen3_5-vision"];

pub const IMAGE_LIMITS: EncoderLimits = EncoderLimits {
    max_patches: 48,
    max_images_per_prompt: 4,
};

#[derive(Deserialize)]
pub struct GoldenImages {
    pub cases: Vec<ImageCase>,
}

#[derive(Deserialize)]
pub struct ImageCase {
    pub prompt: Vec<TokenId>,
    pub images: Vec<GoldenImage>,
    pub last_logits: Vec<Vec<f32>>,
    pub greedy: Vec<TokenId>,
    pub leads: Vec<f32>,
    /// Of transformers' own logits in bf16, by norm, relative; of models that GPUs take.
    #[serde(default)]
    pub bf16_error: f64,
}

#[derive(Deserialize)]
pub struct GoldenImage {
    pub seed: usize,
    pub grid: [usize; 3],
    pub start: usize,
    pub rows: usize,
    /// Of each part, its rows.
    pub features: Vec<Vec<Vec<f32>>>,
    /// Of transformers' own rows in bf16.
    #[serde(default)]
    pub bf16_error: f64,
}

impl GoldenImage {
    /// Its rows, `[rows, parts, width]`.
    pub fn all_rows(&self) -> Vec<f32> {
        let of_row = |row: usize| self.features.iter().flat_map(move |part| part[row].clone());
        (0..self.rows).flat_map(of_row).collect()
    }

    pub fn span(&self) -> ImageSpan {
        ImageSpan {
            start: self.start,
            len: self.rows,
            image: Arc::new(image(self.seed, self.grid)),
        }
    }
}

impl ImageCase {
    pub fn spans(&self) -> Arc<[ImageSpan]> {
        self.images.iter().map(GoldenImage::span).collect()
    }
}

/// As `scripts/golden_images.py` makes it.
pub fn image(seed: usize, [frames, height, width]: [usize; 3]) -> Image {
    const VALUES: usize = 3 * 2 * 4 * 4;
    let grid = ImageGrid {
        frames,
        height,
        width,
    };
    let value = |index: usize| {
        let draw = index * 7919 + seed * 104_729 + (index / VALUES) * (index % VALUES) * 31;
        (draw % 2001) as f32 / 1000.0 - 1.0
    };
    let mut hash = [0; 32];
    for (to, from) in hash.chunks_exact_mut(8).zip([seed, frames, height, width]) {
        to.copy_from_slice(&(from as u64).to_le_bytes());
    }
    Image {
        hash,
        grid,
        patches: (0..grid.patches() * VALUES).map(value).collect(),
    }
}

pub fn golden_images(name: &str) -> GoldenImages {
    let path = golden_path(name).join("images.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

pub fn options(kv_cache_dtype: KvCacheDtype, images: EncoderLimits) -> LoadOptions {
    LoadOptions {
        kv_cache_dtype,
        serve_as: ServeAs {
            images: Some(images),
            ..Default::default()
        },
        ..Default::default()
    }
}

/// The tokens of a prompt as runs of at most `most` tokens, each with rows of one image at most.
pub fn chunks(prompt: &[TokenId], images: &Arc<[ImageSpan]>, table: &[PageId], most: usize) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    let mut start = 0;
    while start < prompt.len() {
        let mut end = prompt.len().min(start + most);
        let mut touched = images
            .iter()
            .filter(|span| !span.rows_in(&(start..end)).is_empty());
        if let (Some(_), Some(second)) = (touched.next(), touched.next()) {
            end = second.start;
        }
        runs.push(Run {
            images: Some(Arc::clone(images)),
            ..run(1, start, &prompt[start..end], table)
        });
        start = end;
    }
    runs
}
