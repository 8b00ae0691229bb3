//! A prompt that waits for pages is tried before every step. What the prefix cache has of it is remembered, not looked up from its
//! beginning each time.

use plimsoll_core::{CacheKind, PageId, TokenId};

use super::{KvManager, Sharing};
use crate::prefix::Prefix;

/// What was cached of one prompt when it was last asked for.
#[derive(Clone, Debug, Default)]
pub struct KnownPrefix {
    /// Up to the end of each block.
    prefixes: Vec<Prefix>,
    /// The first pages of these blocks.
    heads: Vec<PageId>,
}

impl KvManager {
    /// Whether [`Self::open`] of this prompt is sure to fail for want of pages; `known` is of the same prompt and `sharing`. It takes
    /// the time of the blocks that came and went since, and of counting the others. False where it cannot tell: with windows or
    /// states, any part of a prefix may come and go.
    pub fn is_short(
        &self,
        known: &mut KnownPrefix,
        tokens: &[TokenId],
        sharing: Sharing<'_>,
        headroom: usize,
    ) -> bool {
        let available = self.pool.available();
        if available <= headroom {
            return true;
        }
        let pages_per_block = match self.config.groups.as_slice() {
            [group] if group.kind == CacheKind::Full && self.config.groups.state_layers() == 0 => {
                group.pages_per_block
            }
            _ => return false,
        };
        // A block goes together with those behind it.
        let gone = |prefix: &Prefix| !self.index.is_cached(*prefix);
        while known.prefixes.pop_if(|prefix| gone(prefix)).is_some() {
            known.heads.pop();
        }
        let mut at = known.prefixes.last().copied();
        for block in self.shareable(tokens, sharing, known.prefixes.len()) {
            let before = at.unwrap_or_else(|| self.index.root(sharing.salt));
            let Some(found) = self.index.find(before, block.content()) else {
                break;
            };
            known.prefixes.push(found.prefix);
            known.heads.extend(found.blocks[0]);
            at = Some(found.prefix);
        }
        // Pages of blocks that nobody holds are available, and taken from these.
        let is_held = |head: &&PageId| self.references[head.index()] > 0;
        let held = known.heads.iter().filter(is_held).count();
        let blocks = self.config.block_size.blocks_for(tokens.len()) - held;
        blocks * pages_per_block + headroom > available
    }
}
