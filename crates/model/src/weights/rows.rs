use std::borrow::Cow;

use super::{Tensor, slice};
use crate::blocks::{Among, RowOrder};

impl Tensor<'_> {
    /// Stored bytes, without those of rows between its own.
    pub(crate) fn bytes(&self) -> usize {
        match self.order {
            RowOrder::Plain | RowOrder::Interleaved { .. } | RowOrder::Grouped { .. } => self.data.len(),
            RowOrder::Among(among) | RowOrder::Columns(among) => {
                self.data.len() / among.all * self.shape.0[0]
            }
        }
    }

    /// The tensor with its rows one after another. Rows are whole blocks in every quantised type, so this moves bytes.
    pub(crate) fn in_order(mut self) -> Self {
        let (rows, len) = (self.shape.0[0], self.data.len());
        let at = |row: usize| self.order.stored(row);
        let gather = |row_bytes: usize| {
            let mut ordered = Vec::with_capacity(rows * row_bytes);
            for row in 0..rows {
                ordered.extend_from_slice(&self.data[at(row) * row_bytes..][..row_bytes]);
            }
            ordered
        };
        let data: Vec<u8> = match self.order {
            RowOrder::Plain => return self,
            RowOrder::Interleaved { .. } | RowOrder::Grouped { .. } => gather(len / rows),
            RowOrder::Among(Among { all, first, step: 1 }) => {
                let row_bytes = len / all;
                self.data = slice(self.data, first * row_bytes..(first + rows) * row_bytes);
                self.order = RowOrder::Plain;
                return self;
            }
            RowOrder::Among(among) => gather(len / among.all),
            RowOrder::Columns(among) => {
                let size = self.dtype.block_bytes();
                let mut turned = Vec::with_capacity(rows * len / among.all);
                for row in 0..rows {
                    for column in self.data.chunks_exact(among.all * size) {
                        turned.extend_from_slice(&column[at(row) * size..][..size]);
                    }
                }
                turned
            }
        };
        self.data = Cow::Owned(data);
        self.order = RowOrder::Plain;
        self
    }
}

#[cfg(test)]
mod tests {
    use plimsoll_kernels::WeightType;

    use super::*;

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
            order: RowOrder::Interleaved {
                head_dim: usize::from(2 * half),
            },
            ..Tensor::plain("", WeightType::F32, &[converted.len(), 1], converted)
        };
        assert_eq!(tensor.in_order().data, original);
    }

    /// Each element says in which row and in which column it is.
    #[test]
    fn rows_are_found_among_others() {
        let tensor = |order, is_turned: bool| {
            let at = |row, column| (10 * row + column) as f32;
            let elements: Vec<f32> = match is_turned {
                false => (0..12).map(|i| at(i / 3, i % 3)).collect(),
                true => (0..12).map(|i| at(i % 4, i / 4)).collect(),
            };
            let data: Vec<u8> = elements.iter().flat_map(|x| x.to_le_bytes()).collect();
            Tensor {
                order,
                ..Tensor::plain("", WeightType::F32, &[2, 3], data)
            }
        };
        let among = |first, step| Among { all: 4, first, step };
        for (among, rows) in [
            (among(2, 1), [2, 3]),
            (among(0, 2), [0, 2]),
            (among(1, 2), [1, 3]),
        ] {
            let want: Vec<f32> = (0..6).map(|i| (10 * rows[i / 3] + i % 3) as f32).collect();
            for (order, is_turned) in [(RowOrder::Among(among), false), (RowOrder::Columns(among), true)] {
                let found = tensor(order, is_turned);
                assert_eq!(found.bytes(), 2 * 3 * 4);
                let found = found.in_order();
                assert_eq!(found.order, RowOrder::Plain);
                assert_eq!(found.widen().unwrap(), want, "{order:?}");
            }
        }
    }
}
