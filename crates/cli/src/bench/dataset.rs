//! The random dataset: prompts of random tokens with given lengths, the same for the same seed.

use plimsoll_core::TokenId;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::mm::Images;
use crate::picture::Picture;

/// Shape of a random workload; vLLM's `random` and `random-mm` datasets.
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
    /// Images of each request, of `random-mm`.
    pub images: Option<Images>,
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
    /// Images beside the prompt.
    pub images: Vec<Picture>,
}

impl Sample {
    /// The prompt as a text of about as many tokens: single letters, of which tokenizers make `tokens_per_word` tokens each. The first
    /// `prefix_len` tokens, which all prompts have, become the same in all.
    pub(super) fn text(&self, prefix_len: usize, tokens_per_word: f64) -> String {
        let (prefix, own) = self.prompt.split_at(prefix_len.min(self.prompt.len()));
        let words = |tokens: &'_ [TokenId]| -> String {
            let count = (tokens.len() as f64 / tokens_per_word.max(1.0)).round() as usize;
            let letter = |&token: &TokenId| [' ', char::from(b'a' + (token % 26) as u8)];
            tokens[..count].iter().flat_map(letter).collect()
        };
        words(prefix) + &words(own)
    }
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
            let images = self.images.as_ref().map(|images| images.draw(rng));
            Sample {
                prompt,
                output_len,
                images: images.unwrap_or_default(),
            }
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
        images: None,
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

    #[test]
    fn texts_have_about_as_many_words_as_tokens() {
        let samples = SHAPE.generate(3);
        for (sample, each) in samples
            .iter()
            .flat_map(|sample| [(sample, 1.0), (sample, 2.0), (sample, 0.0)])
        {
            let text = sample.text(7, each);
            let words = text.split_ascii_whitespace().count() as f64;
            let expected = sample.prompt.len() as f64 / each.max(1.0);
            assert!((words - expected).abs() <= 1.0, "{words} words for {expected}");
            assert!(text.starts_with(&samples[0].text(7, each)[..6]));
        }
        assert_ne!(samples[0].text(7, 1.0), samples[1].text(7, 1.0));
        assert_eq!(SHAPE.generate(1)[0].text(1000, 1.0), samples[0].text(7, 1.0));
    }
}
