//! The kinds of load.

use clap::ValueEnum;
use strum::{EnumIter, IntoStaticStr};

use super::limits::Limits;

/// One kind of load, in the order in which they run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, EnumIter, IntoStaticStr, ValueEnum)]
#[strum(serialize_all = "snake_case")]
pub(super) enum Stage {
    /// Every feature of the API, once with each endpoint, whole and as a stream.
    Features,
    /// Prompt plus output of the full length.
    Longest,
    /// Long prompts that arrive while all rows generate.
    Mixed,
    /// Many requests that begin alike.
    Prefixes,
    /// Clients that go away in the middle.
    Disconnects,
    /// The largest pictures in all rows, then others; for models that take images.
    Pictures,
    /// Rows and KV cache full at the same time.
    Full,
    /// More short requests than there are rows.
    Rows,
    /// All of it by chance.
    Mix,
}

impl Stage {
    pub(super) fn name(self) -> &'static str {
        self.into()
    }

    /// Its part of the time, beside those of the others.
    pub(super) fn share(self) -> u32 {
        match self {
            Self::Features | Self::Disconnects => 5,
            Self::Longest | Self::Rows | Self::Mixed | Self::Prefixes => 10,
            Self::Pictures | Self::Full => 20,
            Self::Mix => 30,
        }
    }

    /// Whether its goal takes many requests together, at once or of different kinds: a turn that is interrupted has to begin anew.
    pub(super) fn adds_up(self) -> bool {
        matches!(self, Self::Features | Self::Pictures | Self::Full | Self::Rows)
    }

    /// Requests under way at once.
    pub(super) fn concurrency(self, limits: &Limits) -> usize {
        let rows = limits.max_num_seqs;
        match self {
            Self::Features => rows.min(8),
            Self::Longest => rows.min(4),
            Self::Prefixes | Self::Disconnects => rows,
            // Some wait.
            Self::Rows | Self::Mixed | Self::Pictures | Self::Full | Self::Mix => rows + rows.div_ceil(8) + 1,
        }
    }
}
