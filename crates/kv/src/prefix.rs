mod journal;

use std::hash::{BuildHasher, RandomState};

use hashbrown::HashTable;
use plimsoll_core::{CacheEvent, KvConfig, PageId, TokenId};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use journal::Journal;

/// Names one exact sequence of tokens, a whole number of blocks long. Never given to another sequence: after the block
/// that carried it is evicted, no block that continues it is cached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Prefix {
    pub(crate) name: u64,
    /// Carries its last tokens; none does where a sequence begins.
    block: Option<PageId>,
}

impl Prefix {
    /// In the names of salts, which no sequence of tokens reaches by counting.
    const SALTED: u64 = 1 << 63;

    /// Where the sequences of a salt begin, or those without one.
    pub(crate) fn is_root(self) -> bool {
        self.block.is_none()
    }
}

/// Which block holds which tokens. The identity of a cached block is (everything before it, its own tokens); both are
/// compared, the hash only finds candidates, so a collision costs time and never correctness.
///
/// The block before a cached one is cached too, as nobody would find it otherwise.
#[derive(Debug)]
pub(crate) struct PrefixIndex {
    by_hash: HashTable<PageId>,
    entries: Vec<Option<Entry>>,
    /// Tokens of every cached block: `block_size` for each block of the cache.
    tokens: Vec<TokenId>,
    block_size: usize,
    /// The name given last.
    last: u64,
    /// Random, so that clients cannot craft prompts that collide.
    seed: u64,
    /// Keyed too, so that clients cannot craft salts that collide.
    salts: RandomState,
    /// Recorded events, if recording is on.
    journal: Option<Journal>,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    hash: u64,
    before: Prefix,
    name: u64,
    /// Blocks that continue this one, in a list through their `next`.
    first_child: Option<PageId>,
    next: Option<PageId>,
    previous: Option<PageId>,
}

