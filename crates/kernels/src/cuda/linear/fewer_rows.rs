//! What is known of a product with more rows from those with fewer.

use super::key::Kind;
use super::{Choice, Key};

/// Up to so many rows, products are measured with a small kernel after each, except those that apply the activation. With 16 and 32 rows
/// the choices were not better for it (tests/bench/h200/kernels.md). A product that one with the activation is compared with has it up to
/// `MANY_ROWS`, unless its weights are FP8.
pub(super) const PAUSED_ROWS: usize = 8;
/// A way that takes no more than this times what fewer rows took is good enough: fewer rows read the same weights and compute less, so no
/// other way can be much faster.
const GOOD_ENOUGH: f32 = 1.02;

/// The fastest way of a product, or none for a kernel of its own for the activation, and its microseconds.
pub(super) type Found = (Key, Option<Choice>, f32);

/// What the same products took with fewer rows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct FewerRows {
    /// The least microseconds.
    least: f32,
    /// The way of the most of them, and its microseconds.
    last: (Choice, f32),
}

impl FewerRows {
    /// Of what was found, where products were measured as this one is to be.
    pub(super) fn of(found: &[Found], key: &Key) -> Option<Self> {
        let fewer = found.iter().filter_map(|&(other, choice, us)| {
            let alike = Kind::from(&other) == Kind::from(key) && is_paused(&other) == is_paused(key);
            (alike && other.shape.m < key.shape.m).then_some((other.shape.m, choice?, us))
        });
        let fewer: Vec<_> = fewer.collect();
        let &(_, choice, us) = fewer.iter().max_by_key(|(rows, ..)| *rows)?;
        Some(Self {
            least: fewer.iter().map(|(.., us)| *us).fold(us, f32::min),
            last: (choice, us),
        })
    }

    /// Microseconds that are good enough for more rows.
    pub(super) fn enough(&self) -> f32 {
        GOOD_ENOUGH * self.least
    }

    /// The way that is likely to be good enough for more rows too.
    pub(super) fn likely(&self) -> Option<Choice> {
        (self.last.1 <= self.enough()).then_some(self.last.0)
    }
}

/// Whether a small kernel follows each product that is measured. In a step small kernels lie between products, and products that start
/// early load weights meanwhile. A product that applies the activation is followed directly by the next product.
pub(super) fn is_paused(key: &Key) -> bool {
    key.shape.m <= PAUSED_ROWS && key.output.stacked() == 1
}

#[cfg(test)]
mod tests {
    use super::super::cublas_lt::Shape;
    use super::super::{GpuValues, LinearOutput};
    use super::*;

    fn key(m: usize, n: usize) -> Key {
        Key {
            shape: Shape {
                m,
                n,
                k: 4096,
                wide: false,
                bias: false,
                values: GpuValues::Bf16,
                pitch: n,
            },
            output: LinearOutput::Bf16,
        }
    }

    #[test]
    fn the_same_products_with_fewer_rows_say_what_is_good_enough() {
        let (slow, fast) = (Choice::Hopper(1), Choice::Hopper(2));
        let found = [
            (key(1, 4096), Some(slow), 10.0),
            (key(2, 4096), Some(fast), 10.1),
            (key(1, 6144), Some(slow), 1.0),
            (key(16, 4096), Some(slow), 5.0),
            (key(24, 4096), Some(fast), 9.0),
            (key(32, 4096), None, 1.0),
        ];
        let of = |rows| FewerRows::of(&found, &key(rows, 4096));
        assert_eq!(of(1), None);
        let more = of(4).unwrap();
        assert_eq!((more.least, more.last), (10.0, (fast, 10.1)));
        assert_eq!(more.likely(), Some(fast));
        assert!(more.enough() > 10.1 && more.enough() < 10.5);
        // Without pauses others count, and where the activation is on its own no product was measured.
        assert_eq!(of(16), None);
        let more = of(48).unwrap();
        assert_eq!((more.least, more.last), (5.0, (fast, 9.0)));
        assert_eq!(more.likely(), None);
    }
}
