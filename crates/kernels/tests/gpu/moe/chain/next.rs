//! Projections that a layer in one launch ends with, of one product or of several with weights in different formats.

use plimsoll_device::cuda::Gpu;
use plimsoll_kernels::cuda::{GpuLinear, GpuMatrix, MoeKernels, has_hopper_kernels};
use rand::Rng;
use rand::rngs::StdRng;

use super::sizes::check_all;
use super::{BF16, Case, Experts, Format, MXFP4, Size};
use crate::common;

/// What follows a layer.
pub(super) struct Next {
    products: Vec<Experts>,
    pub(super) linear: GpuLinear,
}

impl Next {
    pub(super) fn random(gpu: &Gpu, rng: &mut StdRng, size: Size) -> Self {
        let (others, format) = size.other.unwrap_or((0, size.dense));
        let mut products = Vec::new();
        for (outputs, format) in [(size.next - others, size.dense), (others, format)] {
            if outputs > 0 {
                let bias = rng.random_bool(0.5);
                let product = Experts::random(gpu, rng, format, 1, [outputs, size.width], bias);
                products.push(product);
            }
        }
        let linear = linear_of(
            products
                .iter()
                .map(|product| product.linears[0].clone())
                .collect(),
        );
        Self { products, linear }
    }
}

/// Of products of the same inputs.
fn linear_of(mut products: Vec<GpuLinear>) -> GpuLinear {
    let (outputs, inputs) = (
        products.iter().map(GpuLinear::outputs).sum(),
        products[0].inputs(),
    );
    match products.len() {
        1 => products.remove(0),
        _ => GpuLinear::new(GpuMatrix::Parts(products), None, outputs, inputs),
    }
}

impl Case {
    pub(super) fn check_next(&self, next: &Next, normed: &[f64], found: &[f32]) {
        let mut first = 0;
        for (at, product) in next.products.iter().enumerate() {
            let want = product.product(0, normed);
            let own = &found[first..first + want.len()];
            self.close(&format!("product {at} of what follows"), own, &want);
            first += want.len();
        }
        assert_eq!(first, found.len(), "all that follows");
    }
}

const SMALL: Size = Size {
    attended: 256,
    width: 512,
    inner: 256,
    next: 1040,
    experts: 8,
    top_k: 2,
    ..BF16
};

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn projections_with_weights_in_two_formats_end_the_launch() {
    let gpu = common::gpu();
    let mut rng = common::rng("projections_with_weights_in_two_formats_end_the_launch");
    let [blocks, rows] = [Format::Fp8Blocks, Format::Fp8].map(|format| Size {
        format,
        dense: format,
        ..SMALL
    });
    let sizes = [
        // Qwen3.6-35B-A3B's delta layers: queries, keys, values and gates in e4m3, and the narrow rest in bf16.
        Size {
            inner: 512,
            shared: true,
            next: 12_288 + 64,
            experts: 16,
            other: Some((64, Format::Bf16)),
            dense: Format::Fp8Blocks,
            format: Format::Fp8Blocks,
            ..BF16
        },
        Size {
            other: Some((8, Format::Bf16)),
            ..rows
        },
        Size {
            other: Some((520, Format::Fp8)),
            ..blocks
        },
        Size {
            other: Some((1000, Format::Fp8Blocks)),
            ..SMALL
        },
        Size {
            other: Some((9, Format::Fp8)),
            next: 1049,
            ..SMALL
        },
        Size {
            other: Some((40, Format::Bf16)),
            ..SMALL
        },
        Size {
            other: Some((64, Format::Bf16)),
            dense: Format::Fp8Blocks,
            width: 2944,
            ..MXFP4
        },
    ];
    check_all(&gpu, &mut rng, &sizes);
}

/// Three products, and a product in a format that chains do not have, are launches of their own.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn other_projections_do_not_end_a_launch() {
    let gpu = common::gpu();
    let kernels = MoeKernels::load(&gpu).unwrap();
    let mut rng = common::rng("other_projections_do_not_end_a_launch");
    let case = Case::random(&gpu, &mut rng, SMALL);
    let mut product = |format: Format| {
        let product = Experts::random(&gpu, &mut rng, format, 1, [64, SMALL.width], false);
        product.linears[0].clone()
    };
    let [bf16, fp8, mxfp4] = [Format::Bf16, Format::Fp8, Format::Mxfp4].map(&mut product);
    for (products, fits) in [
        (vec![fp8.clone(), bf16.clone()], has_hopper_kernels(&gpu)),
        (vec![fp8.clone(), bf16.clone(), fp8], false),
        (vec![bf16, mxfp4], false),
    ] {
        let next = linear_of(products);
        assert_eq!(kernels.can_chain(&case.layers(), Some(&next)), fits, "{next:?}");
    }
}
