//! Which cached blocks are known to hold finite numbers.
//!
//! Every row that attends to a NaN key or value becomes NaN, and so does one that continues a NaN state. Blocks of a prompt are cached before any
//! of its rows is read, which may be several steps later, or never if the request is cancelled. So the first finite row that sees a block
//! confirms it, and a row that is not finite evicts the unconfirmed blocks that it sees: they are computed again for the next request,
//! while a common prefix stays for everybody.

use std::ops::Range;

use plimsoll_core::{CacheGroup, GroupTable, PageId};

use super::{NodeId, Prefix, PrefixIndex};

impl PrefixIndex {
    /// A finite row sees `blocks` of a request, the last of which is the last of `prefix`; `tables` has them.
    pub(crate) fn confirm(&mut self, prefix: Prefix, tables: &[GroupTable], blocks: Range<usize>) {
        let groups = self.groups;
        let mut at = self.node_if_cached(prefix);
        for index in blocks.rev() {
            let Some(id) = at else { return };
            let Some(node) = &mut self.nodes[id.index()] else {
                return;
            };
            // Others may have computed the same tokens in other blocks, which this row does not see.
            let same = |((held, group), block): ((&GroupTable, &CacheGroup), &Option<_>)| {
                *block == Some(held.block(group, index)[0])
            };
            let is_seen = tables.iter().zip(&groups).zip(&node.blocks).all(same);
            if !is_seen || std::mem::replace(&mut node.is_confirmed, true) {
                return;
            }
            at = node.before.node;
        }
    }

    /// A row is not finite that sees the blocks of `prefix`: those behind the last confirmed one are forgotten, with all that
    /// continue them. Where `prefix` is not cached any more, what is left of it is found by the blocks that are `held`.
    pub(crate) fn distrust(&mut self, prefix: Option<Prefix>, held: impl Iterator<Item = PageId>) {
        match prefix.and_then(|prefix| self.node_if_cached(prefix)) {
            Some(last) => self.forget_unconfirmed(last),
            None => held.for_each(|head| {
                if let Some(node) = self.node_of[head.index()] {
                    self.forget_unconfirmed(node);
                }
            }),
        }
    }

    fn forget_unconfirmed(&mut self, last: NodeId) {
        let (mut at, mut first) = (Some(last), None);
        while let Some(id) = at
            && let Some(node) = &self.nodes[id.index()]
            && !node.is_confirmed
        {
            first = Some(id);
            at = node.before.node;
        }
        let Some(first) = first else { return };
        self.forget_all_behind(first);
        if let Some(parent) = at {
            self.prune(parent);
        }
    }

    fn node_if_cached(&self, prefix: Prefix) -> Option<NodeId> {
        prefix.node.filter(|_| self.is_cached(prefix))
    }
}
