//! Events of the prefix cache, for routers that send a request where most of its prompt is cached.

use std::fmt::Debug;

use crate::{CacheKind, TokenId};

/// A change of the prefix cache in one cache group. A block's name is a hash of its tokens and images, all before them and the salt:
/// equal on all servers and in all groups of one server, and different for different ones.
///
/// A request finds the longest prefix of whole blocks of which every group with full attention holds all, every group with
/// a window those blocks that the next token sees, and the group of states, if there is one, the last. In a model
/// with full attention and states, all groups tell of blocks at or before a held state only: nothing finds others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CacheEvent {
    /// Consecutive blocks were cached.
    Stored {
        /// Index of their cache group.
        group: usize,
        /// What that group holds of blocks.
        content: CacheContent,
        /// Their names, never 0.
        blocks: Vec<u64>,
        /// The block before the first one, which is cached too if the group keeps everything; `None` where a sequence begins.
        parent: Option<u64>,
        /// Their tokens, the same number for each.
        tokens: Vec<TokenId>,
        /// The images in them, each with the index of its block.
        images: Vec<(usize, BlockImage)>,
        /// Salt of the sequence that begins here; only requests with the same salt share it.
        salt: Option<Box<str>>,
    },
    /// Blocks were evicted. In a group that keeps everything, no block that continues them is cached either.
    Removed {
        /// Index of their cache group.
        group: usize,
        /// Their names.
        blocks: Vec<u64>,
    },
    /// Nothing is cached.
    Cleared,
}

impl CacheEvent {
    /// Number of tokens and names: a measure of the memory that the event takes.
    pub fn weight(&self) -> usize {
        match self {
            Self::Stored { blocks, tokens, .. } => 2 * blocks.len() + tokens.len(),
            Self::Removed { blocks, .. } => 2 * blocks.len(),
            Self::Cleared => 1,
        }
    }
}

/// Rows of an image in a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockImage {
    /// Identity of the image's content.
    pub hash: [u8; 32],
    /// The first of its rows in the block.
    pub row: usize,
    /// The token of the block that is this row.
    pub at: usize,
    /// Rows.
    pub len: usize,
}

/// What a cache group holds of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheContent {
    /// Its keys and values, in layers that keep these tokens.
    Kv(CacheKind),
    /// The state behind its last token, in layers that keep a state of fixed size. Their group comes after all others.
    State,
}

/// How many event batches were delivered and dropped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheEventCounts {
    /// Batches published.
    pub published: u64,
    /// Batches dropped because the queue was full; a snapshot replaced them.
    pub dropped: u64,
}

/// Receives the events of the prefix cache.
pub trait CacheListener: Debug + Send + Sync {
    /// Receives the changes of one step; must not block. `all` returns a snapshot of the cache as `Stored` events, for a
    /// listener that dropped earlier ones.
    fn changed(&self, changes: Vec<CacheEvent>, all: &dyn Fn() -> Vec<CacheEvent>);

    /// How many batches were delivered and dropped.
    fn counts(&self) -> CacheEventCounts;
}
