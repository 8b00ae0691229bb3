//! Prompts with images of the tiny models.

use std::ops::Range;
use std::sync::Arc;

use plimsoll_core::{
    EncoderLimits, Image, ImageGrid, ImageSpan, PageId, PartialEncode, PatchShape, Run, RunInput, StepPlan,
    TokenId,
};
use plimsoll_model::{KvCacheDtype, LoadOptions, ModelConfig, ServeAs};
use rand::Rng;
use rand::rngs::StdRng;
use serde::Deserialize;

use super::{blocks, golden_path, greedy_spec, plan, run};

/// Those of which images are served.
pub const IMAGE_MODELS: [&str; 5] = [
    "gemma3-vision",
    "mistral3-vision",
    "qwen2_5-vl",
    "qwen3-vl",
    "qwen3_5-vision",
];

/// A patch of those of Qwen.
pub const PATCH: PatchShape = PatchShape {
    pixels: 4 * 4,
    frames: 2,
};

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
    /// Of a patch.
    pub pixels: usize,
    /// Of a patch.
    pub frames: usize,
    /// Lines of as many rows each, with a token between them.
    pub lines: usize,
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

    pub fn image(&self) -> Arc<Image> {
        let shape = PatchShape {
            pixels: self.pixels,
            frames: self.frames,
        };
        Arc::new(image(self.seed, self.grid, shape))
    }

    pub fn spans(&self) -> impl Iterator<Item = ImageSpan> {
        let (image, len) = (self.image(), self.rows / self.lines);
        (0..self.lines).map(move |line| ImageSpan {
            start: self.start + line * (len + 1),
            len,
            first: line * len,
            image: Arc::clone(&image),
        })
    }
}

impl ImageCase {
    pub fn spans(&self) -> Arc<[ImageSpan]> {
        self.images.iter().flat_map(GoldenImage::spans).collect()
    }

    /// Some tokens of the prompt, of a request with all of its images.
    pub fn run(&self, request: u64, tokens: Range<usize>, table: &[PageId]) -> Run {
        Run {
            images: Some(self.spans()),
            ..run(request, tokens.start, &self.prompt[tokens], table)
        }
    }

    /// The token behind the prompt and `generated` tokens, the last of which is `input`; the next is the likeliest.
    pub fn next(&self, generated: usize, input: RunInput, table: &[PageId]) -> Run {
        Run {
            images: Some(self.spans()),
            input,
            sample: Some(greedy_spec(generated)),
            ..run(1, self.prompt.len() + generated - 1, &[0], table)
        }
    }

    /// The whole prompt of one request and the beginning of another's without images, each alone with its last row, and the first, the
    /// second and the first once more in one step, with the last row of each.
    pub fn beside_text(&self) -> [(StepPlan, Vec<usize>); 3] {
        let (len, most) = (self.prompt.len(), 7);
        let whole = |request: u64, first: u32| self.run(request, 0..len, &blocks(first..first + 3));
        let text = || run(2, 0, &self.prompt[..most], &blocks(6..7));
        let rows = vec![len - 1, len + most - 1, 2 * len + most - 1];
        [
            (plan(vec![whole(1, 0)]), vec![len - 1]),
            (plan(vec![text()]), vec![most - 1]),
            (plan(vec![whole(1, 0), text(), whole(3, 3)]), rows),
        ]
    }

    /// Steps of another request, one token each, beside which the prompt's first image is encoded in parts; the last step has the prompt
    /// too. And the row of it that is its last.
    pub fn in_parts(&self) -> (Vec<StepPlan>, usize) {
        let image = Arc::clone(&self.spans()[0].image);
        let reader = |step: usize| run(2, step, &self.prompt[step..=step], &blocks(6..7));
        let shares = [0.1, 0.4, 0.41, 0.9, 1.0];
        let mut steps: Vec<StepPlan> = shares
            .iter()
            .enumerate()
            .map(|(step, &share)| StepPlan {
                encode: Some(PartialEncode {
                    image: Arc::clone(&image),
                    share,
                }),
                ..plan(vec![reader(step)])
            })
            .collect();
        let len = self.prompt.len();
        steps.push(plan(vec![
            reader(shares.len()),
            self.run(1, 0..len, &blocks(0..3)),
        ]));
        (steps, len)
    }

