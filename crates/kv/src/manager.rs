mod known;
mod states;

use std::sync::Arc;

use plimsoll_core::{
    CacheEvent, CacheGroup, CacheGroups, CacheKind, GroupTable, ImageSpan, KvConfig, PageId, StateSlot,
    TokenId,
};

pub use known::KnownPrefix;

use crate::{
    BlockTable,
    content::{BlockContent, Content, images_of},
    no_room::{NoRoom, OutOfPages},
    pool::Pool,
    prefix::PrefixIndex,
    slots::{SlotStats, Slots},
    state::TableState,
};

/// Use of the KV cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvStats {
    /// All pages.
    pub total: usize,
    /// Pages referenced by at least one table.
    pub used: usize,
    /// Blocks of each group.
    pub groups: [GroupStats; CacheGroups::MAX],
    /// Slots for states.
    pub slots: SlotStats,
    /// Cached blocks given up since the start because their memory was needed, or that of the block before them.
    pub evictions: u64,
}

impl KvStats {
    /// Blocks of all groups that the prefix cache can share.
    pub fn cached(&self) -> usize {
        self.groups.iter().map(|group| group.cached).sum()
    }
}

/// Use of one cache group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupStats {
    /// Blocks referenced by at least one table.
    pub used: usize,
    /// Blocks that the prefix cache can share, referenced or not.
    pub cached: usize,
}

/// Limits which cached blocks a new table may share.
#[derive(Clone, Copy, Debug)]
pub struct Sharing<'a> {
    /// Share only blocks of tables with the same salt.
    pub salt: Option<&'a str>,
    /// The images of the prompt: only blocks with the same are shared.
    pub images: Option<&'a Arc<[ImageSpan]>>,
    /// Share at most this many tokens: later ones must be computed, even if they are cached.
    pub most: usize,
    /// Tokens of the prompt; those behind it are of an answer that is computed again.
    pub prompt: usize,
}

impl Default for Sharing<'_> {
    /// No limit.
    fn default() -> Self {
        Self {
            salt: None,
            images: None,
            most: usize::MAX,
            prompt: usize::MAX,
        }
    }
}

/// Owns every page of the KV cache and hands them out to requests.
#[derive(Debug)]
pub struct KvManager {
    config: KvConfig,
    /// Most tokens of a request that a step computes.
    longest_run: usize,
    /// As [`Self::with_state_chunk`].
    state_chunk: usize,
    prefix_caching: bool,
    /// Tables that hold each block, by its first page.
    references: Vec<u32>,
    /// Blocks of each group that are referenced.
    used: [usize; CacheGroups::MAX],
    pool: Pool,
    slots: Slots,
    index: PrefixIndex,
    evictions: u64,
    /// Snapshots given up.
    given_up: u64,
}

impl KvManager {
    /// All pages and slots free, nothing cached. A step computes at most `longest_run` tokens of a request.
    pub fn new(config: KvConfig, longest_run: usize, prefix_caching: bool) -> Self {
        Self {
            config,
            longest_run,
            state_chunk: 1,
            prefix_caching,
            references: vec![0; config.num_pages],
            used: [0; CacheGroups::MAX],
            pool: Pool::full(config.num_pages),
            slots: Slots::new(config.state_slots),
            index: PrefixIndex::new(&config),
            evictions: 0,
            given_up: 0,
        }
    }

    /// Prompts are cut at multiples of so many tokens, a power of two, where layers have states:
    /// [`plimsoll_core::Executor::state_chunk`].
    pub fn with_state_chunk(self, tokens: usize) -> Self {
        assert!(tokens.is_power_of_two(), "{tokens} tokens");
        Self {
            state_chunk: tokens,
            ..self
        }
    }

    /// What [`Self::with_state_chunk`] set; 1 without it.
    pub fn state_chunk(&self) -> usize {
        self.state_chunk
    }

