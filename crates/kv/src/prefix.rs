mod journal;
mod snapshots;
mod trust;

use std::hash::{BuildHasher, RandomState};

use hashbrown::HashTable;
use plimsoll_core::{
    BlockImage, CacheContent, CacheEvent, CacheGroups, CacheKind, KvConfig, PageId, StateSlot, TokenId,
};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::content::Content;
use journal::Journal;

/// Names one exact sequence of tokens, a whole number of blocks long. Never given to another sequence: after the node
/// that carried it is gone, none that continues it is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Prefix {
    pub(crate) name: u64,
    /// Carries its last tokens; none does where a sequence begins.
    node: Option<NodeId>,
}

impl Prefix {
    /// In the names of salts, which no sequence of tokens reaches by counting.
    const SALTED: u64 = 1 << 63;

    /// Where the sequences of a salt begin, or those without one.
    pub(crate) fn is_root(self) -> bool {
        self.node.is_none()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct NodeId(u32);

impl NodeId {
    fn index(self) -> usize {
        self.0 as usize
    }
}

/// Which blocks hold which tokens. The identity of a node is (everything before it, its own tokens); both are compared, the
/// hash only finds candidates, so a collision costs time and never correctness.
///
/// A node has a block of each group that still holds its tokens. In a model with full attention it is removed with that group's
/// block, together with all nodes that continue it, which no lookup would reach. In a model with windows alone it is removed
/// once neither it nor a node that continues it has a block.
///
/// Where layers have states, a node may have the one behind its tokens, and only such a node ends a hit.
#[derive(Debug)]
pub(crate) struct PrefixIndex {
    by_hash: HashTable<NodeId>,
    /// The place of a node, empty ones included.
    nodes: Vec<Option<Node>>,
    /// Empty places.
    vacant: Vec<NodeId>,
    /// Nodes at most.
    most: usize,
    /// Tokens of every node: `block_size` for each place.
    tokens: Vec<TokenId>,
    /// Images of every node's tokens.
    images: Vec<Box<[BlockImage]>>,
    /// The node of each block, by its first page.
    node_of: Vec<Option<NodeId>>,
    /// The node of each state slot that holds a snapshot.
    node_of_slot: Vec<Option<NodeId>>,
    /// How many do.
    snapshots: usize,
    /// State slots whose nodes went since they were last taken.
    dropped: Vec<StateSlot>,
    block_size: usize,
    groups: CacheGroups,
    /// Blocks of each group that can be shared.
    cached: [usize; CacheGroups::MAX],
    /// The name given last.
    last: u64,
    /// Random, so that clients cannot craft prompts that collide.
    seed: u64,
    /// Keyed too, so that clients cannot craft salts that collide.
    salts: RandomState,
    /// Recorded events, if recording is on.
    journal: Option<Journal>,
}

/// First pages of the blocks of each group.
pub(crate) type Blocks = [Option<PageId>; CacheGroups::MAX];

/// What is cached of the last block of a prefix.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Found {
    pub(crate) prefix: Prefix,
    pub(crate) blocks: Blocks,
    /// The state behind it.
    pub(crate) state: Option<StateSlot>,
}

#[derive(Clone, Copy, Debug)]
struct Node {
    hash: u64,
    before: Prefix,
    name: u64,
    blocks: Blocks,
    state: Option<StateSlot>,
    /// A row that sees all it has was finite: see [`Self::confirm`](PrefixIndex::confirm).
    is_confirmed: bool,
    /// Its own state, and the nodes that continue this one of which there is one at or behind it.
    hits: u32,
    /// Nodes that continue this one, in a list through their `next`.
    first_child: Option<NodeId>,
    next: Option<NodeId>,
    previous: Option<NodeId>,
}

impl PrefixIndex {
    pub(crate) fn new(config: &KvConfig) -> Self {
        let first = config.groups.as_slice()[0];
        let most = match first.kind {
            CacheKind::Full => config.num_pages / first.pages_per_block,
            // Nodes before those that have blocks are kept without any: leave room for as many.
            CacheKind::Window(_) => 2 * config.num_pages,
        };
        Self {
            by_hash: HashTable::with_capacity(most),
            nodes: vec![None; most],
            vacant: (0..most as u32).rev().map(NodeId).collect(),
            most,
            tokens: vec![0; most * config.block_size.tokens()],
            images: vec![Box::default(); most],
            node_of: vec![None; config.num_pages],
            node_of_slot: vec![None; config.state_slots],
            snapshots: 0,
            dropped: Vec::new(),
            block_size: config.block_size.tokens(),
            groups: config.groups,
            cached: [0; CacheGroups::MAX],
            last: 0,
            seed: RandomState::new().hash_one(0),
            salts: RandomState::new(),
            journal: None,
        }
    }

