//! The manager against a naive model that keeps all tokens of everything and searches them from end to end, and against what
//! a router makes of its events; with one to three cache groups, and with states, of which the model knows what is in each slot.

#[path = "../../sim/src/router.rs"]
mod router;

use std::collections::{BTreeMap, HashMap, VecDeque};

use plimsoll_core::{
    BlockSize, CacheGroup, CacheKind, CacheLayout, KvConfig, PageId, RunState, StateSlot, TokenId,
};
use plimsoll_kv::{BlockTable, KnownPrefix, KvManager, Sharing};
use proptest::{collection::vec, prelude::*};
use router::Router;

const BLOCK_SIZE: usize = 8;

/// The pages of one block.
type Block = Vec<PageId>;

/// A cached sequence of whole blocks, and the last block of it in each group that has it.
struct Cached {
    /// Never given again.
    number: u64,
    salted: bool,
    tokens: Vec<TokenId>,
    blocks: Vec<Option<Block>>,
}

struct NaiveTable {
    salted: bool,
    computed: usize,
    /// Number of the cached sequence that ends with the last full computed block; 0 for none yet.
    cached: u64,
    /// Blocks of each group by index.
    groups: Vec<BTreeMap<usize, Block>>,
}

struct Naive {
    kv: KvConfig,
    chunk: usize,
    /// Unreferenced blocks, next to be taken first.
    free: Vec<Block>,
    cached: Vec<Cached>,
    tables: Vec<NaiveTable>,
    last_number: u64,
    evictions: u64,
    /// The tokens behind which each slot holds the state.
    states: HashMap<StateSlot, (bool, Vec<TokenId>)>,
}

/// The first block that a query at `position` sees.
fn first_seen(group: &CacheGroup, position: usize) -> usize {
    let sees = |key: &usize| match group.kind {
        CacheKind::Full => true,
        CacheKind::Window(window) => position - key < window,
    };
    (0..=position).find(sees).expect("a query sees itself") / BLOCK_SIZE
}

impl Naive {
    fn new(kv: KvConfig, chunk: usize) -> Self {
        let free = (0..kv.num_pages as u32).map(|page| vec![PageId(page)]);
        Self {
            kv,
            chunk,
            free: free.collect(),
            cached: Vec::new(),
            tables: Vec::new(),
            last_number: 0,
            evictions: 0,
            states: HashMap::new(),
        }
    }

    fn has_states(&self) -> bool {
        self.kv.groups.state_layers() > 0
    }

    /// Runs a table's tokens `start..tokens.len()`. A state is that of the tokens before, whoever computed it.
    fn run(&mut self, salted: bool, start: usize, tokens: &[TokenId], state: RunState) -> Result<(), String> {
        let found = state.before.map(|slot| self.states.get(&slot));
        let expected = (salted, tokens[..start].to_vec());
        if found != (start > 0).then_some(Some(&expected)) {
            return Err(format!(
                "{state:?} is not the state of {expected:?}, but {found:?}"
            ));
        }
        self.states.insert(state.after, (salted, tokens.to_vec()));
        Ok(())
    }

    fn groups(&self) -> Vec<CacheGroup> {
        self.kv.groups.as_slice().to_vec()
    }

    /// Sequences that can be cached at once.
    fn most_cached(&self) -> usize {
        match self.groups()[0] {
            CacheGroup {
                kind: CacheKind::Full,
                pages_per_block,
                ..
            } => self.kv.num_pages / pages_per_block,
            _ => 2 * self.kv.num_pages,
        }
    }

    fn find(&self, salted: bool, tokens: &[TokenId]) -> Option<usize> {
        let mut cached = self.cached.iter();
        cached.position(|cached| (cached.salted, cached.tokens.as_slice()) == (salted, tokens))
    }

    fn block(&self, salted: bool, tokens: &[TokenId], group: usize) -> Option<&Block> {
        self.cached[self.find(salted, tokens)?].blocks[group].as_ref()
    }

