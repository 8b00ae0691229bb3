//! What a step's batch is to its kernels, beside its tokens.

use plimsoll_core::{Pooling, StepLimits};
use plimsoll_kernels::cuda::PairAxes;

use crate::ModelConfig;

/// Which of the steps that have a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct DecodeStep {
    /// Rows, padding included.
    pub(super) rows: usize,
    /// One row whose context is too long for whole layers in one launch.
    pub(super) is_long: bool,
}

/// Size of a step's batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum BatchShape {
    /// A graph's: one row per run, each sampled from, padded to so many.
    Decode(DecodeStep),
    /// As many rows as there are tokens, see [`padded_rows`], and those sampled from.
    Exact(Vec<i32>),
    /// A list of the rows that are given out, padded as those of [`Self::Exact`]; without one all are, and there is no padding. Then which of
    /// the rows given out each vector is pooled from: first row and number of rows.
    Pool(Option<Vec<i32>>, Vec<[i32; 2]>),
}

/// Rows of a step of so many tokens that is no graph. Those behind the tokens are computed and given to nobody, as a graph's are: cuBLASLt has no
/// FP8 product with block scales unless the number of rows is a multiple of 4. For up to 32 rows there are kernels of our own.
pub(super) fn padded_rows(tokens: usize) -> usize {
    match tokens {
        0..=32 => tokens,
        _ => tokens.next_multiple_of(4),
    }
}

impl BatchShape {
    /// Rows of a step of so many tokens.
    pub(super) fn rows(&self, tokens: usize) -> usize {
        match *self {
            Self::Decode(step) => step.rows,
            Self::Exact(_) | Self::Pool(Some(_), _) => padded_rows(tokens),
            Self::Pool(None, _) => tokens,
        }
    }

    /// The rows that are given out, where that is said.
    pub(super) fn picked(&self) -> Option<&[i32]> {
        match self {
            Self::Exact(at) | Self::Pool(Some(at), _) => Some(at),
            Self::Decode(_) | Self::Pool(None, _) => None,
        }
    }

    pub(super) fn spans(&self) -> &[[i32; 2]] {
        match self {
            Self::Pool(_, spans) => spans,
            Self::Decode(_) | Self::Exact(_) => &[],
        }
    }
}

/// What becomes of the rows that a step gives out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sampling {
    /// They are sampled from, among so many tokens.
    From {
        /// Tokens of the vocabulary.
        vocab_size: usize,
    },
    /// They are pooled.
    Pooled(Pooling),
}

impl Sampling {
    /// Of this model.
    pub(super) fn of(config: &ModelConfig) -> Self {
        match config.pooling() {
            None => Self::From {
                vocab_size: config.spec.vocab_size,
            },
            Some(pooling) => Self::Pooled(pooling),
        }
    }

    /// Rows of a step that are scored at most.
    pub(super) fn most_scored(self, limits: &StepLimits) -> usize {
        match self {
            Self::From { .. } => limits.max_num_batched_tokens,
            Self::Pooled(_) => 0,
        }
    }

    /// Rows of a step that are sampled from at most. One has room even where there are none: a step's tokens may refer to it.
    pub(super) fn most_rows(self, limits: &StepLimits) -> usize {
        match self {
            Self::From { .. } => limits.max_num_seqs,
            Self::Pooled(_) => 1,
        }
    }
}

/// What the inputs of a step have of images.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ImageInputs {
    /// Where positions have three numbers: rows and columns of patches that are one row of an image.
    pub(super) merge: Option<usize>,
    /// Rows of an image see each other.
    pub(super) mutual: bool,
}

impl ImageInputs {
    /// Of a model that takes images.
    pub(super) fn of(config: &ModelConfig) -> Option<Self> {
        let input = config.image_input()?;
        Some(Self {
            merge: config.spec.has_axes().then_some(input.merge),
            mutual: input.mutual,
        })
    }

    /// Ends of what so many rows see: none where each sees up to itself.
    pub(super) fn ends(images: Option<Self>, rows: usize) -> usize {
        images.filter(|images| images.mutual).map_or(0, |_| rows)
    }

    /// Numbers of a position.
    pub(super) fn numbers(images: Option<Self>) -> usize {
        let merge = images.and_then(|images| images.merge);
        merge.map_or(1, |_| PairAxes::NUMBERS)
    }
}

#[cfg(test)]
mod tests {
    use super::{BatchShape, DecodeStep, padded_rows};

    #[test]
    fn only_rows_that_nobody_is_given_are_padding() {
        let shapes = |tokens: usize| {
            let given = vec![tokens as i32 - 1];
            let decode = DecodeStep {
                rows: tokens,
                is_long: false,
            };
            [
                (BatchShape::Exact(given.clone()), true),
                (BatchShape::Pool(Some(given), vec![[0, 1]]), true),
                (BatchShape::Pool(None, vec![[0, tokens as i32]]), false),
                (BatchShape::Decode(decode), false),
            ]
        };
        for tokens in (1..80).chain([1021, 8189, 8192]) {
            let most = padded_rows(tokens);
            assert_eq!(padded_rows(most), most);
            assert!(
                most - tokens < 4 && (most.is_multiple_of(4) || tokens <= 32),
                "{tokens}"
            );
            for (shape, is_padded) in shapes(tokens) {
                let expected = if is_padded { most } else { tokens };
                assert_eq!(shape.rows(tokens), expected, "{shape:?}");
            }
        }
    }
}
