use std::fmt;

/// Tokens per KV block: 8, 16 or 32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockSize(usize);

impl BlockSize {
    /// `None` unless `tokens` is 8, 16 or 32.
    pub fn new(tokens: usize) -> Option<Self> {
        matches!(tokens, 8 | 16 | 32).then_some(Self(tokens))
    }

    /// Tokens in one block.
    pub fn tokens(self) -> usize {
        self.0
    }

    /// The numbers of equal slices that it can be cut into which are block sizes too, from 1 on.
    pub fn cuts(self) -> impl Iterator<Item = usize> {
        [1, 2, 4]
            .into_iter()
            .filter(move |&slices| self.divided_by(slices).is_some())
    }

    /// Tokens of each of `slices` equal slices; `None` unless that is a block size.
    pub fn divided_by(self, slices: usize) -> Option<Self> {
        Self::new(self.0.checked_div(slices)?).filter(|slice| slice.0 * slices == self.0)
    }

    /// Blocks that `tokens` tokens occupy.
    pub fn blocks_for(self, tokens: usize) -> usize {
        tokens.div_ceil(self.0)
    }
}

impl Default for BlockSize {
    fn default() -> Self {
        Self(16)
    }
}

impl fmt::Display for BlockSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
