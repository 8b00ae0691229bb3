//! Layers of all shapes, each in one launch, alone and in turn.

use half::bf16;
use plimsoll_device::cuda::Gpu;
use plimsoll_kernels::cuda::{MoeKernels, has_hopper_kernels};
use rand::rngs::StdRng;

use super::{ACTIVATIONS, BF16, Case, Format, GEMMA, MXFP4, Memory, SMALL_GEMMA, Size};
use crate::common;

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn a_layer_with_experts_in_one_launch() {
    let gpu = common::gpu();
    let mut rng = common::rng("a_layer_with_experts_in_one_launch");
    let [blocks, rows] = [Format::Fp8Blocks, Format::Fp8].map(|format| Size {
        format,
        dense: format,
        ..BF16
    });
    let sizes = [
        // Qwen3-30B-A3B, Qwen3.5-35B-A3B, Qwen3-Next.
        BF16,
        blocks,
        rows,
        Size {
            inner: 512,
            shared: true,
            next: 0,
            ..BF16
        },
        Size {
            inner: 512,
            shared: true,
            next: 12_288,
            ..blocks
        },
        Size {
            inner: 512,
            shared: true,
            experts: 512,
            top_k: 10,
            width: 256,
            attended: 512,
            ..blocks
        },
        Size {
            attended: 8192,
            width: 4096,
            inner: 1536,
            experts: 9,
            ..blocks
        },
        Size {
            attended: 8192,
            width: 4096,
            inner: 384,
            experts: 9,
            ..rows
        },
        // Parts of pieces, of rows and of shares.
        Size {
            attended: 80,
            width: 72,
            inner: 24,
            next: 40,
            experts: 3,
            top_k: 2,
            ..BF16
        },
        Size {
            attended: 528,
            width: 1040,
            inner: 272,
            next: 1000,
            experts: 12,
            top_k: 12,
            shared: true,
            ..rows
        },
        Size {
            attended: 640,
            width: 3968,
            inner: 2048,
            next: 16,
            experts: 12,
            top_k: 1,
            ..blocks
        },
        Size {
            width: 2880,
            inner: 1000,
            experts: 40,
            top_k: 32,
            shared: true,
            ..BF16
        },
        // Other formats around the experts than theirs.
        Size {
            dense: Format::Bf16,
            ..blocks
        },
        // With one to four windows of a warp; an odd number of experts; parts of stages.
        MXFP4,
        Size {
            attended: 80,
            width: 64,
            inner: 64,
            next: 0,
            experts: 3,
            top_k: 1,
            ..MXFP4
        },
        Size {
            attended: 528,
            width: 1152,
            inner: 192,
            experts: 40,
            top_k: 32,
            ..MXFP4
        },
        Size {
            attended: 512,
            width: 320,
            inner: 3648,
            next: 0,
            top_k: 3,
            ..MXFP4
        },
        Size {
            width: 3968,
            inner: 448,
            experts: 12,
            top_k: 7,
            dense: Format::Fp8,
            ..MXFP4
        },
    ];
    check_all(&gpu, &mut rng, &sizes);
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn a_layer_with_experts_beside_an_mlp_in_one_launch() {
    let gpu = common::gpu();
    let mut rng = common::rng("a_layer_with_experts_beside_an_mlp_in_one_launch");
    let sizes = [
        GEMMA,
        Size {
            attended: 8192,
            next: 0,
            ..GEMMA
        },
        SMALL_GEMMA,
        // Parts of rows and of shares; an MLP narrower than an expert, and one expert alone.
        Size {
            attended: 80,
            width: 72,
            mlp: 8,
            experts: 3,
            top_k: 3,
            ..SMALL_GEMMA
        },
        Size {
            experts: 1,
            top_k: 1,
            next: 0,
            ..SMALL_GEMMA
        },
        Size {
            attended: 528,
            width: 4096,
            inner: 264,
            mlp: 1000,
            experts: 40,
            top_k: 32,
            ..GEMMA
        },
    ];
    check_all(&gpu, &mut rng, &sizes);
}

/// Random layers of these sizes, each in one launch where the GPU can, with the same bits every time.
pub(super) fn check_all(gpu: &Gpu, rng: &mut StdRng, sizes: &[Size]) {
    let (linears, kernels) = (crate::linear::linears(gpu), MoeKernels::load(gpu).unwrap());
    for &size in sizes {
        let case = Case::random(gpu, rng, size);
        let chains = kernels.can_chain(&case.layers(), case.next());
        assert_eq!(chains, has_hopper_kernels(gpu), "{size:?}");
        if !chains {
            return;
        }
        let found = case.run(gpu, &kernels, &linears);
        case.check(&found);
        for _ in 0..5 {
            assert!(case.run(gpu, &kernels, &linears) == found, "{size:?}: other bits");
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn what_launches_before_left_is_not_taken() {
    let small = Size {
        attended: 64,
        width: 64,
        inner: 16,
        next: 64,
        experts: 4,
        top_k: 2,
        ..BF16
    };
    let mxfp4 = Size {
        inner: 64,
        format: Format::Mxfp4,
        ..small
    };
    let small = [small, Size { next: 0, ..small }, mxfp4];
    check_turns("what_launches_before_left_is_not_taken", &small, BF16);
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn what_launches_beside_an_mlp_left_is_not_taken() {
    let small = [
        SMALL_GEMMA,
        Size {
            next: 0,
            ..SMALL_GEMMA
        },
    ];
    check_turns("what_launches_beside_an_mlp_left_is_not_taken", &small, GEMMA);
}

/// Layers of different sizes take turns in the workspace, in graphs too, until the tags of launches begin anew (65,535 of them); a row of what is
/// no number leaves nothing behind.
fn check_turns(test: &str, small: &[Size], large: Size) {
    let Some(gpu) = common::hopper() else { return };
    let (linears, kernels) = (crate::linear::linears(&gpu), MoeKernels::load(&gpu).unwrap());
    let mut rng = common::rng(test);
    let mut random = |size: Size| Case::random(&gpu, &mut rng, size);
    let small: Vec<Case> = small.iter().map(|size| random(*size)).collect();
    let mut large = random(large);
    // A clamp would make numbers of what is none.
    large.activation = ACTIVATIONS[0];
    let run = |case: &Case| case.run(&gpu, &kernels, &linears);
    let checked = |case: &Case| {
        let found = run(case);
        case.check(&found);
        found
    };
    let (of_small, of_large): (Vec<_>, _) = (small.iter().map(checked).collect(), checked(&large));
    let memory: Vec<Memory> = small.iter().map(|case| Memory::new(&gpu, case)).collect();
    // With another launch of the large layer as many as there are tags.
    const LAUNCHES: usize = 434;
    const REPLAYS: usize = 65_534 / LAUNCHES;
    let graph = gpu
        .capture(|| {
            let mut turns = (0..LAUNCHES).map(|at| at % small.len());
            turns.try_for_each(|of| memory[of].forward(&small[of], &kernels, &linears))
        })
        .expect("a capture");
    for is_lost in [false, true] {
        let inputs = (large.x.clone(), large.hidden.clone());
        large.x = common::random(&mut rng, large.x.len());
        large.hidden = common::random(&mut rng, large.hidden.len());
        if is_lost {
            large.hidden[7] = bf16::NAN;
        }
        let other = run(&large);
        if is_lost {
            assert!(other.logits.iter().all(|x| x.is_nan()), "logits");
            let rest = [
                &other.activated,
                &other.dense_activated,
                &other.hidden,
                &other.out,
            ];
            assert!(rest.into_iter().flatten().all(|x| x.is_nan()), "all that follows");
        }
        (large.x, large.hidden) = inputs;
        for _ in 0..REPLAYS {
            graph.launch().expect("a replay");
        }
        assert!(
            run(&large) == of_large,
            "behind what is lost ({is_lost}): other bits"
        );
    }
    assert!(small.iter().map(run).eq(of_small.into_iter()), "other bits");
}
