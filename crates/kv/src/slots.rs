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

/// When a snapshot is given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Worth {
    /// That of a place within a prompt: before all others.
    Within,
    /// That of the end of an output: before those of prompts, the least recently used first. Without it, the answer is computed again.
    Output,
    /// That of a prompt, the least recently used first. Without it, all of the prompt is computed again.
    Prompt,
}

/// All slots. Those that no table holds are idle: free, or snapshots that can be given up.
#[derive(Debug)]
pub(crate) struct Slots {
    /// Tables that hold each slot.
    references: Vec<u32>,
    free: FreeList<StateSlot>,
    /// Idle snapshots within prompts, then those of outputs.
    passing: FreeList<StateSlot>,
    /// Idle snapshots of prompts.
    prompts: FreeList<StateSlot>,
    /// How many they are.
    num_prompts: usize,
    used: usize,
}

impl Slots {
    pub(crate) fn new(total: usize) -> Self {
        Self {
            references: vec![0; total],
            free: FreeList::full(total),
            passing: FreeList::empty(total),
            prompts: FreeList::empty(total),
            num_prompts: 0,
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

    /// Takes a slot for a table: a free one, or that of the snapshot to be given up next.
    pub(crate) fn take(&mut self) -> Result<StateSlot, NoRoom> {
        let full = NoRoom::Slots(self.total());
        let slot = self.take_passing();
        slot.or_else(|| self.take_from(|slots| slots.prompts.first()))
            .ok_or(full)
    }

    /// The same, where it costs no snapshot of a prompt.
    pub(crate) fn take_passing(&mut self) -> Option<StateSlot> {
        self.take_from(|slots| slots.free.first().or_else(|| slots.passing.first()))
    }

    /// The same, where it costs one of a prompt beyond half of all slots.
    pub(crate) fn take_extra(&mut self) -> Option<StateSlot> {
        let many = 2 * self.num_prompts > self.total();
        self.take_from(|slots| slots.prompts.first().filter(|_| many))
    }

    fn take_from(&mut self, choose: impl Fn(&Self) -> Option<StateSlot>) -> Option<StateSlot> {
        let slot = choose(self)?;
        self.hold(slot);
        Some(slot)
    }

    /// One more table holds `slot`.
    pub(crate) fn hold(&mut self, slot: StateSlot) {
        if self.references(slot) == 0 {
            self.unlink(slot);
            self.used += 1;
        }
        self.references[slot.index()] += 1;
    }

    /// A table holds `slot` no more. Idle, it is a snapshot of some worth, or free.
    pub(crate) fn put(&mut self, slot: StateSlot, worth: Option<Worth>) {
        let references = &mut self.references[slot.index()];
        *references -= 1;
        if *references > 0 {
            return;
        }
        self.used -= 1;
        match worth {
            None => self.free.push_front(slot),
            Some(Worth::Within) => self.passing.push_front(slot),
            Some(Worth::Output) => self.passing.push_back(slot),
            Some(Worth::Prompt) => {
                self.prompts.push_back(slot);
                self.num_prompts += 1;
            }
        }
    }

    /// `slot` is a snapshot no more.
    pub(crate) fn forget(&mut self, slot: StateSlot) {
        if self.references(slot) == 0 {
            self.unlink(slot);
            self.free.push_front(slot);
        }
    }

    /// No slot is a snapshot any more.
    pub(crate) fn forget_all(&mut self) {
        for slot in (0..self.total() as u32).map(StateSlot) {
            self.forget(slot);
        }
    }

    /// Takes an idle slot from its list.
    fn unlink(&mut self, slot: StateSlot) {
        if self.prompts.contains(slot) {
            self.prompts.remove(slot);
            self.num_prompts -= 1;
        } else if self.passing.contains(slot) {
            self.passing.remove(slot);
        } else {
            self.free.remove(slot);
        }
    }

    /// Each slot is idle, or held by as many tables as are counted, which hold it as often as `held` has it; those that are idle and
    /// not free are snapshots.
    pub(crate) fn check_invariants(
        &self,
        held: impl Iterator<Item = StateSlot>,
        is_snapshot: impl Fn(StateSlot) -> bool,
    ) -> Result<(), String> {
        let mut references = vec![0; self.total()];
        held.for_each(|slot| references[slot.index()] += 1);
        let prompts = self.prompts.iter().count();
        let snapshots = || self.passing.iter().chain(self.prompts.iter());
        let mut idle: Vec<_> = self
            .free
            .iter()
            .chain(snapshots())
            .map(StateSlot::index)
            .collect();
        idle.sort_unstable();
        let unused = (0..self.total()).filter(|&slot| references[slot] == 0);
        let counts = (self.total() - idle.len(), prompts) == (self.used, self.num_prompts);
        let known = snapshots().all(&is_snapshot) && !self.free.iter().any(&is_snapshot);
        match references == self.references && unused.eq(idle.iter().copied()) && counts && known {
            true => Ok(()),
            false => Err(format!(
                "{self:?} are idle or held, and tables hold {references:?}"
            )),
        }
    }
}
