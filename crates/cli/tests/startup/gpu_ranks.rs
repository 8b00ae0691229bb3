//! Ranks on GPUs of their own, from the start to the end: `make test-gpu` on a machine with two.

use std::sync::Arc;
use std::time::{Duration, Instant};

use plimsoll_cli::Error;
use plimsoll_cli::backend::{Backend, RanksBackend};
use plimsoll_cli::plan_cache::PlanCache;
use plimsoll_cli::start::Started;
use plimsoll_core::{Component, StepError};
use plimsoll_device::cuda::{Gpu, GpuLimit, GpuOptions};
use plimsoll_engine::{Drained, Phase};
use plimsoll_kernels::Exchange;
use plimsoll_kernels::cuda::{communication_bytes, sent_bytes};
use plimsoll_profiler::Bound;
use plimsoll_server::Memory;
use serde_json::{Value, json};

use crate::process::Process;
use crate::ranks::hang;
use crate::recovery::{read, submit, until_ready};
use crate::{CONFIG, Model, STARTS, answers, start};

/// What each GPU says it has.
const LIMIT: u64 = 4 << 30;

/// Longest wait for a rank in a step.
const STEP: Duration = Duration::from_secs(30);

fn model() -> Model {
    Model::of(&CONFIG.replace(r#""head_dim": 8"#, r#""head_dim": 64"#))
}

/// As many GPUs, which say that they have so many bytes; says so where there are fewer.
#[expect(clippy::print_stdout, reason = "what was not tested")]
fn gpus(limits: &[u64]) -> Option<Vec<Gpu>> {
    let open = |(ordinal, &bytes): (usize, &u64)| {
        let options = GpuOptions {
            limit: GpuLimit::Bytes(bytes),
            cap: None,
        };
        Gpu::open_with(ordinal, options)
    };
    let gpus: Result<Vec<_>, _> = limits.iter().enumerate().map(open).collect();
    match gpus {
        Ok(gpus) => Some(gpus),
        Err(error) => {
            let wanted = limits.len();
            println!("SKIPPED, NOTHING WAS TESTED: this needs {wanted} GPUs ({error})");
            None
        }
    }
}

fn start_on(model: &Model, flags: &str, gpus: &[Gpu]) -> Result<Started, Error> {
    let settings = model.settings(flags, PlanCache::off());
    let exchanges = Exchange::group_with(gpus.len(), STEP, 10 * STEP);
    let backend = RanksBackend::on_gpus(model.dir.path(), &settings, gpus, exchanges)?;
    let backend: Arc<dyn Backend> = Arc::new(backend);
    start(&model.load_on(&settings, backend)?)
}

/// Bytes of servers, and of what ranks exchange sums in.
fn held(gpus: &[Gpu]) -> u64 {
    let of_gpu = |gpu: &Gpu| {
        gpu.trim().unwrap();
        let meters = gpu.meters();
        let bytes = |component| meters.by_component.get(component);
        meters.reserved - bytes(Component::Runtime) - bytes(Component::Graphs)
    };
    gpus.iter().map(of_gpu).sum()
}

fn assert_nothing_is_held(gpus: &[Gpu], when: &str) {
    let meters = || gpus.iter().map(Gpu::meters).collect::<Vec<_>>();
    assert_eq!(held(gpus), 0, "{when}: {:?}", meters());
}

async fn stop(ready: Started, gpus: &[Gpu]) {
    assert_eq!(
        ready.engine.drain(Duration::from_secs(20)).await,
        Drained::Complete
    );
    drop(ready);
    // The ranks' threads free their states as they end.
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_nothing_is_held(gpus, "after the end");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
async fn several_gpus_prove_and_serve_one_model() {
    for ranks in [2, 4] {
        if let Some(gpus) = gpus(&vec![LIMIT; ranks]) {
            prove_and_serve(&gpus).await;
        }
    }
}

async fn prove_and_serve(gpus: &[Gpu]) {
    let (model, of_all) = (model(), gpus.len());
    let mut texts = Vec::new();
    for flags in ["--mem-fraction 1.0", "--enforce-eager", ""] {
        let ready = start_on(&model, flags, gpus).unwrap();
        assert_eq!((ready.report.rank, ready.report.ranks), (0, of_all));
        texts.push(answers(&ready.engine).await);
        assert_eq!(answers(&ready.engine).await, texts[0], "{flags}");
        let ranks = ready.memory.meters();
        assert_eq!(ranks.len(), of_all);
        for meters in ranks {
            let bytes = |component| meters.by_component.get(component);
            assert_eq!(
                bytes(Component::Communication),
                communication_bytes(of_all) as u64
            );
            assert!(
                bytes(Component::Kv) > 0 && bytes(Component::Weights) > 0,
                "{meters:?}"
            );
        }
        assert_eq!(ready.memory.allocations_after_ready(), 0);
        stop(ready, gpus).await;
    }
    assert!(texts.iter().all(|text| *text == texts[0]));
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
async fn the_smaller_gpu_decides() {
    let model = model();
    let mut sizes = Vec::new();
    for limits in [[LIMIT; 2], [LIMIT / 2, LIMIT], [LIMIT, LIMIT / 2]] {
        let Some(gpus) = gpus(&limits) else { return };
        let ready = start_on(&model, "--mem-fraction 1.0", &gpus).unwrap();
        // Of two with the same limit, one has a few megabytes less.
        if limits[0] != limits[1] {
            assert_eq!(
                ready.report.sizing.bound == Bound::OtherRank,
                limits[1] < limits[0]
            );
        }
        let margins =
            ready.report.sizing.margins.canary_bytes + ready.report.sizing.margins.min_fragmentation_bytes;
        sizes.push(ready.report.sizing.kv_bytes + margins);
        stop(ready, &gpus).await;
    }
    // Margins are scaled to the first GPU, so they are smaller where that is the smaller one.
    assert!(
        sizes[1].abs_diff(sizes[2]) < sizes[0] / 50 && 3 * sizes[1] < 2 * sizes[0],
        "{sizes:?}"
    );
}

/// Every few allocations of a start, on either GPU.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
#[expect(clippy::print_stdout, reason = "where it was, should it hang")]
async fn an_allocation_of_a_start_may_fail_on_either_gpu() {
    let Some(gpus) = gpus(&[LIMIT; 2]) else { return };
    let (model, flags) = (model(), "--max-total-token-num 4096");
    let count = || gpus[1].budget().meters().allocations;
    let before = count();
    stop(start_on(&model, flags, &gpus).unwrap(), &gpus).await;
    let allocations = count() - before;
    let step = (allocations / 12).max(1);
    for (bad, gpu) in gpus.iter().enumerate() {
        for n in (1 + bad as u64 * step / 2..=allocations).step_by(step as usize) {
            gpu.budget().fail_allocation(n);
            let begun = Instant::now();
            println!("allocation {n} of {allocations} on GPU {bad}");
            match start_on(&model, flags, &gpus) {
                Ok(ready) => stop(ready, &gpus).await,
                Err(error) => assert_eq!(error.exit_code(), 4, "allocation {n} of GPU {bad}: {error:?}"),
            }
            assert!(
                begun.elapsed() < STEP,
                "allocation {n} of GPU {bad}: somebody waited"
            );
            gpu.budget().fail_allocation(0);
            assert_nothing_is_held(&gpus, &format!("allocation {n} of GPU {bad}"));
        }
    }
}

/// With two steps in flight, the state is lost on one GPU and built again on both.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
async fn a_gpu_that_runs_out_of_memory_is_built_again_with_the_other() {
    let Some(gpus) = gpus(&[LIMIT; 2]) else { return };
    let ready = start_on(&model(), "", &gpus).unwrap();
    let engine = ready.engine.clone();
    let expected = answers(&engine).await;
    let mut rebuilds = 0;
    for step in [1, 2, 9] {
        for gpu in &gpus {
            gpu.budget().fail_step(step);
            let streams: Vec<_> = STARTS.map(|first| submit(&engine, first, 24)).into();
            let mut failed = 0;
            for (i, stream) in streams.into_iter().enumerate() {
                match read(stream).await {
                    Ok(tokens) => assert_eq!(tokens, expected[i], "step {step}"),
                    Err(StepError::Oom(_)) => failed += 1,
                    Err(other) => panic!("step {step}: {other}"),
                }
            }
            assert!(failed > 0, "step {step}");
            until_ready(&engine).await;
            rebuilds += 1;
            assert_eq!(answers(&engine).await, expected, "step {step}");
        }
    }
    assert_eq!(engine.stats().rebuilds_oom, rebuilds);
    assert_eq!(ready.memory.allocations_after_ready(), 0);
    drop(engine);
    stop(ready, &gpus).await;
}

/// The whole server, from flags to JSON.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
async fn the_binary_serves_on_two_gpus_and_says_so() {
    if gpus(&[LIMIT; 2]).is_none() {
        return;
    }
    let (model, locks) = (model(), tempfile::tempdir().unwrap());
    let flags = [
        "--port",
        "0",
        "--device-memory",
        "4GiB",
        "--tensor-parallel-size",
        "2",
        "--max-num-batched-tokens",
        "4096",
    ];
    let with = |device: &'static str| [&flags[..], &["--device", device]].concat();
    let mut refused = Process::start("serve", model.dir.path(), locks.path(), &with("cuda:0"));
    assert_eq!(refused.finish(), Some(2), "{}", refused.log.join("\n"));
    refused.expect(&["--device", "one GPU of --tensor-parallel-size 2"]);
    for device in ["cuda", "cuda:1,0"] {
        let mut server = Process::start("serve", model.dir.path(), locks.path(), &with(device));
        server.expect(&["tensor parallelism: 2 GPUs", "one shot"]);
        let ready = server.expect(&["ready: ", "http://"]);
        let url = format!("http://{}", ready.split_once("http://").unwrap().1);
        let body = json!({ "prompt": [5, 6, 7], "max_tokens": 12, "temperature": 0, "ignore_eos": true });
        let answer = reqwest::Client::new()
            .post(format!("{url}/v1/completions"))
            .json(&body)
            .send()
            .await
            .unwrap();
        assert!(answer.status().is_success(), "{:?}", answer.text().await);
        let memory: Value = reqwest::get(format!("{url}/memory"))
            .await
            .unwrap()
            .json()
            .await
            .unwrap();
        let ranks = memory["ranks"].as_array().unwrap();
        assert_eq!(ranks.len(), 2);
        for rank in ranks {
            assert_eq!(
                rank["components"]["communication"].as_u64(),
                Some((communication_bytes(2) + sent_bytes(2, 4096, 32)) as u64)
            );
        }
        assert_eq!(memory["device_allocs_after_ready"], 0);
    }
}

/// A rank whose thread does not come to its step: the engine ends, and says which.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
async fn a_gpu_whose_thread_hangs_ends_the_engine_by_name() {
    let Some(gpus) = gpus(&[LIMIT; 2]) else { return };
    let model = model();
    for bad in 0..2 {
        let settings = model.settings("", PlanCache::off());
        let exchanges = Exchange::group_with(2, STEP / 5, 10 * STEP);
        let backend = RanksBackend::on_gpus(model.dir.path(), &settings, &gpus, exchanges).unwrap();
        let exchange = Arc::clone(&backend.parts()[bad].1);
        let ready = start(&model.load_on(&settings, Arc::new(backend)).unwrap()).unwrap();
        let (end, holder) = hang(exchange);
        let error = read(submit(&ready.engine, 3, 20)).await.unwrap_err();
        let StepError::RankLost(why) = &error else {
            panic!("{error:?}")
        };
        assert!(why.starts_with(&format!("rank {bad} did not")), "{why}");
        tokio::time::timeout(STEP, ready.engine.ended()).await.unwrap();
        assert_eq!(ready.engine.health().phase, Phase::Dead);
        drop(end);
        holder.join().unwrap();
        drop(ready);
        // The rank's thread goes on to its step, which nobody waits for, and ends.
        let ended = Instant::now();
        while held(&gpus) > 0 {
            assert!(ended.elapsed() < STEP, "a state is held for ever");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}
