//! Ranks that serve one model together: sized by the least, and none waits for one that fails.

use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use plimsoll_cli::Error;
use plimsoll_cli::backend::{Backend, CpuBackend, CpuRank, RanksBackend, SharedExchange};
use plimsoll_cli::plan_cache::PlanCache;
use plimsoll_cli::settings::EngineSettings;
use plimsoll_cli::start::{Started, predict};
use plimsoll_core::{Component, EncoderLimits, StepError};
use plimsoll_device::Budget;
use plimsoll_engine::Phase;
use plimsoll_kernels::Exchange;
use plimsoll_profiler::{Bound, ProfileError};
use plimsoll_server::Memory;
use serde_json::{Value, json};

use crate::prediction::compare;
use crate::process::Process;
use crate::recovery::{read, submit, until_ready};
use crate::{BUDGET, Model, answers, start, stop};

/// Far longer than a step of these models, and short enough for a test.
const STEP: Duration = Duration::from_secs(4);

struct Group {
    budgets: Vec<Budget>,
    exchanges: Vec<SharedExchange>,
}

impl Group {
    fn of(bytes: &[u64]) -> Self {
        let exchanges = Exchange::group_with(bytes.len(), STEP, 4 * STEP);
        Self {
            budgets: bytes.iter().map(|&bytes| Budget::new(bytes)).collect(),
            exchanges: (exchanges.into_iter())
                .map(|exchange| Arc::new(Mutex::new(exchange)))
                .collect(),
        }
    }

    fn start(&self, model: &Model, flags: &str) -> Result<Started, Error> {
        let settings = model.settings(&format!("{flags} --threads 2"), PlanCache::off());
        start(&model.load_on(&settings, self.backend(model, &settings)?)?)
    }

    fn backend(&self, model: &Model, settings: &Arc<EngineSettings>) -> Result<Arc<dyn Backend>, Error> {
        let ranks = self
            .budgets
            .iter()
            .zip(&self.exchanges)
            .map(|(budget, exchange)| {
                let rank =
                    CpuRank::part(budget.clone(), Arc::clone(exchange)).map_err(Error::WeightsDoNotFit)?;
                let backend: Arc<dyn Backend> = Arc::new(CpuBackend::new(model.dir.path(), settings, rank));
                Ok((backend, Arc::clone(exchange)))
            });
        Ok(Arc::new(RanksBackend::new(ranks.collect::<Result<_, Error>>()?)))
    }

