//! Pictures of requests: the largest that the server has proved, those of extreme shape, and all between.

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::picture::{Format, Picture, Size};

/// The images for which the server says that it has memory (`GET /memory`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub(super) struct ImageLimits {
    /// Most of one request.
    pub(super) max_per_request: usize,
    /// That of which the encoder needs the most memory.
    pub(super) largest: Size,
}

/// What pictures requests may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Pictures {
    /// Most of one request that leave room for text.
    pub(super) most: usize,
    /// The largest of which one fits a request.
    pub(super) largest: Size,
    /// Tokens that it takes.
    pub(super) tokens: usize,
    /// Tokens of the chat around it.
    pub(super) text: usize,
    /// Most that one side may be times the other.
    pub(super) ratio: usize,
}

/// Ratios of sides from the most that families of models take down; the last is that of squares.
pub(super) const RATIOS: [usize; 9] = [200, 128, 64, 32, 16, 8, 4, 2, 1];
/// Most pixels of one picture, below what servers decode.
pub(super) const MOST_PIXELS: usize = 32 << 20;
/// Different pictures that are sent again and again.
const REPEATED: u64 = 6;
/// Sides of squares of one colour: files stay small, and what is sent is not what limits the load.
const GRAIN: usize = 16;

/// Which pictures a request has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// One of the largest.
    Largest,
    /// As many of the largest as fit.
    Full,
    /// One or more that are as long as can be.
    Extreme,
    /// One or more of any size, larger ones than the server keeps among them.
    Any,
    /// One or more of those that all stages send, so that their embeddings are already there.
    Repeated,
}

impl Kind {
    /// All, as they take turns.
    const ALL: [Self; 5] = [
        Self::Full,
        Self::Extreme,
        Self::Any,
        Self::Repeated,
        Self::Largest,
    ];

    /// What the request is called where it fails.
    pub(super) fn label(self) -> &'static str {
        match self {
            Self::Largest => "the largest picture",
            Self::Full => "as many of the largest pictures as fit",
            Self::Extreme => "long pictures",
            Self::Any => "pictures of any size",
            Self::Repeated => "repeated pictures",
        }
    }

    /// Of the `index`-th request that is not among the first.
    pub(super) fn nth(index: u64) -> Self {
        Self::ALL[(index % Self::ALL.len() as u64) as usize]
    }
}

/// With so many pixels, and one side so many times the other.
pub(super) fn extreme(area: usize, ratio: usize) -> Size {
    let height = (area / ratio).isqrt().max(1);
    Size {
        width: height * ratio,
        height,
    }
}

impl Pictures {
    /// Those of one request, at least one and at most [`Self::most`].
    pub(super) fn of(&self, kind: Kind, rng: &mut StdRng) -> Vec<Picture> {
        let count = match kind {
            Kind::Largest => 1,
            Kind::Full => self.most,
            Kind::Extreme | Kind::Any | Kind::Repeated => rng.random_range(1..=self.most.min(4)),
        };
        (0..count).map(|_| self.one(kind, rng)).collect()
    }

    fn one(&self, kind: Kind, rng: &mut StdRng) -> Picture {
        match kind {
            Kind::Largest | Kind::Full => picture(self.largest, rng.random()),
            Kind::Extreme => {
                let size = extreme(rng.random_range(1..=self.largest.area()), self.ratio);
                picture(turned_by_chance(size, rng), rng.random())
            }
            Kind::Any => picture(self.any_size(rng), rng.random()),
            Kind::Repeated => {
                // Of one seed everything follows.
                let seed = rng.random_range(0..REPEATED);
                let mut known = StdRng::seed_from_u64(seed);
                picture(self.any_size(&mut known), seed)
            }
        }
    }

    /// Small ones as often as large ones; the largest have four times the pixels that the encoder sees.
    fn any_size(&self, rng: &mut StdRng) -> Size {
        let largest = (4 * self.largest.area()).min(MOST_PIXELS) as f64;
        let area = largest.powf(rng.random_range(0.0..1.0)) as usize;
        let ratio = (self.ratio as f64).powf(rng.random_range(0.0..1.0));
        let height = ((area as f64 / ratio).sqrt() as usize).max(1);
        let width = ((height as f64 * ratio) as usize).max(1);
        turned_by_chance(Size { width, height }, rng)
    }
}

fn turned_by_chance(size: Size, rng: &mut StdRng) -> Size {
    match rng.random_bool(0.5) {
        true => size.turned(),
        false => size,
    }
}

fn picture(size: Size, seed: u64) -> Picture {
    // No JPEG is longer.
    let fits = size.width.max(size.height) <= usize::from(u16::MAX);
    let format = match seed.is_multiple_of(2) && fits {
        true => Format::Jpeg,
        false => Format::Png,
    };
    Picture {
        size,
        seed,
        format,
        grain: GRAIN,
    }
}

/// The content of a message: pictures and a text.
///
/// # Errors
/// Where no file can hold a picture.
pub(super) fn message(pictures: &[Picture], text: &str) -> Result<Value, String> {
    let parts = pictures.iter().map(Picture::part);
    let mut parts = parts.collect::<Result<Vec<_>, _>>()?;
    parts.push(json!({"type": "text", "text": text}));
    Ok(parts.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    const PICTURES: Pictures = Pictures {
        most: 3,
        largest: Size {
            width: 640,
            height: 480,
        },
        tokens: 300,
        text: 10,
        ratio: 64,
    };

    #[test]
    fn pictures_are_within_what_the_server_takes() {
        let mut rng = StdRng::seed_from_u64(1);
        let (mut longest, mut largest, mut smallest) = (0.0f64, 0, usize::MAX);
        for index in 0..2000 {
            let kind = Kind::nth(index);
            let pictures = PICTURES.of(kind, &mut rng);
            assert!((1..=3).contains(&pictures.len()), "{kind:?}: {pictures:?}");
            for picture in pictures {
                let Size { width, height } = picture.size;
                let ratio = width.max(height) as f64 / width.min(height) as f64;
                assert!(ratio <= 64.0, "{kind:?}: {picture:?}");
                assert!(picture.size.area() <= 4 * 640 * 480, "{kind:?}: {picture:?}");
                if kind == Kind::Full {
                    assert_eq!(picture.size, PICTURES.largest);
                }
                longest = longest.max(ratio);
                largest = largest.max(picture.size.area());
                smallest = smallest.min(picture.size.area());
            }
        }
        assert_eq!(longest, 64.0);
        assert!(largest > 640 * 480 && smallest < 64, "{smallest} to {largest}");
    }

    #[test]
    fn some_pictures_are_sent_again() {
        let mut seen = Vec::new();
        for seed in 0..100 {
            seen.extend(PICTURES.of(Kind::Repeated, &mut StdRng::seed_from_u64(seed)));
        }
        let mut seeds: Vec<_> = seen
            .iter()
            .map(|picture| (picture.seed, picture.size.area()))
            .collect();
        seeds.sort_unstable();
        seeds.dedup();
        assert_eq!(seeds.len() as u64, REPEATED);
    }
}