    /// Clears the index and changes its size.
    pub(crate) fn reset(&mut self, config: &KvConfig) {
        if let Some(journal) = &mut self.journal {
            journal.clear(!self.by_hash.is_empty());
        }
        *self = Self {
            // Names are never reused, and where the sequences of a salt begin stays the same: open tables go on from there.
            last: self.last,
            salts: self.salts.clone(),
            journal: self.journal.take(),
            ..Self::new(config)
        };
    }

    /// Enables event recording; the cache must be empty.
    pub(crate) fn record(&mut self) {
        debug_assert!(self.by_hash.is_empty());
        self.journal.get_or_insert_default();
    }

    /// Takes the recorded events.
    pub(crate) fn take_events(&mut self) -> Vec<CacheEvent> {
        self.journal.as_mut().map(Journal::take).unwrap_or_default()
    }

    /// A snapshot as `Stored` events; none if recording is off.
    pub(crate) fn all(&self) -> Vec<CacheEvent> {
        let Some(journal) = &self.journal else {
            return Vec::new();
        };
        let cached = self.nodes.iter().enumerate();
        let mut cached: Vec<_> = cached
            .filter_map(|(index, node)| Some((index, node.as_ref()?)))
            .collect();
        // Names are given in order: those before come first.
        cached.sort_unstable_by_key(|(_, node)| node.name);
        let mut events = Vec::new();
        for (index, node) in cached {
            let held = self.content_of(index);
            let mut tell = |group| journal.tell(&mut events, group, node.before, node.name, held);
            if self.is_told(NodeId(index as u32)) {
                let kinds = self.kinds().map(CacheContent::Kv).enumerate();
                kinds
                    .filter(|&(group, _)| node.blocks[group].is_some())
                    .for_each(&mut tell);
            }
            if node.state.is_some() {
                tell((self.groups.as_slice().len(), CacheContent::State));
            }
        }
        events
    }

    /// Where the sequences of `salt` begin: they share nothing with those of another.
    pub(crate) fn root(&self, salt: Option<&str>) -> Prefix {
        let name = salt.map_or(0, |salt| Prefix::SALTED | self.salts.hash_one(salt));
        Prefix { name, node: None }
    }

    /// The text of `salt`; kept only while events are recorded.
    pub(crate) fn keep_salt(&self, salt: Option<&str>) -> Option<Box<str>> {
        self.journal.as_ref().and(salt).map(Box::from)
    }

    /// Blocks of each group that can be shared.
    pub(crate) fn cached(&self) -> [usize; CacheGroups::MAX] {
        self.cached
    }

    fn kinds(&self) -> impl Iterator<Item = CacheKind> {
        self.groups.iter().map(|group| group.kind)
    }

    /// Whether the first group keeps everything.
    fn keeps_all(&self) -> bool {
        self.groups.as_slice()[0].kind == CacheKind::Full
    }

    /// Whether there is no name for another block.
    pub(crate) fn is_full(&self) -> bool {
        self.vacant.is_empty()
    }

    /// Whether the block that begins with `page` can be shared.
    pub(crate) fn contains(&self, page: PageId) -> bool {
        self.node_of[page.index()].is_some()
    }

    /// What is cached of exactly `content` after exactly `before`.
    pub(crate) fn find(&self, before: Prefix, content: Content<'_>) -> Option<Found> {
        let prefix = self.find_hashed(self.hash(before, content), before, content)?;
        let Node { blocks, state, .. } = self.nodes[prefix.node?.index()]?;
        Some(Found {
            prefix,
            blocks,
            state,
        })
    }

    /// Caches `blocks` as holding `content` after `before`, in a sequence of `salt`. Blocks that are
    /// already cached for it stay. Returns the prefix that includes it; `None` if `before` was evicted
    /// meanwhile, so that no lookup would reach it, or if the index is full.
    pub(crate) fn insert(
        &mut self,
        blocks: Blocks,
        before: Prefix,
        content: Content<'_>,
        salt: Option<&str>,
    ) -> Option<Prefix> {
        let hash = self.hash(before, content);
        if let Some(prefix) = self.find_hashed(hash, before, content) {
            self.complete(prefix.node?, blocks);
            return Some(prefix);
        }
        if !self.is_cached(before) {
            return None;
        }
        let id = self.vacant.pop()?;
        self.last += 1;
        let name = self.last;
        self.tokens[id.index() * self.block_size..][..self.block_size].copy_from_slice(content.tokens);
        self.images[id.index()] = content.images.into();
        self.nodes[id.index()] = Some(Node {
            hash,
            before,
            name,
            blocks: [None; CacheGroups::MAX],
            state: None,
            is_confirmed: false,
            hits: 0,
            first_child: None,
            next: None,
            previous: None,
        });
        self.link(id, before);
        let nodes = &self.nodes;
        self.by_hash
            .insert_unique(hash, id, |id| nodes[id.index()].map_or(0, |node| node.hash));
        if let Some(journal) = &mut self.journal {
            journal.name(before, name, content, salt);
        }
        self.complete(id, blocks);
        Some(Prefix { name, node: Some(id) })
    }

