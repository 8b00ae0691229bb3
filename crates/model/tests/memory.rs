//! Every byte is charged first, running out is a typed error, and everything comes back.

use std::sync::Arc;

use crate::common::scores::scored_run;
use crate::common::*;
use plimsoll_core::{Component, Executor, Oom, RefusedBy, Scratch, StateConfig, StepError};
use plimsoll_device::Budget;
use plimsoll_model::{LoadOptions, LoadProgress, Model, ModelError, Runner};

fn start(name: &str, config: &StateConfig, budget: &Budget) -> Result<(Arc<Model>, Runner), ModelError> {
    let model = Model::load(&golden_path(name), LoadOptions::default(), budget, &mut |_| ())?;
    let mut touched = 0;
    let runner = model.build_state(config, &LIMITS, budget, &mut || touched += 1)?;
    let states = usize::from(model.state_bytes() > 0);
    assert_eq!(
        touched,
        1 + states,
        "whoever waits hears of a small KV cache once, and of small states"
    );
    Ok((model, runner))
}

fn config() -> StateConfig {
    StateConfig {
        scratch: Scratch::Fixed(1 << 20),
        canary_bytes: 1 << 16,
        ..state_config(16, 8)
    }
}

#[test]
fn any_allocation_of_a_start_may_fail() {
    for name in MODELS {
        let budget = Budget::new(1 << 26);
        drop(start(name, &config(), &budget).unwrap());
        assert_eq!(budget.meters().reserved, 0, "{name}");
        let allocations = budget.meters().allocations;
        assert!(allocations > 15, "{name}: {allocations} allocations");
        for n in 1..=allocations {
            budget.fail_allocation(n);
            let error = start(name, &config(), &budget).map(|_| ()).unwrap_err();
            assert!(
                matches!(error, ModelError::Oom(_)),
                "{name}, allocation {n}: {error}"
            );
            assert_eq!(budget.meters().reserved, 0, "{name}, allocation {n}");
        }
    }
}

#[test]
fn components_are_what_they_say() {
    let budget = Budget::new(1 << 26);
    let (model, mut runner) = start("llama", &config(), &budget).unwrap();
    let bytes = |component| budget.meters().by_component.get(component);
    // 2 (K and V) x 2 layers x 1 head x 128 elements x 4 bytes.
    assert_eq!(model.kv_bytes_per_token(), 2048);
    assert_eq!(bytes(Component::Kv), 2048 * 16 * 8);
    assert_eq!(
        (bytes(Component::Arena), bytes(Component::Canary)),
        (1 << 20, 1 << 16)
    );
    assert!(bytes(Component::Staging) > 0);
    // f32 as stored; rows may be padded to whole panels.
    let stored = std::fs::metadata(golden_path("llama").join("model.safetensors"))
        .unwrap()
        .len();
    assert!((stored - 4096..stored + 65536).contains(&bytes(Component::Weights)));
    runner.release_canary();
    assert_eq!(bytes(Component::Canary), 0);
    drop(runner);
    assert_eq!(budget.meters().reserved, bytes(Component::Weights));
    drop(model);
    assert_eq!(budget.meters().reserved, 0);
}

/// A tied output projection takes no memory of its own.
#[test]
fn tied_embeddings_are_shared() {
    let weights = |name| {
        let budget = Budget::new(1 << 26);
        let _model = Model::load(&golden_path(name), LoadOptions::default(), &budget, &mut |_| ()).unwrap();
        budget.meters().reserved
    };
    // Biases apart, qwen2 is llama with tied embeddings.
    let biases = 2 * (4 + 1 + 1) * 128 * 4;
    assert!(weights("llama") + biases - weights("qwen2") > 160 * 64 * 4 - 1024);
}

#[test]
fn the_high_water_mark_is_the_size_of_a_fixed_arena() {
    let budget = Budget::new(1 << 26);
    let (model, mut probe) = start("qwen3-f16", &state_config(16, 8), &budget).unwrap();
    let full = plan(vec![scored_run(&[9; 100], 0, 100, 0, &blocks(0..7))]);
    let expected = probe.execute(&full).unwrap();
    let need = probe.take_arena_high_water();
    drop(probe);

    let build = |bytes| {
        let config = StateConfig {
            scratch: Scratch::Fixed(bytes),
            ..state_config(16, 8)
        };
        model.build_state(&config, &LIMITS, &budget, &mut || {}).unwrap()
    };
    let mut enough = build(need);
    let before = budget.meters().allocations;
    assert_eq!(enough.execute(&full).unwrap(), expected);
    assert_eq!(
        budget.meters().allocations,
        before,
        "a step allocated from the device"
    );
    drop(enough);

    let mut short = build(need - 64);
    let error = short.execute(&full).unwrap_err();
    assert!(
        matches!(
            error,
            StepError::Oom(Oom {
                component: Component::Arena,
                refused_by: RefusedBy::FixedScratch,
                ..
            })
        ),
        "{error}"
    );
    // A smaller step still runs.
    short
        .execute(&plan(vec![run(1, 0, &[9; 10], &blocks(0..7))]))
        .unwrap();
}

#[test]
fn loading_ends_where_it_is_cancelled() {
    let options = LoadOptions::default();
    let cancel = options.cancel.clone();
    let mut tensors = 0;
    let error = Model::load(&golden_path("llama"), options, &budget(), &mut |_| {
        tensors += 1;
        cancel.cancel();
    });
    assert!(matches!(error, Err(ModelError::Cancelled)));
    assert_eq!(tensors, 1);
}

#[test]
fn progress_reaches_the_total() {
    let mut seen = Vec::new();
    let path = golden_path("qwen3-sharded");
    Model::load(&path, LoadOptions::default(), &budget(), &mut |progress| {
        seen.push(progress)
    })
    .unwrap();
    assert!(seen.is_sorted_by_key(|progress| progress.done));
    let Some(&LoadProgress { done, total }) = seen.last() else {
        panic!("no progress")
    };
    assert_eq!(done, total);
}
