//! The state of a request, where layers keep one of fixed size.

use plimsoll_core::StateSlot;

use crate::slots::Worth;

/// Tokens between snapshots within a prompt, or those of the longest run where that is less.
const INTERVAL: usize = 512;

/// The state of one request, as its runs are planned.
#[derive(Debug)]
pub(crate) struct TableState {
    /// Where the state behind `planned` tokens is; none before the first.
    pub(crate) before: Option<StateSlot>,
    /// Where the next run leaves its state; no other table holds it.
    pub(crate) own: StateSlot,
    /// Tokens that runs were planned for.
    pub(crate) planned: usize,
    /// The snapshot that the request began with, and the name of its prefix.
    pub(crate) began: Option<(StateSlot, u64)>,
    /// Tokens of the prompt.
    pub(crate) prompt: usize,
    /// Numbers of tokens of the prompt behind which a snapshot is wanted.
    pub(crate) places: [Option<usize>; 2],
    /// Tokens of the last snapshot.
    pub(crate) last: usize,
    /// Slots left behind, until the runs that left them are computed.
    pub(crate) left: Vec<Left>,
    /// The last snapshot in the output, and the name of its prefix.
    pub(crate) output: Option<(StateSlot, u64)>,
}

/// A slot left behind.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Left {
    pub(crate) slot: StateSlot,
    pub(crate) tokens: usize,
    pub(crate) worth: Worth,
}

impl TableState {
    /// Slots that the table holds.
    pub(crate) fn held(&self) -> impl Iterator<Item = StateSlot> + '_ {
        let left = self.left.iter().map(|left| left.slot);
        left.chain(std::iter::once(self.own))
    }

    /// What the state before the next run would be worth as a snapshot; `None` if none is wanted there. They lie at multiples of
    /// `unit` tokens. No run is longer than `longest_run` tokens.
    pub(crate) fn worth(&self, unit: usize, longest_run: usize) -> Option<Worth> {
        let start = self.planned;
        if start == 0 || !start.is_multiple_of(unit) {
            return None;
        }
        if self.places.contains(&Some(start)) {
            return Some(Worth::Prompt);
        }
        if start >= self.prompt {
            return Some(Worth::Output);
        }
        (start >= self.last + INTERVAL.min(longest_run)).then_some(Worth::Within)
    }
}
