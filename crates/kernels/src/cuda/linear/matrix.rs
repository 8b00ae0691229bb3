use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use half::bf16;
use plimsoll_device::Pod;
use plimsoll_device::cuda::{GpuSlab, GpuSlice};

/// Outputs and inputs that share a scale, where scales are for blocks.
const BLOCK: usize = 128;

/// Weights in a slab that is shared with others and lives as long as any of them.
#[derive(Debug)]
pub struct GpuWeight<T = bf16> {
    slab: Arc<GpuSlab>,
    elements: Range<usize>,
    of: PhantomData<T>,
}

impl<T> Clone for GpuWeight<T> {
    fn clone(&self) -> Self {
        Self {
            slab: Arc::clone(&self.slab),
            elements: self.elements.clone(),
            of: PhantomData,
        }
    }
}

impl<T: Pod> GpuWeight<T> {
    /// `elements` of a slab seen as `T`.
    ///
    /// # Panics
    /// If the slab has fewer.
    pub fn new(slab: &Arc<GpuSlab>, elements: Range<usize>) -> Self {
        let this = Self {
            slab: slab.clone(),
            elements,
            of: PhantomData,
        };
        this.slice();
        this
    }

    /// The elements.
    pub fn slice(&self) -> GpuSlice<'_, T> {
        self.slab.slice().range(self.elements.clone())
    }
}

/// The matrix of a linear layer, `[n, k]`, in the format in which it is kept.
#[derive(Clone, Debug)]
pub enum GpuMatrix {
    /// Elements.
    Bf16(GpuWeight),
    /// `e4m3` elements, each times the scale of its output or of its block.
    Fp8 {
        /// `[n, k]`.
        weight: GpuWeight<u8>,
        /// `[n]`, or `[n / 128, k / 128]`, rounded up, for blocks.
        scales: GpuWeight<f32>,
        /// Whether scales are for blocks of 128 outputs by 128 inputs.
        blocks: bool,
    },
}

impl GpuMatrix {
    /// # Panics
    /// If a length does not fit.
    pub(super) fn check(&self, n: usize, k: usize) {
        let (elements, scales) = match self {
            Self::Bf16(weight) => (weight.slice().len(), None),
            Self::Fp8 {
                weight,
                scales,
                blocks,
            } => {
                let expected = match blocks {
                    true => n.div_ceil(BLOCK) * k.div_ceil(BLOCK),
                    false => n,
                };
                (weight.slice().len(), Some((scales.slice().len(), expected)))
            }
        };
        assert_eq!(elements, n * k, "weight of [{n}, {k}]");
        assert!(
            scales.is_none_or(|(scales, expected)| scales == expected),
            "scales of [{n}, {k}]"
        );
    }
}