    /// Blocks of the longest prefix that every group can serve.
    fn hit(&self, salted: bool, tokens: &[TokenId]) -> usize {
        let has_all = |&end: &usize| {
            self.groups().iter().enumerate().all(|(index, group)| {
                let mut seen = first_seen(group, end * BLOCK_SIZE)..end;
                seen.all(|block| {
                    self.block(salted, &tokens[..(block + 1) * BLOCK_SIZE], index)
                        .is_some()
                })
            })
        };
        (0..=tokens.len() / BLOCK_SIZE)
            .rev()
            .find(has_all)
            .expect("nothing needs nothing")
    }

    /// Whether a cached sequence is still of use.
    fn is_kept(&self, index: usize) -> bool {
        let Cached {
            salted,
            tokens,
            blocks,
            ..
        } = &self.cached[index];
        let before = &tokens[..tokens.len() - BLOCK_SIZE];
        match self.groups()[0].kind {
            // It is found, and what comes before it is.
            CacheKind::Full => {
                blocks[0].is_some() && (before.is_empty() || self.find(*salted, before).is_some())
            }
            // It, or what continues it, has a block.
            CacheKind::Window(_) => self.cached.iter().any(|other| {
                let continues = other.salted == *salted && other.tokens.starts_with(tokens);
                continues && other.blocks.iter().any(Option::is_some)
            }),
        }
    }

    fn blocks_cached(&self, group: usize) -> usize {
        self.cached
            .iter()
            .filter(|cached| cached.blocks[group].is_some())
            .count()
    }

    fn is_cached(&self, block: &Block) -> bool {
        let mut blocks = self.cached.iter().flat_map(|cached| &cached.blocks);
        blocks.any(|cached| cached.as_ref() == Some(block))
    }

    /// Takes the next free page, which may begin a cached block.
    fn take(&mut self) -> PageId {
        let count = |naive: &Self| {
            (0..naive.groups().len())
                .map(|group| naive.blocks_cached(group))
                .sum::<usize>()
        };
        let before = count(self);
        let block = self.free.remove(0);
        for cached in self.cached.iter_mut().flat_map(|cached| &mut cached.blocks) {
            if cached.as_ref() == Some(&block) {
                *cached = None;
            }
        }
        while let Some(lost) = (0..self.cached.len()).find(|&index| !self.is_kept(index)) {
            self.cached.remove(lost);
        }
        self.evictions += (before - count(self)) as u64;
        if block.len() > 1 {
            self.free.insert(0, block[1..].to_vec());
        }
        block[0]
    }

    fn free_pages(&self) -> usize {
        self.free.iter().map(Vec::len).sum()
    }

    /// Where layers have states, `snapshot` is the number of tokens of the longest prefix with one.
    fn open(
        &mut self,
        tokens: &[TokenId],
        salted: bool,
        most: usize,
        headroom: usize,
        snapshot: Option<usize>,
    ) -> bool {
        let shareable = &tokens[..most.min(tokens.len() - 1)];
        let hit = snapshot.map_or_else(|| self.hit(salted, shareable), |tokens| tokens / BLOCK_SIZE);
        let total = tokens.len().div_ceil(BLOCK_SIZE);
        let mut free = self.free.clone();
        let (mut groups, mut ends, mut needed) = (Vec::new(), Vec::new(), headroom);
        for (index, group) in self.groups().iter().enumerate() {
            let first = first_seen(group, hit * BLOCK_SIZE);
            let shared = (first..hit).map(|block| {
                let found = self.block(salted, &tokens[..(block + 1) * BLOCK_SIZE], index);
                (block, found.expect("it is a hit").clone())
            });
            let shared: BTreeMap<_, _> = shared.collect();
            free.retain(|block| !shared.values().any(|shared| shared == block));
            // Room for everything, or for the most blocks that the tokens touch which a chunk computes or sees.
            let end = match group.kind {
                CacheKind::Full => total,
                CacheKind::Window(window) => {
                    let span = window - 1 + self.chunk;
                    let touched = (0..BLOCK_SIZE).map(|offset| (offset + span).div_ceil(BLOCK_SIZE));
                    total
                        .min(first + touched.max().expect("there are offsets"))
                        .max(hit)
                }
            };
            needed += (end - hit) * group.pages_per_block;
            groups.push(shared);
            ends.push(end);
        }
        if free.iter().map(Vec::len).sum::<usize>() < needed {
            return false;
        }
        self.free = free;
        self.tables.push(NaiveTable {
            salted,
            computed: hit * BLOCK_SIZE,
            cached: self
                .find(salted, &tokens[..hit * BLOCK_SIZE])
                .map_or(0, |found| self.cached[found].number),
            groups,
        });
        for (group, end) in ends.into_iter().enumerate() {
            self.grow(self.tables.len() - 1, group, hit, end);
        }
        true
    }

