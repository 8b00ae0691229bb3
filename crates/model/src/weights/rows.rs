use std::borrow::Cow;

use super::Tensor;

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
}

impl RowOrder {
    /// Where row `row` lies.
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
        }
    }
}

impl Tensor<'_> {
    /// The tensor with its rows one after another. Rows are whole blocks in every quantised type, so this moves bytes.
    pub(crate) fn in_order(mut self) -> Self {
        if self.order != RowOrder::Plain {
            let rows = self.shape.0[0];
            let row_bytes = self.data.len() / rows;
            let mut ordered = Vec::with_capacity(self.data.len());
            for row in 0..rows {
                let start = self.order.stored(row) * row_bytes;
                ordered.extend_from_slice(&self.data[start..start + row_bytes]);
            }
            self.data = Cow::Owned(ordered);
            self.order = RowOrder::Plain;
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use plimsoll_kernels::WeightType;

    use super::*;
    use crate::Shape;

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

    /// The converter's own words: `w.reshape(heads, 2, d / 2).swapaxes(1, 2)`.
    #[test]
    fn undoes_the_converters_permutation() {
        let (heads, half) = (3_u8, 4_u8);
        let original: Vec<u8> = (0..heads * 2 * half).collect();
        let row = |head: u8, pair: u8, side: u8| head * 2 * half + side * half + pair;
        let pairs = (0..heads).flat_map(|h| (0..half).flat_map(move |p| [row(h, p, 0), row(h, p, 1)]));
        let converted: Vec<u8> = pairs.collect();
        assert_ne!(converted, original);
        let tensor = Tensor {
            name: String::new(),
            dtype: WeightType::F32,
            shape: Shape(vec![converted.len(), 1]),
            order: RowOrder::Interleaved {
                head_dim: usize::from(2 * half),
            },
            unit_offset: false,
            data: converted.into(),
        };
        assert_eq!(tensor.in_order().data, original);
    }
}