    /// The same prompt with a larger image than [`IMAGE_LIMITS`] allow.
    pub fn too_large(&self, table: &[PageId]) -> (Arc<Image>, Run) {
        let image = Arc::new(image(1, [1, 2, 26], PATCH));
        let span = ImageSpan {
            start: 0,
            len: 13,
            first: 0,
            image: Arc::clone(&image),
        };
        let run = Run {
            images: Some([span].into()),
            ..self.run(1, 0..self.prompt.len(), table)
        };
        (image, run)
    }
}

/// As `scripts/golden_images.py` makes it.
pub fn image(seed: usize, [frames, height, width]: [usize; 3], shape: PatchShape) -> Image {
    let grid = ImageGrid {
        frames,
        height,
        width,
    };
    let byte = |index: usize| {
        let (patch, place) = (index / shape.bytes(), index % shape.bytes());
        ((index * 7919 + seed * 104_729 + patch * place * 31) % 251) as u8
    };
    let level = |byte: usize| (byte as f32 - 127.5) / 127.5;
    let mut hash = [0; 32];
    for (to, from) in hash.chunks_exact_mut(8).zip([seed, frames, height, width]) {
        to.copy_from_slice(&(from as u64).to_le_bytes());
    }
    Image {
        hash,
        grid,
        pixels: (0..grid.patches() * shape.bytes()).map(byte).collect(),
        levels: Arc::new([std::array::from_fn(level); 3]),
    }
}

/// An image that a model takes, of these patches if it takes any.
pub fn image_of(config: &ModelConfig, seed: usize, grid: [usize; 3]) -> Image {
    let input = config.image_input().unwrap();
    let only = input.only.map(|grid| [grid.frames, grid.height, grid.width]);
    image(seed, only.unwrap_or(grid), input.patch)
}

/// Images come and go; whether one is kept does not change what it is. `encode` gives the rows of one.
pub fn come_and_go(
    name: &str,
    config: &ModelConfig,
    rng: &mut StdRng,
    mut encode: impl FnMut(&Image) -> Vec<f32>,
) {
    let mut known: Vec<(Image, Vec<f32>)> = Vec::new();
    for seed in 0..60 {
        if rng.random_bool(0.5) && !known.is_empty() {
            let (image, rows) = &known[rng.random_range(0..known.len())];
            assert_eq!(&encode(image), rows, "{name}");
            continue;
        }
        let height = 2 * rng.random_range(1..=4);
        let width = 2 * rng.random_range(1..=IMAGE_LIMITS.max_patches / height / 2);
        let image = image_of(config, seed, [1, height, width]);
        let rows = encode(&image);
        assert!(rows.iter().all(|x| x.is_finite()));
        assert!(known.iter().all(|(_, other)| *other != rows));
        known.push((image, rows));
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

/// The tokens of a prompt as runs of at most `most` tokens, each with rows of one image at most; where spans are `mutual`, none ends
/// inside one, however long that is.
pub fn chunks(
    prompt: &[TokenId],
    images: &Arc<[ImageSpan]>,
    table: &[PageId],
    most: usize,
    mutual: bool,
) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    let mut start = 0;
    while start < prompt.len() {
        let mut end = prompt.len().min(start + most);
        let mut touched = images
            .iter()
            .filter(|span| !span.rows_in(&(start..end)).is_empty());
        if let Some(first) = touched.next()
            && let Some(second) = touched.find(|span| span.image.hash != first.image.hash)
        {
            end = second.start;
        }
        if let Some(span) = images.iter().find(|span| mutual && span.is_cut_at(end)) {
            end = span.end();
        }
        runs.push(Run {
            images: Some(Arc::clone(images)),
            ..run(1, start, &prompt[start..end], table)
        });
        start = end;
    }
    runs
}