    /// Adds those blocks that a node lacks.
    fn complete(&mut self, id: NodeId, blocks: Blocks) {
        for (group, block) in blocks.into_iter().enumerate() {
            let Some(node) = &mut self.nodes[id.index()] else {
                return;
            };
            if let (held @ None, Some(block)) = (&mut node.blocks[group], block) {
                *held = Some(block);
                node.is_confirmed = false;
                self.node_of[block.index()] = Some(id);
                self.cached[group] += 1;
                if self.is_told(id) {
                    self.tell(id, group);
                }
            }
        }
    }

    /// Tells listeners of a node's block of a group, if it has one.
    fn tell(&mut self, id: NodeId, group: usize) {
        let mut journal = self.journal.take();
        if let (Some(node), Some(journal)) = (self.nodes[id.index()], &mut journal)
            && node.blocks[group].is_some()
        {
            let content = CacheContent::Kv(self.groups.as_slice()[group].kind);
            let held = self.content_of(id.index());
            journal.stored((group, content), node.before, node.name, held);
        }
        self.journal = journal;
    }

    /// The block that begins with `page` holds other tokens from here on. Returns how many blocks are cached no more: its
    /// node may go, and those behind it, which a table may hold still that computed the same tokens in other blocks.
    pub(crate) fn evict(&mut self, page: PageId) -> usize {
        let Some(id) = self.node_of[page.index()] else {
            return 0;
        };
        let cached: usize = self.cached.iter().sum();
        let node = self.nodes[id.index()].expect("a block's node is there");
        let group = node.blocks.iter().position(|&block| block == Some(page));
        match group.expect("a node knows its blocks") {
            0 if self.keeps_all() => self.forget_all_behind(id),
            group => {
                self.drop_block(id, group);
                self.prune(id);
            }
        }
        cached - self.cached.iter().sum::<usize>()
    }

    /// Forgets a node and all behind it.
    fn forget_all_behind(&mut self, id: NodeId) {
        let mut at = id;
        while let Some(node) = self.nodes[at.index()] {
            if let Some(child) = node.first_child {
                // Names grow from a node to those behind it, so this comes to an end.
                debug_assert_eq!(
                    self.nodes[child.index()].map(|child| child.before.name),
                    Some(node.name)
                );
                at = child;
                continue;
            }
            self.forget(at);
            match node.before.node {
                Some(parent) if at != id => at = parent,
                _ => break,
            }
        }
    }

    /// Forgets a node, and those before it, as far as nothing is left of them.
    fn prune(&mut self, id: NodeId) {
        let mut at = Some(id);
        while let Some(id) = at
            && let Some(node) = self.nodes[id.index()]
            && node.first_child.is_none()
            && node.blocks.iter().all(Option::is_none)
        {
            self.forget(id);
            at = node.before.node;
        }
    }

    /// The block of a group is cached no more.
    fn drop_block(&mut self, id: NodeId, group: usize) {
        let is_told = self.is_told(id);
        if let Some(node) = &mut self.nodes[id.index()]
            && let Some(block) = node.blocks[group].take()
        {
            self.node_of[block.index()] = None;
            self.cached[group] -= 1;
            if let Some(journal) = self.journal.as_mut().filter(|_| is_told) {
                journal.removed(group, node.name);
            }
        }
    }

    /// Forgets a node, which no other continues.
    fn forget(&mut self, id: NodeId) {
        if let Some(slot) = self.nodes[id.index()].and_then(|node| node.state) {
            self.drop_state(slot);
            self.dropped.push(slot);
        }
        (0..CacheGroups::MAX).for_each(|group| self.drop_block(id, group));
        self.images[id.index()] = Box::default();
        let node = self.nodes[id.index()].take().expect("it is cached");
        self.vacant.push(id);
        match (node.previous, node.before.node) {
            (Some(previous), _) => self.change(previous, |previous| previous.next = node.next),
            (None, Some(parent)) => self.change(parent, |parent| parent.first_child = node.next),
            (None, None) => {}
        }
        if let Some(next) = node.next {
            self.change(next, |next| next.previous = node.previous);
        }
        let found = self.by_hash.find_entry(node.hash, |&other| other == id);
        found.expect("every node is in the table").remove();
        if let Some(journal) = &mut self.journal {
            journal.forget(node.name);
        }
    }

