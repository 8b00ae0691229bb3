use plimsoll_core::PageId;

/// First pages of unreferenced blocks, next to be taken first: a doubly linked list in one array, so that a cached block that is
/// hit again leaves the middle of the list in constant time.
#[derive(Debug)]
pub(crate) struct FreeList {
    /// One link per page, then the sentinel that closes the ring.
    links: Vec<Link>,
}

#[derive(Clone, Copy, Debug)]
struct Link {
    prev: u32,
    next: u32,
}

const UNLINKED: Link = Link {
    prev: u32::MAX,
    next: u32::MAX,
};

impl FreeList {
    /// All of `num_pages` pages, in their order.
    pub(crate) fn full(num_pages: usize) -> Self {
        let sentinel = u32::try_from(num_pages).expect("the number of pages fits 32 bits");
        let mut list = Self {
            links: vec![UNLINKED; num_pages + 1],
        };
        list.links[num_pages] = Link {
            prev: sentinel,
            next: sentinel,
        };
        for block in 0..sentinel {
            list.push_back(PageId(block));
        }
        list
    }

    pub(crate) fn contains(&self, block: PageId) -> bool {
        self.links[block.index()].next != UNLINKED.next
    }

    /// `block` will be taken after all others.
    pub(crate) fn push_back(&mut self, block: PageId) {
        self.link(block, self.links[self.sentinel() as usize].prev);
    }

    /// `block` will be taken next.
    pub(crate) fn push_front(&mut self, block: PageId) {
        self.link(block, self.sentinel());
    }

    pub(crate) fn pop_front(&mut self) -> Option<PageId> {
        let first = self.links[self.sentinel() as usize].next;
        (first != self.sentinel()).then(|| {
            self.remove(PageId(first));
            PageId(first)
        })
    }

    pub(crate) fn remove(&mut self, block: PageId) {
        debug_assert!(self.contains(block));
        let Link { prev, next } = std::mem::replace(&mut self.links[block.index()], UNLINKED);
        self.links[prev as usize].next = next;
        self.links[next as usize].prev = prev;
    }

    /// From the next to be taken to the last.
    pub(crate) fn iter(&self) -> impl Iterator<Item = PageId> + '_ {
        let after = |at: u32| Some(self.links[at as usize].next).filter(|&next| next != self.sentinel());
        std::iter::successors(after(self.sentinel()), move |&at| after(at)).map(PageId)
    }

    fn sentinel(&self) -> u32 {
        (self.links.len() - 1) as u32
    }

    fn link(&mut self, block: PageId, prev: u32) {
        debug_assert!(!self.contains(block));
        let next = self.links[prev as usize].next;
        self.links[block.index()] = Link { prev, next };
        self.links[prev as usize].next = block.0;
        self.links[next as usize].prev = block.0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_a_queue_with_two_ends_and_removal_anywhere() {
        let mut list = FreeList::full(4);
        list.remove(PageId(2));
        assert_eq!(list.pop_front(), Some(PageId(0)));
        list.push_front(PageId(2));
        list.push_back(PageId(0));
        assert!(list.contains(PageId(3)));
        assert_eq!(list.iter().map(|b| b.0).collect::<Vec<_>>(), [2, 1, 3, 0]);
        assert_eq!(
            std::iter::from_fn(|| list.pop_front())
                .map(|b| b.0)
                .collect::<Vec<_>>(),
            [2, 1, 3, 0]
        );
        assert!(!list.contains(PageId(3)));
    }
}
