//! A start that was measured before is proved at once, and whatever lies in the cache, it ends with a proved size.

use std::fs;
use std::path::{Path, PathBuf};

use plimsoll_cli::Error;
use plimsoll_cli::plan_cache::PlanCache;
use plimsoll_cli::start::{Loaded, Started};
use plimsoll_device::Budget;
use plimsoll_profiler::{Origin, Outcome, Report};
use plimsoll_server::Memory;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::neighbours::Machine;
use crate::{BUDGET, CONFIG, Model, answers, engine_settings, start, stop};

/// So many tokens would be of use that memory is the bound.
const LARGE: &str = "--max-num-seqs 32 --max-model-len 4096 --mem-fraction 0.95";

/// A model and a directory for plans.
struct Rig {
    model: Model,
    dir: tempfile::TempDir,
}

impl Rig {
    fn new() -> Self {
        Self {
            model: Model::new(),
            dir: tempfile::tempdir().unwrap(),
        }
    }

    fn plans(&self) -> PlanCache {
        PlanCache::at(self.dir.path())
    }

    fn load(&self, flags: &str, budget: &Budget, plans: PlanCache) -> Loaded {
        self.model.load(flags, budget, plans).unwrap()
    }

    fn start_with(&self, flags: &str, budget: &Budget, plans: PlanCache) -> Result<Started, Error> {
        start(&self.load(flags, budget, plans))
    }

    fn start(&self, flags: &str, budget: &Budget) -> Started {
        self.start_with(flags, budget, self.plans()).unwrap()
    }

    /// The report of a start that ends at once.
    async fn report(&self, flags: &str) -> Report {
        let budget = Budget::new(BUDGET);
        let ready = self.start(flags, &budget);
        let report = ready.report.clone();
        stop(ready, &budget).await;
        report
    }

    fn files(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.dir.path()).unwrap();
        entries.map(|entry| entry.unwrap().path()).collect()
    }

    /// The only file.
    fn file(&self) -> PathBuf {
        let files = self.files();
        assert_eq!(files.len(), 1, "{files:?}");
        files[0].clone()
    }
}

fn drift(report: &Report) -> f64 {
    match report.origin {
        Origin::Cached { drift } => drift,
        other => panic!("not cached: {other:?}"),
    }
}

