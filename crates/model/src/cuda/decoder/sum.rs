//! How ranks sum what is added to the residual stream.

use plimsoll_kernels::cuda::SentHalf;

/// How far the sum over the ranks of what is to be added to the residual stream is.
#[derive(Clone, Copy, Debug, Default)]
pub(super) enum RankSum {
    /// It is there.
    #[default]
    Done,
    /// This rank's part is there: what takes it up makes the sum.
    Whole,
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

impl RankSum {
    pub(super) fn is_done(&self) -> bool {
        matches!(self, Self::Done)
    }
}
