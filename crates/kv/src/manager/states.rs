//! The states of requests: where each run finds and leaves its own, and which of them stay behind as snapshots.
//!
//! A snapshot costs no copy. A run that begins where one is wanted leaves its state in another slot, and the slot that it began
//! with stays as it is: the table holds it until that run is computed, and from the time at which what came before is computed it
//! belongs to the prefix cache too. A request that hits it begins with that slot in the same way.
//!
//! They are wanted at the ends of blocks, and up to the end of a prompt at the ends of chunks of the recurrence, where runs of prompts
//! end in any case: what follows is computed in the same chunks however a prompt is divided among steps. In particular:
//!
//! - before the end of a prompt, where the next turn of a chat goes on, whether or not it repeats all of the answer;
//! - where a prompt leaves a prefix whose KV is cached, without a state there: what two requests have in common, others will have
//!   too (Marconi, arXiv:2411.19379);
//! - in the output, where only the last one stays: that of the end of a turn;
//! - where a long prompt is cut into steps anyway.
//!
//! [`Worth`] says which are given up first.

use plimsoll_core::{RunState, StateSlot};

use super::KvManager;
use crate::{
    BlockTable, NoRoom,
    slots::{SlotStats, Worth},
    state::{Left, TableState},
};

/// Tokens at the end of a prompt that the next turn of a chat often does not repeat: chat templates end a prompt with the head of
/// an answer, such as `<think>`, which they leave out of answers in the past.
const ANSWER_HEAD: usize = 8;

/// Least number of blocks between what is found and a place at which a prompt is cut for a snapshot: to compute so few again
/// takes no longer than the step that the cut adds.
const LEAST_BLOCKS: usize = 2;

impl KvManager {
    /// Where a run ends that begins at `start` and has room up to `end`: with the prompt, where a snapshot is wanted, at the end of a
    /// chunk of the recurrence, and of a block if there is room for one. At `start` where there is not room for a chunk. A run behind the
    /// prompt ends anywhere.
    pub fn cut(&self, table: &BlockTable, start: usize, end: usize) -> usize {
        let Some(state) = table.state.as_ref().filter(|state| start < state.prompt) else {
            return end;
        };
        let end = end.min(state.prompt);
        let last = |unit: usize| match end < state.prompt {
            true => (end / unit * unit).max(start),
            false => end,
        };
        if !self.keeps_states() {
            return last(self.state_chunk);
        }
        let within = |&place: &usize| start < place && place < end;
        let place = state.places.into_iter().flatten().filter(within).min();
        let aligned = || Some(last(self.snapshot_unit())).filter(|&at| at > start);
        place.or_else(aligned).unwrap_or_else(|| last(self.state_chunk))
    }

    /// Tokens at whose multiples prompts are cut for snapshots: the size of blocks or of chunks, both powers of two.
    fn snapshot_unit(&self) -> usize {
        self.config.block_size.tokens().max(self.state_chunk)
    }

    /// Snapshots behind `tokens` tokens of a request lie at multiples of so many: larger ones up to the end of its prompt.
    fn unit_behind(&self, tokens: usize, prompt: usize) -> usize {
        match tokens <= prompt {
            true => self.snapshot_unit(),
            false => self.config.block_size.tokens(),
        }
    }

    /// Plans the table's next run, up to `end` tokens: where its state is. `None` in a model without states.
    pub fn next_state(&mut self, table: &mut BlockTable, end: usize) -> Option<RunState> {
        let mut state = table.state.take()?;
        let unit = self.unit_behind(state.planned, state.prompt);
        if let Some(worth) = state.worth(unit, self.longest_run)
            && state.before == Some(state.own)
            && self.prefix_caching
        {
            self.leave(table, &mut state, worth);
        }
        let run = RunState {
            before: state.before.replace(state.own),
            after: state.own,
            in_chunks: state.planned < state.prompt,
        };
        state.planned = end;
        table.state = Some(state);
        Some(run)
    }

    /// Leaves the slot of the state so far behind, if there is another to go on with.
    fn leave(&mut self, table: &BlockTable, state: &mut TableState, worth: Worth) {
        self.supersede(state);
        let Some(next) = self.next_slot(state, worth) else {
            return;
        };
        let left = Left {
            slot: std::mem::replace(&mut state.own, next),
            tokens: state.planned,
            worth,
        };
        state.last = left.tokens;
        state.left.push(left);
        self.keep_computed(table, state);
    }

    /// A slot for what follows a snapshot of some worth.
    fn next_slot(&mut self, state: &mut TableState, worth: Worth) -> Option<StateSlot> {
        if let Some(slot) = self.slots.take_passing() {
            self.give_up(slot);
            return Some(slot);
        }
        if worth != Worth::Prompt {
            let slot = self.slots.take_extra()?;
            self.give_up(slot);
            return Some(slot);
        }
        // The next turn of the same chat has no use for the snapshot that this one began with.
        if let Some((slot, name)) = state.began.take()
            && self.index.name_of(slot) == Some(name)
            && self.index.goes_on_once(slot)
        {
            let held = state.left.iter().position(|left| left.slot == slot);
            if self.slots.references(slot) == u32::from(held.is_some()) {
                self.give_up(slot);
                if let Some(held) = held {
                    return Some(state.left.remove(held).slot);
                }
            }
        }
        self.take_slot().ok()
    }

