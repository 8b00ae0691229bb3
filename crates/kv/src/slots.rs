//! Slots for states of fixed size.

use plimsoll_core::StateSlot;

use crate::NoRoom;

/// Use of the slots for states.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SlotStats {
    /// All slots; 0 where no layer has a state.
    pub total: usize,
    /// Slots held by a table.
    pub used: usize,
}

/// All slots, and which of them are free.
#[derive(Debug)]
pub(crate) struct Slots {
    total: usize,
    /// A stack: the last is given out next.
    free: Vec<StateSlot>,
}

impl Slots {
    pub(crate) fn new(total: usize) -> Self {
        Self {
            total,
            free: (0..total as u32).rev().map(StateSlot).collect(),
        }
    }

    pub(crate) fn stats(&self) -> SlotStats {
        SlotStats {
            total: self.total,
            used: self.total - self.free.len(),
        }
    }

    pub(crate) fn take(&mut self) -> Result<StateSlot, NoRoom> {
        self.free.pop().ok_or(NoRoom::Slots(self.total))
    }

    pub(crate) fn put(&mut self, slot: StateSlot) {
        self.free.push(slot);
    }

    /// Each slot is free or one of `held`, once.
    pub(crate) fn check_invariants(&self, held: impl Iterator<Item = StateSlot>) -> Result<(), String> {
        let mut all: Vec<StateSlot> = self.free.iter().copied().chain(held).collect();
        all.sort_unstable();
        match all.iter().map(|slot| slot.index()).eq(0..self.total) {
            true => Ok(()),
            false => Err(format!(
                "of {} state slots, these are free or held: {all:?}",
                self.total
            )),
        }
    }
}
