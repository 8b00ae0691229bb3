//! What a test's KV cache holds, of 16 or of 8 bits.

use std::sync::LazyLock;

use half::bf16;
use plimsoll_device::cuda::{Gpu, GpuSlab};
use plimsoll_kernels::cuda::{GpuKv, GpuKvElement};
use rand::Rng;
use rand::rngs::StdRng;
use rayon::iter::{IntoParallelRefIterator, ParallelIterator};

use crate::common::{random, upload};

/// The value of an element of 8 bits, by the definition of [e4m3](https://arxiv.org/abs/2209.05433).
pub(crate) fn from_e4m3(bits: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(bits >> 3 & 15), f32::from(bits & 7));
    let size = match (exponent, bits & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa * 2f32.powi(-9),
        _ => (8.0 + mantissa) * 2f32.powi(exponent - 10),
    };
    if bits >> 7 == 0 { size } else { -size }
}

/// The nearest element, of two the even one; 448 for more, and NaN for NaN.
pub(crate) fn to_e4m3(value: f32) -> u8 {
    const LARGEST: u8 = 0x7e;
    /// The elements that are not negative, in order.
    static ELEMENTS: LazyLock<Vec<f32>> = LazyLock::new(|| (0..=LARGEST).map(from_e4m3).collect());
    if value.is_nan() {
        return 0x7f;
    }
    let size = value.abs();
    let above = ELEMENTS.partition_point(|&element| element < size) as u8;
    let above = above.min(LARGEST);
    let below = above.saturating_sub(1);
    let element = |bits: u8| ELEMENTS[usize::from(bits)];
    let (up, down) = (element(above) - size, size - element(below));
    let nearest = match () {
        () if up < down || (up == down && above.is_multiple_of(2)) => above,
        () if element(above) < size => above,
        () => below,
    };
    nearest | u8::from(value.is_sign_negative()) << 7
}

/// How keys and values are stored.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cache {
    pub(crate) element: GpuKvElement,
    pub(crate) k_scale: f32,
    pub(crate) v_scale: f32,
}

impl Cache {
    /// In 16 bits.
    pub(crate) const BF16: Self = Self {
        element: GpuKvElement::Bf16,
        k_scale: 1.0,
        v_scale: 1.0,
    };

    /// In 16 bits, or in 8 with any scales.
    pub(crate) fn random(rng: &mut StdRng) -> Self {
        match rng.random_bool(0.5) {
            true => Self::BF16,
            false => Self {
                element: GpuKvElement::Fp8,
                k_scale: rng.random_range(0.3..2.0),
                v_scale: rng.random_range(0.001..100.0),
            },
        }
    }

    /// Values of elements, to be multiplied by a scale.
    pub(crate) fn values(self, rng: &mut StdRng, len: usize) -> Vec<bf16> {
        let values = random(rng, len);
        match self.element {
            GpuKvElement::Bf16 => values,
            GpuKvElement::Fp8 => {
                let rounded = values.into_iter().map(|x| from_e4m3(to_e4m3(x.to_f32())));
                rounded.map(bf16::from_f32).collect()
            }
        }
    }

    /// Device memory that holds such values.
    pub(crate) fn upload(self, gpu: &Gpu, values: &[bf16]) -> GpuSlab {
        match self.element {
            GpuKvElement::Bf16 => upload(gpu, values),
            GpuKvElement::Fp8 => {
                let bytes: Vec<u8> = values.par_iter().map(|x| to_e4m3(x.to_f32())).collect();
                upload(gpu, &bytes)
            }
        }
    }

    /// Keys and values of so many elements in device memory, whose blocks begin so many apart.
    pub(crate) fn on_gpu<'a>(
        self,
        k: &'a GpuSlab,
        v: &'a GpuSlab,
        (elements, block_stride): (usize, usize),
    ) -> GpuKv<'a> {
        let Self {
            element,
            k_scale,
            v_scale,
        } = self;
        let bytes = elements * element.bytes();
        GpuKv {
            k: k.slice().range(0..bytes),
            v: v.slice().range(0..bytes),
            block_stride,
            element,
            k_scale,
            v_scale,
        }
    }
}

#[test]
fn every_element_is_its_own_nearest() {
    for bits in 0..=u8::MAX {
        let value = from_e4m3(bits);
        if value.is_nan() {
            assert_eq!(to_e4m3(value), 0x7f);
        } else {
            assert_eq!(to_e4m3(value), bits, "{value}");
        }
    }
    // Between 1 and 1.125 the even one, and what is nearest.
    assert_eq!(
        [1.0624, 1.0625, 1.0626, 1.1875].map(to_e4m3).map(from_e4m3),
        [1.0, 1.0, 1.125, 1.25]
    );
    assert_eq!(
        [1e9, -1e9, 1e-9].map(to_e4m3).map(from_e4m3),
        [448.0, -448.0, 0.0]
    );
}
