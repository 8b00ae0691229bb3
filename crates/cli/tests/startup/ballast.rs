//! Real starts beside real processes that hold memory, on this machine as it is: other processes come and go as well.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use plimsoll_device::Machine;
use serde_json::Value;
use tokio::sync::Mutex;

use crate::Model;
use crate::process::{Ballast, Process};

/// 8 KiB of KV a token.
pub(crate) const CONFIG: &str = r#"{
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32", "hidden_act": "silu",
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 16,
    "num_key_value_heads": 16, "head_dim": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "vocab_size": 260,
    "max_position_embeddings": 4096, "tie_word_embeddings": false
}"#;

/// So many tokens are of use that memory is the bound.
pub(crate) const LIMITS: &str = "--max-num-seqs 64 --max-num-batched-tokens 64 --max-model-len 2048";

/// What the KV cache shall take of this machine, whatever the machine has.
const KV_BYTES: u64 = 192 << 20;

/// What the neighbour takes.
const BALLAST_MIB: usize = 320;

/// The kernel counts in batches, and our own process takes a little beside its account.
const BLUR: u64 = 96 << 20;

/// What no test machine has on top of what it has.
const PROMISED: u64 = 64 << 30;

/// These tests take memory in earnest, and would be each other's neighbours.
static ONE_AT_A_TIME: Mutex<()> = Mutex::const_new(());

/// When the neighbour comes.
#[derive(Clone, Copy, Debug, PartialEq)]
enum When {
    Before,
    /// It grows once the baseline is known, and goes after the probe.
    During,
}

fn room() -> u64 {
    Machine::this().room().unwrap().bytes()
}

/// Least and most that the machine had while `work` ran.
fn watched<T>(work: impl FnOnce() -> T) -> (T, u64, u64) {
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let watch = scope.spawn(|| {
            let (mut least, mut most) = (room(), 0);
            while !done.load(Ordering::Relaxed) {
                let now = room();
                (least, most) = (least.min(now), most.max(now));
                thread::sleep(Duration::from_millis(2));
            }
            (least, most)
        });
        let result = work();
        done.store(true, Ordering::Relaxed);
        let (least, most) = watch.join().unwrap();
        (result, least, most)
    })
}

/// A start, and the report of it.
fn profile(model: &Model, memory: Option<u64>, when: When) -> Value {
    let dir = tempfile::tempdir().unwrap();
    let report = dir.path().join("report.json");
    let fraction = (KV_BYTES as f64 / room() as f64).min(1.0).to_string();
    let memory = memory.map(|bytes| bytes.to_string());
    let mut flags: Vec<&str> = LIMITS.split(' ').collect();
    flags.extend([
        "--mem-fraction",
        &fraction,
        "--profile-report",
        report.to_str().unwrap(),
    ]);
    flags.extend(memory.iter().flat_map(|bytes| ["--device-memory", bytes]));
    let before = (when == When::Before).then(|| Ballast::of(BALLAST_MIB));
    let mut process = Process::start("profile", model.dir.path(), dir.path(), &flags);
    if when == When::During {
        process.expect(&["phase=baseline"]);
        let mut ballast = Ballast::of(BALLAST_MIB / 2);
        ballast.grow(BALLAST_MIB / 2);
        process.expect(&["phase=probe"]);
    }
    assert_eq!(process.finish(), Some(0), "{when:?}:\n{}", process.log.join("\n"));
    drop(before);
    read(&report)
}

