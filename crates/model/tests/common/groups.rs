//! Requests whose layers keep different things: tables of pages as the KV manager hands them out.

use plimsoll_core::{BlockSize, CacheGroups, GroupTable, PageId, TokenId};

use super::{Oracle, plan, run};

/// The tables of one request. Pages that no later token sees go back and are the first to be used again.
pub struct Tables {
    groups: CacheGroups,
    block_size: BlockSize,
    free: Vec<PageId>,
    tables: Vec<GroupTable>,
}

impl Tables {
    pub fn new(groups: CacheGroups, block_size: BlockSize, num_pages: usize) -> Self {
        Self {
            groups,
            block_size,
            free: (0..num_pages as u32).map(PageId).collect(),
            tables: groups.iter().map(|_| GroupTable::default()).collect(),
        }
    }

    /// For a run of the tokens from `start` to `end`.
    pub fn reserve(&mut self, start: usize, end: usize) -> Vec<GroupTable> {
        for (group, table) in self.groups.iter().zip(&mut self.tables) {
            let first = group.first_block(self.block_size, start);
            let gone = (first - table.first) * group.pages_per_block;
            self.free.extend(table.pages.drain(..gone.min(table.pages.len())));
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
