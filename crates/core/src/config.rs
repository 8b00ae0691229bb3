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

/// The size of a paged KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvConfig {
    /// Tokens per block.
    pub block_size: BlockSize,
    /// Physical blocks, all of them usable.
    pub num_blocks: usize,
}

impl KvConfig {
    /// Tokens the cache holds.
    pub fn capacity_tokens(&self) -> usize {
        self.num_blocks * self.block_size.tokens()
    }
}

/// How the step arena gets its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scratch {
    /// Grows on demand; for the probe, which finds out how much is needed.
    Growable,
    /// One allocation of this many bytes; a step that needs more fails with [`crate::Oom`].
    Fixed(u64),
}

/// Everything that decides the memory of one engine state: a state is built from this and nothing else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateConfig {
    /// The KV cache.
    pub kv: KvConfig,
    /// The step arena.
    pub scratch: Scratch,
    /// Bytes held back while the size is proved and freed before serving; 0 for none.
    pub canary_bytes: u64,
}

/// The largest step the scheduler will ever plan. The profiler derives its worst cases from the same numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepLimits {
    /// Tokens in one step, over all runs (`--max-num-batched-tokens`).
    pub max_num_batched_tokens: usize,
    /// Runs in one step (`--max-num-seqs`).
    pub max_num_seqs: usize,
    /// Prompt plus output tokens of one request (`--max-model-len`).
    pub max_model_len: usize,
}