    async fn stop(&self, ready: Started) {
        let [first, ..] = &self.budgets[..] else {
            panic!("no rank")
        };
        stop(ready, first).await;
        let begun = Instant::now();
        while self.budgets.iter().any(|budget| budget.meters().reserved > 0) {
            assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", self.budgets);
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

/// Also where there are fewer heads of keys and values than ranks.
#[tokio::test(flavor = "multi_thread")]
async fn ranks_say_what_one_says() {
    for model in [Model::new(), Model::hybrid()] {
        let budget = Budget::new(BUDGET);
        let alone = model.start("", &budget).unwrap();
        let expected = answers(&alone.engine).await;
        stop(alone, &budget).await;
        for ranks in [2, 4] {
            let group = Group::of(&vec![BUDGET; ranks]);
            let ready = match group.start(&model, "") {
                Ok(ready) => ready,
                Err(error) => {
                    // The hybrid has two key heads.
                    assert_eq!((ranks, error.exit_code()), (4, 2), "{error}");
                    assert!(error.to_string().contains("1, 2 can"), "{error}");
                    continue;
                }
            };
            assert_eq!((ready.report.rank, ready.report.ranks), (0, ranks));
            assert_eq!(answers(&ready.engine).await, expected, "{ranks} ranks");
            assert_eq!(ready.memory.meters().len(), ranks);
            assert_eq!(ready.memory.allocations_after_ready(), 0);
            group.stop(ready).await;
        }
    }
}

/// Each rank proves and holds all of it, as predicted; rows that see each other are computed in one step on all.
#[tokio::test(flavor = "multi_thread")]
async fn every_rank_proves_the_encoder_of_images() {
    for name in ["qwen3-vl", "gemma3-vision"] {
        let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden");
        let config = std::fs::read_to_string(format!("{golden}/{name}/config.json")).unwrap();
        let model = Model::of(&config);
        let mut settings = EngineSettings::clone(&model.settings("--threads 2", PlanCache::off()));
        settings.serve_as.images = Some(EncoderLimits {
            max_patches: 48,
            max_images_per_prompt: 2,
        });
        let settings = Arc::new(settings);
        let group = Group::of(&[BUDGET; 2]);
        let backend = group.backend(&model, &settings).unwrap();
        let rows_at_once = if name == "gemma3-vision" { 9 } else { 1 };
        assert_eq!(backend.tokens_at_once().unwrap(), rows_at_once);
        let predicted = predict(&settings, &*backend).unwrap();
        let ready = start(&model.load_on(&settings, backend).unwrap()).unwrap();
        compare(&predicted, &ready.report, name);
        let held = ready.memory.meters().into_iter();
        let held: Vec<_> = held
            .map(|meters| meters.by_component.get(Component::Encoder))
            .collect();
        assert!(held[0] > 0 && held == [held[0]; 2], "{name}: {held:?}");
        group.stop(ready).await;
    }
}

/// The smallest rank decides, whichever it is.
#[tokio::test(flavor = "multi_thread")]
async fn all_serve_what_the_least_can_hold() {
    let model = Model::new();
    let flags = "--mem-fraction 1.0 --max-num-seqs 32 --max-model-len 4096";
    let mut sizes = Vec::new();
    for small in 0..2 {
        let mut bytes = [BUDGET; 2];
        bytes[small] = BUDGET / 2;
        let group = Group::of(&bytes);
        let ready = group.start(&model, flags).unwrap();
        sizes.push(ready.report.sizing.kv_tokens);
        assert_eq!(
            ready.report.sizing.bound == Bound::OtherRank,
            small == 1,
            "{:?}",
            ready.report.sizing.bound
        );
        group.stop(ready).await;
    }
    let group = Group::of(&[BUDGET; 2]);
    let ready = group.start(&model, flags).unwrap();
    assert!(
        sizes
            .iter()
            .all(|&size| 5 * size < 4 * ready.report.sizing.kv_tokens),
        "{sizes:?}"
    );
    group.stop(ready).await;
}

/// Whichever allocation fails on whichever rank, all end in the same smaller server, or in an error with its own exit code.
#[tokio::test(flavor = "multi_thread")]
async fn every_allocation_of_every_rank_may_fail() {
    let model = Model::new();
    let group = Group::of(&[BUDGET; 2]);
    let clean = group.start(&model, "").unwrap();
    let (expected, full) = (answers(&clean.engine).await, clean.report.sizing.kv_tokens);
    let allocations = group.budgets[1].meters().allocations;
    group.stop(clean).await;
    for bad in 0..2 {
        let (mut smaller, mut refused) = (0, 0);
        for n in 1..=allocations {
            let group = Group::of(&[BUDGET; 2]);
            group.budgets[bad].fail_allocation(n);
            match group.start(&model, "") {
                Ok(ready) => {
                    assert!(
                        ready.report.sizing.kv_tokens <= full,
                        "allocation {n} of rank {bad}"
                    );
                    smaller += usize::from(ready.report.sizing.kv_tokens < full);
                    assert_eq!(
                        answers(&ready.engine).await,
                        expected,
                        "allocation {n} of rank {bad}"
                    );
                    group.stop(ready).await;
                }
                Err(error) => {
                    let typed = matches!(
                        error,
                        Error::WeightsDoNotFit(_) | Error::Profile(ProfileError::DoesNotFit(_))
                    );
                    assert!(
                        typed && error.exit_code() == 4,
                        "allocation {n} of rank {bad}: {error:?}"
                    );
                    refused += 1;
                }
            }
        }
        assert!(
            smaller > 0 && refused > 0,
            "rank {bad}: {smaller} smaller, {refused} refused"
        );
    }
}

/// A step that finds no memory on one rank costs its requests; the state is built again on all, and the others go on.
#[tokio::test(flavor = "multi_thread")]
async fn a_rank_that_runs_out_of_memory_is_built_again_with_the_others() {
    let model = Model::new();
    let group = Group::of(&[BUDGET; 4]);
    let ready = group.start(&model, "").unwrap();
    let expected = read(submit(&ready.engine, 3, 20)).await.unwrap();
    for bad in 0..4 {
        group.budgets[bad].fail_step(5);
        let failed = read(submit(&ready.engine, 3, 20)).await.unwrap_err();
        assert!(matches!(failed, StepError::Oom(_)), "rank {bad}: {failed:?}");
        until_ready(&ready.engine).await;
        assert_eq!(
            read(submit(&ready.engine, 3, 20)).await.unwrap(),
            expected,
            "rank {bad}"
        );
    }
    assert_eq!(ready.engine.stats().rebuilds_oom, 4);
    group.stop(ready).await;
}

/// Keeps a rank from entering its next step until what is returned is dropped, and then joined.
pub(crate) fn hang(exchange: SharedExchange) -> (Sender<()>, JoinHandle<()>) {
    let (hangs, hanging) = channel();
    let (end, ended) = channel();
    let holder = thread::spawn(move || {
        let _held = exchange.lock().unwrap();
        hangs.send(()).unwrap();
        // Nothing is sent: it ends with the other end.
        let _ = ended.recv();
    });
    hanging.recv().unwrap();
    (end, holder)
}

/// It is named, and the engine ends: a supervisor starts another.
#[tokio::test(flavor = "multi_thread")]
async fn a_rank_that_hangs_ends_the_engine_by_name() {
    let model = Model::new();
    for bad in 0..2 {
        let group = Group::of(&[BUDGET; 2]);
        let ready = group.start(&model, "").unwrap();
        let begun = Instant::now();
        // It waits for ever to enter its next step.
        let exchange = Arc::clone(&group.exchanges[bad]);
        let (end, holder) = hang(exchange);
        let error = read(submit(&ready.engine, 3, 20)).await.unwrap_err();
        let StepError::RankLost(why) = &error else {
            panic!("{error:?}")
        };
        assert!(why.starts_with(&format!("rank {bad} did not")), "{why}");
        tokio::time::timeout(Duration::from_secs(20), ready.engine.ended())
            .await
            .unwrap();
        let health = ready.engine.health();
        assert_eq!(health.phase, Phase::Dead);
        assert!(
            health
                .last_error
                .unwrap()
                .contains(&format!("rank {bad} did not"))
        );
        assert!(begun.elapsed() < 10 * STEP);
        drop(end);
        holder.join().unwrap();
    }
}

/// The whole server, from flags to JSON.
#[tokio::test(flavor = "multi_thread")]
async fn the_binary_serves_with_ranks_and_says_so() {
    let (model, locks) = (Model::new(), tempfile::tempdir().unwrap());
    let flags = [
        "--port",
        "0",
        "--device-memory",
        "24MiB",
        "--tensor-parallel-size",
    ];
    let with = |ranks: &'static str| [&flags[..], &[ranks]].concat();
    let mut refused = Process::start("serve", model.dir.path(), locks.path(), &with("3"));
    assert_eq!(refused.finish(), Some(2), "{}", refused.log.join("\n"));
    refused.expect(&[
        "--tensor-parallel-size",
        "3 ranks cannot share 4 attention heads",
        "1, 2, 4 can",
    ]);
    let mut server = Process::start("serve", model.dir.path(), locks.path(), &with("2"));
    server.expect(&["2 ranks on threads of the CPU"]);
    let ready = server.expect(&["ready: ", "http://"]);
    let url = format!("http://{}", ready.split_once("http://").unwrap().1);
    let client = reqwest::Client::new();
    let body = json!({ "prompt": [5, 6, 7], "max_tokens": 12, "temperature": 0, "ignore_eos": true });
    let answer = client
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
    assert_eq!(
        (&memory["profile"]["ranks"], &memory["profile"]["rank"]),
        (&json!(2), &json!(0))
    );
    let ranks = memory["ranks"].as_array().unwrap();
    assert_eq!(ranks.len(), 2);
    let page = reqwest::get(format!("{url}/metrics"))
        .await
        .unwrap()
        .text()
        .await
        .unwrap();
    for (rank, now) in ranks.iter().enumerate() {
        assert_eq!((&now["rank"], &now["total"]), (&json!(rank), &json!(24 << 20)));
        assert!(now["components"]["kv"].as_u64().unwrap() > 0 && now["reserved"].as_u64() > Some(1 << 20));
        assert!(
            now["proved_peak"].as_u64() >= now["reserved_high"].as_u64(),
            "{now}"
        );
        for (metric, value) in [
            ("device_memory_proved_peak_bytes", &now["proved_peak"]),
            ("device_memory_total_bytes", &now["total"]),
        ] {
            let line = format!("plimsoll_{metric}{{");
            let ends = format!(",rank=\"{rank}\"}} {value}");
            let of_rank = page
                .lines()
                .filter(|text| text.starts_with(&line) && text.ends_with(&ends));
            assert_eq!(of_rank.count(), 1, "{metric} of rank {rank} in {page}");
        }
    }
    assert_eq!(memory["device_allocs_after_ready"], 0);
}