    /// Puts a node first among those that continue `before`.
    fn link(&mut self, id: NodeId, before: Prefix) {
        let Some(parent) = before.node else { return };
        let mut next = None;
        self.change(parent, |parent| next = parent.first_child.replace(id));
        self.change(id, |node| node.next = next);
        if let Some(next) = next {
            self.change(next, |next| next.previous = Some(id));
        }
    }

    fn change(&mut self, id: NodeId, change: impl FnOnce(&mut Node)) {
        change(self.nodes[id.index()].as_mut().expect("it is cached"));
    }

    /// Whether nodes that continue `prefix` can be found. It may be older than the last [`reset`](Self::reset).
    pub(crate) fn is_cached(&self, prefix: Prefix) -> bool {
        let node_of = |id: NodeId| self.nodes.get(id.index())?.as_ref();
        prefix
            .node
            .is_none_or(|id| node_of(id).is_some_and(|node| node.name == prefix.name))
    }

    fn tokens_of(&self, index: usize) -> &[TokenId] {
        &self.tokens[index * self.block_size..][..self.block_size]
    }

    fn content_of(&self, index: usize) -> Content<'_> {
        Content {
            tokens: self.tokens_of(index),
            images: &self.images[index],
        }
    }

    fn find_hashed(&self, hash: u64, before: Prefix, content: Content<'_>) -> Option<Prefix> {
        let same = |id: &NodeId| {
            self.nodes[id.index()].is_some_and(|node| node.before == before)
                && self.tokens_of(id.index()) == content.tokens
                && *self.images[id.index()] == *content.images
        };
        let &id = self.by_hash.find(hash, same)?;
        let name = self.nodes[id.index()]?.name;
        Some(Prefix { name, node: Some(id) })
    }

    fn hash(&self, before: Prefix, content: Content<'_>) -> u64 {
        let tokens = content.tokens;
        let mut bytes = [0; 4 * MAX_BLOCK_SIZE];
        for (to, token) in bytes.chunks_exact_mut(4).zip(tokens) {
            to.copy_from_slice(&token.to_le_bytes());
        }
        let seed =
            (content.images.iter()).fold(self.seed, |seed, image| xxh3_64_with_seed(&image.hash, seed));
        xxh3_64_with_seed(&bytes[..4 * tokens.len()], seed ^ before.name)
    }

    /// Checks that every node is found under its own identity and no other, that the node before it exists, that its blocks
    /// refer to it, and that no unneeded node is left.
    pub(crate) fn check_invariants(&self) -> Result<(), String> {
        let (mut cached, mut blocks) = (0, [0; CacheGroups::MAX]);
        for (index, node) in self.nodes.iter().enumerate() {
            let Some(node) = node else { continue };
            cached += 1;
            let found = self.find(node.before, self.content_of(index));
            if found.map(|found| found.prefix.name) != Some(node.name) {
                return Err(format!("node {index} is found as {found:?}"));
            }
            if !self.is_cached(node.before) {
                return Err(format!("node {index} is behind one that is not cached"));
            }
            for (count, block) in blocks.iter_mut().zip(node.blocks) {
                let Some(block) = block else { continue };
                *count += 1;
                if self.node_of[block.index()].map(NodeId::index) != Some(index) {
                    return Err(format!("block {} does not know its node, {index}", block.0));
                }
            }
            let needed = match self.keeps_all() {
                true => node.blocks[0].is_some(),
                false => node.first_child.is_some() || node.blocks.iter().any(Option::is_some),
            };
            if !needed {
                return Err(format!("node {index} has outlived its blocks"));
            }
        }
        let known = self.node_of.iter().flatten().count();
        let counted = (cached, cached + self.vacant.len(), blocks, blocks.iter().sum());
        if counted != (self.by_hash.len(), self.most, self.cached, known) {
            return Err(format!(
                "{} nodes in the hash table, {cached} in use and {} vacant of {}; {blocks:?} blocks, of which {:?} are \
                 counted and {known} know their node",
                self.by_hash.len(),
                self.vacant.len(),
                self.most,
                self.cached,
            ));
        }
        self.check_snapshots()
    }
}

const MAX_BLOCK_SIZE: usize = 32;
