/// How the rows of a stored matrix lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RowOrder {
    /// One after another.
    Plain,
    /// Those of each head as (0, d/2, 1, d/2 + 1, ...).
    Interleaved {
        /// Rows of one head, even, a divisor of all rows.
        head_dim: usize,
    },
    /// Group by group, some of each part: all of the first part come first when they are put in order.
    Grouped {
        /// Number of groups.
        groups: usize,
        /// Rows of each part in one group.
        parts: [usize; 4],
    },
    /// Some of the rows of a larger tensor, as those of one expert in a tensor of all.
    Among(Among),
    /// Some of the columns of a larger tensor, which stores the matrix transposed.
    Columns(Among),
}

/// Which rows of a tensor belong to a matrix: `first`, `first + step`, ...
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Among {
    /// Rows of the tensor.
    pub(crate) all: usize,
    /// The first row of the matrix.
    pub(crate) first: usize,
    /// From one of its rows to the next.
    pub(crate) step: usize,
}

impl RowOrder {
    /// Where row `row` lies: which row it is, or which column.
    pub(crate) fn stored(self, row: usize) -> usize {
        match self {
            Self::Plain => row,
            Self::Interleaved { head_dim } => {
                let (head, row) = (row / head_dim, row % head_dim);
                let half = head_dim / 2;
                head * head_dim + 2 * (row % half) + row / half
            }
            Self::Grouped { groups, parts } => {
                let (mut row, mut before) = (row, 0);
                for part in parts {
                    if row < groups * part {
                        return row / part * parts.iter().sum::<usize>() + before + row % part;
                    }
                    row -= groups * part;
                    before += part;
                }
                unreachable!("a matrix has the rows of its parts")
            }
            Self::Among(among) | Self::Columns(among) => among.first + row * among.step,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// transformers' `fix_query_key_value_ordering`: `view(groups, sum of parts)`, split, flattened part by part.
    #[test]
    fn groups_become_parts() {
        let (groups, parts) = (3, [2, 1, 0, 4]);
        let order = RowOrder::Grouped { groups, parts };
        let stored =
            |group: usize, part: usize, row: usize| group * 7 + parts[..part].iter().sum::<usize>() + row;
        let mut expected = Vec::new();
        for (part, &rows) in parts.iter().enumerate() {
            for group in 0..groups {
                expected.extend((0..rows).map(|row| stored(group, part, row)));
            }
        }
        let found: Vec<usize> = (0..21).map(|row| order.stored(row)).collect();
        assert_eq!(found, expected);
    }
}
