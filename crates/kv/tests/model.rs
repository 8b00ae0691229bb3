//! The manager against a naive model that keeps everything in vectors and searches them from end to end, and against what a
//! router makes of its events.

#[path = "../../sim/src/router.rs"]
mod router;

use plimsoll_core::{BlockSize, CacheGroups, KvConfig, PageId, TokenId};
use plimsoll_kv::{BlockTable, KvManager, Sharing};
use proptest::{collection::vec, prelude::*};
use router::Router;

const BLOCK_SIZE: usize = 8;

/// A cached block, known by its whole past: the number given to what came before, and its tokens.
#[derive(Clone, Debug, PartialEq)]
struct Cached {
    number: u64,
    before: u64,
    tokens: Vec<TokenId>,
}

/// Where sequences with a salt begin; those without one begin at 0.
const SALTED: u64 = u64::MAX;

#[derive(Default)]
struct Naive {
    /// Free blocks, next to be taken first.
    free: Vec<PageId>,
    cached: Vec<Option<Cached>>,
    tables: Vec<NaiveTable>,
    last_number: u64,
}

#[derive(Clone, Debug)]
struct NaiveTable {
    blocks: Vec<PageId>,
    computed: usize,
    before: u64,
}

impl Naive {
    fn new(num_blocks: usize) -> Self {
        let free = (0..num_blocks as u32).map(PageId).collect();
        Self {
            free,
            cached: vec![None; num_blocks],
            ..Self::default()
        }
    }

    fn find(&self, before: u64, tokens: &[TokenId]) -> Option<PageId> {
        let same = |c: &Option<Cached>| {
            c.as_ref()
                .is_some_and(|c| c.before == before && c.tokens == tokens)
        };
        self.cached
            .iter()
            .position(same)
            .map(|index| PageId(index as u32))
    }

    fn number(&self, block: PageId) -> Option<u64> {
        self.cached[block.index()].as_ref().map(|cached| cached.number)
    }

    /// Whether anybody would find what comes after `before`.
    fn is_known(&self, before: u64) -> bool {
        [0, SALTED].contains(&before) || self.cached.iter().flatten().any(|cached| cached.number == before)
    }

    /// Nothing comes after what is not there.
    fn evict(&mut self, block: PageId) {
        self.cached[block.index()] = None;
        for _ in 0..self.cached.len() {
            for index in 0..self.cached.len() {
                let before = self.cached[index].as_ref().map(|cached| cached.before);
                if before.is_some_and(|before| !self.is_known(before)) {
                    self.cached[index] = None;
                }
            }
        }
    }

    fn open(&mut self, tokens: &[TokenId], salted: bool, headroom: usize) -> bool {
        let mut table = NaiveTable {
            blocks: Vec::new(),
            computed: 0,
            before: if salted { SALTED } else { 0 },
        };
        for block_tokens in tokens[..tokens.len() - 1].chunks_exact(BLOCK_SIZE) {
            let Some(block) = self.find(table.before, block_tokens) else {
                break;
            };
            table.before = self.number(block).expect("it was found");
            table.computed += BLOCK_SIZE;
            table.blocks.push(block);
        }
        let mut free = self.free.clone();
        free.retain(|block| !table.blocks.contains(block));
        if free.len() < tokens.len().div_ceil(BLOCK_SIZE) - table.blocks.len() + headroom {
            return false;
        }
        self.free = free;
        self.tables.push(table);
        self.reserve(self.tables.len() - 1, tokens.len())
    }

    fn reserve(&mut self, table: usize, tokens: usize) -> bool {
        let more = tokens
            .div_ceil(BLOCK_SIZE)
            .saturating_sub(self.tables[table].blocks.len());
        if more > self.free.len() {
            return false;
        }
        for block in self.free.drain(..more).collect::<Vec<_>>() {
            self.evict(block);
            self.tables[table].blocks.push(block);
        }
        true
    }

    fn commit(&mut self, table: usize, tokens: &[TokenId]) {
        let full = self.tables[table].computed / BLOCK_SIZE;
        for (i, block_tokens) in tokens.chunks_exact(BLOCK_SIZE).enumerate().skip(full) {
            let before = self.tables[table].before;
            let own = self.tables[table].blocks[i];
            let block = self.find(before, block_tokens).unwrap_or(own);
            if block == own && self.is_known(before) {
                self.last_number += 1;
                self.cached[own.index()] = Some(Cached {
                    number: self.last_number,
                    before,
                    tokens: block_tokens.to_vec(),
                });
            }
            // Otherwise its past is gone, and stays so.
            self.tables[table].before = self.number(block).unwrap_or(before);
        }
        self.tables[table].computed = tokens.len();
    }

