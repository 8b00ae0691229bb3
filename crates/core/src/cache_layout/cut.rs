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
    /// The fewest slices, and for these the largest pages, with which padding is small in each group; where there are none, the cut
    /// with the least padding.
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
        let cuts = all.into_iter().flat_map(|slices| {
            let groups = widths.iter().zip(&slices);
            let widest = groups
                .clone()
                .flat_map(|(widths, slices)| widths.iter().map(move |w| w / slices));
            let least = widest.max().unwrap_or(1);
            let most = groups.map(|(widths, slices)| widths.iter().sum::<usize>() / slices);
            let sizes = (least..=most.max().unwrap_or(1).max(least)).rev();
            sizes.map(move |columns_per_page| Self {
                columns_per_page,
                slices: slices.clone(),
            })
        });
        let cuts: Vec<Self> = cuts.collect();
        let small = |cut: &Self| {
            let mut groups = cut.padding(widths).zip(widths);
            groups.all(|(padding, widths)| {
                padding as f64 <= widths.iter().sum::<usize>() as f64 * CacheGroups::MAX_PADDING
            })
        };
        let at = cuts.iter().position(small).or_else(|| {
            let paddings = cuts.iter().map(|cut| cut.padding(widths).sum::<usize>());
            let least = paddings.enumerate().min_by_key(|&(_, padding)| padding);
            least.map(|(at, _)| at)
        });
        let at = at.expect("blocks of one slice are a cut");
        cuts.into_iter().nth(at).expect("it was just found")
    }

    /// Unused columns of a block of each group.
    fn padding(&self, widths: &[Vec<usize>]) -> impl Iterator<Item = usize> {
        widths.iter().zip(&self.slices).map(|(widths, &slices)| {
            let held = slices * pages(widths, slices, self.columns_per_page) * self.columns_per_page;
            held - widths.iter().sum::<usize>()
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
