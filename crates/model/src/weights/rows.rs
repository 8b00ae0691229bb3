use std::borrow::Cow;

use super::Tensor;
use crate::blocks::RowOrder;

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
