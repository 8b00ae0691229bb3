//! Slots for states of fixed size.

use plimsoll_core::StateSlot;

use crate::{NoRoom, free_list::FreeList};

/// Use of the slots for states.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SlotStats {
    /// All slots; 0 where no layer has a state.
    pub total: usize,
    /// Slots held by a table.
    pub used: usize,
    /// Slots with a snapshot in the prefix cache; a table that begins with one holds it for a step.
    pub snapshots: usize,
    /// Snapshots given up since the start because their slot was needed, or a later one of the same output took their place.
    pub given_up: u64,
}

/// All slots. Those that no table holds are idle: free, or snapshots that can be given up.
#[derive(Debug)]
pub(crate) struct Slots {
    /// Tables that hold each slot.
    references: Vec<u32>,
    idle: FreeList<StateSlot>,
    used: usize,
}

impl Slots {
    pub(crate) fn new(total: usize) -> Self {
        Self {
            references: vec![0; total],
            idle: FreeList::full(total),
            used: 0,
        }
    }

    pub(crate) fn total(&self) -> usize {
        self.references.len()
    }

    /// Slots held by a table.
    pub(crate) fn used(&self) -> usize {
        self.used
    }

    /// Tables that hold a slot.
    pub(crate) fn references(&self, slot: StateSlot) -> u32 {
        self.references[slot.index()]
    }

    /// Takes an idle slot for a table: a free one, or else the snapshot that is the next to be given up.
    pub(crate) fn take(&mut self, is_snapshot: impl Fn(StateSlot) -> bool) -> Result<StateSlot, NoRoom> {
        let mut idle = self.idle.iter();
        let first = idle.next().ok_or(NoRoom::Slots(self.total()))?;
        let free = std::iter::once(first)
            .chain(idle)
            .find(|&slot| !is_snapshot(slot));
        let slot = free.unwrap_or(first);
        self.hold(slot);
        Ok(slot)
    }

    /// One more table holds `slot`.
    pub(crate) fn hold(&mut self, slot: StateSlot) {
        let references = &mut self.references[slot.index()];
        if *references == 0 {
            self.idle.remove(slot);
            self.used += 1;
        }
        *references += 1;
    }

    /// A table holds `slot` no more. Idle, it is taken first, or `last` if what it holds is worth keeping.
    pub(crate) fn put(&mut self, slot: StateSlot, last: bool) {
        let references = &mut self.references[slot.index()];
        *references -= 1;
        if *references == 0 {
            self.used -= 1;
            match last {
                true => self.idle.push_back(slot),
                false => self.idle.push_front(slot),
            }
        }
    }

    /// Each slot is idle, or held by as many tables as are counted, which hold it as often as `held` has it.
    pub(crate) fn check_invariants(&self, held: impl Iterator<Item = StateSlot>) -> Result<(), String> {
        let mut references = vec![0; self.total()];
        held.for_each(|slot| references[slot.index()] += 1);
        let mut idle: Vec<_> = self.idle.iter().map(StateSlot::index).collect();
        idle.sort_unstable();
        let unused = (0..self.total()).filter(|&slot| references[slot] == 0);
        let used = self.total() - idle.len();
        match references == self.references && unused.eq(idle.iter().copied()) && used == self.used {
            true => Ok(()),
            false => Err(format!(
                "state slots {idle:?} are idle, {} used, and {:?} counted; tables hold {references:?}",
                self.used, self.references
            )),
        }
    }
}
