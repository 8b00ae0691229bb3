//! Requests whose layers keep different things: tables of pages as the KV manager hands them out.

use plimsoll_core::{BlockSize, CacheGroups, Executor, GroupTable, KvConfig, PageId, TokenId};
use plimsoll_model::DecoderSpec;

use super::{Case, Oracle, greedy_spec, plan, run, state_config};

/// The tables of one request. Pages that no later token sees go back and are the first to be used again.
pub struct Tables {
    groups: CacheGroups,
    block_size: BlockSize,
    free: Vec<PageId>,
    tables: Vec<GroupTable>,
    /// Pages that another request has too: they do not go back.
    shared: Vec<PageId>,
}

impl Tables {
    pub fn new(groups: CacheGroups, block_size: BlockSize, num_pages: usize) -> Self {
        Self {
            groups,
            block_size,
            free: (0..num_pages as u32).map(PageId).collect(),
            tables: groups.iter().map(|_| GroupTable::default()).collect(),
            shared: Vec::new(),
        }
    }

    /// Those of a request that begins with the same `hit` tokens, whole blocks: it shares the blocks that the next token
    /// sees, and gets half of the free pages.
    pub fn share(&mut self, hit: usize) -> Self {
        let mut other = Self {
            groups: self.groups,
            block_size: self.block_size,
            free: self.free.split_off(self.free.len() / 2),
            tables: self.tables.clone(),
            shared: Vec::new(),
        };
        for (group, table) in other.groups.iter().zip(&mut other.tables) {
            let first = group.first_block(other.block_size, hit);
            table.pages.drain(..(first - table.first) * group.pages_per_block);
            table.first = first;
            other.shared.extend(&table.pages);
        }
        self.shared.clone_from(&other.shared);
        other
    }

    /// For a run of the tokens from `start` to `end`.
    pub fn reserve(&mut self, start: usize, end: usize) -> Vec<GroupTable> {
        for (group, table) in self.groups.iter().zip(&mut self.tables) {
            let first = group.first_block(self.block_size, start);
            let gone = (first - table.first) * group.pages_per_block;
            let gone = table.pages.drain(..gone.min(table.pages.len()));
            self.free.extend(gone.filter(|page| !self.shared.contains(page)));
            table.first = first;
            let blocks = self.block_size.blocks_for(end) - first;
            while table.pages.len() < blocks * group.pages_per_block {
                table.pages.push(self.free.pop().expect("pages are enough"));
            }
        }
        self.tables.clone()
    }
}

/// Logits after each chunk of a prompt, which ends at these positions.
pub fn logits_of_chunks(
    runner: &mut impl Oracle,
    tables: &mut Tables,
    prompt: &[TokenId],
    ends: &[usize],
) -> Vec<Vec<f32>> {
    let mut start = 0;
    let chunk = |&end: &usize| {
        let mut run = run(1, start, &prompt[start..end], &[]);
        run.tables = tables.reserve(start, end);
        let last = end - start - 1;
        start = end;
        runner.logits(&plan(vec![run]), &[last]).unwrap()
    };
    ends.iter().map(chunk).collect()
}

/// The golden text of a prompt, computed in chunks and told token by token, and once more by a request that takes the
/// first `hit` tokens, whole blocks, from the cache. `check` gets the index of each token and what was sampled in its place.
pub fn serve_twice(
    runner: &mut impl Executor,
    kv: KvConfig,
    case: &Case,
    (hit, chunk): (usize, usize),
    check: &mut dyn FnMut(usize, TokenId),
) {
    let tokens = [case.prompt.as_slice(), &case.greedy].concat();
    let mut compute = |tables: &mut Tables, mut start: usize, end: usize| {
        while start < end {
            let len = match start < case.prompt.len() {
                true => chunk.min(case.prompt.len().min(end) - start),
                false => 1,
            };
            let mut run = run(1, start, &tokens[start..start + len], &[]);
            run.tables = tables.reserve(start, start + len);
            start += len;
            let index = start.checked_sub(case.prompt.len());
            run.sample = index.map(greedy_spec);
            let output = runner.execute(&plan(vec![run])).unwrap();
            if let (Some(index), Some(sampled)) = (index, &output.samples[0]) {
                check(index, sampled.token);
            }
        }
    };
    let mut first = Tables::new(kv.groups, kv.block_size, kv.num_pages);
    compute(&mut first, 0, hit);
    let mut second = first.share(hit);
    for tables in [&mut first, &mut second] {
        compute(tables, hit, tokens.len() - 1);
    }
}

/// A cache of pages for what [`serve_twice`] holds at most.
pub fn grouped(spec: &DecoderSpec, block_size: usize, chunk: usize) -> KvConfig {
    let kv = state_config(block_size, 0).kv;
    let mut kv = KvConfig {
        groups: spec.cache_groups(kv.block_size),
        ..kv
    };
    kv.num_pages = 3 * kv.request_pages(128, chunk);
    kv
}

/// All that [`serve_twice`] is to be tried with on a model: a case, how much of it is a hit, and the length of chunks.
pub fn hits_past_the_window(
    cases: &[Case],
    block_size: usize,
) -> impl Iterator<Item = (&Case, (usize, usize))> {
    // Of the golden models, the largest is 13.
    let long = cases.iter().filter(|case| case.prompt.len() > 40);
    let hit = move |case: &Case| (case.prompt.len() - 1) / block_size * block_size;
    long.flat_map(move |case| [7, 20, 128].map(|chunk| (case, (hit(case), chunk))))
}
