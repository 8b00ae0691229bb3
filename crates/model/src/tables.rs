//! A step's tables of pages: one for each page of a block of each group of layers.

use std::ops::Range;

use plimsoll_core::{BlockSize, CacheGroup, CacheGroups, CacheLayout, LayerPlace, PageId, Run};

/// The pages of one index within the blocks of a group.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PageTable {
    /// Index of the group.
    group: usize,
    kind: CacheGroup,
    /// Which of the pages of each block.
    plane: usize,
}

impl PageTable {
    /// Those of a model, in the order that [`LayerPage::table`] counts.
    pub(crate) fn all(groups: &CacheGroups) -> Vec<Self> {
        let of = |(group, &kind): (usize, &CacheGroup)| {
            (0..kind.pages_per_block).map(move |plane| Self { group, kind, plane })
        };
        groups.iter().enumerate().flat_map(of).collect()
    }

    /// The blocks that a run reads or writes.
    pub(crate) fn blocks(&self, run: &Run, block_size: BlockSize) -> Range<usize> {
        self.kind.first_block(block_size, run.start)..block_size.blocks_for(run.end())
    }

    /// Most blocks of a run.
    pub(crate) fn most_blocks(&self, block_size: BlockSize, tokens: usize, chunk: usize) -> usize {
        self.kind.most_blocks(block_size, tokens, chunk)
    }

    /// The page of a block of a checked run.
    pub(crate) fn page(&self, run: &Run, block: usize) -> PageId {
        let table = &run.tables[self.group];
        table.pages[(block - table.first) * self.kind.pages_per_block + self.plane]
    }
}

/// Where a layer's keys and values are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LayerPage {
    /// Index among [`PageTable::all`].
    pub(crate) table: usize,
    /// Which of the layers of a page.
    pub(crate) column: usize,
}

impl LayerPage {
    /// Of each layer.
    pub(crate) fn all(layout: &CacheLayout) -> Vec<Self> {
        let place = |place: &LayerPlace| {
            let before = &layout.groups.as_slice()[..place.group];
            let before: usize = before.iter().map(|group| group.pages_per_block).sum();
            Self {
                table: before + place.plane,
                column: place.column,
            }
        };
        layout.places.iter().map(place).collect()
    }
}

/// What is wrong with the tables of a run of a step.
pub(crate) fn check(
    run: &Run,
    groups: &CacheGroups,
    block_size: BlockSize,
    num_pages: usize,
) -> Result<(), String> {
    let count = groups.as_slice().len();
    if run.tables.len() != count {
        return Err(format!("{} block tables; {count} are needed", run.tables.len()));
    }
    let mut written: Vec<PageId> = Vec::new();
    for (table, group) in run.tables.iter().zip(groups) {
        let (needed, first) = (
            block_size.blocks_for(run.end()),
            group.first_block(block_size, run.start),
        );
        let held = table.first + table.pages.len() / group.pages_per_block;
        if table.first > first || held < needed {
            return Err(format!(
                "blocks {}..{held} for {} tokens; {first}..{needed} are needed ({})",
                table.first,
                run.end(),
                group.kind
            ));
        }
        if let Some(page) = table.pages.iter().find(|page| page.index() >= num_pages) {
            return Err(format!("page {} of {num_pages}", page.0));
        }
        let first_written = run.start / block_size.tokens() - table.first;
        let end = (needed - table.first) * group.pages_per_block;
        written.extend(&table.pages[first_written * group.pages_per_block..end]);
    }
    // The rows of a run are written in parallel.
    written.sort_unstable();
    match written.windows(2).any(|pair| pair[0] == pair[1]) {
        false => Ok(()),
        true => Err("a page to be written is in its tables twice".to_owned()),
    }
}
