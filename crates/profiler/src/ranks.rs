//! Several devices that serve one model, each with a process or thread of its own: its rank.

/// How one rank reaches the others. Every rank makes the same calls in the same order, and each call waits for all.
///
/// The profile asks after everything that can fail, so that ranks go on together or not at all. A step that was launched
/// everywhere is finished everywhere, and a state in which it was launched only here and there is dropped: an executor with
/// collectives of its own must survive that (by ending its communicator).
pub trait Ranks {
    /// This rank, from 0.
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn count(&self) -> usize;

    /// The least of all ranks' values, the same on every rank.
    ///
    /// # Errors
    /// [`RankLost`] if there is no answer, on every rank that is left and at every later call.
    fn min(&mut self, value: usize) -> Result<usize, RankLost>;

    /// The worst of all ranks' verdicts, and the first rank that has it.
    ///
    /// # Errors
    /// As [`Self::min`].
    fn worst(&mut self, verdict: Verdict) -> Result<(Verdict, usize), RankLost> {
        let count = self.count();
        let worst = self.min(verdict as usize * count + self.rank())?;
        let verdict = [Verdict::Failed, Verdict::OutOfMemory]
            .get(worst / count)
            .copied()
            .unwrap_or(Verdict::Passed);
        Ok((verdict, worst % count))
    }
}

/// How something went on one rank; the worst is the least.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verdict {
    /// No size helps: everything ends.
    Failed,
    /// A smaller size may do.
    OutOfMemory,
    /// Go on.
    Passed,
}

/// A rank is gone, or cannot be reached.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the ranks lost contact with each other: {0}")]
pub struct RankLost(
    /// What the collective says.
    pub String,
);

/// The one rank of a server on one device.
#[derive(Clone, Copy, Debug, Default)]
pub struct Solo;

impl Ranks for Solo {
    fn rank(&self) -> usize {
        0
    }

    fn count(&self) -> usize {
        1
    }

    fn min(&mut self, value: usize) -> Result<usize, RankLost> {
        Ok(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The third of five ranks, whose others said what is in the list.
    struct Fixed(Vec<usize>);

    impl Ranks for Fixed {
        fn rank(&self) -> usize {
            2
        }

        fn count(&self) -> usize {
            5
        }

        fn min(&mut self, value: usize) -> Result<usize, RankLost> {
            Ok(self.0.iter().copied().fold(value, usize::min))
        }
    }

    #[test]
    fn the_worst_verdict_is_the_first_ranks_that_has_it() {
        use Verdict::{Failed, OutOfMemory, Passed};
        let said = |verdicts: [Verdict; 4]| {
            let ranks = [0, 1, 3, 4];
            let codes = ranks.iter().zip(verdicts);
            Fixed(codes.map(|(rank, v)| v as usize * 5 + rank).collect())
        };
        let cases = [
            ([Passed; 4], Passed, (Passed, 0)),
            ([Passed; 4], OutOfMemory, (OutOfMemory, 2)),
            (
                [Passed, OutOfMemory, Passed, Passed],
                OutOfMemory,
                (OutOfMemory, 1),
            ),
            ([OutOfMemory, OutOfMemory, Passed, Failed], Passed, (Failed, 4)),
            ([OutOfMemory, Passed, Passed, Passed], Failed, (Failed, 2)),
        ];
        for (others, own, worst) in cases {
            assert_eq!(said(others).worst(own), Ok(worst));
        }
    }
}