/// Names of the stages of a start.
fn stages(ready: &Started) -> Vec<String> {
    let start = &ready.memory.report()["start"];
    let stages = start["stages"].as_array().unwrap();
    assert!(stages.iter().all(|stage| stage["seconds"].is_number()));
    let names = stages.iter().map(|stage| stage["stage"].as_str().unwrap());
    names.map(str::to_owned).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_second_start_skips_the_probe_and_is_proved_all_the_same() {
    let rig = Rig::new();
    let cold = Budget::new(BUDGET);
    let first = rig.start("", &cold);
    assert_eq!(first.report.origin, Origin::Measured);
    let expected = answers(&first.engine).await;
    let allocations = cold.meters().allocations;
    let names = stages(&first);
    for name in [
        "text", "weights", "baseline", "probe", "compute", "rebuild", "validate", "engine",
    ] {
        assert!(names.iter().any(|known| known == name), "no {name} in {names:?}");
    }
    let searched = first.report.clone();
    stop(first, &cold).await;

    let warm = Budget::new(BUDGET);
    let second = rig.start("", &warm);
    let report = &second.report;
    assert_eq!(drift(report), 0.0);
    assert_eq!(
        (
            report.sizing.kv_pages,
            report.sizing.scratch_bytes,
            report.sizing.bound
        ),
        (
            searched.sizing.kv_pages,
            searched.sizing.scratch_bytes,
            searched.sizing.bound
        )
    );
    // The proof is whole.
    assert_eq!(report.attempts.len(), 1);
    assert_eq!(report.attempts[0].outcome, Outcome::Proved);
    let kinds = |report: &Report| -> Vec<_> {
        let last = report.attempts.last().unwrap();
        last.scenarios
            .iter()
            .map(|s| (s.kind, s.rows, s.tokens))
            .collect()
    };
    assert_eq!(kinds(report), kinds(&searched));
    // One state was built instead of two.
    let saved = allocations - warm.meters().allocations;
    assert!(saved > 0, "{allocations} allocations both times");
    let names = stages(&second);
    assert!(!names.iter().any(|name| name == "probe"), "{names:?}");
    assert_eq!(answers(&second.engine).await, expected);
    stop(second, &warm).await;
    rig.file();
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_read_or_written_where_the_cache_is_off() {
    let rig = Rig::new();
    let dir = rig.dir.path().to_str().unwrap().to_owned();
    let flags = format!("--profile-cache-dir {dir} --no-profile-cache");
    let off = engine_settings(rig.model.dir.path(), &flags).plans;
    let budget = Budget::new(BUDGET);
    for _ in 0..2 {
        let ready = rig.start_with(&flags, &budget, off.clone()).unwrap();
        assert_eq!(ready.report.origin, Origin::Measured);
        stop(ready, &budget).await;
    }
    assert!(rig.files().is_empty());
    // What lies there is not looked at.
    rig.report("").await;
    let ready = rig.start_with(&flags, &budget, off).unwrap();
    assert_eq!(ready.report.origin, Origin::Measured);
    stop(ready, &budget).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_asks_for_a_measurement_gets_one_and_leaves_it_to_others() {
    let rig = Rig::new();
    for _ in 0..2 {
        let budget = Budget::new(BUDGET);
        let loaded = rig.load("", &budget, rig.plans().write_only());
        assert_eq!(loaded.prove().unwrap().report().origin, Origin::Measured);
    }
    rig.file();
    assert_eq!(drift(&rig.report("").await), 0.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pinned_size_leaves_the_cache_alone() {
    let rig = Rig::new();
    let report = rig.report("--max-total-token-num 1024").await;
    assert_eq!(report.origin, Origin::Pinned);
    assert!(rig.files().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_decides_a_step_is_in_the_key_and_nothing_else() {
    let rig = Rig::new();
    let full = rig.report(LARGE).await;
    let mut last = full.sizing.kv_tokens;
    for same in [
        "",
        "--mem-fraction 0.5",
        "--mem-fraction 0.5 --no-enable-prefix-caching",
        // A CPU has no graphs to do without.
        "--mem-fraction 0.5 --enforce-eager",
    ] {
        let report = rig.report(&format!("{LARGE} {same}")).await;
        let fraction = if same.contains("0.5") { 0.5 } else { 0.95 };
        let share = report.sizing.kv_tokens as f64 / full.sizing.kv_tokens as f64;
        assert!((share - fraction / 0.95).abs() < 0.01, "{same}: {share}");
        // A new fraction is told once.
        let change = report.sizing.kv_tokens as f64 / last as f64 - 1.0;
        last = report.sizing.kv_tokens;
        assert!(
            (drift(&report) - change).abs() < 1e-9,
            "{same}: {:?}",
            report.origin
        );
    }
    let changes = [
        "--max-num-seqs 16",
        "--max-num-batched-tokens 48",
        "--max-model-len 2048",
        "--block-size 8",
        "--kv-cache-dtype float16",
        "--device-memory 20MiB",
        "--seed 8",
        "--runner pooling",
        "--runner pooling --pooler-config {\"pooling_type\":\"MEAN\"}",
    ];
    for (before, change) in changes.into_iter().enumerate() {
        assert_eq!(rig.files().len(), before + 1);
        let report = rig.report(&format!("{LARGE} {change}")).await;
        assert_eq!(report.origin, Origin::Measured, "{change}");
        let again = rig.report(&format!("{LARGE} {change}")).await;
        assert_eq!(
            (drift(&again), again.sizing.kv_pages),
            (0.0, report.sizing.kv_pages),
            "{change}"
        );
    }
    let config = rig.model.dir.path().join("config.json");
    fs::write(config, CONFIG.replace("10000.0", "20000.0")).unwrap();
    assert_eq!(rig.report(LARGE).await.origin, Origin::Measured);
}

/// The size is what today's meters leave, not what was there when the plan was made.
#[tokio::test(flavor = "multi_thread")]
async fn a_plan_on_a_smaller_device_or_beside_a_neighbour_ends_with_a_proved_size() {
    let rig = Rig::new();
    let mut planned = rig.report(LARGE).await.sizing.kv_pages;
    let cases = [
        (BUDGET / 2, 0),
        (BUDGET, BUDGET / 3),
        (BUDGET * 2, 0),
        (BUDGET * 2, BUDGET),
    ];
    for (total, peers) in cases {
        let start = |plans| {
            let (machine, budget) = Machine::quiet(total);
            machine.set(peers);
            let ready = rig.start_with(LARGE, &budget, plans).unwrap();
            (ready, budget)
        };
        let (measured, budget) = start(PlanCache::off());
        let blocks = measured.report.sizing.kv_pages;
        stop(measured, &budget).await;
        let (cached, budget) = start(rig.plans());
        let report = &cached.report;
        assert_eq!(report.sizing.kv_pages, blocks, "{total} bytes, {peers} of others");
        let change = blocks as f64 / planned as f64 - 1.0;
        assert!(
            (drift(report) - change).abs() < 1e-9,
            "{:?} is not {change}",
            report.origin
        );
        assert_eq!(report.attempts.last().unwrap().outcome, Outcome::Proved);
        planned = blocks;
        assert_eq!(answers(&cached.engine).await.len(), 4);
        stop(cached, &budget).await;
    }
}

/// A device that gives less than it promises: the plan is thrown away, and the next one remembers.
#[tokio::test(flavor = "multi_thread")]
async fn a_plan_that_fails_is_replaced() {
    let rig = Rig::new();
    let planned = rig.report(LARGE).await;
    let capped = || {
        let budget = Budget::new(BUDGET);
        budget.set_cap(Some(planned.attempts[0].peak_reserved / 100 * 97));
        budget
    };
    let budget = capped();
    let ready = rig.start(LARGE, &budget);
    assert_eq!(ready.report.origin, Origin::Measured);
    assert!(ready.report.discarded_plan.is_some());
    let blocks = ready.report.sizing.kv_pages;
    assert!(blocks < planned.sizing.kv_pages);
    stop(ready, &budget).await;
    rig.file();

    let budget = capped();
    let ready = rig.start(LARGE, &budget);
    assert_eq!(
        (drift(&ready.report), ready.report.sizing.kv_pages),
        (0.0, blocks)
    );
    assert_eq!(ready.report.attempts.len(), 1);
    stop(ready, &budget).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_file_costs_time_and_is_replaced() {
    let rig = Rig::new();
    let full = rig.report("").await.sizing.kv_pages;
    let whole = fs::read(rig.file()).unwrap();
    for seed in 0..40 {
        let mut random = StdRng::seed_from_u64(seed);
        let mut bytes = whole.clone();
        if seed % 2 == 0 {
            bytes.truncate(random.random_range(0..bytes.len()));
        } else {
            let at = random.random_range(0..bytes.len());
            bytes[at] ^= 1 << random.random_range(0..8);
        }
        fs::write(rig.file(), bytes).unwrap();
        let report = rig.report("").await;
        assert_eq!(
            (report.origin, report.sizing.kv_pages),
            (Origin::Measured, full),
            "seed {seed}"
        );
        let again = rig.report("").await;
        assert_eq!((drift(&again), again.sizing.kv_pages), (0.0, full), "seed {seed}");
    }
}

/// Numbers that somebody changed, checksum and all.
#[tokio::test(flavor = "multi_thread")]
async fn whatever_a_plan_says_the_size_is_proved() {
    let rig = Rig::new();
    let honest = rig.report(LARGE).await;
    let whole = fs::read_to_string(rig.file()).unwrap();
    let (_, content) = whole.split_once('\n').unwrap();
    let stored: Value = serde_json::from_str(content).unwrap();
    let mut kept = 0;
    for seed in 0..60 {
        let mut random = StdRng::seed_from_u64(seed);
        let mut forged = stored.clone();
        let mut numbers = Vec::new();
        collect(&mut forged["plan"], &mut numbers);
        let chosen = random.random_range(0..numbers.len());
        let was = numbers[chosen].as_u64().unwrap_or(1);
        *numbers[chosen] = match random.random_range(0..4) {
            0 => 0.into(),
            1 => u64::MAX.into(),
            2 => (was / 2).into(),
            _ => (was + was / 50 + 1).into(),
        };
        let content = format!("{forged:#}\n");
        let checksum: String = Sha256::digest(&content)
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        fs::write(rig.file(), format!("plimsoll-profile 2 {checksum}\n{content}")).unwrap();
        let report = rig.report(LARGE).await;
        let last = report.attempts.last().unwrap();
        assert_eq!(last.outcome, Outcome::Proved, "seed {seed}");
        assert_eq!(last.kv_tokens, report.sizing.kv_tokens, "seed {seed}");
        match report.origin {
            Origin::Cached { .. } => kept += 1,
            _ => assert_eq!(report.sizing.kv_pages, honest.sizing.kv_pages, "seed {seed}"),
        }
    }
    // Both ends occur.
    assert!(kept > 0 && kept < 60, "{kept} of 60 plans were used");
}

fn collect<'a>(value: &'a mut Value, numbers: &mut Vec<&'a mut Value>) {
    match value {
        Value::Number(_) => numbers.push(value),
        Value::Array(values) => values.iter_mut().for_each(|value| collect(value, numbers)),
        Value::Object(fields) => fields.values_mut().for_each(|value| collect(value, numbers)),
        _ => {}
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_directory_that_cannot_be_written_is_no_reason_not_to_serve() {
    let rig = Rig::new();
    let file = rig.dir.path().join("file");
    fs::write(&file, "").unwrap();
    for dir in [file.join("profiles"), Path::new("/proc/plimsoll").to_owned()] {
        let budget = Budget::new(BUDGET);
        let ready = rig.start_with("", &budget, PlanCache::at(dir)).unwrap();
        assert_eq!(ready.report.origin, Origin::Measured);
        assert_eq!(answers(&ready.engine).await.len(), 4);
        stop(ready, &budget).await;
    }
}
