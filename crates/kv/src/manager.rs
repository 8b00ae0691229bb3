use plimsoll_core::{CacheEvent, KvConfig, PageId, TokenId};

use crate::{BlockTable, free_list::FreeList, prefix::PrefixIndex};

/// Too few blocks are unreferenced; nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{needed} KV blocks are needed and {available} are available: preempt or wait for a request to end")]
pub struct OutOfBlocks {
    /// Blocks asked for, headroom included.
    pub needed: usize,
    /// Blocks nobody references, cached ones included.
    pub available: usize,
}

/// Where the blocks are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvStats {
    /// All blocks.
    pub total: usize,
    /// Blocks referenced by at least one table.
    pub used: usize,
    /// Blocks whose content the prefix cache can share, referenced or not.
    pub cached: usize,
    /// Cached blocks given up since the start because their memory was needed, or that of the block before them.
    pub evictions: u64,
}

/// Limits which cached blocks a new table may share.
#[derive(Clone, Copy, Debug)]
pub struct Sharing<'a> {
    /// Share only blocks of tables with the same salt.
    pub salt: Option<&'a str>,
    /// Share at most this many tokens: later ones must be computed, even if they are cached.
    pub most: usize,
}

impl Default for Sharing<'_> {
    /// No limit.
    fn default() -> Self {
        Self {
            salt: None,
            most: usize::MAX,
        }
    }
}

/// Allocates the blocks of the KV cache.
#[derive(Debug)]
pub struct KvManager {
    config: KvConfig,
    prefix_caching: bool,
    /// Tables that hold each block.
    references: Vec<u32>,
    free: FreeList,
    index: PrefixIndex,
    evictions: u64,
}

impl KvManager {
    /// All blocks free, nothing cached.
    pub fn new(config: KvConfig, prefix_caching: bool) -> Self {
        Self {
            config,
            prefix_caching,
            references: vec![0; config.num_pages],
            free: FreeList::full(config.num_pages),
            index: PrefixIndex::new(&config),
            evictions: 0,
        }
    }

    /// Resets to an empty cache of `config`. Open tables become invalid.
    pub fn reset(&mut self, config: KvConfig) {
        self.index.reset(&config);
        self.config = config;
        self.references = vec![0; config.num_pages];
        self.free = FreeList::full(config.num_pages);
    }

    /// Enables event recording, for [`Self::take_events`]; the prefix cache must be empty.
    pub fn record_events(&mut self) {
        self.index.record();
    }

    /// Takes the recorded events; none if recording is off.
    pub fn take_events(&mut self) -> Vec<CacheEvent> {
        self.index.take_events()
    }

    /// A snapshot of the prefix cache as `Stored` events, if recording is on. Takes time linear in the cache.
    pub fn cached(&self) -> Vec<CacheEvent> {
        self.index.all()
    }

    /// The cache's size.
    pub fn config(&self) -> KvConfig {
        self.config
    }

    /// Blocks nobody references, cached ones included.
    pub fn available(&self) -> usize {
        self.free.len()
    }

    /// True if [`Self::open`] looks up prefixes.
    pub fn looks_up(&self, sharing: &Sharing<'_>) -> bool {
        self.prefix_caching && sharing.most > 0
    }

    /// A table with room for all of `tokens` that shares the longest cached prefix that `sharing` allows, at most all but the
    /// last token. Fails unless `headroom` blocks stay available.
    pub fn open(
        &mut self,
        tokens: &[TokenId],
        sharing: Sharing<'_>,
        headroom: usize,
    ) -> Result<BlockTable, OutOfBlocks> {
        let available = self.free.len();
        if available <= headroom {
            // Even a fully cached prompt needs one block; a long queue must not be hashed anew in every step.
            return Err(OutOfBlocks {
                needed: headroom + 1,
                available,
            });
        }
        let total = self.config.block_size.blocks_for(tokens.len());
        let mut table = self.longest_prefix(tokens, sharing, total);
        // Shared blocks that nobody else references leave the free list too.
        let idle = table
            .blocks
            .iter()
            .filter(|block| self.references[block.index()] == 0)
            .count();
        let needed = total - table.blocks.len() + idle + headroom;
        if needed > available {
            return Err(OutOfBlocks { needed, available });
        }
        // All hits first: what is referenced cannot be evicted for the rest.
        for &block in &table.blocks {
            self.retain(block);
        }
        self.grow(&mut table, total);
        Ok(table)
    }

    /// Makes room for `tokens` tokens in all.
    pub fn reserve(&mut self, table: &mut BlockTable, tokens: usize) -> Result<(), OutOfBlocks> {
        let total = self.config.block_size.blocks_for(tokens);
        let needed = total.saturating_sub(table.blocks.len());
        let available = self.free.len();
        if needed > available {
            return Err(OutOfBlocks { needed, available });
        }
        self.grow(table, total);
        Ok(())
    }

