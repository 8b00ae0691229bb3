//! How what is added to the residual stream is summed.

use plimsoll_kernels::cuda::{GpuExpertOutputs, SentHalf};

/// How far what is to be added to the residual stream has been summed.
#[derive(Clone, Copy, Debug, Default)]
pub(super) enum DeltaSum<'a> {
    /// It is there.
    #[default]
    Done,
    /// The outputs of each row's experts are there: what takes up the sum adds them. On one GPU alone.
    Experts(GpuExpertOutputs<'a>),
    /// This rank's part is there: what takes up the sum adds those of the ranks.
    Rank,
    /// The same, and both halves of the rows are on their way between the ranks.
    Sent(SentSum),
    /// The same of the rows at hand, which are one of the halves.
    Half(SentHalf),
}

/// A sum in halves.
#[derive(Clone, Copy, Debug)]
pub(super) struct SentSum {
    /// Of each half.
    pub(super) rows: [usize; 2],
    pub(super) halves: [SentHalf; 2],
}

impl DeltaSum<'_> {
    pub(super) fn is_done(&self) -> bool {
        matches!(self, Self::Done)
    }
}
