//! A step's tables of pages: one for each page of a slice of a block of each group of layers. For attention, each slice is a block.

use std::ops::Range;

use plimsoll_core::{
    BlockSize, CacheGroup, CacheGroups, CacheKind, CacheLayout, LayerPlace, PageId, Run, StepLimits,
};

/// The pages of one index within the slices of blocks of a group.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PageTable {
    /// Index of the group.
    group: usize,
    kind: CacheGroup,
    /// Which of the pages of each slice.
    plane: usize,
    slice_size: BlockSize,
}

impl PageTable {
    /// Those of a model, in the order that [`LayerPage::table`] counts.
    pub(crate) fn all(groups: &CacheGroups, block_size: BlockSize) -> Vec<Self> {
        let of = |(group, &kind): (usize, &CacheGroup)| {
            let table = move |plane| Self {
                group,
                kind,
                plane,
                slice_size: slice_size(&kind, block_size),
            };
            (0..kind.pages_per_slice()).map(table)
        };
        groups.iter().enumerate().flat_map(of).collect()
    }

    /// Tokens of a slice.
    pub(crate) fn slice_size(&self) -> usize {
        self.slice_size.tokens()
    }

    /// The slices that a run reads or writes.
    pub(crate) fn slices(&self, run: &Run) -> Range<usize> {
        self.kind.first_block(self.slice_size, run.start)..self.slice_size.blocks_for(run.end())
    }

    /// Most slices of all runs of a step.
    pub(crate) fn most_slices(&self, limits: &StepLimits) -> usize {
        let tokens = limits.max_num_batched_tokens;
        let runs = limits.max_num_seqs.min(tokens);
        let all = runs.saturating_mul(self.slice_size.blocks_for(limits.max_model_len));
        match self.kind.kind {
            CacheKind::Full => all,
            // A run of n tokens sees n + window - 1 of them, which lie in at most (n + window + size - 3) / size + 1 slices,
            // rounded down; all runs together have `tokens` tokens.
            CacheKind::Window(window) => {
                let size = self.slice_size.tokens();
                let seen = runs.saturating_mul(window.saturating_add(size - 3));
                all.min((seen.saturating_add(tokens) / size).saturating_add(runs))
            }
        }
    }

    /// The page of a slice of a checked run.
    pub(crate) fn page(&self, run: &Run, slice: usize) -> PageId {
        let table = &run.tables[self.group];
        let first = table.first * self.kind.slices;
        table.pages[(slice - first) * self.kind.pages_per_slice() + self.plane]
    }
}

fn slice_size(group: &CacheGroup, block_size: BlockSize) -> BlockSize {
    let size = block_size.divided_by(group.slices);
    size.expect("groups are cut for this block size")
}

/// Where a layer's keys and values are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LayerPage {
    /// Index among [`PageTable::all`].
    pub(crate) table: usize,
    /// The first of its columns of a page.
    pub(crate) column: usize,
    /// Tokens of a slice, which attention takes for a block.
    pub(crate) slice_size: BlockSize,
}

impl LayerPage {
    /// Of each layer that keeps tokens.
    pub(crate) fn all(layout: &CacheLayout, block_size: BlockSize) -> Vec<Self> {
        let place = |place: &LayerPlace| {
            let (before, rest) = layout.groups.as_slice().split_at(place.group);
            let before: usize = before.iter().map(CacheGroup::pages_per_slice).sum();
            Self {
                table: before + place.plane,
                column: place.column,
                slice_size: slice_size(&rest[0], block_size),
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

#[cfg(test)]
mod tests {
    use plimsoll_core::{CacheLayer, RequestId, RunInput};
    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

    use super::*;

    /// Where steps are as bad as can be, they need all room but a block for each run, and never more.
    #[test]
    fn no_step_has_more_slices_than_there_is_room_for() {
        let mut rng = StdRng::seed_from_u64(7);
        let (mut tight, mut cut) = (0, 0);
        for _ in 0..2000 {
            let limits = StepLimits {
                max_num_batched_tokens: rng.random_range(1..200),
                max_num_seqs: rng.random_range(1..20),
                max_model_len: rng.random_range(1..600),
            };
            let block_size = BlockSize::new([8, 16, 32][rng.random_range(0..3)]).unwrap();
            let windowed = CacheLayer {
                columns: rng.random_range(1..5),
                ..CacheKind::Window(rng.random_range(1..300)).into()
            };
            let layers = [CacheKind::Full.into(), windowed];
            let groups = CacheLayout::of(&layers, limits.max_model_len.max(2), block_size)
                .unwrap()
                .groups;
            cut += usize::from(groups.iter().any(|group| group.slices > 1));
            let worst = rng.random_bool(0.5);
            let (mut runs, mut tokens) = (Vec::new(), limits.max_num_batched_tokens);
            while runs.len() < limits.max_num_seqs && tokens > 0 {
                let rest = limits.max_num_seqs - runs.len() - 1;
                let most = tokens
                    .saturating_sub(if worst { rest } else { 0 })
                    .clamp(1, limits.max_model_len);
                let len = if worst { most } else { rng.random_range(1..=most) };
                // In the worst case, a run begins with the last token of a block.
                let last = limits.max_model_len - len;
                let start = match worst {
                    true => last - (last + 1) % block_size.tokens().min(last + 1),
                    false => rng.random_range(0..=last),
                };
                tokens -= len;
                runs.push(Run {
                    request: RequestId(0),
                    start,
                    input: RunInput::Known(vec![0; len]),
                    images: None,
                    tables: Vec::new(),
                    state: None,
                    sample: None,
                    score: None,
                    pool: None,
                });
            }
            for table in PageTable::all(&groups, block_size) {
                let needed: usize = runs.iter().map(|run| table.slices(run).len()).sum();
                let room = table.most_slices(&limits);
                assert!(
                    needed <= room,
                    "{needed} slices and room for {room}: {limits:?}, {groups:?}"
                );
                let full = runs.len() == limits.max_num_seqs.min(limits.max_num_batched_tokens);
                tight += usize::from(worst && full && room <= needed + runs.len() + 1);
            }
        }
        assert!(tight > 100, "{tight} steps nearly need the room there is");
        assert!(cut > 100, "blocks of {cut} caches are cut");
    }
}