    /// Resets to an empty cache of `config`. Open tables become invalid.
    pub fn reset(&mut self, config: KvConfig) {
        self.index.reset(&config);
        self.config = config;
        self.references = vec![0; config.num_pages];
        self.used = [0; CacheGroups::MAX];
        self.pool = Pool::full(config.num_pages);
        self.slots = Slots::new(config.state_slots);
    }

    /// Empties the prefix cache. Open tables stay valid; the blocks that they have computed so far are not shared.
    pub fn forget_cached(&mut self) {
        self.index.reset(&self.config);
        self.slots.forget_all();
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

    /// Unreferenced pages, cached ones included.
    pub fn available(&self) -> usize {
        self.pool.available()
    }

    /// Whether the cache can hold all of a request of `tokens` tokens, alone.
    pub fn fits(&self, tokens: usize) -> bool {
        self.config.request_pages(tokens, self.longest_run) <= self.config.num_pages
    }

    /// Tokens of the longest request that fits.
    pub fn longest_request(&self) -> usize {
        self.config.longest_request(self.longest_run)
    }

    /// True if [`Self::open`] looks up prefixes.
    pub fn looks_up(&self, sharing: &Sharing<'_>) -> bool {
        self.prefix_caching && sharing.most > 0
    }

    /// A table for `tokens` that shares the longest cached prefix that `sharing` allows, at most all but the last token. It has
    /// room for all of them, or in a group with a window for as many as it ever holds at once. Fails unless `headroom`
    /// pages stay available. Where layers have states, the table gets a slot too, and a prefix ends with a snapshot.
    pub fn open(
        &mut self,
        tokens: &[TokenId],
        sharing: Sharing<'_>,
        headroom: usize,
    ) -> Result<BlockTable, NoRoom> {
        let available = self.pool.available();
        if available <= headroom {
            // Even a fully cached prompt needs one page; this avoids hashing a long queue in every step.
            return Err(OutOfPages {
                needed: headroom + 1,
                available,
            }
            .into());
        }
        let (mut table, hit) = self.longest_prefix(tokens, sharing);
        let total = self.config.block_size.blocks_for(tokens.len());
        let groups = self.config.groups;
        let ends = |table: &BlockTable| {
            let mut ends = [0; CacheGroups::MAX];
            for ((end, group), held) in ends.iter_mut().zip(&groups).zip(&table.groups) {
                let most = group.most_blocks(self.config.block_size, tokens.len(), self.longest_run);
                *end = total.min(held.first + most).max(held.end(group));
            }
            ends
        };
        let ends = ends(&table);
        let mut needed = headroom;
        for ((&end, group), held) in ends.iter().zip(&groups).zip(&table.groups) {
            needed += (end - held.end(group)) * group.pages_per_block;
            // Shared blocks without references leave the pool too.
            let idle = heads(held, group).filter(|head| self.references[head.index()] == 0);
            needed += idle.count() * group.pages_per_block;
        }
        if needed > available {
            return Err(OutOfPages { needed, available }.into());
        }
        if groups.state_layers() > 0 {
            let Hit { state, cached } = hit;
            let prompt = tokens.len().min(sharing.prompt);
            table.state = Some(self.open_state(state, table.computed, cached, prompt)?);
        }
        // All hits first: what is referenced cannot be evicted for the rest.
        for ((held, group), used) in table.groups.iter().zip(&groups).zip(&mut self.used) {
            for head in heads(held, group) {
                let references = &mut self.references[head.index()];
                if *references == 0 {
                    self.pool.claim(head);
                    *used += 1;
                }
                *references += 1;
            }
        }
        for (index, held) in table.groups.iter_mut().enumerate() {
            self.grow(held, index, ends[index]);
        }
        Ok(table)
    }

    /// Makes room for `tokens` tokens in all.
    pub fn reserve(&mut self, table: &mut BlockTable, tokens: usize) -> Result<(), OutOfPages> {
        let total = self.config.block_size.blocks_for(tokens);
        let groups = self.config.groups;
        let missing = table.groups.iter().zip(&groups).map(|(held, group)| {
            let blocks = total.saturating_sub(held.end(group));
            blocks * group.pages_per_block
        });
        let needed = missing.sum();
        let available = self.pool.available();
        if needed > available {
            return Err(OutOfPages { needed, available });
        }
        if needed > 0 {
            for (index, held) in table.groups.iter_mut().enumerate() {
                self.grow(held, index, total);
            }
        }
        Ok(())
    }

    /// The KV of `tokens`, all tokens of the request so far, is computed: blocks that became full can be shared from now on, and
    /// those that no later token sees go back.
    pub fn commit(&mut self, table: &mut BlockTable, tokens: &[TokenId]) {
        let block_size = self.config.block_size.tokens();
        let room = table.room(&self.config);
        assert!(
            (table.computed..=room).contains(&tokens.len()),
            "{} tokens committed to a table with room for {room}, {} computed",
            tokens.len(),
            table.computed,
        );
        let full = table.computed / block_size;
        table.computed = tokens.len();
        let groups = self.config.groups;
        if self.prefix_caching {
            let new = tokens[full * block_size..].chunks_exact(block_size);
            for (index, block_tokens) in (full..).zip(new) {
                let Some(before) = table.prefix else { break };
                let mut blocks = [None; CacheGroups::MAX];
                for ((block, held), group) in blocks.iter_mut().zip(&table.groups).zip(&groups) {
                    *block = Some(held.block(group, index)[0]);
                }
                let spans = table.images.as_deref().unwrap_or_default();
                let content = Content {
                    tokens: block_tokens,
                    images: &images_of(spans, index * block_size, block_size),
                };
                table.prefix = self.index.insert(blocks, before, content, table.salt.as_deref());
            }
        }
        self.commit_state(table);
        for (index, (held, group)) in table.groups.iter_mut().zip(&groups).enumerate() {
            let first = group.first_block(self.config.block_size, table.computed);
            if first > held.first {
                let behind = (first - held.first) * group.pages_per_block;
                let behind: Vec<PageId> = held.pages.drain(..behind).collect();
                held.first = first;
                for pages in behind.chunks_exact(group.pages_per_block).rev() {
                    self.drop_reference(index, pages[0]);
                }
            }
        }
    }

    /// The row of the last computed token is finite, and so is everything that it attends to.
    pub fn confirm(&mut self, table: &BlockTable) {
        let Some(prefix) = table.prefix.filter(|_| self.prefix_caching) else {
            return;
        };
        let block_size = self.config.block_size.tokens();
        let groups = self.config.groups.iter();
        // Of a block that lies partly behind a window, the row does not see all.
        let seen = groups.map(|group| group.kind.first_visible(table.computed).div_ceil(block_size));
        let blocks = seen.max().unwrap_or(0)..table.computed / block_size;
        self.index.confirm(prefix, table.groups(), blocks);
    }

    /// A row behind the computed tokens is not finite, and it is not known which of them was the first. Of their blocks, those that no finite
    /// row has confirmed leave the prefix cache, whoever computed them, and nothing that the table computes from here on is cached.
    pub fn distrust(&mut self, table: &mut BlockTable) {
        let groups = table.groups.iter().zip(&self.config.groups);
        let held = groups.flat_map(|(held, group)| heads(held, group));
        self.index.distrust(table.prefix.take(), held);
        for slot in self.index.take_dropped() {
            self.slots.forget(slot);
        }
    }

    /// Drops the table's references. Cached blocks stay cached until their memory is needed.
    pub fn release(&mut self, mut table: BlockTable) {
        if let Some(state) = table.state.take() {
            self.release_state(&table, state);
        }
        let groups = self.config.groups;
        for (index, (held, group)) in table.groups.iter().zip(&groups).enumerate() {
            // From the end: a block is evicted before those it continues.
            for pages in held.pages.chunks_exact(group.pages_per_block).rev() {
                self.drop_reference(index, pages[0]);
            }
        }
    }

    fn drop_reference(&mut self, group: usize, head: PageId) {
        let references = &mut self.references[head.index()];
        *references -= 1;
        if *references == 0 {
            // Where no more can be cached, what is cached must get its turn to go.
            let last = self.index.contains(head) || self.index.is_full();
            self.pool.put(head, last);
            self.used[group] -= 1;
        }
    }

    /// Current numbers.
    pub fn stats(&self) -> KvStats {
        let cached = self.index.cached();
        KvStats {
            total: self.config.num_pages,
            used: self.config.num_pages - self.pool.available(),
            groups: std::array::from_fn(|group| GroupStats {
                used: self.used[group],
                cached: cached[group],
            }),
            slots: self.slot_stats(),
            evictions: self.evictions,
        }
    }

    /// Audits everything against `tables`, which must be all tables that are open: no page is lost, counted wrongly, or
    /// at once shared and still to be written. Costs time linear in the cache; for tests and leak audits.
    pub fn check_invariants<'a>(
        &self,
        tables: impl IntoIterator<Item = &'a BlockTable>,
    ) -> Result<(), String> {
        let mut references = vec![0; self.config.num_pages];
        // The block of each page, by its first.
        let mut owners: Vec<Option<PageId>> = vec![None; self.config.num_pages];
        let mut used = [0; CacheGroups::MAX];
        let (mut unfinished, mut slots) = (Vec::new(), Vec::new());
        for table in tables {
            slots.extend(table.state.iter().flat_map(TableState::held));
            for ((held, group), used) in table.groups.iter().zip(&self.config.groups).zip(&mut used) {
                let needed = group.first_block(self.config.block_size, table.computed);
                if held.first != needed {
                    return Err(format!("a table begins at block {}, not {needed}", held.first));
                }
                for (pages, index) in held.pages.chunks(group.pages_per_block).zip(held.first..) {
                    let head = pages[0];
                    references[head.index()] += 1;
                    *used += usize::from(references[head.index()] == 1);
                    for page in pages {
                        if owners[page.index()]
                            .replace(head)
                            .is_some_and(|other| other != head)
                        {
                            return Err(format!("page {} is in two blocks", page.0));
                        }
                    }
                    if (index + 1) * self.config.block_size.tokens() > table.computed {
                        unfinished.push(head);
                    }
                }
            }
        }
        if (&references, used) != (&self.references, self.used) {
            return Err(format!(
                "reference counts are {:?}, by group {:?}; tables hold {references:?} and {used:?}",
                self.references, self.used
            ));
        }
        if let Some(block) = unfinished
            .iter()
            .find(|b| references[b.index()] > 1 || self.index.contains(**b))
        {
            return Err(format!("block {} is shared before it is computed", block.0));
        }
        let free: Vec<_> = self.pool.iter().collect();
        let mut idle = owners.iter().map(Option::is_none).collect::<Vec<_>>();
        let unowned = idle.iter().filter(|&&idle| idle).count();
        let each_once = free.iter().all(|page| std::mem::take(&mut idle[page.index()]));
        if !each_once || free.len() != self.pool.available() || free.len() != unowned {
            return Err(format!(
                "{} pages are available as {free:?}, and tables hold all but {unowned}",
                self.pool.available()
            ));
        }
        self.slots
            .check_invariants(slots.into_iter(), |slot| self.index.is_snapshot(slot))?;
        self.index.check_invariants()
    }