    fn grow(&mut self, table: usize, group: usize, from: usize, to: usize) {
        for index in from..to {
            let block = (0..self.groups()[group].pages_per_block)
                .map(|_| self.take())
                .collect();
            self.tables[table].groups[group].insert(index, block);
        }
    }

    fn end(&self, table: usize, group: usize) -> usize {
        let NaiveTable { groups, computed, .. } = &self.tables[table];
        // A window of one token holds nothing at the end of a block.
        groups[group]
            .keys()
            .next_back()
            .map_or(computed / BLOCK_SIZE, |last| last + 1)
    }

    fn reserve(&mut self, table: usize, tokens: usize) -> bool {
        let total = tokens.div_ceil(BLOCK_SIZE);
        let groups = self.groups();
        let missing = groups
            .iter()
            .enumerate()
            .map(|(index, group)| total.saturating_sub(self.end(table, index)) * group.pages_per_block);
        if missing.sum::<usize>() > self.free_pages() {
            return false;
        }
        for group in 0..groups.len() {
            self.grow(table, group, self.end(table, group), total);
        }
        true
    }

    fn commit(&mut self, table: usize, tokens: &[TokenId]) {
        let NaiveTable { salted, computed, .. } = self.tables[table];
        for index in computed / BLOCK_SIZE..tokens.len() / BLOCK_SIZE {
            let before = self.tables[table].cached;
            // Where the past was evicted meanwhile nothing is cached behind it, even if somebody else computed it again.
            if before != 0 && self.cached.iter().all(|cached| cached.number != before) {
                break;
            }
            let tokens = &tokens[..(index + 1) * BLOCK_SIZE];
            let found = self.find(salted, tokens).or_else(|| {
                if self.cached.len() == self.most_cached() {
                    return None;
                }
                self.last_number += 1;
                self.cached.push(Cached {
                    number: self.last_number,
                    salted,
                    tokens: tokens.to_vec(),
                    blocks: vec![None; self.groups().len()],
                });
                Some(self.cached.len() - 1)
            });
            let Some(found) = found else {
                // No number is this one.
                self.tables[table].cached = u64::MAX;
                break;
            };
            let cached = &mut self.cached[found];
            for (kept, own) in cached.blocks.iter_mut().zip(&self.tables[table].groups) {
                kept.get_or_insert_with(|| own[&index].clone());
            }
            self.tables[table].cached = cached.number;
        }
        self.tables[table].computed = tokens.len();
        for (index, group) in self.groups().iter().enumerate() {
            let first = first_seen(group, tokens.len());
            let seen = self.tables[table].groups[index].split_off(&first);
            let behind = std::mem::replace(&mut self.tables[table].groups[index], seen);
            self.give_back(behind);
        }
    }

    fn give_back(&mut self, blocks: BTreeMap<usize, Block>) {
        for block in blocks.into_values().rev() {
            let mut held = self
                .tables
                .iter()
                .flat_map(|table| &table.groups)
                .flat_map(BTreeMap::values);
            if held.any(|other| *other == block) {
                continue;
            }
            let last = self.is_cached(&block) || self.cached.len() == self.most_cached();
            let at = if last { self.free.len() } else { 0 };
            self.free.insert(at, block);
        }
    }

    fn release(&mut self, table: usize) {
        for blocks in self.tables.remove(table).groups {
            self.give_back(blocks);
        }
    }
}

#[derive(Clone, Debug)]
enum Op {
    /// The prompt, as (document, number of tokens) pairs.
    Open {
        documents: Vec<(u8, usize)>,
        salted: bool,
        most: usize,
        headroom: usize,
    },
    /// Reserve some more tokens and, unless the request is cancelled before the step ends, commit them.
    Grow {
        table: usize,
        tokens: usize,
        commits: bool,
    },
    Release {
        table: usize,
    },
    /// The cache is lost.
    Reset,
}

