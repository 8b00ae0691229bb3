//! `kernels/moe_stream.cu` where its blocks have much to do.

use plimsoll_kernels::cuda::{EXPERT_TILES, MoeKernels};

use super::Case;
use super::weights::Format;
use crate::common;

/// So many tiles that each block fills its stages again and again, with rows of several experts, some of which have
/// more than eight; with an odd number of eights of outputs.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn persistent_blocks_have_many_tiles() {
    let gpu = common::gpu();
    let mut rng = common::rng("persistent_blocks_have_many_tiles");
    let kernels = MoeKernels::load(&gpu).unwrap();
    // Six stages of a block, no multiple of the teams, to sixteen, the most; and inputs of the second projection that are too long.
    for (sizes, streams) in [
        ((2880, 2880), [true, true]),
        ((1024, 2016), [true, true]),
        ((160, 8224), [true, false]),
    ] {
        let mut case = Case::of_sizes(&gpu, &mut rng, Format::Mxfp4, sizes, [10, 4, 2]);
        let shared = common::random(&mut rng, 10 * sizes.0);
        assert_eq!(
            case.run(&gpu, &kernels, EXPERT_TILES[0], &shared).streams,
            streams
        );
        case.check(&gpu, &kernels, &mut rng, EXPERT_TILES[0]);
        // All rows to two experts.
        for row in case.logits.chunks_exact_mut(4) {
            row.copy_from_slice(&[0.0, 9.0, -1.0, 8.0]);
        }
        case.check(&gpu, &kernels, &mut rng, EXPERT_TILES[0]);
    }
}
