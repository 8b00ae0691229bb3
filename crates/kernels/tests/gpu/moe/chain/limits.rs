//! Which layers are computed in one launch.

use plimsoll_kernels::cuda::{Int4Group, MoeChainLayers, MoeKernels, SharedExpertLayers, has_hopper_kernels};

use super::{BF16, Case, Experts, Format, Size, Table};
use crate::common;

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn experts_that_do_not_fit_a_chain_go_one_by_one() {
    let gpu = common::gpu();
    let kernels = MoeKernels::load(&gpu).unwrap();
    let mut rng = common::rng("experts_that_do_not_fit_a_chain_go_one_by_one");
    let small = Size {
        attended: 128,
        width: 128,
        inner: 128,
        next: 64,
        experts: 4,
        top_k: 2,
        ..BF16
    };
    let mxfp4 = Size {
        format: Format::Mxfp4,
        ..small
    };
    let int4 = Size {
        format: Format::Int4(Int4Group::Of128),
        ..small
    };
    let others = [
        (small, has_hopper_kernels(&gpu)),
        (mxfp4, has_hopper_kernels(&gpu)),
        (int4, false),
        // Parts of windows, and more of them than warps have.
        (Size { width: 96, ..mxfp4 }, false),
        (Size { inner: 96, ..mxfp4 }, false),
        (Size { inner: 4160, ..mxfp4 }, false),
        (
            Size {
                dense: Format::Fp8,
                ..small
            },
            has_hopper_kernels(&gpu),
        ),
        // An inner width and a stream that are too wide, and too many experts.
        (Size { inner: 2056, ..small }, false),
        (Size { width: 4104, ..small }, false),
        (
            Size {
                experts: 513,
                ..small
            },
            false,
        ),
    ];
    for (size, fits) in others {
        let case = Case::random(&gpu, &mut rng, size);
        assert_eq!(kernels.can_chain(&case.layers(), case.next()), fits, "{size:?}");
    }
    // A bias of the experts, a router of other experts, too few or too many experts of a row, and an expert for all rows that is not like the
    // others.
    let case = Case::random(&gpu, &mut rng, small);
    let biased = Experts::random(&gpu, &mut rng, Format::Bf16, 4, [256, 128], true);
    let router = Table::random(&gpu, &mut rng, [5, 128], 1.0);
    let other = Experts::random(&gpu, &mut rng, Format::Fp8, 1, [256, 128], false);
    let gate = Table::random(&gpu, &mut rng, [1, 128], 1.0);
    let layers = case.layers();
    let shared = SharedExpertLayers {
        gate_up: &other.linears[0],
        down: &case.down.linears[0],
        gate: &gate.device,
    };
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
        MoeChainLayers { top_k: 5, ..layers },
        MoeChainLayers {
            shared: Some(shared),
            ..layers
        },
    ] {
        assert!(!kernels.can_chain(&layers, None));
    }
    let portable = MoeKernels::load_portable(&gpu).unwrap();
    assert!(!portable.can_chain(&layers, None));
}