fn op() -> impl Strategy<Value = Op> {
    // Whole blocks are likely, so that equal blocks come after different beginnings.
    let length = prop_oneof![3 => Just(BLOCK_SIZE), 1 => 1..=2 * BLOCK_SIZE];
    let most = prop_oneof![4 => Just(usize::MAX), 1 => 0..4 * BLOCK_SIZE];
    let salted = prop::bool::weighted(0.2);
    prop_oneof![
        3 => (vec((0..2u8, length), 1..5), salted, most, 0..2usize)
            .prop_map(|(documents, salted, most, headroom)| Op::Open { documents, salted, most, headroom }),
        5 => (any::<usize>(), 0..20usize, prop::bool::weighted(0.9))
            .prop_map(|(table, tokens, commits)| Op::Grow { table, tokens, commits }),
        2 => any::<usize>().prop_map(|table| Op::Release { table }),
        1 => Just(Op::Reset),
    ]
}

/// A cache of one to three groups, of some layers each, and of up to eleven blocks of all of them.
fn kv() -> impl Strategy<Value = KvConfig> {
    let kind = prop_oneof![Just(CacheKind::Full), (1..40usize).prop_map(CacheKind::Window)];
    let groups = prop_oneof![
        2 => Just(vec![(CacheKind::Full, 1)]),
        5 => vec((kind, 1..4usize), 1..4),
    ];
    // Such a model has no use for a cache.
    let groups = groups.prop_filter("every layer sees only the token itself", |groups| {
        groups.iter().any(|&(kind, _)| kind != CacheKind::Window(1))
    });
    let slots = prop_oneof![1 => Just(0), 1 => 1..7usize];
    (groups, 1..12usize, 0..3usize, slots).prop_map(|(groups, num_blocks, rest, state_slots)| {
        let kinds: Vec<_> = groups
            .iter()
            .flat_map(|&(kind, layers)| vec![kind; layers])
            .collect();
        let groups = CacheLayout::new(&kinds, usize::MAX)
            .expect("there are few kinds")
            .groups;
        KvConfig {
            block_size: BlockSize::new(BLOCK_SIZE).expect("8 is legal"),
            num_pages: num_blocks * groups.pages_per_block() + rest,
            groups: groups.with_states(state_slots),
            state_slots,
        }
    })
}

/// A request: its table, and tokens without end.
struct Open {
    table: BlockTable,
    tokens: Vec<TokenId>,
    salt: Option<&'static str>,
}

/// A prompt that is asked for again and again.
struct Known {
    prefix: KnownPrefix,
    tokens: Vec<TokenId>,
    sharing: Sharing<'static>,
    headroom: usize,
}

