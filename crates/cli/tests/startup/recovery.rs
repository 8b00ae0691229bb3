//! What happens to a live server when its device's memory goes away, or is to go.

use std::time::{Duration, Instant};

use futures::StreamExt;
use plimsoll_cli::backend;
use plimsoll_cli::plan_cache::PlanCache;
use plimsoll_cli::start::Serving;
use plimsoll_core::{Component, Event, Request, RequestOptions, SamplingOptions, StepError, TokenId};
use plimsoll_device::Budget;
use plimsoll_engine::{EngineHandle, Phase, RequestStream, SubmitError, WakeError};
use plimsoll_server::Memory;

use crate::neighbours::Machine;
use crate::{BUDGET, Model, STARTS, answers, stop};

pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

async fn until(what: &str, condition: impl Fn() -> bool) {
    let began = Instant::now();
    while !condition() {
        assert!(began.elapsed() < PATIENCE, "{what} did not happen");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// A greedy request whose text depends on its first token. One that comes too late for the state that is about to be lost
/// waits for the next.
pub(crate) fn submit(engine: &EngineHandle, first: TokenId, max_tokens: usize) -> RequestStream {
    let options = RequestOptions {
        prompt: (first..first + 40).collect(),
        max_tokens: Some(max_tokens),
        sampling: SamplingOptions {
            temperature: Some(0.0),
            ..Default::default()
        },
        ..Default::default()
    };
    let request = Request::new(engine.next_id(), options, &engine.limits()).unwrap();
    let began = Instant::now();
    loop {
        match engine.submit(request.clone()) {
            Err(SubmitError::Rebuilding { .. }) if began.elapsed() < PATIENCE => {
                std::thread::sleep(Duration::from_millis(1));
            }
            submitted => return submitted.unwrap(),
        }
    }
}

pub(crate) async fn read(mut stream: RequestStream) -> Result<Vec<TokenId>, StepError> {
    let mut tokens = Vec::new();
    while let Some(event) = stream.next().await {
        match event {
            Event::Admitted { .. } | Event::Prompt(_) => {}
            Event::Token(token) => tokens.push(token.token),
            Event::Pooled(_) => panic!("a vector for a text"),
            Event::Failed(error) => return Err(error),
        }
    }
    Ok(tokens)
}

/// Serves again, with nothing in.
pub(crate) async fn until_ready(engine: &EngineHandle) {
    until("readiness", || engine.health().phase == Phase::Running).await;
    until("emptiness", || {
        let stats = engine.stats();
        stats.in_flight == 0 && stats.scheduler.pages_used == 0
    })
    .await;
}

/// Serving takes nothing from the device, so a neighbour that takes all of it disturbs nobody.
#[tokio::test(flavor = "multi_thread")]
async fn a_neighbour_that_takes_all_memory_disturbs_no_request() {
    let model = Model::new();
    for flags in ["", "--max-total-token-num 1024"] {
        let (machine, budget) = Machine::quiet(BUDGET);
        let ready = model.start(flags, &budget).unwrap();
        let memory = ready.memory.clone();
        let expected = answers(&ready.engine).await;
        let at_rest = budget.meters();
        machine.set(BUDGET);
        budget.set_cap(Some(0));
        assert_eq!(answers(&ready.engine).await, expected);
        let [meters] = memory.meters()[..] else {
            panic!("one rank")
        };
        assert_eq!((meters.reserved, meters.headroom()), (at_rest.reserved, 0));
        assert_eq!(
            meters.reserved_high, meters.reserved,
            "the mark is as low as at ready"
        );
        assert!(memory.proved_peaks()[0] >= meters.reserved_high);
        assert_eq!(memory.allocations_after_ready(), 0);
        assert_eq!(ready.engine.stats().high_water_above_proof, 0);
        stop(ready, &budget).await;
    }
}

/// Only the requests of the step without memory fail; the others wait for the new state and say what they would have.
#[tokio::test(flavor = "multi_thread")]
async fn one_step_without_memory_costs_its_requests_alone() {
    for (model, flags) in [
        (Model::new(), ""),
        (Model::new(), "--max-total-token-num 1024"),
        (Model::new(), "--no-enable-prefix-caching"),
        (Model::hybrid(), ""),
        (Model::windowed(), ""),
    ] {
        let budget = Budget::new(BUDGET);
        let ready = model.start(flags, &budget).unwrap();
        let (engine, memory) = (ready.engine.clone(), ready.memory.clone());
        let (expected, capacity) = (answers(&engine).await, engine.limits().kv_capacity_tokens);
        // A single request keeps less of a window than all of it.
        match ready.report.sizing.groups.len() {
            1 => assert_eq!(capacity, ready.report.sizing.kv_tokens),
            _ => assert!(capacity > ready.report.sizing.kv_tokens, "{capacity}"),
        }
        until_ready(&engine).await;
        let before = budget.meters();
        for step in [1, 2, 5, 20] {
            budget.fail_step(step);
            // Four run, four wait.
            let streams = [STARTS, STARTS].concat();
            let streams: Vec<_> = streams.iter().map(|&first| submit(&engine, first, 24)).collect();
            let mut failed = 0;
            for (i, stream) in streams.into_iter().enumerate() {
                match read(stream).await {
                    Ok(tokens) => assert_eq!(tokens, expected[i % 4], "step {step}"),
                    Err(StepError::Oom(oom)) => {
                        failed += 1;
                        assert_eq!(oom.component, Component::Arena);
                    }
                    Err(other) => panic!("step {step}: {other}"),
                }
            }
            assert!((1..=4).contains(&failed), "{failed} failed in step {step}");
            until_ready(&engine).await;
            let after = budget.meters();
            assert_eq!(after.by_component, before.by_component, "step {step}");
            assert_eq!(after.reserved_high, after.reserved, "marks start anew");
        }
        let stats = engine.stats();
        assert_eq!((stats.rebuilds_oom, stats.high_water_above_proof), (4, 0));
        assert_eq!(memory.allocations_after_ready(), 0, "a rebuild is no step");
        assert_eq!(engine.limits().kv_capacity_tokens, capacity);
        assert_eq!(memory.report()["kv_tokens"], ready.report.sizing.kv_tokens);
        assert_eq!(answers(&engine).await, expected);
        drop(engine);
        stop(ready, &budget).await;
    }
}

/// A neighbour that keeps the memory leaves a smaller server, or none until it goes.
#[tokio::test(flavor = "multi_thread")]
async fn a_neighbour_that_stays_leaves_a_smaller_server_or_one_that_waits() {
    let model = Model::new();
    for flags in ["", "--max-total-token-num 16384"] {
        let (machine, budget) = Machine::quiet(BUDGET);
        let ready = model.start(flags, &budget).unwrap();
        let (engine, memory) = (ready.engine.clone(), ready.memory.clone());
        let expected = answers(&engine).await;
        until_ready(&engine).await;
        let held = budget.meters();
        let full = engine.limits().kv_capacity_tokens;

        // It takes what is free, and part of the KV cache as soon as that is given back.
        let margin =
            ready.report.sizing.margins.canary_bytes + ready.report.sizing.margins.min_fragmentation_bytes;
        let kv = held.by_component.get(Component::Kv);
        machine.set(BUDGET - held.reserved - margin + kv / 2);
        budget.fail_step(1);
        assert!(matches!(
            read(submit(&engine, 0, 24)).await,
            Err(StepError::Oom(_))
        ));
        until_ready(&engine).await;
        let smaller = engine.limits().kv_capacity_tokens;
        assert!(smaller < full && smaller >= 256, "{flags}: {smaller} of {full}");
        assert_eq!(memory.report()["kv_tokens"], smaller);
        assert!(budget.meters().reserved + budget.meters().peers() <= BUDGET);
        assert_eq!(answers(&engine).await, expected);
        let outage = engine.stats().last_oom.unwrap();
        assert!(outage.peers_delta() > 0, "{outage}");

        // It takes everything, then leaves.
        machine.set(BUDGET);
        budget.fail_step(1);
        assert!(matches!(
            read(submit(&engine, 0, 24)).await,
            Err(StepError::Oom(_))
        ));
        until("an attempt that failed", || {
            engine.health().outage.is_some_and(|why| !why.contains("a step"))
        })
        .await;
        assert_eq!(engine.health().phase, Phase::Rebuilding);
        let weights = held.by_component.get(Component::Weights);
        assert_eq!(
            budget.meters().reserved,
            weights,
            "weights stay, nothing else does"
        );
        machine.set(0);
        until_ready(&engine).await;
        assert_eq!(engine.limits().kv_capacity_tokens, full, "{flags}");
        assert_eq!(answers(&engine).await, expected);
        assert_eq!(memory.allocations_after_ready(), 0);
        drop(engine);
        stop(ready, &budget).await;
    }
}

/// Asleep, there is nothing but the weights; awake, everything is as it was.
#[tokio::test(flavor = "multi_thread")]
async fn sleep_gives_everything_back_but_the_weights() {
    for model in [Model::new(), Model::hybrid(), Model::windowed()] {
        let budget = Budget::new(BUDGET);
        let ready = model.start("", &budget).unwrap();
        let engine = ready.engine.clone();
        let expected = answers(&engine).await;
        until_ready(&engine).await;
        let awake = budget.meters();
        for _ in 0..2 {
            engine.sleep(PATIENCE).await.unwrap();
            let asleep = budget.meters();
            assert_eq!(asleep.reserved, awake.by_component.get(Component::Weights));
            engine.wake().await.unwrap();
            assert_eq!(budget.meters().by_component, awake.by_component);
            assert_eq!(answers(&engine).await, expected);
        }
        assert_eq!(engine.stats().rebuilds_wake, 2);
        assert_eq!(ready.memory.allocations_after_ready(), 0);
        drop(engine);
        stop(ready, &budget).await;
    }
}

/// Who wakes measures the device as a start does, so not while another start does.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_wakes_once_no_other_measures_its_device() {
    let (model, locks) = (Model::new(), tempfile::tempdir().unwrap());
    let flags = format!(
        "--device-lock-dir {} --device-memory 24MiB",
        locks.path().display()
    );
    let settings = model.settings(&flags, PlanCache::off());
    let (backend, lock) = backend::open(&model.source(), &settings).unwrap();
    let relock = lock.relock();
    let loaded = model.load_on(&settings, backend).unwrap();
    let serving = Serving {
        max_queue: 4,
        relock: relock.clone(),
        ..Serving::default()
    };
    let ready = loaded.spawn(loaded.prove().unwrap(), serving).unwrap();
    drop(lock);
    let engine = ready.engine.clone();
    let expected = answers(&engine).await;
    until_ready(&engine).await;
    engine.sleep(PATIENCE).await.unwrap();
    let other = relock.try_take().unwrap();
    let error = engine.wake().await.unwrap_err();
    assert!(matches!(error, WakeError::NoMemory { .. }), "{error}");
    let name = format!("process {}", std::process::id());
    assert!(error.to_string().contains(&name), "{error}");
    assert_eq!(engine.health().phase, Phase::Rebuilding);
    drop(other);
    until_ready(&engine).await;
    assert_eq!(answers(&engine).await, expected);
    assert!(relock.try_take().unwrap().is_held(), "it is free again");
}
