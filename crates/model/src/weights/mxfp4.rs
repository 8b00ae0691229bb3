//! Matrices in MXFP4, of which checkpoints store elements and exponents apart.

use plimsoll_kernels::WeightType;
use rayon::prelude::*;

use super::Tensor;
use crate::Shape;
use crate::quantization::MXFP4_BLOCK;

/// Bytes of the elements of a block.
const HALF: usize = MXFP4_BLOCK / 2;

/// Elements and exponents, both in plain order, as ggml's blocks: the exponent, then bytes with the elements of the first half of
/// the block in their low bits and those of the second half in their high ones. In checkpoints a byte has two neighbouring elements.
pub(super) fn in_blocks<'a>(elements: Tensor<'a>, exponents: Tensor<'a>) -> Tensor<'a> {
    let rows = elements.shape.0[0];
    let inputs = 2 * elements.data.len() / rows.max(1);
    let mut data = vec![0; exponents.data.len() * (1 + HALF)];
    let blocks = elements
        .data
        .par_chunks_exact(HALF)
        .zip(exponents.data.par_iter());
    let places = data.par_chunks_exact_mut(1 + HALF).with_min_len(1 << 10);
    places.zip(blocks).for_each(|(place, (elements, exponent))| {
        let element = |index: usize| elements[index / 2] >> (4 * (index % 2)) & 15;
        place[0] = *exponent;
        for (index, byte) in place[1..].iter_mut().enumerate() {
            *byte = element(index) | element(index + HALF) << 4;
        }
    });
    Tensor {
        dtype: WeightType::Mxfp4,
        shape: Shape(vec![rows, inputs]),
        data: data.into(),
        ..elements
    }
}
