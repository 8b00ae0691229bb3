use std::hash::{BuildHasher, RandomState};

use hashbrown::HashTable;
use plimsoll_core::{BlockId, KvConfig, TokenId};
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Names one exact sequence of tokens, a whole number of blocks long. Never given to another sequence: after the block
/// that carried it is evicted, blocks that continue it can no longer be reached and age out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Prefix(u64);

impl Prefix {
    const EMPTY: Self = Self(0);
    /// In the names of salts, which no sequence of tokens reaches by counting.
    const SALTED: u64 = 1 << 63;
}

/// Which block holds which tokens. The identity of a cached block is (everything before it, its own tokens); both are
/// compared, the hash only finds candidates, so a collision costs time and never correctness.
#[derive(Debug)]
pub(crate) struct PrefixIndex {
    by_hash: HashTable<BlockId>,
    entries: Vec<Option<Entry>>,
    /// Tokens of every cached block: `block_size` for each block of the cache.
    tokens: Vec<TokenId>,
    block_size: usize,
    last: Prefix,
    /// Unpredictable, lest a client craft prompts that collide.
    seed: u64,
    /// Likewise keyed: nobody finds a salt with the name of another.
    salts: RandomState,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    hash: u64,
    before: Prefix,
    name: Prefix,
}

impl PrefixIndex {
    pub(crate) fn new(config: &KvConfig) -> Self {
        Self {
            by_hash: HashTable::with_capacity(config.num_blocks),
            entries: vec![None; config.num_blocks],
            tokens: vec![0; config.capacity_tokens()],
            block_size: config.block_size.tokens(),
            last: Prefix::EMPTY,
            seed: RandomState::new().hash_one(0),
            salts: RandomState::new(),
        }
    }

    /// Where the sequences of `salt` begin: they share nothing with those of another.
    pub(crate) fn root(&self, salt: Option<&str>) -> Prefix {
        salt.map_or(Prefix::EMPTY, |salt| {
            Prefix(Prefix::SALTED | self.salts.hash_one(salt))
        })
    }

    pub(crate) fn len(&self) -> usize {
        self.by_hash.len()
    }

    pub(crate) fn contains(&self, block: BlockId) -> bool {
        self.entries[block.index()].is_some()
    }

    /// The block that holds exactly `tokens` after exactly `before`, and the name of the two together.
    pub(crate) fn find(&self, before: Prefix, tokens: &[TokenId]) -> Option<(BlockId, Prefix)> {
        self.find_hashed(self.hash(before, tokens), before, tokens)
    }

    /// Caches `block` as holding `tokens` after `before`. Where another block already does, that one stays the cached one.
    /// Returns the name of the two together.
    pub(crate) fn insert(&mut self, block: BlockId, before: Prefix, tokens: &[TokenId]) -> Prefix {
        let hash = self.hash(before, tokens);
        if let Some((_, name)) = self.find_hashed(hash, before, tokens) {
            return name;
        }
        self.last = Prefix(self.last.0 + 1);
        let name = self.last;
        self.tokens[block.index() * self.block_size..][..self.block_size].copy_from_slice(tokens);
        self.entries[block.index()] = Some(Entry { hash, before, name });
        let entries = &self.entries;
        self.by_hash
            .insert_unique(hash, block, |b| entries[b.index()].map_or(0, |entry| entry.hash));
        name
    }

    /// Forgets `block`; true where it was cached.
    pub(crate) fn remove(&mut self, block: BlockId) -> bool {
        let Some(entry) = self.entries[block.index()].take() else {
            return false;
        };
        let found = self.by_hash.find_entry(entry.hash, |&b| b == block);
        found.expect("every entry is in the table").remove();
        true
    }

    fn find_hashed(&self, hash: u64, before: Prefix, tokens: &[TokenId]) -> Option<(BlockId, Prefix)> {
        let same = |block: &BlockId| {
            self.entries[block.index()].is_some_and(|entry| entry.before == before)
                && self.tokens[block.index() * self.block_size..].starts_with(tokens)
        };
        let &block = self.by_hash.find(hash, same)?;
        self.entries[block.index()].map(|entry| (block, entry.name))
    }

    fn hash(&self, before: Prefix, tokens: &[TokenId]) -> u64 {
        let mut bytes = [0; 4 * MAX_BLOCK_SIZE];
        for (to, token) in bytes.chunks_exact_mut(4).zip(tokens) {
            to.copy_from_slice(&token.to_le_bytes());
        }
        xxh3_64_with_seed(&bytes[..4 * tokens.len()], self.seed ^ before.0)
    }

    /// Every cached block is found under its own identity, and under no other.
    pub(crate) fn check_invariants(&self) -> Result<(), String> {
        let mut cached = 0;
        for (index, entry) in self.entries.iter().enumerate() {
            let Some(entry) = entry else { continue };
            cached += 1;
            let tokens = &self.tokens[index * self.block_size..][..self.block_size];
            let found = self.find(entry.before, tokens);
            if found.map(|(block, _)| block.index()) != Some(index) {
                return Err(format!("cached block {index} is found as {found:?}"));
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
