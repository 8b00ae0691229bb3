//! Resizing pictures of 8 bits, bit by bit as PyTorch does on CPUs (`interpolate(antialias=True)` of `uint8`), which goes back to
//! Pillow's: two passes, each with weights of 16 bits and a rounded result.

use crate::decode::Pixels;

/// How pixels are weighed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Filter {
    /// Triangle.
    Bilinear,
    /// Cubic convolution with a = -0.5.
    Bicubic,
}

impl Filter {
    /// Half of the width at scale 1.
    fn support(self) -> f64 {
        match self {
            Self::Bilinear => 1.0,
            Self::Bicubic => 2.0,
        }
    }

    fn weight(self, x: f64) -> f64 {
        const A: f64 = -0.5;
        let x = x.abs();
        match self {
            Self::Bilinear => (1.0 - x).max(0.0),
            Self::Bicubic if x < 1.0 => ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0,
            Self::Bicubic if x < 2.0 => (((x - 5.0) * x + 8.0) * x - 4.0) * A,
            Self::Bicubic => 0.0,
        }
    }
}

/// For each output the first input, and the weights from there on.
struct Weights {
    /// `(first input, place in `weights`, count)`.
    spans: Vec<(usize, usize, usize)>,
    weights: Vec<i32>,
    /// Bits behind the point.
    precision: u32,
}

impl Weights {
    fn new(filter: Filter, input: usize, output: usize) -> Self {
        let scale = input as f64 / output as f64;
        let (stretch, support) = (scale.max(1.0), filter.support() * scale.max(1.0));
        let mut spans = Vec::with_capacity(output);
        let mut floats: Vec<f64> = Vec::new();
        for i in 0..output {
            let centre = scale * (i as f64 + 0.5);
            // Casts cut towards zero, and saturate.
            let first = (centre - support + 0.5) as usize;
            let end = ((centre + support + 0.5) as usize).min(input);
            let from = floats.len();
            let weight = |j| filter.weight((j as f64 - centre + 0.5) / stretch);
            floats.extend((first..end).map(weight));
            let sum: f64 = floats[from..].iter().sum();
            if sum != 0.0 {
                floats[from..].iter_mut().for_each(|weight| *weight /= sum);
            }
            spans.push((first, from, floats.len() - from));
        }
        // As many bits as the largest weight leaves in 16.
        let largest = floats.iter().copied().fold(0.0, f64::max);
        let fits = |bits: &u32| ((0.5 + largest * f64::from(1u32 << (bits + 1))) as i64) < 1 << 15;
        let precision = (0..22).find(|bits| !fits(bits)).unwrap_or(22);
        let one = f64::from(1u32 << precision);
        let fixed = |weight: f64| (weight * one + 0.5f64.copysign(weight)) as i32;
        Self {
            spans,
            weights: floats.into_iter().map(fixed).collect(),
            precision,
        }
    }

    fn rounded(&self, sum: i32) -> u8 {
        (sum >> self.precision).clamp(0, 255) as u8
    }

    /// The weights of each output with their first input.
    fn of_outputs(&self) -> impl Iterator<Item = (usize, &[i32])> {
        let spans = self.spans.iter();
        spans.map(|&(first, at, count)| (first, &self.weights[at..at + count]))
    }
}

/// `pixels` with `width` columns and `height` rows.
pub(crate) fn resize(pixels: &Pixels, width: usize, height: usize, filter: Filter) -> Pixels {
    let rgb = match pixels.width == width {
        true => None,
        false => Some(columns(pixels, width, filter)),
    };
    let before = rgb.as_deref().unwrap_or(&pixels.rgb);
    let rgb = match pixels.height == height {
        true => before.to_vec(),
        false => rows(before, width, (pixels.height, height), filter),
    };
    Pixels { width, height, rgb }
}

fn columns(pixels: &Pixels, width: usize, filter: Filter) -> Vec<u8> {
    let weights = Weights::new(filter, pixels.width, width);
    let half = 1 << (weights.precision - 1);
    let mut resized = Vec::with_capacity(width * pixels.height * 3);
    for row in pixels.rgb.chunks_exact(pixels.width * 3) {
        for (first, weights_of_one) in weights.of_outputs() {
            let mut sums = [half; 3];
            for (pixel, weight) in row[first * 3..].chunks_exact(3).zip(weights_of_one) {
                for (sum, &value) in sums.iter_mut().zip(pixel) {
                    *sum += weight * i32::from(value);
                }
            }
            resized.extend(sums.map(|sum| weights.rounded(sum)));
        }
    }
    resized
}

fn rows(rgb: &[u8], width: usize, (before, height): (usize, usize), filter: Filter) -> Vec<u8> {
    let weights = Weights::new(filter, before, height);
    let half = 1 << (weights.precision - 1);
    let mut resized = Vec::with_capacity(width * height * 3);
    let mut sums = vec![0; width * 3];
    for (first, weights_of_one) in weights.of_outputs() {
        sums.fill(half);
        for (row, weight) in rgb[first * width * 3..]
            .chunks_exact(width * 3)
            .zip(weights_of_one)
        {
            for (sum, &value) in sums.iter_mut().zip(row) {
                *sum += weight * i32::from(value);
            }
        }
        resized.extend(sums.iter().map(|&sum| weights.rounded(sum)));
    }
    resized
}
