//! Which layers are computed in one launch.

use plimsoll_device::cuda::Gpu;
use plimsoll_kernels::cuda::{DenseLayers, Int4Group, MoeChainLayers, MoeKernels, has_hopper_kernels};
use rand::rngs::StdRng;

use super::{BF16, Case, Experts, Format, SMALL_GEMMA, Size, Table};
use crate::common;

const SMALL: Size = Size {
    attended: 128,
    width: 128,
    inner: 128,
    next: 64,
    experts: 4,
    top_k: 2,
    ..BF16
};

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn experts_that_do_not_fit_a_chain_go_one_by_one() {
    let mxfp4 = Size {
        format: Format::Mxfp4,
        ..SMALL
    };
    let int4 = Size {
        format: Format::Int4(Int4Group::Of128),
        ..SMALL
    };
    let others = [
        (mxfp4, true),
        (int4, false),
        // Parts of windows, and more of them than warps have.
        (Size { width: 96, ..mxfp4 }, false),
        (Size { inner: 96, ..mxfp4 }, false),
        (Size { inner: 4160, ..mxfp4 }, false),
        (
            Size {
                dense: Format::Fp8,
                ..SMALL
            },
            true,
        ),
        // An inner width that is too wide.
        (Size { inner: 2056, ..SMALL }, false),
    ];
    check("experts_that_do_not_fit_a_chain_go_one_by_one", SMALL, &others);
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn experts_beside_an_mlp_that_do_not_fit_a_chain_go_one_by_one() {
    let fp8 = Size {
        mlp: 128,
        format: Format::Fp8,
        ..SMALL
    };
    let others = [
        (
            Size {
                dense: Format::Fp8,
                ..fp8
            },
            false,
        ),
        (fp8, false),
        (
            Size {
                dense: Format::Fp8,
                mlp: 128,
                ..SMALL
            },
            false,
        ),
        // Rows of which three do not fit into shared memory.
        (
            Size {
                mlp: 45_056,
                ..SMALL_GEMMA
            },
            false,
        ),
    ];
    check(
        "experts_beside_an_mlp_that_do_not_fit_a_chain_go_one_by_one",
        SMALL_GEMMA,
        &others,
    );
}

/// A small layer is one launch, layers of these other sizes as they say, and variants of the small one that no launch can compute are not.
fn check(test: &str, small: Size, others: &[(Size, bool)]) {
    let gpu = common::gpu();
    let kernels = MoeKernels::load(&gpu).unwrap();
    let mut rng = common::rng(test);
    // A stream that is too wide, and too many experts.
    let wide = Size { width: 4104, ..small };
    let many = Size {
        experts: 513,
        ..small
    };
    for &(size, fits) in [(small, true), (wide, false), (many, false)].iter().chain(others) {
        let case = Case::random(&gpu, &mut rng, size);
        let chains = kernels.can_chain(&case.layers(), case.next());
        assert_eq!(chains, fits && has_hopper_kernels(&gpu), "{size:?}");
    }
    let case = Case::random(&gpu, &mut rng, small);
    check_variants(&gpu, &mut rng, &kernels, &case);
    let portable = MoeKernels::load_portable(&gpu).unwrap();
    assert!(!portable.can_chain(&case.layers(), None));
}

/// With a bias of the experts, a router of other experts, too few or too many experts of a row, and something that every row goes to which is
/// neither an expert like the others nor an MLP in bf16 of one inner width.
fn check_variants(gpu: &Gpu, rng: &mut StdRng, kernels: &MoeKernels, case: &Case) {
    let Size {
        width,
        inner,
        experts,
        ..
    } = case.size;
    let biased = Experts::random(gpu, rng, Format::Bf16, experts, [2 * inner, width], true);
    let router = Table::random(gpu, rng, [experts - 1, width], 1.0);
    let fp8 = Experts::random(gpu, rng, Format::Fp8, 1, [2 * inner, width], false);
    let [gate, gate_up, down] = [[1, width], [2 * inner, width], [width, inner + 8]]
        .map(|shape| Table::random(gpu, rng, shape, 1.0).device);
    let layers = case.layers();
    let with = |dense: DenseLayers<'_>| {
        kernels.can_chain(
            &MoeChainLayers {
                dense: Some(dense),
                ..layers
            },
            None,
        )
    };
    for gate in [None, Some(&gate)] {
        let (gate_up, down) = (&gate_up, &down);
        assert!(!with(DenseLayers { gate_up, down, gate }), "another inner width");
        let (gate_up, down) = (&fp8.linears[0], &case.down.linears[0]);
        assert!(!with(DenseLayers { gate_up, down, gate }), "another format");
    }
    for layers in [
        MoeChainLayers {
            gate_up: &biased.device,
            ..layers
        },
        MoeChainLayers {
            router: &router.device,
            ..layers
        },
        MoeChainLayers { top_k: 0, ..layers },
        MoeChainLayers {
            top_k: experts + 1,
            ..layers
        },
    ] {
        assert!(!kernels.can_chain(&layers, None));
    }
}
