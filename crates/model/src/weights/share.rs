//! A rank's part of stored tensors. Only its bytes are read.

use std::borrow::Cow;
use std::ops::Range;

use super::{Tensor, slice};
use crate::ModelError;
use crate::blocks::RowOrder;
use crate::shard::{Axis, Share};

impl Tensor<'_> {
    /// The rank's part of a matrix `[outputs, inputs]`, or of a vector, in place of all of it.
    ///
    /// # Errors
    /// [`ModelError::Unsupported`] where blocks of inputs, or heads whose rows are mixed, would be cut.
    pub(crate) fn of_rank(mut self, share: &Share) -> Result<Self, ModelError> {
        let block = self.dtype.block_len();
        match (share.axis, self.order) {
            (Axis::Outputs, RowOrder::Interleaved { head_dim }) => self.cut(0, share, head_dim),
            (Axis::Outputs, _) => self.cut(0, share, 1),
            // It lies transposed.
            (Axis::Inputs, RowOrder::Columns(_)) => {
                let data = pieces(self.data, 1, share.of, &share.own);
                let mut shape = self.shape;
                shape.0[1] = len(&share.own);
                Ok(Self { data, shape, ..self })
            }
            (Axis::Inputs, RowOrder::Among(among)) => {
                let rows = std::mem::replace(&mut self.shape.0[0], among.all);
                let mut cut = self.cut(1, share, block)?;
                cut.shape.0[0] = rows;
                Ok(cut)
            }
            (Axis::Inputs, _) => self.cut(1, share, block),
        }
    }

    /// Pieces along a dimension, of which `unit` neighbours cannot be cut.
    pub(crate) fn cut(mut self, dimension: usize, share: &Share, unit: usize) -> Result<Self, ModelError> {
        let own = in_units(share, unit, &self.name)?;
        let along = share.of / unit;
        let outer = self.shape.0[..dimension].iter().product();
        self.data = pieces(self.data, outer, along, &own);
        self.shape.0[dimension] = len(&share.own);
        Ok(self)
    }

    /// The same where an element along the dimension stands for `unit` of the matrix, the last for what is left.
    pub(crate) fn cut_units(
        mut self,
        dimension: usize,
        share: &Share,
        unit: usize,
    ) -> Result<Self, ModelError> {
        let own = in_units(share, unit, &self.name)?;
        let outer = self.shape.0[..dimension].iter().product();
        self.data = pieces(self.data, outer, share.of.div_ceil(unit), &own);
        self.shape.0[dimension] = len(&own);
        Ok(self)
    }
}

/// Which units a rank has.
///
/// # Errors
/// [`ModelError::Flag`] where one would be cut.
pub(crate) fn in_units(share: &Share, unit: usize, name: &str) -> Result<Vec<Range<usize>>, ModelError> {
    let own = share.own.iter().map(|range| {
        let is_whole = range.start.is_multiple_of(unit) && range.end.is_multiple_of(unit);
        is_whole.then(|| range.start / unit..range.end / unit)
    });
    own.collect::<Option<_>>().ok_or_else(|| {
        let what = match share.axis {
            Axis::Outputs => "outputs",
            Axis::Inputs => "inputs",
        };
        let (own, of) = (len(&share.own), share.of);
        let message = format!(
            "a rank would have {own} of its {of} {what} of `{name}`, which are stored {unit} together; a number of ranks that leaves \
             each a multiple of {unit} can share them"
        );
        ModelError::flag("--tensor-parallel-size", message)
    })
}

fn len(ranges: &[Range<usize>]) -> usize {
    ranges.iter().map(Range::len).sum()
}

/// Of `[outer, along]` pieces of bytes those of `own` along the second dimension; not copied where they lie together.
fn pieces<'a>(data: Cow<'a, [u8]>, outer: usize, along: usize, own: &[Range<usize>]) -> Cow<'a, [u8]> {
    let bytes = data.len() / (outer * along).max(1);
    if let (1, [own]) = (outer, own) {
        return slice(data, own.start * bytes..own.end * bytes);
    }
    let mut cut = Vec::with_capacity(outer * len(own) * bytes);
    for row in data.chunks_exact((along * bytes).max(1)) {
        for own in own {
            cut.extend_from_slice(&row[own.start * bytes..own.end * bytes]);
        }
    }
    Cow::Owned(cut)
}

#[cfg(test)]
mod tests {
    use plimsoll_kernels::WeightType;

    use super::*;
    use crate::Shape;
    use crate::blocks::Among;
    use crate::shard::Shard;

    /// `[rows, columns]`, each element with its row and its column.
    fn tensor(rows: usize, columns: usize) -> Tensor<'static> {
        let elements = (0..rows * columns).map(|at| (100 * (at / columns) + at % columns) as f32);
        let data: Vec<u8> = elements.flat_map(f32::to_le_bytes).collect();
        Tensor::plain("t", WeightType::F32, &[rows, columns], data)
    }

    #[test]
    fn ranks_have_rows_and_columns() {
        let shard = Shard { rank: 1, ranks: 2 };
        let rows = Share::of_parts(Axis::Outputs, &[(2, shard), (1, shard)]).unwrap();
        let part = tensor(6, 2).of_rank(&rows).unwrap();
        assert_eq!(part.shape.0, [3, 2]);
        assert_eq!(part.widen().unwrap(), [200., 201., 300., 301., 500., 501.]);
        let columns = Share::of_parts(Axis::Inputs, &[(2, shard)]).unwrap();
        let part = tensor(2, 4).of_rank(&columns).unwrap();
        assert_eq!(part.shape.0, [2, 2]);
        assert_eq!(part.widen().unwrap(), [2., 3., 102., 103.]);
        // One of several matrices that lie together, and one that lies transposed.
        let among = Among {
            all: 3,
            first: 1,
            step: 1,
        };
        let mut some = tensor(3, 4);
        (some.shape, some.order) = (Shape(vec![2, 4]), RowOrder::Among(among));
        let part = some.of_rank(&columns).unwrap().in_order();
        assert_eq!(
            (part.shape.0.clone(), part.widen().unwrap()),
            (vec![2, 2], vec![102., 103., 202., 203.])
        );
        let mut turned = tensor(4, 3);
        (turned.shape, turned.order) = (Shape(vec![2, 4]), RowOrder::Columns(among));
        let part = turned.of_rank(&columns).unwrap().in_order();
        assert_eq!(
            (part.shape.0.clone(), part.widen().unwrap()),
            (vec![2, 2], vec![201., 301., 202., 302.])
        );
    }

    #[test]
    fn what_is_stored_together_is_not_cut() {
        let share = Share::of_parts(Axis::Inputs, &[(48, Shard { rank: 0, ranks: 2 })]).unwrap();
        assert_eq!(in_units(&share, 16, "t").unwrap(), vec![0..3]);
        let error = in_units(&share, 32, "t").unwrap_err().to_string();
        assert!(
            error.contains("48 of its 96 inputs of `t`") && error.contains("multiple of 32"),
            "{error}"
        );
    }
}
