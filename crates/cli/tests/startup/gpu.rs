//! The same on a GPU that gives less than it promises, so that nothing has to fill it: `make test-gpu`.

use plimsoll_cli::Error;
use plimsoll_cli::plan_cache::PlanCache;
use plimsoll_cli::start::{Started, predict};
use plimsoll_core::{Component, Meters, StepError};
use plimsoll_device::cuda::{Gpu, GpuLimit, GpuOptions};
use plimsoll_engine::Drained;
use plimsoll_profiler::{Origin, Outcome, ProfileError, ScenarioKind, ScenarioResult};
use plimsoll_server::Memory;

use crate::recovery::{PATIENCE, read, submit, until_ready};
use crate::{CONFIG, Model, STARTS, WINDOWED, answers, start};

/// What the GPU says it has.
const LIMIT: u64 = 4 << 30;

fn model() -> Model {
    Model::of(&CONFIG.replace(r#""head_dim": 8"#, r#""head_dim": 64"#))
}

/// [`model`], and one with windows. Gemma 4 does not divide scores by the size of heads, so with norms of unit length these would
/// make a maximum of every softmax, which multiplies what rounding does. The large epsilon shortens queries and keys, and all else that is
/// normalised.
fn models() -> [Model; 2] {
    let windowed = WINDOWED
        .replace(r#""head_dim": 8"#, r#""head_dim": 64"#)
        .replace(r#""global_head_dim": 16"#, r#""global_head_dim": 128"#)
        .replace(r#""rms_norm_eps": 1e-6"#, r#""rms_norm_eps": 0.9"#);
    assert!(windowed.contains("128") && windowed.contains("0.9"), "{windowed}");
    [model(), Model::of(&windowed)]
}

/// A GPU that says it has [`LIMIT`] bytes and lets no more than `cap` be allocated.
fn gpu(cap: Option<u64>) -> Gpu {
    let options = GpuOptions {
        limit: GpuLimit::Bytes(LIMIT),
        cap,
    };
    Gpu::open_with(0, options).unwrap()
}

/// What a state and weights hold: the runtime stays, and the driver keeps the memory of graphs for the next ones.
fn held(meters: &Meters) -> u64 {
    let bytes = |component| meters.by_component.get(component);
    meters.reserved - bytes(Component::Runtime) - bytes(Component::Graphs)
}

async fn stop(ready: Started, gpu: &Gpu) {
    let patience = std::time::Duration::from_secs(10);
    assert_eq!(ready.engine.drain(patience).await, Drained::Complete);
    drop(ready);
    gpu.trim().unwrap();
    assert_eq!(held(&gpu.meters()), 0);
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
async fn the_size_that_is_proved_is_what_the_gpu_holds() {
    for model in models() {
        let gpu = gpu(None);
        let ready = model.start_on_gpu("--mem-fraction 1.0", &gpu).unwrap();
        let (report, meters) = (&ready.report, gpu.meters());
        assert_eq!(report.attempts.len(), 1, "{:?}", report.attempts);
        assert_eq!(report.baseline.total, LIMIT);
        assert!(report.sizing.kv_bytes > LIMIT / 2, "{report:?}");
        // The canary and the buffer are free, as promised.
        assert!(meters.free >= report.sizing.margins.canary_bytes, "{meters:?}");
        assert!(meters.free <= LIMIT / 4, "{meters:?}");
        let allocations = meters.allocations;
        let expected = answers(&ready.engine).await;
        assert!(expected.iter().all(|tokens| tokens.len() == 24));
        assert_eq!(answers(&ready.engine).await, expected);
        assert_eq!(gpu.meters().allocations, allocations, "serving allocates nothing");
        stop(ready, &gpu).await;
        // Without graphs the text is the same.
        let ready = model.start_on_gpu("--enforce-eager", &gpu).unwrap();
        assert_eq!(answers(&ready.engine).await, expected);
        stop(ready, &gpu).await;
    }
}

/// With CUDA graphs too, the second start captures them once instead of twice.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
async fn the_second_start_on_a_gpu_skips_the_probe() {
    let model = model();
    let gpu = gpu(None);
    let plans = tempfile::tempdir().unwrap();
    let settings = model.settings("--mem-fraction 1.0", PlanCache::at(plans.path()));
    let mut allocations = vec![gpu.budget().meters().allocations];
    let mut starts = Vec::new();
    for _ in 0..2 {
        let loaded = model.load_on(&settings, model.on_gpu(&settings, &gpu)).unwrap();
        let ready = start(&loaded).unwrap();
        drop(loaded);
        allocations.push(gpu.budget().meters().allocations);
        starts.push((ready.report.clone(), answers(&ready.engine).await));
        stop(ready, &gpu).await;
    }
    let [(first, expected), (second, found)] = &starts[..] else {
        panic!("{} starts", starts.len())
    };
    assert_eq!((first.origin, found), (Origin::Measured, expected));
    let Origin::Cached { drift } = second.origin else {
        panic!("{:?}", second.origin)
    };
    // The runtime has loaded by now what it loads once.
    assert!(drift.abs() < 0.02, "{drift}");
    assert!(second.sizing.kv_pages.abs_diff(first.sizing.kv_pages) <= first.sizing.kv_pages / 50);
    assert_eq!(second.attempts.len(), 1, "{:?}", second.attempts);
    let [first, second] = [0, 1].map(|n| allocations[n + 1] - allocations[n]);
    assert!(second < first, "{second} allocations instead of {first}");
}

/// Every start shows what the graphs took, which the driver takes once and keeps; nothing of it passes for a neighbour's or
/// for the runtime's.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
async fn the_memory_of_graphs_is_theirs_alone() {
    // Enough of them that the driver takes memory.
    let config = CONFIG.replace(r#""head_dim": 8"#, r#""head_dim": 64"#);
    let model = Model::of(&config.replace(r#""num_hidden_layers": 2"#, r#""num_hidden_layers": 32"#));
    let gpu = Gpu::open(0).unwrap();
    let flags = "--max-num-seqs 256 --max-num-batched-tokens 512 --max-total-token-num 8192";
    let mut runtime = Vec::new();
    let mut graphs = Vec::new();
    for flags in [flags, "--max-num-seqs 256 --max-num-batched-tokens 512", flags] {
        let ready = model.start_on_gpu(flags, &gpu).unwrap();
        let report = &ready.report;
        let bytes = |name: &str| {
            let mut parts = report.ready.components.iter();
            parts.find(|part| part.name == name).unwrap().bytes
        };
        graphs.push(bytes("graphs"));
        runtime.push(bytes("runtime"));
        // A GPU that nobody else uses has no neighbours, before or after, nor in between.
        assert_eq!(report.ready.peers, report.baseline.peers, "{report:?}");
        let computed = report.arithmetic.as_ref().map(|arithmetic| arithmetic.peers);
        assert!(
            computed.is_none_or(|peers| peers == report.baseline.peers),
            "{report:?}"
        );
        assert_eq!(
            bytes("graphs"),
            gpu.budget().meters().by_component.get(Component::Graphs)
        );
        stop(ready, &gpu).await;
    }
    assert!(
        graphs[0] > 0 && graphs.iter().all(|bytes| *bytes == graphs[0]),
        "{graphs:?}"
    );
    assert!(
        runtime[1..].iter().all(|bytes| *bytes == runtime[1]),
        "{runtime:?}"
    );
    let meters = gpu.meters();
    assert_eq!(meters.by_component.get(Component::Graphs), graphs[0]);
}

/// A GPU that gives a little less than it promises gets a smaller cache.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
async fn a_gpu_that_gives_less_gets_a_smaller_cache() {
    let model = model();
    let clean = gpu(None);
    let ready = model.start_on_gpu("", &clean).unwrap();
    let (full, peak) = (
        ready.report.sizing.kv_tokens,
        ready.report.attempts[0].peak_reserved,
    );
    let runtime = clean.meters().by_component.get(Component::Runtime);
    let expected = answers(&ready.engine).await;
    stop(ready, &clean).await;

    let capped = gpu(Some((peak - runtime) / 100 * 97));
    let ready = model.start_on_gpu("", &capped).unwrap();
    let outcomes: Vec<_> = ready
        .report
        .attempts
        .iter()
        .map(|attempt| &attempt.outcome)
        .collect();
    assert!(matches!(outcomes[0], Outcome::OutOfMemory { .. }), "{outcomes:?}");
    assert_eq!(outcomes.last(), Some(&&Outcome::Proved));
    assert!(ready.report.sizing.kv_tokens < full && ready.report.sizing.kv_tokens > full / 5 * 4);
    assert_eq!(answers(&ready.engine).await, expected);
    stop(ready, &capped).await;
}

/// One that gives far less is diagnosed, and holds nothing.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
async fn a_gpu_that_gives_far_less_is_diagnosed() {
    let model = model();
    let capped = gpu(Some(LIMIT / 4));
    let error = model.start_on_gpu("", &capped).unwrap_err();
    assert!(
        matches!(&error, Error::Profile(ProfileError::DoesNotFit(_))),
        "{error:?}"
    );
    capped.trim().unwrap();
    assert_eq!((error.exit_code(), held(&capped.meters())), (4, 0));
    let tiny = gpu(Some(1 << 20));
    let error = model.start_on_gpu("", &tiny).unwrap_err();
    tiny.trim().unwrap();
    assert_eq!((error.exit_code(), held(&tiny.meters())), (4, 0), "{error}");
}

/// On the real path, with graphs: the n-th allocation fails, for every n.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
async fn every_allocation_of_a_start_on_a_gpu_may_fail() {
    for model in models() {
        let gpu = gpu(None);
        let flags = "--max-total-token-num 4096";
        let ready = model.start_on_gpu(flags, &gpu).unwrap();
        let before = gpu.budget().meters().allocations;
        stop(ready, &gpu).await;
        let ready = model.start_on_gpu(flags, &gpu).unwrap();
        let allocations = gpu.budget().meters().allocations - before;
        stop(ready, &gpu).await;
        for n in 1..=allocations {
            gpu.budget().fail_allocation(n);
            match model.start_on_gpu(flags, &gpu) {
                Ok(ready) => stop(ready, &gpu).await,
                Err(error) => assert_eq!(error.exit_code(), 4, "allocation {n}: {error:?}"),
            }
            gpu.budget().fail_allocation(0);
            gpu.trim().unwrap();
            assert_eq!(held(&gpu.meters()), 0, "allocation {n}");
        }
    }
}

/// With graphs and two steps in flight, the state is lost while they run and built again; smaller, where the GPU gives less.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
async fn a_step_without_memory_costs_its_requests_alone_on_a_gpu() {
    for model in models() {
        let gpu = gpu(None);
        let ready = model.start_on_gpu("", &gpu).unwrap();
        let engine = ready.engine.clone();
        let full = engine.limits().kv_capacity_tokens;
        let expected = answers(&engine).await;
        until_ready(&engine).await;
        let before = gpu.budget().meters();
        for step in [1, 2, 9] {
            gpu.budget().fail_step(step);
            let streams = [STARTS, STARTS].concat();
            let streams: Vec<_> = streams.iter().map(|&first| submit(&engine, first, 24)).collect();
            let mut failed = 0;
            for (i, stream) in streams.into_iter().enumerate() {
                match read(stream).await {
                    Ok(tokens) => assert_eq!(tokens, expected[i % 4], "step {step}"),
                    Err(StepError::Oom(_)) => failed += 1,
                    Err(other) => panic!("step {step}: {other}"),
                }
            }
            assert!((1..=4).contains(&failed), "{failed} failed in step {step}");
            until_ready(&engine).await;
            let after = gpu.budget().meters();
            for component in [Component::Weights, Component::Arena, Component::Staging] {
                let held = [&before, &after].map(|meters| meters.by_component.get(component));
                assert_eq!(held[0], held[1], "{component} after step {step}");
            }
            assert_eq!(answers(&engine).await, expected);
        }
        assert_eq!(ready.memory.allocations_after_ready(), 0);

        // There is room for the state, and none for the canary beside it.
        gpu.budget().set_cap(Some(gpu.budget().meters().reserved));
        gpu.budget().fail_step(1);
        assert!(matches!(
            read(submit(&engine, 0, 24)).await,
            Err(StepError::Oom(_))
        ));
        until_ready(&engine).await;
        let smaller = engine.limits().kv_capacity_tokens;
        assert!(smaller < full && smaller > full / 5 * 4, "{smaller} of {full}");
        assert_eq!(answers(&engine).await, expected);
        assert_eq!(engine.stats().rebuilds_oom, 4);
        drop(engine);
        stop(ready, &gpu).await;
    }
}

/// The pool is trimmed too.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
async fn a_gpu_holds_the_weights_alone_while_the_server_sleeps() {
    for model in models() {
        let gpu = gpu(None);
        let ready = model.start_on_gpu("", &gpu).unwrap();
        let engine = ready.engine.clone();
        let expected = answers(&engine).await;
        until_ready(&engine).await;
        let weights = gpu.meters().by_component.get(Component::Weights);
        for _ in 0..2 {
            engine.sleep(PATIENCE).await.unwrap();
            let asleep = gpu.meters();
            // The pool gives back whole chunks of 2 MiB.
            let slack = held(&asleep) - weights;
            assert!(slack < 64 << 20, "{slack} bytes beside the weights: {asleep:?}");
            assert_eq!(asleep.by_component.get(Component::Kv), 0);
            engine.wake().await.unwrap();
            assert_eq!(answers(&engine).await, expected);
        }
        assert_eq!(ready.memory.allocations_after_ready(), 0);
        drop(engine);
        stop(ready, &gpu).await;
    }
}

/// The parts sum to what the device reports used, and the prediction is near.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
async fn parts_sum_to_what_the_gpu_reports_and_are_predicted() {
    let model = model();
    let gpu = gpu(None);
    let flags = "--max-num-seqs 64 --max-num-batched-tokens 2048 --max-model-len 4096";
    let settings = model.settings(flags, PlanCache::off());
    let backend = model.on_gpu(&settings, &gpu);
    let prediction = predict(&settings, &*backend).unwrap();
    let proof = model.load_on(&settings, backend).unwrap().prove().unwrap();
    let report = proof.report();
    for memory in [&report.baseline, &report.ready] {
        // Others on the GPU are not ours to explain, and a limit hides what is beyond it.
        let parts = memory.attributed + memory.peers;
        assert!(parts.abs_diff(memory.device_used) <= 64 << 20, "{memory:?}");
    }
    // Worst steps take as much of the arena in the proof, with the longest contexts, as in the probe.
    let taken = |steps: &[ScenarioResult]| -> Vec<_> {
        let steps = steps.iter();
        steps.map(|step| (step.kind, step.scratch_bytes)).collect()
    };
    let probed = taken(&report.probe_scenarios);
    assert_eq!(taken(&report.attempts.last().unwrap().scenarios), probed);
    assert!(probed.iter().any(|(kind, _)| *kind == ScenarioKind::LongPrefix));
    let tokens = prediction.sizing.kv_tokens as f64 / report.sizing.kv_tokens as f64;
    assert!((tokens - 1.0).abs() < 0.03, "{:?}", prediction.compare(report));
}
