//! Sizes of pages, and slices of blocks.

use super::CacheGroups;
use crate::BlockSize;

/// How memory is cut for groups of layers that are so many columns wide.
pub(super) struct Cut {
    pub(super) columns_per_page: usize,
    /// Of a block of each group.
    pub(super) slices: Vec<usize>,
}

impl Cut {
    /// The fewest slices, and for these the largest pages, with which padding is small in each group; where there are none, those
    /// whose worst group has the least.
    pub(super) fn of(widths: &[Vec<usize>], block_size: BlockSize) -> Self {
        let mut all: Vec<Vec<usize>> = vec![Vec::new()];
        for widths in widths {
            let divides = |&slices: &usize| widths.iter().all(|width| width.is_multiple_of(slices));
            let slices: Vec<usize> = block_size.cuts().filter(divides).collect();
            let longer = |cut: Vec<usize>| {
                let with = move |&slices: &usize| [&cut[..], &[slices]].concat();
                slices.iter().map(with).collect::<Vec<_>>()
            };
            all = all.into_iter().flat_map(longer).collect();
        }
        all.sort_by_key(|slices| slices.iter().sum::<usize>());
        let cuts = || all.iter().flat_map(|slices| Self::with(widths, slices));
        let small = |cut: &Self| {
            cut.padding(widths)
                .all(|padding| padding <= CacheGroups::MAX_PADDING)
        };
        let largest = |cut: &Self| cut.padding(widths).fold(0.0, f64::max);
        let sum = |cut: &Self| cut.padding(widths).sum::<f64>();
        let less = |a: &Self, b: &Self| largest(a).total_cmp(&largest(b)).then(sum(a).total_cmp(&sum(b)));
        cuts()
            .find(small)
            .or_else(|| cuts().min_by(less))
            .expect("blocks of one slice are a cut")
    }

    /// Those with so many slices, the largest pages first.
    fn with(widths: &[Vec<usize>], slices: &[usize]) -> impl Iterator<Item = Self> {
        let groups = widths.iter().zip(slices);
        let widest = groups
            .clone()
            .map(|(widths, slices)| widths.iter().max().map_or(1, |w| w / slices));
        let all = groups.map(|(widths, slices)| widths.iter().sum::<usize>() / slices);
        let (least, most) = (widest.max().unwrap_or(1), all.max().unwrap_or(1));
        (least..=most.max(least)).rev().map(|columns_per_page| Self {
            columns_per_page,
            slices: slices.to_vec(),
        })
    }

    /// Of each group the unused columns of a block by those used.
    fn padding(&self, widths: &[Vec<usize>]) -> impl Iterator<Item = f64> {
        widths.iter().zip(&self.slices).map(|(widths, &slices)| {
            let held = slices * pages(widths, slices, self.columns_per_page) * self.columns_per_page;
            let used: usize = widths.iter().sum();
            (held - used) as f64 / used as f64
        })
    }
}

/// The page and column of the next layer of a group whose layers so far end at `end`: none is divided among pages.
pub(super) fn place(end: &mut (usize, usize), columns: usize, per_page: usize) -> (usize, usize) {
    let (page, column) = *end;
    let start = match column + columns <= per_page {
        true => (page, column),
        false => (page + 1, 0),
    };
    *end = (start.0, start.1 + columns);
    start
}

/// Pages of a slice of a block of layers of these widths.
pub(super) fn pages(widths: &[usize], slices: usize, per_page: usize) -> usize {
    let mut end = (0, 0);
    for columns in widths {
        place(&mut end, columns / slices, per_page);
    }
    end.0 + 1
}
