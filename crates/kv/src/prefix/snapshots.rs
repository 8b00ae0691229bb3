//! States behind cached prefixes, and which prefixes can be hit at all.

use plimsoll_core::{CacheContent, CacheGroups, StateSlot};

use super::{NodeId, Prefix, PrefixIndex};

impl PrefixIndex {
    /// Whether `slot` holds the state behind a cached prefix.
    pub(crate) fn is_snapshot(&self, slot: StateSlot) -> bool {
        self.node_of_slot[slot.index()].is_some()
    }

    /// States behind cached prefixes.
    pub(crate) fn snapshots(&self) -> usize {
        self.snapshots
    }

    /// The name of the prefix whose state `slot` holds.
    pub(crate) fn name_of(&self, slot: StateSlot) -> Option<u64> {
        let node = self.nodes[self.node_of_slot[slot.index()]?.index()]?;
        Some(node.name)
    }

    /// Keeps `slot` as the state behind `prefix`. False if that is not cached any more, or has one.
    pub(crate) fn keep_state(&mut self, prefix: Prefix, slot: StateSlot) -> bool {
        let Some(id) = prefix.node.filter(|_| self.is_cached(prefix)) else {
            return false;
        };
        if self.nodes[id.index()].is_none_or(|node| node.state.is_some()) {
            return false;
        }
        self.change(id, |node| {
            node.state = Some(slot);
            node.is_confirmed = false;
        });
        self.node_of_slot[slot.index()] = Some(id);
        self.snapshots += 1;
        self.promise(id);
        let mut journal = self.journal.take();
        if let (Some(node), Some(journal)) = (self.nodes[id.index()], &mut journal) {
            let group = (self.groups.as_slice().len(), CacheContent::State);
            journal.stored(group, node.before, node.name, self.content_of(id.index()));
        }
        self.journal = journal;
        true
    }

    /// `slot` holds the state behind a prefix no more. False if it did not.
    pub(crate) fn drop_state(&mut self, slot: StateSlot) -> bool {
        let Some(id) = self.node_of_slot[slot.index()].take() else {
            return false;
        };
        self.snapshots -= 1;
        self.change(id, |node| node.state = None);
        if let (Some(node), Some(journal)) = (self.nodes[id.index()], &mut self.journal) {
            journal.removed(self.groups.as_slice().len(), node.name);
        }
        self.withdraw(id);
        true
    }

    /// Slots that are no snapshots any more because their blocks were evicted.
    pub(crate) fn take_dropped(&mut self) -> Vec<StateSlot> {
        std::mem::take(&mut self.dropped)
    }

    /// Whether no more than one node continues the prefix whose state `slot` holds.
    pub(crate) fn goes_on_once(&self, slot: StateSlot) -> bool {
        let node = |id: NodeId| self.nodes[id.index()];
        let child = self.node_of_slot[slot.index()]
            .and_then(node)
            .and_then(|node| node.first_child);
        child.and_then(node).is_none_or(|child| child.next.is_none())
    }

    /// Whether routers are told of a node's blocks: where there are states, only if a hit may end at or behind it. In a model with
    /// windows alone they need the names of all, as blocks before those of a hit may be gone.
    pub(super) fn is_told(&self, id: NodeId) -> bool {
        !self.tells_hits() || self.nodes[id.index()].is_some_and(|node| node.hits > 0)
    }

    fn tells_hits(&self) -> bool {
        self.groups.state_layers() > 0 && self.keeps_all()
    }

    /// A hit may end at a node from now on: it and those before it are told of, the first ones first.
    fn promise(&mut self, id: NodeId) {
        let (tells, mut new, mut at) = (self.tells_hits(), Vec::new(), Some(id));
        while let Some(id) = at
            && let Some(node) = &mut self.nodes[id.index()]
        {
            node.hits += 1;
            if node.hits > 1 {
                break;
            }
            new.push(id);
            at = node.before.node;
        }
        let told = new.into_iter().rev().filter(|_| tells);
        for id in told {
            for group in 0..CacheGroups::MAX {
                self.tell(id, group);
            }
        }
    }

    /// A hit ends at a node no more: it and those before it are withdrawn, the last ones first, as far as nothing else is behind them.
    fn withdraw(&mut self, id: NodeId) {
        let (tells, mut at) = (self.tells_hits(), Some(id));
        while let Some(id) = at
            && let Some(node) = &mut self.nodes[id.index()]
        {
            node.hits -= 1;
            if node.hits > 0 {
                break;
            }
            at = node.before.node;
            if let Some(journal) = self.journal.as_mut().filter(|_| tells) {
                let held = node
                    .blocks
                    .iter()
                    .enumerate()
                    .filter(|(_, block)| block.is_some());
                held.for_each(|(group, _)| journal.removed(group, node.name));
            }
        }
    }

    /// Checks that states and nodes know each other, and that the nodes that can be hit are those at or before a state.
    pub(super) fn check_snapshots(&self) -> Result<(), String> {
        let mut hits = vec![0; self.nodes.len()];
        let mut states = 0;
        // Those behind are counted before those in front: names grow.
        let nodes = self.nodes.iter().enumerate();
        let mut nodes: Vec<_> = nodes
            .filter_map(|(index, node)| Some((index, (*node)?)))
            .collect();
        nodes.sort_unstable_by_key(|(_, node)| std::cmp::Reverse(node.name));
        for (index, node) in nodes {
            if let Some(slot) = node.state {
                states += 1;
                hits[index] += 1;
                if self.node_of_slot[slot.index()].map(NodeId::index) != Some(index) {
                    return Err(format!("state slot {} does not know its node, {index}", slot.0));
                }
            }
            if node.hits != hits[index] {
                return Err(format!(
                    "node {index} can be hit in {} ways, not {}",
                    node.hits, hits[index]
                ));
            }
            if let Some(parent) = node.before.node.filter(|_| hits[index] > 0) {
                hits[parent.index()] += 1;
            }
        }
        let known = self.node_of_slot.iter().flatten().count();
        match (states, known) == (self.snapshots, self.snapshots) {
            true => Ok(()),
            false => Err(format!(
                "{states} states, {known} of which know their node, are counted as {}",
                self.snapshots
            )),
        }
    }
}
