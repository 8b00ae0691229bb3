use std::marker::PhantomData;

use plimsoll_core::{PageId, StateSlot};

/// What is free or not: pages or state slots, by number.
pub(crate) trait Numbered: Copy {
    fn of(number: u32) -> Self;
    fn number(self) -> u32;
}

impl Numbered for PageId {
    fn of(number: u32) -> Self {
        Self(number)
    }

    fn number(self) -> u32 {
        self.0
    }
}

impl Numbered for StateSlot {
    fn of(number: u32) -> Self {
        Self(number)
    }

    fn number(self) -> u32 {
        self.0
    }
}

/// First pages of unreferenced blocks, or unreferenced slots, next to be taken first: a doubly linked list in one array, so that
/// what is cached and hit again leaves the middle of the list in constant time.
#[derive(Debug)]
pub(crate) struct FreeList<T> {
    /// One link for each, then the sentinel that closes the ring.
    links: Vec<Link>,
    of: PhantomData<T>,
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

impl<T: Numbered> FreeList<T> {
    /// None of so many.
    pub(crate) fn empty(count: usize) -> Self {
        let sentinel = u32::try_from(count).expect("their number fits 32 bits");
        let mut list = Self {
            links: vec![UNLINKED; count + 1],
            of: PhantomData,
        };
        list.links[count] = Link {
            prev: sentinel,
            next: sentinel,
        };
        list
    }

    /// All of so many, in their order.
    pub(crate) fn full(count: usize) -> Self {
        let mut list = Self::empty(count);
        for number in 0..list.sentinel() {
            list.push_back(T::of(number));
        }
        list
    }

    pub(crate) fn contains(&self, item: T) -> bool {
        self.links[item.number() as usize].next != UNLINKED.next
    }

    /// `item` will be taken after all others.
    pub(crate) fn push_back(&mut self, item: T) {
        self.link(item, self.links[self.sentinel() as usize].prev);
    }

    /// `item` will be taken next.
    pub(crate) fn push_front(&mut self, item: T) {
        self.link(item, self.sentinel());
    }

    pub(crate) fn pop_front(&mut self) -> Option<T> {
        let first = self.links[self.sentinel() as usize].next;
        (first != self.sentinel()).then(|| {
            self.remove(T::of(first));
            T::of(first)
        })
    }

    pub(crate) fn remove(&mut self, item: T) {
        debug_assert!(self.contains(item));
        let Link { prev, next } = std::mem::replace(&mut self.links[item.number() as usize], UNLINKED);
        self.links[prev as usize].next = next;
        self.links[next as usize].prev = prev;
    }

    /// The next to be taken.
    pub(crate) fn first(&self) -> Option<T> {
        self.iter().next()
    }

    /// From the next to be taken to the last.
    pub(crate) fn iter(&self) -> impl Iterator<Item = T> + '_ {
        let after = |at: u32| Some(self.links[at as usize].next).filter(|&next| next != self.sentinel());
        std::iter::successors(after(self.sentinel()), move |&at| after(at)).map(T::of)
    }

    fn sentinel(&self) -> u32 {
        (self.links.len() - 1) as u32
    }

    fn link(&mut self, item: T, prev: u32) {
        debug_assert!(!self.contains(item));
        let number = item.number();
        let next = self.links[prev as usize].next;
        self.links[number as usize] = Link { prev, next };
        self.links[prev as usize].next = number;
        self.links[next as usize].prev = number;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_a_queue_with_two_ends_and_removal_anywhere() {
        let mut list = FreeList::<PageId>::full(4);
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