pub(crate) fn read(path: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

pub(crate) fn number(value: &Value) -> u64 {
    value
        .as_u64()
        .unwrap_or_else(|| panic!("{value} is no number of bytes"))
}

/// The KV cache is what the meters of this very start justify, within one block.
pub(crate) fn assert_justified(report: &Value, name: &str) {
    let sum = &report["arithmetic"];
    let taken: u64 = ["non_kv", "peers", "canary", "fragmentation_buffer"]
        .iter()
        .map(|part| number(&sum[part]))
        .sum();
    let room = number(&sum["total"]).saturating_sub(taken);
    let budget = room as f64 * sum["mem_fraction"].as_f64().unwrap();
    let justified = budget as u64 / number(&sum["page_bytes"]);
    let retries = report["attempts"].as_array().unwrap().len() as i32 - 1;
    let (least, most) = (
        (justified as f64 * 0.95_f64.powi(retries)) as u64 - 1,
        justified + 1,
    );
    let blocks = number(&report["kv_pages"]);
    assert!(
        (least..=most).contains(&blocks),
        "{name}: {blocks} blocks, {justified} justified\n{report:#}"
    );
    assert_eq!(report["bound"], "memory", "{name}");
}

/// As before, with the size that suits this machine.
#[test]
#[cfg(target_os = "linux")]
fn a_neighbour_never_ends_a_start_on_this_machine() {
    let _one = ONE_AT_A_TIME.blocking_lock();
    let model = Model::of(CONFIG);
    for when in [When::Before, When::During] {
        let (report, least, most) = watched(|| profile(&model, None, when));
        assert_justified(&report, &format!("{when:?}"));
        // Half of what is available, or three quarters of what a control group leaves.
        let total = number(&report["arithmetic"]["total"]);
        assert!(
            (least / 2 - BLUR..=most / 4 * 3 + BLUR).contains(&total),
            "{when:?}: {total} of {least} to {most}"
        );
    }
}

/// Where more is promised than the machine has, others hold the rest, and the KV cache is of what is really left.
#[test]
#[cfg(target_os = "linux")]
fn what_others_hold_is_not_planned_with_on_this_machine() {
    let _one = ONE_AT_A_TIME.blocking_lock();
    let model = Model::of(CONFIG);
    let promised = room() + PROMISED;
    for when in [When::Before, When::During] {
        let (report, least, most) = watched(|| profile(&model, Some(promised), when));
        assert_justified(&report, &format!("{when:?}"));
        let baseline = &report["baseline"];
        let [free, peers, ours] = ["free", "peers", "reserved"].map(|key| number(&baseline[key]));
        assert_eq!(free + peers + ours, promised);
        assert!(
            (least - BLUR..=most + BLUR).contains(&free),
            "{when:?}: {free} free, the machine had {least} to {most}"
        );
        let sum = &report["arithmetic"];
        let left = promised - number(&sum["peers"]) - ours;
        assert!(
            (least - BLUR..=most + BLUR).contains(&left),
            "{when:?}: {left} left, the machine had {least} to {most}"
        );
    }
}

/// A neighbour that comes when the server is ready is seen at the next look, and so is its end.
#[tokio::test(flavor = "multi_thread")]
#[cfg(target_os = "linux")]
async fn a_neighbour_of_a_server_is_seen_on_this_machine() {
    let _one = ONE_AT_A_TIME.lock().await;
    let model = Model::of(CONFIG);
    let locks = tempfile::tempdir().unwrap();
    let promised = (room() + PROMISED).to_string();
    let mut flags: Vec<&str> = LIMITS.split(' ').collect();
    flags.extend([
        "--port",
        "0",
        "--kv-cache-memory-bytes",
        "64MiB",
        "--device-memory",
        &promised,
    ]);
    let mut server = Process::start("serve", model.dir.path(), locks.path(), &flags);
    let ready = server.expect(&["ready: ", "http://"]);
    let url = format!("http://{}/memory", ready.split_once("http://").unwrap().1);
    // What others leave, by the server and by the machine itself. Others may come and go between two looks, not each time.
    let agree = async |moment: &str| {
        let mut seen = Vec::new();
        for _ in 0..10 {
            let before = room();
            let memory: Value = reqwest::get(&url).await.unwrap().json().await.unwrap();
            let after = room();
            let left = number(&memory["now"]["free"]);
            if (before.min(after) - BLUR..=before.max(after) + BLUR).contains(&left) {
                return;
            }
            seen.push((before, left, after));
        }
        panic!("{moment}: the machine had, the server saw, the machine had: {seen:?}");
    };
    agree("alone").await;
    let ballast = Ballast::of(BALLAST_MIB);
    agree("beside").await;
    drop(ballast);
    agree("alone again").await;
}
