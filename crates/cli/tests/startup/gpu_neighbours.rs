//! Neighbours on a real GPU: other servers, and a process that takes and frees memory all the time. `make test-gpu`.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use plimsoll_core::Component;
use plimsoll_device::cuda::Gpu;
use serde_json::Value;

use crate::ballast::{assert_justified, number, read};
use crate::process::Process;
use crate::{CONFIG, Model};

/// What the driver takes by the way, and rounds.
const BLUR: u64 = 1 << 30;

/// 16 KiB of KV a token, so that blocks do not become too many before the memory is full.
fn model() -> Model {
    let config = [
        (r#""head_dim": 8"#, r#""head_dim": 128"#),
        (r#""num_hidden_layers": 2"#, r#""num_hidden_layers": 4"#),
        (r#""num_attention_heads": 4"#, r#""num_attention_heads": 16"#),
        (r#""num_key_value_heads": 2"#, r#""num_key_value_heads": 8"#),
    ];
    let config = config
        .iter()
        .fold(CONFIG.to_owned(), |text, (from, to)| text.replace(from, to));
    Model::of(&config)
}

/// A start on the GPU, and the file that its report goes to.
fn start(command: &str, model: &Model, dir: &Path, name: &str, flags: &[&str]) -> (Process, PathBuf) {
    let report = dir.join(format!("{name}.json"));
    let on_gpu = [
        "--device",
        "cuda",
        "--max-num-seqs",
        "64",
        "--max-num-batched-tokens",
        "512",
    ];
    let file = ["--profile-report", report.to_str().unwrap()];
    let process = Process::start(
        command,
        model.dir.path(),
        dir,
        &[&on_gpu[..], &file, flags].concat(),
    );
    (process, report)
}

/// Neither start charges the other's memory to itself (vllm-project/vllm#55827), and both fit.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn two_servers_that_start_together_share_a_gpu() {
    let (model, dir) = (model(), tempfile::tempdir().unwrap());
    let flags = ["--port", "0", "--mem-fraction", "0.4"];
    let mut servers = ["one", "two"].map(|name| start("serve", &model, dir.path(), name, &flags));
    for (server, _) in &mut servers {
        server.expect(&["ready: "]);
    }
    let mut reports = servers.each_ref().map(|(_, report)| read(report));
    let peers = |report: &Value| number(&report["baseline"]["peers"]);
    reports.sort_by_key(peers);
    let [first, second] = &reports;
    assert_justified(first, "the first");
    assert_justified(second, "the second");
    let held = number(&first["ready"]["reserved"]);
    assert!(
        peers(second).abs_diff(peers(first) + held) < BLUR,
        "{held}: {first:#}\n{second:#}"
    );
    let total = number(&first["ready"]["total"]);
    assert!(held + number(&second["ready"]["reserved"]) <= total);
}

/// Whatever a neighbour does meanwhile (vllm-project/vllm#56830), the start ends with a size that fits.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn a_restless_neighbour_never_ends_a_start_on_a_gpu() {
    let (model, dir) = (model(), tempfile::tempdir().unwrap());
    let gpu = Gpu::open(0).unwrap();
    let done = AtomicBool::new(false);
    let report = thread::scope(|scope| {
        let neighbour = scope.spawn(|| {
            let (mut taken, mut refused) = (0, 0);
            let begin = Instant::now();
            while !done.load(Ordering::Relaxed) && begin.elapsed() < Duration::from_secs(300) {
                // Where the server holds all, the neighbour gets nothing.
                match gpu.alloc(Component::Staging, 8 << 30) {
                    Ok(slab) => {
                        taken += 1;
                        thread::sleep(Duration::from_millis(50));
                        drop(slab);
                    }
                    Err(_) => refused += 1,
                }
                gpu.trim().unwrap();
                thread::sleep(Duration::from_millis(50));
            }
            (taken, refused)
        });
        let (mut process, report) = start("profile", &model, dir.path(), "beside", &[]);
        let code = process.finish();
        done.store(true, Ordering::Relaxed);
        let (taken, refused) = neighbour.join().unwrap();
        assert_eq!(
            code,
            Some(0),
            "{taken} taken, {refused} refused\n{}",
            process.log.join("\n")
        );
        assert!(taken > 0, "the neighbour came too late");
        read(&report)
    });
    assert_justified(&report, "beside a neighbour");
    assert!(number(&report["kv_bytes"]) > number(&report["ready"]["total"]) / 4);
}
