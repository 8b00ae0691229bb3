use plimsoll_device::cuda::GpuSlice;

use crate::KvLayout;

/// What the KV cache of a GPU holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GpuKvElement {
    /// 16 bits.
    #[default]
    Bf16,
    /// 8 bits, [e4m3](https://arxiv.org/abs/2209.05433): four of exponent, three of mantissa, up to 448.
    Fp8,
}

impl GpuKvElement {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Bf16, Self::Fp8];

    /// Bytes.
    pub const fn bytes(self) -> usize {
        match self {
            Self::Bf16 => 2,
            Self::Fp8 => 1,
        }
    }

    /// What its kernels have in their names.
    pub(super) fn infix(self) -> &'static str {
        match self {
            Self::Bf16 => "",
            Self::Fp8 => "_fp8",
        }
    }

    /// Index among [`Self::ALL`].
    pub(super) fn index(self) -> usize {
        match self {
            Self::Bf16 => 0,
            Self::Fp8 => 1,
        }
    }
}

/// One layer of the KV cache: blocks of `[kv_heads][block_size][head_dim]` elements each.
#[derive(Clone, Copy, Debug)]
pub struct GpuKv<'a> {
    /// Keys, as bytes.
    pub k: GpuSlice<'a, u8>,
    /// Values, as bytes.
    pub v: GpuSlice<'a, u8>,
    /// Elements from the start of a block to that of the next one, of either: those of a block, or more where other layers' are
    /// between them; a multiple of the head size.
    pub block_stride: usize,
    /// What they are.
    pub element: GpuKvElement,
    /// A key is its elements times this; more than 0. 1 for 16 bits.
    pub k_scale: f32,
    /// Of values, likewise.
    pub v_scale: f32,
}

impl GpuKv<'_> {
    /// Elements of the keys, and of the values.
    ///
    /// # Panics
    /// If something is not as documented.
    pub(super) fn elements(&self) -> usize {
        let size = self.element.bytes();
        assert_eq!(self.k.len(), self.v.len());
        assert!(
            self.k.len().is_multiple_of(size),
            "keys are elements of {size} bytes"
        );
        assert!(self.k_scale > 0.0 && self.v_scale > 0.0);
        let unscaled = (self.k_scale, self.v_scale) == (1.0, 1.0);
        assert!(
            self.element == GpuKvElement::Fp8 || unscaled,
            "elements of 16 bits have no scale"
        );
        self.k.len() / size
    }

    /// [`Self::block_stride`] in rows of a head, in a cache of this layout.
    ///
    /// # Panics
    /// If something is not as documented.
    pub(super) fn block_rows(&self, layout: &KvLayout) -> usize {
        self.check_blocks(layout.elements(1), layout.head_dim);
        self.block_stride / layout.head_dim
    }

    /// For blocks of `own` elements.
    ///
    /// # Panics
    /// If something is not as documented.
    pub(super) fn check_blocks(&self, own: usize, head_dim: usize) {
        let (elements, stride) = (self.elements(), self.block_stride);
        assert!(
            stride >= own && stride.is_multiple_of(head_dim),
            "blocks of {own} elements start {stride} apart"
        );
        assert!(
            elements == 0 || (elements >= own && (elements - own).is_multiple_of(stride)),
            "k and v are not whole blocks"
        );
    }
}