    /// Records that the KV of `tokens`, all tokens of the request so far, is computed: full blocks can be shared from now on.
    pub fn commit(&mut self, table: &mut BlockTable, tokens: &[TokenId]) {
        let block_size = self.config.block_size.tokens();
        assert!(
            (table.computed..=table.blocks.len() * block_size).contains(&tokens.len()),
            "{} tokens committed to a table of {} blocks with {} computed",
            tokens.len(),
            table.blocks.len(),
            table.computed,
        );
        let full = table.computed / block_size;
        table.computed = tokens.len();
        if self.prefix_caching {
            let new = tokens[full * block_size..].chunks_exact(block_size);
            for (block_tokens, &block) in new.zip(&table.blocks[full..]) {
                table.prefix = self
                    .index
                    .insert(block, table.prefix, block_tokens, table.salt.as_deref());
            }
        }
    }

    /// Drops the table's references. Cached blocks stay cached until their memory is needed.
    pub fn release(&mut self, table: BlockTable) {
        // From the end: a block is evicted before those it continues.
        for block in table.blocks.into_iter().rev() {
            let references = &mut self.references[block.index()];
            *references -= 1;
            if *references == 0 {
                if self.index.contains(block) {
                    self.free.push_back(block);
                } else {
                    self.free.push_front(block);
                }
            }
        }
    }

    /// Current numbers.
    pub fn stats(&self) -> KvStats {
        KvStats {
            total: self.config.num_pages,
            used: self.config.num_pages - self.free.len(),
            cached: self.index.len(),
            evictions: self.evictions,
        }
    }

    /// Audits everything against `tables`, which must be all tables that are open: no block is lost, counted wrongly, or
    /// at once shared and still to be written. Costs time linear in the cache; for tests and leak audits.
    pub fn check_invariants<'a>(
        &self,
        tables: impl IntoIterator<Item = &'a BlockTable>,
    ) -> Result<(), String> {
        let mut references = vec![0; self.config.num_pages];
        let mut unfinished = Vec::new();
        for table in tables {
            for (i, &block) in table.blocks.iter().enumerate() {
                references[block.index()] += 1;
                if (i + 1) * self.config.block_size.tokens() > table.computed {
                    unfinished.push(block);
                }
            }
        }
        if references != self.references {
            return Err(format!(
                "reference counts are {:?}, tables hold {references:?}",
                self.references
            ));
        }
        if let Some(block) = unfinished
            .iter()
            .find(|b| references[b.index()] > 1 || self.index.contains(**b))
        {
            return Err(format!("block {} is shared before it is computed", block.0));
        }
        let free: Vec<_> = self.free.iter().collect();
        if free.len() != self.free.len()
            || free.len() != references.iter().filter(|&&count| count == 0).count()
        {
            return Err(format!(
                "the free list {free:?} disagrees with the reference counts {references:?}"
            ));
        }
        if let Some(block) = free.iter().find(|block| references[block.index()] > 0) {
            return Err(format!("block {} is free and referenced", block.0));
        }
        self.index.check_invariants()
    }

    fn longest_prefix(&self, tokens: &[TokenId], sharing: Sharing<'_>, capacity: usize) -> BlockTable {
        let mut table = BlockTable {
            blocks: Vec::with_capacity(capacity),
            computed: 0,
            prefix: self.index.root(sharing.salt),
            salt: self.index.keep_salt(sharing.salt),
        };
        if self.prefix_caching {
            let shareable = &tokens[..tokens.len().saturating_sub(1)];
            let shareable = &shareable[..shareable.len().min(sharing.most)];
            for block_tokens in shareable.chunks_exact(self.config.block_size.tokens()) {
                let Some((block, prefix)) = self.index.find(table.prefix, block_tokens) else {
                    break;
                };
                table.blocks.push(block);
                table.computed += block_tokens.len();
                table.prefix = prefix;
            }
        }
        table
    }

    fn retain(&mut self, block: PageId) {
        let references = &mut self.references[block.index()];
        if *references == 0 {
            self.free.remove(block);
        }
        *references += 1;
    }

    /// Lengthens `table` to `total` blocks; the caller has checked that they exist.
    fn grow(&mut self, table: &mut BlockTable, total: usize) {
        while table.blocks.len() < total {
            let block = self
                .free
                .pop_front()
                .expect("the number of free blocks was checked");
            self.evictions += self.index.remove(block) as u64;
            self.references[block.index()] = 1;
            table.blocks.push(block);
        }
    }
}
