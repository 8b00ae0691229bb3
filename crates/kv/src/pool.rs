use plimsoll_core::PageId;

use crate::free_list::FreeList;

/// The unreferenced pages, in blocks as they were last used: a cached block that is hit again leaves as a whole,
/// and one whose memory is needed is taken apart.
#[derive(Debug)]
pub(crate) struct Pool {
    /// First pages of the blocks.
    heads: FreeList<PageId>,
    /// The page after each page of a block, used or not.
    after: Vec<Option<PageId>>,
    available: usize,
}

impl Pool {
    /// All of `num_pages` pages, each a block by itself.
    pub(crate) fn full(num_pages: usize) -> Self {
        Self {
            heads: FreeList::full(num_pages),
            after: vec![None; num_pages],
            available: num_pages,
        }
    }

    /// Number of unreferenced pages.
    pub(crate) fn available(&self) -> usize {
        self.available
    }

    /// Takes a page out. The block that it began, if it is cached, is lost.
    pub(crate) fn take(&mut self) -> Option<PageId> {
        let page = self.heads.pop_front()?;
        if let Some(rest) = self.after[page.index()].take() {
            self.heads.push_front(rest);
        }
        self.available -= 1;
        Some(page)
    }

    /// Makes one block of pages that were taken.
    pub(crate) fn join(&mut self, pages: &[PageId]) {
        for pair in pages.windows(2) {
            self.after[pair[0].index()] = Some(pair[1]);
        }
    }

    /// The pages of a block.
    pub(crate) fn pages(&self, head: PageId) -> impl Iterator<Item = PageId> + '_ {
        std::iter::successors(Some(head), |page| self.after[page.index()])
    }

    /// Takes a whole block out.
    pub(crate) fn claim(&mut self, head: PageId) {
        self.heads.remove(head);
        self.available -= self.pages(head).count();
    }

    /// Returns a block without references; it is taken again first, or `last` if its content is worth keeping.
    pub(crate) fn put(&mut self, head: PageId, last: bool) {
        match last {
            true => self.heads.push_back(head),
            false => self.heads.push_front(head),
        }
        self.available += self.pages(head).count();
    }

    /// From the next to be taken to the last.
    pub(crate) fn iter(&self) -> impl Iterator<Item = PageId> + '_ {
        self.heads.iter().flat_map(|head| self.pages(head))
    }
}
