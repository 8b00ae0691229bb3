use plimsoll_core::PageId;

use crate::prefix::Prefix;

/// The blocks of one request, in the order of its tokens. Holding one means holding a reference to each of its blocks:
/// it cannot be cloned and goes back through [`crate::KvManager::release`].
#[derive(Debug)]
#[must_use = "a table that is not released leaks its blocks"]
pub struct BlockTable {
    pub(crate) blocks: Vec<PageId>,
    /// Tokens whose KV is computed.
    pub(crate) computed: usize,
    /// Names the tokens of all full computed blocks.
    pub(crate) prefix: Prefix,
    /// Who may share them, while changes of the cache are recorded.
    pub(crate) salt: Option<Box<str>>,
}

impl BlockTable {
    /// The blocks; block `i` holds the tokens from `i * block_size` on.
    pub fn blocks(&self) -> &[PageId] {
        &self.blocks
    }

    /// Tokens whose KV is computed; right after `open`, those the prefix cache held.
    pub fn computed(&self) -> usize {
        self.computed
    }
}
