use std::sync::Arc;

use plimsoll_core::{GroupTable, ImageSpan, KvConfig};

use crate::{prefix::Prefix, state::TableState};

/// The blocks of one request in each group, in the order of its tokens. Holding one means holding a reference to each of its
/// blocks: it cannot be cloned and goes back through [`crate::KvManager::release`].
#[derive(Debug)]
#[must_use = "a table that is not released leaks its blocks"]
pub struct BlockTable {
    pub(crate) groups: Vec<GroupTable>,
    /// Where layers have states.
    pub(crate) state: Option<TableState>,
    /// Tokens whose KV is computed.
    pub(crate) computed: usize,
    /// Names the tokens of all full computed blocks; `None` where they are cached no more.
    pub(crate) prefix: Option<Prefix>,
    /// Only requests with the same salt may share them; kept only while events are recorded.
    pub(crate) salt: Option<Box<str>>,
    /// The images of its prompt.
    pub(crate) images: Option<Arc<[ImageSpan]>>,
}

impl BlockTable {
    /// The blocks of each group that are held.
    pub fn groups(&self) -> &[GroupTable] {
        &self.groups
    }

    /// The same as far as a step needs it after which `tokens` tokens are computed.
    pub fn up_to(&self, tokens: usize, kv: &KvConfig) -> Vec<GroupTable> {
        let blocks = kv.block_size.blocks_for(tokens);
        let groups = self.groups.iter().zip(&kv.groups);
        let cut = groups.map(|(table, group)| {
            let pages = (blocks - table.first) * group.pages_per_block;
            GroupTable {
                first: table.first,
                pages: table.pages[..pages].to_vec(),
            }
        });
        cut.collect()
    }

    /// Tokens whose KV is computed; right after `open`, those the prefix cache held.
    pub fn computed(&self) -> usize {
        self.computed
    }

    /// Tokens that every group has room for.
    pub fn room(&self, kv: &KvConfig) -> usize {
        let ends = self.groups.iter().zip(&kv.groups);
        let end = ends.map(|(table, group)| table.end(group)).min();
        end.unwrap_or(0) * kv.block_size.tokens()
    }
}