    /// Gives up the last snapshot in the output, unless another request begins with it: the next one takes its place.
    fn supersede(&mut self, state: &mut TableState) {
        if let Some((slot, name)) = state.output.take()
            && self.index.name_of(slot) == Some(name)
            && self.slots.references(slot) == 0
        {
            self.give_up(slot);
        }
    }

    /// Tokens of `table` were computed: what they left behind can be hit, and what the runs behind began with goes back.
    pub(super) fn commit_state(&mut self, table: &mut BlockTable) {
        let Some(mut state) = table.state.take() else {
            return;
        };
        self.keep_computed(table, &mut state);
        let computed = table.computed;
        state.left.retain(|left| {
            let stays = left.tokens >= computed;
            if !stays {
                self.put_slot(left.slot, left.worth);
            }
            stays
        });
        table.state = Some(state);
    }

    /// Gives what was left behind the last computed token to the prefix cache.
    fn keep_computed(&mut self, table: &BlockTable, state: &mut TableState) {
        let left = state.left.iter().find(|left| left.tokens == table.computed);
        if let (Some(left), Some(prefix)) = (left, table.prefix)
            && self.index.keep_state(prefix, left.slot)
            && left.tokens >= state.prompt
        {
            state.output = Some((left.slot, prefix.name));
        }
    }

    /// Gives back the slots of a table. The state behind its last token stays as a snapshot where a block ends there.
    pub(super) fn release_state(&mut self, table: &BlockTable, mut state: TableState) {
        let is_settled = state.before == Some(state.own) && state.planned == table.computed;
        let unit = self.unit_behind(table.computed, state.prompt);
        let is_aligned = table.computed.is_multiple_of(unit);
        if let Some(prefix) = table
            .prefix
            .filter(|_| self.prefix_caching && is_settled && is_aligned)
            && self.index.keep_state(prefix, state.own)
        {
            self.supersede(&mut state);
        }
        for left in state.left {
            self.put_slot(left.slot, left.worth);
        }
        self.put_slot(state.own, Worth::Output);
    }

    /// The state of a table with a prompt of `prompt` tokens that begins with the snapshot `hit` behind `computed` tokens, if there is
    /// one. The KV of `cached` tokens is cached. Nothing is changed where there is no room.
    pub(super) fn open_state(
        &mut self,
        hit: Option<StateSlot>,
        computed: usize,
        cached: usize,
        prompt: usize,
    ) -> Result<TableState, NoRoom> {
        if let Some(slot) = hit {
            self.slots.hold(slot);
        }
        let mut left = Vec::new();
        let own = match (self.take_slot(), hit) {
            (Ok(own), hit) => {
                left.extend(hit.map(|slot| Left {
                    slot,
                    tokens: computed,
                    worth: Worth::Prompt,
                }));
                own
            }
            // The snapshot has the only slot that is left: the request goes on in it.
            (Err(_), Some(slot)) if self.slots.references(slot) == 1 => {
                self.give_up(slot);
                slot
            }
            (Err(full), hit) => {
                if let Some(slot) = hit {
                    self.put_slot(slot, Worth::Prompt);
                }
                return Err(full);
            }
        };
        let unit = self.snapshot_unit();
        let end = prompt.saturating_sub(ANSWER_HEAD) / unit * unit;
        let gain = LEAST_BLOCKS * self.config.block_size.tokens();
        let fork = Some(cached / unit * unit).filter(|&fork| fork >= computed + gain && fork + gain <= end);
        Ok(TableState {
            before: hit,
            own,
            planned: computed,
            began: hit.and_then(|slot| Some((slot, self.index.name_of(slot)?))),
            prompt,
            places: [fork, Some(end).filter(|&end| end >= computed + gain)],
            last: computed,
            left,
            output: None,
        })
    }

    /// Numbers of slots.
    pub(super) fn slot_stats(&self) -> SlotStats {
        SlotStats {
            total: self.slots.total(),
            used: self.slots.used(),
            snapshots: self.index.snapshots(),
            given_up: self.given_up,
        }
    }

    /// Whether there is a slot for another snapshot.
    fn keeps_states(&self) -> bool {
        self.prefix_caching && self.slots.used() < self.slots.total()
    }

    fn take_slot(&mut self) -> Result<StateSlot, NoRoom> {
        let slot = self.slots.take()?;
        self.give_up(slot);
        Ok(slot)
    }

    /// `slot` is a snapshot no more, if it was one.
    fn give_up(&mut self, slot: StateSlot) {
        if self.index.drop_state(slot) {
            self.given_up += 1;
            self.slots.forget(slot);
        }
    }

    fn put_slot(&mut self, slot: StateSlot, worth: Worth) {
        let worth = Some(worth).filter(|_| self.index.is_snapshot(slot));
        self.slots.put(slot, worth);
    }
}
