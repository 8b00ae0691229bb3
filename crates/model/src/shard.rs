//! Which part of a model a rank has, and where that lies in stored tensors.

use std::ops::Range;

/// Most ranks.
pub const MAX_RANKS: usize = 8;

/// A rank of several, each of which has a part of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    /// From 0.
    pub rank: usize,
    /// How many there are.
    pub ranks: usize,
}

impl Default for Shard {
    fn default() -> Self {
        Self::WHOLE
    }
}

impl Shard {
    /// The one that has all of it.
    pub const WHOLE: Self = Self { rank: 0, ranks: 1 };

    /// Of fewer parts, each of which several ranks have.
    pub(crate) fn among(self, parts: usize) -> Self {
        Self {
            rank: self.rank * parts / self.ranks,
            ranks: parts,
        }
    }
}

/// Which rows or columns of a stored tensor are a rank's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Share {
    pub(crate) axis: Axis,
    /// As many as are stored.
    pub(crate) of: usize,
    /// Those of the rank, ascending.
    pub(crate) own: Vec<Range<usize>>,
}

/// What is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Axis {
    /// Of a matrix `[outputs, inputs]`, or elements of a vector.
    Outputs,
    Inputs,
}

impl Share {
    /// Of parts that lie one after the other: the length of each that the rank has, and among whom it is divided. None where that
    /// is all.
    pub(crate) fn of_parts(axis: Axis, parts: &[(usize, Shard)]) -> Option<Self> {
        let mut of = 0;
        let own = parts.iter().map(|&(len, shard)| {
            let start = of + shard.rank * len;
            of += shard.ranks * len;
            start..start + len
        });
        let own = own.collect();
        let is_all = parts.iter().all(|(_, shard)| shard.ranks == 1);
        (!is_all).then_some(Self { axis, of, own })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_lie_one_after_the_other() {
        let shard = Shard { rank: 3, ranks: 4 };
        let kv = shard.among(2);
        assert_eq!(kv, Shard { rank: 1, ranks: 2 });
        let share = Share::of_parts(Axis::Outputs, &[(8, shard), (2, kv), (2, kv)]).unwrap();
        assert_eq!((share.of, share.own), (40, vec![24..32, 34..36, 38..40]));
        assert_eq!(Share::of_parts(Axis::Inputs, &[(8, Shard::WHOLE)]), None);
    }
}
