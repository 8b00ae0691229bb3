//! A start takes what it needs or nothing, and nothing is allocated after it.

use plimsoll_core::{BuildError, Component, Oom, Scratch, StateConfig};
use plimsoll_device::cuda::Gpu;
use plimsoll_model::cuda::{GpuModel, GpuOptions};
use plimsoll_model::{KvCacheDtype, LoadOptions, ModelError};

use crate::common::images::{IMAGE_LIMITS, options};
use crate::common::requests::{Disturbance, Request, serve};
use crate::common::{golden_path, state_config};
use crate::reference::VOCAB;
use crate::setup::{HYBRID_EXPERT_MODELS, HYBRID_MODELS, LIMITS, MODELS, Setup, gpu, load};

/// Whether memory sufficed.
fn start(gpu: &Gpu, name: &str, options: &LoadOptions) -> Result<(), Oom> {
    let path = golden_path(name);
    let model = match GpuModel::load(&path, options.clone(), gpu, &mut |_| ()) {
        Err(ModelError::Oom(oom)) => return Err(oom),
        loaded => loaded.unwrap(),
    };
    let config = StateConfig {
        canary_bytes: 1 << 16,
        ..state_config(16, 8)
    };
    match model.build_state(&config, &LIMITS, GpuOptions::default(), &mut |_, _| {}) {
        Ok(_) => Ok(()),
        Err(BuildError::Oom(oom)) => Err(oom),
        Err(other) => panic!("{other}"),
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn any_allocation_of_a_start_may_fail() {
    let gpu = gpu();
    let text = LoadOptions::default();
    let images = options(KvCacheDtype::Auto, IMAGE_LIMITS);
    for (name, options) in [
        ("llama3-tied-bf16", &text),
        (HYBRID_MODELS[0], &text),
        ("qwen3-vl", &images),
    ] {
        let meters = || gpu.budget().meters();
        // The kernels' modules stay loaded, so that every load of a model takes some more of the runtime.
        let held = || meters().reserved - meters().by_component.get(Component::Runtime);
        start(&gpu, name, options).unwrap();
        let (before, allocations) = (held(), meters().allocations);
        start(&gpu, name, options).unwrap();
        let allocations = meters().allocations - allocations;
        assert_eq!(held(), before, "{name}");
        assert!(allocations > 10, "{name}: {allocations} allocations");
        for n in 1..=allocations {
            gpu.budget().fail_allocation(n);
            assert!(start(&gpu, name, options).is_err(), "{name}, allocation {n}");
            assert_eq!(held(), before, "{name}, allocation {n}");
        }
        start(&gpu, name, options).unwrap();
    }
}

/// All slots are charged as they were asked for, and come back.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn states_are_charged() {
    let gpu = gpu();
    for name in HYBRID_MODELS {
        let model = load(&gpu, name);
        let setup = Setup {
            block_size: 16,
            tokens: 256,
            enforce_eager: false,
        };
        let held = || gpu.budget().meters().by_component.get(Component::States);
        assert_eq!(held(), 0, "{name}");
        let runner = setup.build(&model);
        let asked = model.state_bytes() * state_config(16, 0).kv.state_slots as u64;
        assert!(asked > 0, "{name}");
        // In whole pages of 2 MiB.
        assert_eq!(held(), asked.next_multiple_of(2 << 20), "{name}");
        drop(runner);
        assert_eq!(held(), 0, "{name}");
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn a_mixed_load_allocates_nothing() {
    let gpu = gpu();
    for (turn, name) in MODELS.into_iter().chain(HYBRID_EXPERT_MODELS).enumerate() {
        let model = load(&gpu, name);
        for setup in Setup::in_turn(turn, 2048) {
            // As many as have slots.
            let (requests, least_steps) = match HYBRID_MODELS.contains(&name) {
                false => (200, 200),
                true => (state_config(8, 0).kv.state_slots as u64, 10),
            };
            let requests = Request::random(requests, 11, VOCAB, 200);
            let how = Disturbance {
                block_size: setup.block_size,
                num_blocks: setup.num_blocks() as u32,
                limits: LIMITS,
                seed: 12,
                depth: 2,
            };
            // The worst step of this load, as the profile would find it.
            let mut probe = setup.build(&model);
            let mut first = requests.clone();
            serve(&mut probe, &mut first, how, &mut |_, sampled| sampled.token);
            let need = probe.take_arena_high_water();
            drop(probe);

            let mut runner = setup.build_for(&model, &LIMITS, Scratch::Fixed(need));
            gpu.synchronize().unwrap();
            let meters = || (gpu.allocations(), gpu.budget().meters().reserved);
            let (before, free) = (meters(), gpu.memory_info().unwrap().free);
            let mut again = requests.clone();
            let steps = serve(&mut runner, &mut again, how, &mut |_, sampled| sampled.token);
            assert!(steps > least_steps, "only {steps} steps");
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