impl PrefixIndex {
    pub(crate) fn new(config: &KvConfig) -> Self {
        Self {
            by_hash: HashTable::with_capacity(config.num_pages),
            entries: vec![None; config.num_pages],
            tokens: vec![0; config.capacity_tokens()],
            block_size: config.block_size.tokens(),
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
            // Names are never reused.
            last: self.last,
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
        let cached = self.entries.iter().enumerate();
        let mut cached: Vec<_> = cached
            .filter_map(|(index, entry)| Some((index, entry.as_ref()?)))
            .collect();
        // Names are given in order: those before come first.
        cached.sort_unstable_by_key(|(_, entry)| entry.name);
        let mut events = Vec::new();
        for (index, entry) in cached {
            journal.tell(&mut events, entry.before, entry.name, self.tokens_of(index));
        }
        events
    }

    /// Where the sequences of `salt` begin: they share nothing with those of another.
    pub(crate) fn root(&self, salt: Option<&str>) -> Prefix {
        let name = salt.map_or(0, |salt| Prefix::SALTED | self.salts.hash_one(salt));
        Prefix { name, block: None }
    }

    /// The text of `salt`; kept only while events are recorded.
    pub(crate) fn keep_salt(&self, salt: Option<&str>) -> Option<Box<str>> {
        self.journal.as_ref().and(salt).map(Box::from)
    }

    pub(crate) fn len(&self) -> usize {
        self.by_hash.len()
    }

    pub(crate) fn contains(&self, block: PageId) -> bool {
        self.entries[block.index()].is_some()
    }

    /// The block that holds exactly `tokens` after exactly `before`, and the name of the two together.
    pub(crate) fn find(&self, before: Prefix, tokens: &[TokenId]) -> Option<(PageId, Prefix)> {
        self.find_hashed(self.hash(before, tokens), before, tokens)
    }

    /// Caches `block` as holding `tokens` after `before`, in a sequence of `salt`. Where another block already does, that one
    /// stays the cached one; where the block before was evicted meanwhile, nobody would find this one. Returns the name of
    /// the two together.
    pub(crate) fn insert(
        &mut self,
        block: PageId,
        before: Prefix,
        tokens: &[TokenId],
        salt: Option<&str>,
    ) -> Prefix {
        let hash = self.hash(before, tokens);
        if let Some((_, name)) = self.find_hashed(hash, before, tokens) {
            return name;
        }
        if !self.is_cached(before) {
            return before;
        }
        self.last += 1;
        let name = self.last;
        self.tokens[block.index() * self.block_size..][..self.block_size].copy_from_slice(tokens);
        self.entries[block.index()] = Some(Entry {
            hash,
            before,
            name,
            first_child: None,
            next: None,
            previous: None,
        });
        self.link(block, before);
        let entries = &self.entries;
        self.by_hash
            .insert_unique(hash, block, |b| entries[b.index()].map_or(0, |entry| entry.hash));
        if let Some(journal) = &mut self.journal {
            journal.stored(before, name, tokens, salt);
        }
        Prefix {
            name,
            block: Some(block),
        }
    }

    /// Forgets `block`, and all blocks that continue it: a table that computed the same tokens in another block may have
    /// cached some behind this one, and hold them still. Returns how many that were.
    pub(crate) fn remove(&mut self, block: PageId) -> usize {
        let mut forgotten = 0;
        let mut at = block;
        while let Some(entry) = self.entries[at.index()] {
            if let Some(child) = entry.first_child {
                // Names grow from a block to those behind it, so this comes to an end.
                debug_assert_eq!(
                    self.entries[child.index()].map(|child| child.before.name),
                    Some(entry.name)
                );
                at = child;
                continue;
            }
            self.forget(at, entry);
            forgotten += 1;
            match entry.before.block {
                Some(parent) if at != block => at = parent,
                _ => break,
            }
        }
        forgotten
    }

    /// Forgets `block`, which no other continues.
    fn forget(&mut self, block: PageId, entry: Entry) {
        self.entries[block.index()] = None;
        match (entry.previous, entry.before.block) {
            (Some(previous), _) => self.change(previous, |previous| previous.next = entry.next),
            (None, Some(parent)) => self.change(parent, |parent| parent.first_child = entry.next),
            (None, None) => {}
        }
        if let Some(next) = entry.next {
            self.change(next, |next| next.previous = entry.previous);
        }
        let found = self.by_hash.find_entry(entry.hash, |&b| b == block);
        found.expect("every entry is in the table").remove();
        if let Some(journal) = &mut self.journal {
            journal.removed(entry.name);
        }
    }

    /// Puts `block` first among those that continue `before`.
    fn link(&mut self, block: PageId, before: Prefix) {
        let Some(parent) = before.block else { return };
        let mut next = None;
        self.change(parent, |parent| next = parent.first_child.replace(block));
        self.change(block, |block| block.next = next);
        if let Some(next) = next {
            self.change(next, |next| next.previous = Some(block));
        }
    }

    fn change(&mut self, block: PageId, change: impl FnOnce(&mut Entry)) {
        change(self.entries[block.index()].as_mut().expect("it is cached"));
    }

    /// Whether blocks that continue `prefix` can be found.
    fn is_cached(&self, prefix: Prefix) -> bool {
        prefix
            .block
            .is_none_or(|block| self.entries[block.index()].is_some_and(|entry| entry.name == prefix.name))
    }

    fn tokens_of(&self, index: usize) -> &[TokenId] {
        &self.tokens[index * self.block_size..][..self.block_size]
    }

    fn find_hashed(&self, hash: u64, before: Prefix, tokens: &[TokenId]) -> Option<(PageId, Prefix)> {
        let same = |block: &PageId| {
            self.entries[block.index()].is_some_and(|entry| entry.before == before)
                && self.tokens[block.index() * self.block_size..].starts_with(tokens)
        };
        let &block = self.by_hash.find(hash, same)?;
        let name = self.entries[block.index()]?.name;
        let block_of = Some(block);
        Some((
            block,
            Prefix {
                name,
                block: block_of,
            },
        ))
    }

    fn hash(&self, before: Prefix, tokens: &[TokenId]) -> u64 {
        let mut bytes = [0; 4 * MAX_BLOCK_SIZE];
        for (to, token) in bytes.chunks_exact_mut(4).zip(tokens) {
            to.copy_from_slice(&token.to_le_bytes());
        }
        xxh3_64_with_seed(&bytes[..4 * tokens.len()], self.seed ^ before.name)
    }

    /// Every cached block is found under its own identity, and under no other, behind one that is cached.
    pub(crate) fn check_invariants(&self) -> Result<(), String> {
        let mut cached = 0;
        for (index, entry) in self.entries.iter().enumerate() {
            let Some(entry) = entry else { continue };
            cached += 1;
            let found = self.find(entry.before, self.tokens_of(index));
            if found.map(|(block, _)| block.index()) != Some(index) {
                return Err(format!("cached block {index} is found as {found:?}"));
            }
            if !self.is_cached(entry.before) {
                return Err(format!("cached block {index} is behind one that is not"));
            }
        }
        if cached != self.by_hash.len() {
            return Err(format!(
                "{} blocks in the hash table, {cached} with an entry",
                self.by_hash.len()
            ));
        }
        Ok(())
    }
}

const MAX_BLOCK_SIZE: usize = 32;