    fn release(&mut self, table: usize) {
        let released = self.tables.remove(table);
        for block in released.blocks.into_iter().rev() {
            if self.tables.iter().any(|table| table.blocks.contains(&block)) {
                continue;
            }
            let at = if self.cached[block.index()].is_some() {
                self.free.len()
            } else {
                0
            };
            self.free.insert(at, block);
        }
    }
}

#[derive(Clone, Debug)]
enum Op {
    /// The prompt, as (document, number of tokens) pairs.
    Open {
        documents: Vec<(u8, usize)>,
        salted: bool,
        headroom: usize,
    },
    /// Reserve and commit some more tokens.
    Grow {
        table: usize,
        tokens: usize,
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
    prop_oneof![
        3 => (vec((0..2u8, length), 1..4), prop::bool::weighted(0.2), 0..2usize)
            .prop_map(|(documents, salted, headroom)| Op::Open { documents, salted, headroom }),
        5 => (any::<usize>(), 0..20usize).prop_map(|(table, tokens)| Op::Grow { table, tokens }),
        2 => any::<usize>().prop_map(|table| Op::Release { table }),
        1 => Just(Op::Reset),
    ]
}

/// A request: its table, and tokens without end.
struct Open {
    table: BlockTable,
    tokens: Vec<TokenId>,
}

fn prompt(documents: &[(u8, usize)]) -> Vec<TokenId> {
    documents
        .iter()
        .flat_map(|&(document, len)| vec![TokenId::from(document); len])
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, failure_persistence: None, ..Default::default() })]

    #[test]
    fn does_what_the_naive_model_does(num_blocks in 1..12usize, ops in vec(op(), 1..80)) {
        let block_size = BlockSize::new(BLOCK_SIZE).expect("8 is legal");
        let mut manager = KvManager::new(KvConfig { block_size, num_pages: num_blocks, groups: CacheGroups::default() }, 64, true);
        let mut naive = Naive::new(num_blocks);
        let mut open: Vec<Open> = Vec::new();
        manager.record_events();
        let mut router = Router::default();
        for op in ops {
            match op {
                Op::Open { documents, salted, headroom } => {
                    let tokens = prompt(&documents);
                    let salt = salted.then_some("pepper");
                    let opened = manager.open(&tokens, Sharing { salt, ..Sharing::default() }, headroom);
                    prop_assert_eq!(opened.is_ok(), naive.open(&tokens, salted, headroom));
                    if let Ok(table) = &opened {
                        prop_assert_eq!(table.computed(), router.longest(salt, &tokens[..tokens.len() - 1], BLOCK_SIZE));
                    }
                    open.extend(opened.map(|table| Open { table, tokens }));
                }
                Op::Grow { table, tokens } if !open.is_empty() => {
                    let i = table % open.len();
                    let Open { table, tokens: known } = &mut open[i];
                    let end = table.computed() + tokens;
                    // Beyond the prompt, everyone says the same.
                    known.resize(known.len().max(end), 0);
                    let room = manager.reserve(table, end);
                    prop_assert_eq!(room.is_ok(), naive.reserve(i, end));
                    if room.is_ok() {
                        manager.commit(table, &known[..end]);
                        naive.commit(i, &known[..end]);
                    }
                }
                Op::Release { table } if !open.is_empty() => {
                    let i = table % open.len();
                    manager.release(open.remove(i).table);
                    naive.release(i);
                }
                Op::Reset => {
                    let config = manager.config();
                    manager.reset(config);
                    open.drain(..).for_each(|open| drop(open.table));
                    naive = Naive { last_number: naive.last_number, ..Naive::new(num_blocks) };
                }
                Op::Grow { .. } | Op::Release { .. } => {}
            }
            manager.check_invariants(open.iter().map(|open| &open.table)).map_err(TestCaseError::fail)?;
            prop_assert_eq!(manager.available(), naive.free.len());
            prop_assert_eq!(manager.stats().cached, naive.cached.iter().flatten().count());
            router.hear(manager.take_events()).map_err(TestCaseError::fail)?;
            prop_assert_eq!(router.len(), manager.stats().cached);
            // Whoever comes late is told the same.
            let mut late = Router::default();
            late.hear(manager.cached()).map_err(TestCaseError::fail)?;
            prop_assert_eq!(&late, &router);
            for (open, naive) in open.iter().zip(&naive.tables) {
                prop_assert_eq!(&open.table.groups()[0].pages, &naive.blocks);
                prop_assert_eq!(open.table.computed(), naive.computed);
            }
        }
        for Open { table, .. } in open {
            manager.release(table);
        }
        prop_assert_eq!(manager.stats().used, 0);
    }
}
