//! The random dataset: prompts of random tokens with given lengths, the same for the same seed.

use plimsoll_core::TokenId;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// Shape of a random workload; vLLM's `random` dataset.
#[derive(Clone, Debug)]
pub(super) struct RandomDataset {
    /// Mean prompt length in tokens.
    pub input_len: usize,
    /// Mean output length in tokens.
    pub output_len: usize,
    /// Lengths are drawn uniformly from `len * (1 - ratio) ..= len * (1 + ratio)`.
    pub range_ratio: f64,
    /// Tokens all prompts begin with, on top of `input_len`.
    pub prefix_len: usize,
    /// Token ids are drawn below this.
    pub vocab_size: usize,
    /// Same seed, same workload.
    pub seed: u64,
}

/// One request of a workload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Sample {
    /// Prompt tokens.
    pub prompt: Vec<TokenId>,
    /// Output tokens to generate.
    pub output_len: usize,
}

impl RandomDataset {
    /// `count` requests.
    pub(super) fn generate(&self, count: usize) -> Vec<Sample> {
        let mut rng = StdRng::seed_from_u64(self.seed);
        let vocab = self.vocab_size.max(1) as TokenId;
        let prefix: Vec<_> = (0..self.prefix_len).map(|_| rng.random_range(0..vocab)).collect();
        let sample = |rng: &mut StdRng| {
            let input_len = self.length(self.input_len, rng);
            let output_len = self.length(self.output_len, rng);
            let mut prompt = prefix.clone();
            prompt.extend((0..input_len).map(|_| rng.random_range(0..vocab)));
            Sample { prompt, output_len }
        };
        (0..count).map(|_| sample(&mut rng)).collect()
    }

    fn length(&self, mean: usize, rng: &mut StdRng) -> usize {
        let low = (mean as f64 * (1.0 - self.range_ratio)).floor().max(1.0) as usize;
        let high = (mean as f64 * (1.0 + self.range_ratio)).ceil() as usize;
        rng.random_range(low..=high.max(low))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: RandomDataset = RandomDataset {
        input_len: 100,
        output_len: 10,
        range_ratio: 0.5,
        prefix_len: 7,
        vocab_size: 50,
        seed: 3,
    };

    #[test]
    fn lengths_lie_in_the_range_and_vary() {
        let samples = SHAPE.generate(500);
        for sample in &samples {
            assert!((50 + 7..=150 + 7).contains(&sample.prompt.len()));
            assert!((5..=15).contains(&sample.output_len));
            assert!(sample.prompt.iter().all(|&token| token < 50));
            assert_eq!(sample.prompt[..7], samples[0].prompt[..7]);
        }
        let mean = samples.iter().map(|s| s.prompt.len()).sum::<usize>() as f64 / 500.0;
        assert!((mean - 107.0).abs() < 8.0, "the mean is {mean}");
        let fixed = RandomDataset {
            range_ratio: 0.0,
            ..SHAPE
        }
        .generate(20);
        assert!(fixed.iter().all(|s| s.prompt.len() == 107 && s.output_len == 10));
    }

    #[test]
    fn the_seed_decides() {
        assert_eq!(SHAPE.generate(5), SHAPE.generate(5));
        assert_ne!(SHAPE.generate(5), RandomDataset { seed: 4, ..SHAPE }.generate(5));
    }
}
