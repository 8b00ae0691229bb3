//! What the prefix cache tells the outside: routers send a request where most of its prompt is cached.

use std::fmt::Debug;

use crate::TokenId;

/// A change of what the prefix cache can share. A block's name follows from its tokens, those before them and the salt: it is
/// the same on all servers, and that of no other block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CacheEvent {
    /// Blocks that follow each other are cached.
    Stored {
        /// Their names, never 0.
        blocks: Vec<u64>,
        /// The block before the first one, which is cached; `None` where a sequence begins.
        parent: Option<u64>,
        /// Their tokens, the same number for each.
        tokens: Vec<TokenId>,
        /// Where a sequence begins: only requests with this salt share it, if it has one.
        salt: Option<Box<str>>,
    },
    /// Blocks are cached no more, and none that continues them is.
    Removed(Vec<u64>),
    /// Nothing is cached.
    Cleared,
}

impl CacheEvent {
    /// Tokens and names, which is what it takes to keep it.
    pub fn weight(&self) -> usize {
        match self {
            Self::Stored { blocks, tokens, .. } => 2 * blocks.len() + tokens.len(),
            Self::Removed(blocks) => 2 * blocks.len(),
            Self::Cleared => 1,
        }
    }
}

/// What became of the events so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheEventCounts {
    /// Batches that went out.
    pub published: u64,
    /// Batches given up because they were not taken in time; what they said was said anew.
    pub dropped: u64,
}

/// Who hears what the prefix cache holds.
pub trait CacheListener: Debug + Send + Sync {
    /// Takes what changed in a step. Never waits. `all` tells what is cached now, from an empty cache on, for a listener that
    /// has lost track.
    fn changed(&self, changes: Vec<CacheEvent>, all: &dyn Fn() -> Vec<CacheEvent>);

    /// What became of it.
    fn counts(&self) -> CacheEventCounts;
}