fn prompt(documents: &[(u8, usize)]) -> Vec<TokenId> {
    let tokens = documents
        .iter()
        .map(|&(document, len)| vec![TokenId::from(document); len]);
    tokens.collect::<Vec<_>>().concat()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 10_000, failure_persistence: None, ..Default::default() })]

    #[test]
    fn does_what_the_naive_model_does(kv in kv(), chunk in 1..24usize, ops in vec(op(), 1..80)) {
        let mut manager = KvManager::new(kv, chunk, true);
        let mut naive = Naive::new(kv, chunk);
        let mut open: Vec<Open> = Vec::new();
        manager.record_events();
        let mut router = Router::default();
        let mut known: VecDeque<Known> = VecDeque::new();
        for op in ops {
            match op {
                Op::Open { documents, salted, most, headroom } => {
                    let tokens = prompt(&documents);
                    let salt = salted.then_some("pepper");
                    let slots = manager.stats().slots;
                    let has_slot = slots.used < slots.total || !naive.has_states();
                    let sharing = Sharing { salt, most, ..Sharing::default() };
                    let is_short = manager.is_short(&mut KnownPrefix::default(), &tokens, sharing, headroom);
                    let opened = manager.open(&tokens, sharing, headroom);
                    // Where windows or states make it hard to tell, room may be missing all the same.
                    let is_plain = kv.groups.iter().all(|group| group.kind == CacheKind::Full) && !naive.has_states();
                    match is_plain && kv.groups.as_slice().len() == 1 {
                        true => prop_assert_eq!(is_short, opened.is_err()),
                        false => prop_assert!(!is_short || opened.is_err()),
                    }
                    known.truncate(2);
                    known.push_front(Known { prefix: KnownPrefix::default(), tokens: tokens.clone(), sharing, headroom });
                    let shareable = &tokens[..most.min(tokens.len() - 1)];
                    let snapshot = naive.has_states().then(|| router.longest(salt, shareable, &[], &kv));
                    let opens = has_slot && naive.open(&tokens, salted, most, headroom, snapshot);
                    prop_assert_eq!(opened.is_ok(), opens);
                    open.extend(opened.map(|table| Open { table, tokens, salt }));
                }
                Op::Grow { table, tokens, commits } if !open.is_empty() => {
                    let i = table % open.len();
                    let Open { table, tokens: known, salt } = &mut open[i];
                    let start = table.computed();
                    let end = manager.cut(table, start, start + tokens);
                    // Beyond the prompt, everyone says the same.
                    known.resize(known.len().max(end), 0);
                    let room = manager.reserve(table, end);
                    prop_assert_eq!(room.is_ok(), naive.reserve(i, end));
                    let runs = room.is_ok() && end > start;
                    let state = if runs { manager.next_state(table, end) } else { None };
                    prop_assert_eq!(state.is_some(), runs && naive.has_states());
                    if let Some(state) = state {
                        naive.run(salt.is_some(), start, &known[..end], state).map_err(TestCaseError::fail)?;
                    }
                    if room.is_ok() && commits {
                        manager.commit(table, &known[..end]);
                        naive.commit(i, &known[..end]);
                    } else if state.is_some() {
                        // Nothing goes on behind a run that failed.
                        manager.release(open.remove(i).table);
                        naive.release(i);
                    }
                }
                Op::Release { table } if !open.is_empty() => {
                    let i = table % open.len();
                    manager.release(open.remove(i).table);
                    naive.release(i);
                }
                Op::Reset => {
                    manager.reset(kv);
                    open.drain(..).for_each(|open| drop(open.table));
                    naive = Naive { evictions: naive.evictions, ..Naive::new(kv, chunk) };
                }
                Op::Grow { .. } | Op::Release { .. } => {}
            }
            for Known { prefix, tokens, sharing, headroom } in &mut known {
                let fresh = manager.is_short(&mut KnownPrefix::default(), tokens, *sharing, *headroom);
                prop_assert_eq!(manager.is_short(prefix, tokens, *sharing, *headroom), fresh);
            }
            manager.check_invariants(open.iter().map(|open| &open.table)).map_err(TestCaseError::fail)?;
            let stats = manager.stats();
            prop_assert_eq!((manager.available(), stats.evictions), (naive.free_pages(), naive.evictions));
            for (group, stats) in stats.groups[..kv.groups.as_slice().len()].iter().enumerate() {
                let mut used: Vec<_> = naive.tables.iter().flat_map(|table| table.groups[group].values()).collect();
                used.sort_unstable();
                used.dedup();
                prop_assert_eq!((stats.used, stats.cached), (used.len(), naive.blocks_cached(group)));
            }
            router.hear(manager.take_events()).map_err(TestCaseError::fail)?;
            match naive.has_states() {
                true => prop_assert!(router.len() <= stats.cached() + stats.slots.snapshots),
                false => prop_assert_eq!(router.len(), stats.cached()),
            }
            // Whoever comes late is told the same.
            let mut late = Router::default();
            late.hear(manager.cached()).map_err(TestCaseError::fail)?;
            prop_assert_eq!(&late, &router);
            for (open, naive_table) in open.iter().zip(&naive.tables) {
                prop_assert_eq!(open.table.computed(), naive_table.computed);
                for (held, naive) in open.table.groups().iter().zip(&naive_table.groups) {
                    prop_assert_eq!(&held.pages, &naive.values().flatten().copied().collect::<Vec<_>>());
                    prop_assert!(naive.keys().next().is_none_or(|&first| first == held.first));
                }
                // Events promise neither more nor less than a request finds.
                let found = naive.hit(open.salt.is_some(), &open.tokens) * BLOCK_SIZE;
                let foretold = router.longest(open.salt, &open.tokens, &[], &kv);
                prop_assert!(foretold == found || naive.has_states() && foretold < found);
            }
        }
        for Open { table, .. } in open {
            manager.release(table);
        }
        prop_assert_eq!(manager.stats().used, 0);
    }
}