    /// The blocks of `tokens` that may be shared, but for the first `known`; none where nothing is.
    fn shareable<'a>(
        &self,
        tokens: &'a [TokenId],
        sharing: Sharing<'a>,
        known: usize,
    ) -> impl Iterator<Item = BlockContent<'a>> {
        let block_size = self.config.block_size.tokens();
        let most = if self.prefix_caching { sharing.most } else { 0 };
        let shareable = &tokens[..tokens.len().saturating_sub(1)];
        let shareable = &shareable[..shareable.len().min(most)];
        let blocks = shareable.chunks_exact(block_size).enumerate().skip(known);
        let spans = sharing.images.map_or(&[][..], |images| &images[..]);
        blocks.map(move |(index, tokens)| BlockContent {
            tokens,
            images: images_of(spans, index * block_size, block_size),
        })
    }

    /// The longest prefix of which every group has what a query behind it sees, and the state behind it where layers have one.
    fn longest_prefix(&self, tokens: &[TokenId], sharing: Sharing<'_>) -> (BlockTable, Hit) {
        let block_size = self.config.block_size;
        let groups = self.config.groups.as_slice();
        let root = self.index.root(sharing.salt);
        let mut found = Vec::new();
        let (mut best, mut prefix, mut hit) = (0, root, Hit::default());
        if self.prefix_caching {
            // Blocks in a row that each group has, up to the last one found.
            let mut rows = [0; CacheGroups::MAX];
            let mut at = root;
            for block in self.shareable(tokens, sharing, 0) {
                let Some(next) = self.index.find(at, block.content()) else {
                    break;
                };
                let blocks = next.blocks;
                at = next.prefix;
                found.push(blocks);
                let end = found.len();
                let mut whole = true;
                for ((row, block), group) in rows.iter_mut().zip(blocks).zip(groups) {
                    *row = if block.is_some() { *row + 1 } else { 0 };
                    let first = group.first_block(block_size, end * block_size.tokens());
                    whole &= *row >= end - first;
                }
                if whole {
                    hit.cached = end * block_size.tokens();
                }
                if whole && (next.state.is_some() || self.config.groups.state_layers() == 0) {
                    (best, prefix, hit.state) = (end, at, next.state);
                }
            }
        }
        let computed = best * block_size.tokens();
        let shared = groups.iter().enumerate().map(|(index, group)| {
            let first = group.first_block(block_size, computed);
            let heads = found[first.min(best)..best]
                .iter()
                .filter_map(|blocks| blocks[index]);
            let mut pages = Vec::with_capacity(match group.kind {
                CacheKind::Full => block_size.blocks_for(tokens.len()) * group.pages_per_block,
                CacheKind::Window(_) => 0,
            });
            for head in heads {
                pages.extend(self.pool.pages(head));
            }
            GroupTable { first, pages }
        });
        let table = BlockTable {
            groups: shared.collect(),
            state: None,
            computed,
            prefix: Some(prefix),
            salt: self.index.keep_salt(sharing.salt),
            images: sharing.images.cloned(),
        };
        (table, hit)
    }

    /// Lengthens a table up to block `end`; the caller has checked that the pages exist.
    fn grow(&mut self, table: &mut GroupTable, index: usize, end: usize) {
        let group = self.config.groups.as_slice()[index];
        while table.end(&group) < end {
            self.used[index] += 1;
            let start = table.pages.len();
            for _ in 0..group.pages_per_block {
                let page = self
                    .pool
                    .take()
                    .expect("the number of available pages was checked");
                self.evictions += self.index.evict(page) as u64;
                for slot in self.index.take_dropped() {
                    self.slots.forget(slot);
                }
                table.pages.push(page);
            }
            self.pool.join(&table.pages[start..]);
            self.references[table.pages[start].index()] = 1;
        }
    }
}

/// What a lookup found beside blocks.
#[derive(Clone, Copy, Debug, Default)]
struct Hit {
    /// The state behind the prefix.
    state: Option<StateSlot>,
    /// Tokens of the longest prefix whose KV is there, with a state or without.
    cached: usize,
}

/// The first pages of a table's blocks.
fn heads(table: &GroupTable, group: &CacheGroup) -> impl Iterator<Item = PageId> {
    table.pages.iter().step_by(group.pages_per_block).copied()
}
