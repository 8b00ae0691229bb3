//! Nothing is allocated from the device after ready.

use plimsoll_core::Scratch;

use crate::common::requests::{Disturbance, Request, serve};
use crate::reference::VOCAB;
use crate::setup::{LIMITS, MODELS, Setup, gpu, load};

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn a_mixed_load_allocates_nothing() {
    let gpu = gpu();
    for name in MODELS {
        let model = load(&gpu, name);
        for setup in Setup::all(2048) {
            let requests = Request::random(60, 11, VOCAB, 200);
            let how = Disturbance {
                block_size: setup.block_size,
                num_blocks: setup.num_blocks() as u32,
                max_tokens: LIMITS.max_num_batched_tokens,
                seed: 12,
                depth: 2,
            };
            // The worst step of this load, as the profile would find it.
            let mut probe = setup.build(&model);
            let mut first = requests.clone();
            serve(&mut probe, &mut first, how, &mut |_, sampled| sampled.token);
            let need = probe.arena_high_water();
            drop(probe);

            let mut runner = setup.build_for(&model, &LIMITS, Scratch::Fixed(need));
            gpu.synchronize().unwrap();
            let meters = || (gpu.allocations(), gpu.budget().meters().reserved);
            let (before, free) = (meters(), gpu.memory_info().unwrap().free);
            let mut again = requests.clone();
            let steps = serve(&mut runner, &mut again, how, &mut |_, sampled| sampled.token);
            assert!(steps > 100, "only {steps} steps");
            gpu.synchronize().unwrap();
            assert_eq!(meters(), before, "{name}, {setup:?}: {steps} steps");
            let left = gpu.memory_info().unwrap().free;
            assert!(
                left >= free,
                "{name}, {setup:?}: {steps} steps took {} bytes",
                free - left
            );
            for (first, again) in first.iter().zip(&again) {
                assert_eq!(
                    again.output, first.output,
                    "{name}, {setup:?}: the same plans, another text"
                );
            }
        }
    }
}
