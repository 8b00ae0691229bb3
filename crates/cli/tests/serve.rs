//! The binary from outside: start, ready, signals, exit codes, and the load generator against it.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

const BINARY: &str = env!("CARGO_BIN_EXE_plimsoll");

pub(crate) struct Server {
    child: Child,
    address: String,
}

/// A command that leaves the user's caches alone.
fn command() -> Command {
    let mut command = Command::new(BINARY);
    command.env("PLIMSOLL_NO_PROFILE_CACHE", "true");
    command.env("PLIMSOLL_LOG_FORMAT", "text");
    command
}

impl Server {
    /// `plimsoll serve sim` on a free port, ready.
    pub(crate) fn start(flags: &[&str]) -> Self {
        Self::start_as(&mut command(), flags)
    }

    fn start_as(command: &mut Command, flags: &[&str]) -> Self {
        let mut child = command
            .env("PLIMSOLL_LOG_FORMAT", "text")
            .args(["serve", "sim", "--port", "0", "--verbose"])
            .args(flags)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let ready = lines
            .map_while(Result::ok)
            .find(|line| line.starts_with("ready: "));
        let address = ready
            .and_then(|line| Some(line.split_once("http://")?.1.to_owned()))
            .expect("it says where");
        Self { child, address }
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    fn signal(&self, name: &str) {
        let status = Command::new("kill")
            .args(["-s", name, &self.child.id().to_string()])
            .status()
            .unwrap();
        assert!(status.success());
    }

    fn exit_code(&mut self, within: Duration) -> Option<i32> {
        let begin = Instant::now();
        while begin.elapsed() < within {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("the server still runs after {within:?}");
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn plimsoll(args: &[&str]) -> Output {
    command().args(args).output().unwrap()
}

#[tokio::test]
async fn serves_under_all_its_names_until_sigterm() {
    let mut server = Server::start(&["--served-model-name", "one", "two"]);
    let client = reqwest::Client::new();
    let models: Value = client
        .get(server.url("/v1/models"))
        .send()
        .await
        .unwrap()
        .json()
        .await
        .unwrap();
    assert_eq!(models["data"][0]["id"], "one");
    let body =
        |model: &str| serde_json::json!({"model": model, "messages": [{"role": "user", "content": "hi"}]});
    for (model, status) in [("one", 200), ("two", 200), ("three", 404)] {
        let request = client.post(server.url("/v1/chat/completions")).json(&body(model));
        assert_eq!(request.send().await.unwrap().status(), status, "{model}");
    }
    let memory: Value = client
        .get(server.url("/memory"))
        .send()
        .await
        .unwrap()
        .json()
        .await
        .unwrap();
    assert!(memory["profile"]["kv_tokens"].as_u64().unwrap() > 0);
    server.signal("TERM");
    assert_eq!(server.exit_code(Duration::from_secs(10)), Some(0));
}

#[test]
fn a_port_that_is_taken_ends_with_its_own_code() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let output = plimsoll(&["serve", "sim", "--port", &port]);
    assert_eq!(output.status.code(), Some(5));
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("--port") && text.contains(&port), "{text}");
}

#[test]
fn wrong_flags_models_and_sizes_have_their_codes() {
    let cases: [(&[&str], i32, &str); 11] = [
        (&["serve", "--no-such-flag"], 2, "--no-such-flag"),
        (&["serve", "sim", "--mem-fraction", "1.1"], 2, "at most 1.0"),
        (&["serve", "sim", "--block-size", "12"], 2, "8, 16 or 32"),
        (
            &["serve", "sim", "--max-model-len", "999999"],
            3,
            "--max-model-len",
        ),
        (
            &[
                "profile",
                "sim",
                "--max-num-batched-tokens",
                "18446744073709551615",
            ],
            2,
            "--max-num-batched-tokens",
        ),
        (&["serve", "sim", "--drain-timeout", "1e19"], 2, "at most a year"),
        (&["serve", "sim", "--device", "gpu"], 2, "cuda:N"),
        (&["serve", "./no/such/model"], 3, "./no/such/model"),
        (&["serve", "/etc/hostname"], 3, ".gguf"),
        (
            &["profile", "sim", "--device-memory", "1MiB"],
            4,
            "--device-memory",
        ),
        (
            &["profile", "sim", "--max-total-token-num", "99999999"],
            4,
            "--max-total-token-num",
        ),
    ];
    for (args, code, text) in cases {
        let output = plimsoll(args);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {stderr}");
        assert!(stderr.contains(text), "{args:?}: {stderr}");
    }
}

/// No machine has so many GPUs; most have not even a driver.
#[test]
fn a_gpu_that_cannot_be_used_has_its_own_code() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), "{}").unwrap();
    let model = dir.path().to_str().unwrap();
    let output = plimsoll(&["profile", model, "--load-format", "dummy", "--device", "cuda:99"]);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(7), "{stderr}");
    assert!(stderr.contains("--device"), "{stderr}");
}

#[test]
fn profile_reports_and_exits() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("profile.json");
    let output = plimsoll(&["profile", "sim", "-v", "--profile-report", file.to_str().unwrap()]);
    assert!(output.status.success());
    assert!(String::from_utf8_lossy(&output.stdout).contains("tokens of KV"));
    let stderr = String::from_utf8_lossy(&output.stderr);
    for phase in ["baseline", "probe", "compute", "rebuild", "validate"] {
        assert!(
            stderr.contains(&format!("auto-profile phase={phase} ")),
            "{phase} in {stderr}"
        );
    }
    let report: Value = serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
    assert!(report["kv_tokens"].as_u64().unwrap() > 0);
}

/// The cache lies where the environment says, and each start says how long it took.
#[tokio::test]
async fn the_second_start_is_cached_unless_a_flag_says_no() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("report.json");
    let mut origins = Vec::new();
    for flags in [&[][..], &[], &["--no-profile-cache"]] {
        let flags = [flags, &["--profile-report", file.to_str().unwrap()]].concat();
        let mut command = Command::new(BINARY);
        let server = Server::start_as(command.env("XDG_CACHE_HOME", dir.path()), &flags);
        let report: Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
        let memory: Value = reqwest::get(server.url("/memory"))
            .await
            .unwrap()
            .json()
            .await
            .unwrap();
        assert_eq!(memory["profile"]["start"], report["start"]);
        let total = report["start"]["seconds"].as_f64().unwrap();
        let stages = report["start"]["stages"].as_array().unwrap();
        for name in ["resolve", "wait", "device", "validate", "engine", "listen"] {
            let stage = stages.iter().find(|stage| stage["stage"] == name).expect(name);
            assert!(stage["seconds"].as_f64().unwrap() <= total, "{name}: {report}");
        }
        origins.push(report["origin"]["from"].clone());
    }
    assert_eq!(origins, ["measured", "cached", "measured"]);
    let plans = std::fs::read_dir(dir.path().join("plimsoll/profiles")).unwrap();
    assert_eq!(plans.count(), 1);
}

/// Whether a start learned from another, and if not why, is in its log.
#[test]
fn the_log_says_hit_or_miss_and_what_changed() {
    let dir = tempfile::tempdir().unwrap();
    let start = |cache: &Path, flags: &[&str]| {
        let bench = [
            "bench",
            "latency",
            "sim",
            "--batch-size",
            "1",
            "--num-iters",
            "1",
            "--output-len",
            "2",
        ];
        let mut command = Command::new(BINARY);
        let output = command
            .env("XDG_CACHE_HOME", cache)
            .env("PLIMSOLL_VERBOSE", "1")
            .args(bench)
            .args(flags)
            .output()
            .unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{stderr}");
        let lines = stderr
            .lines()
            .filter_map(|line| Some(line.split_once(" profile-cache ")?.1.to_owned()));
        lines.collect::<Vec<_>>()
    };
    let lines = start(dir.path(), &[]);
    assert_eq!(lines[0], "outcome=miss reason=none-stored");
    let file = lines[1].strip_prefix("outcome=stored file=").unwrap().to_owned();
    assert_eq!(start(dir.path(), &[]), [format!("outcome=hit file={file}")]);
    let changed = start(dir.path(), &["--max-num-seqs", "9"]);
    assert_eq!(
        changed[0],
        "outcome=miss reason=changed parts=\"shape.max_num_seqs (then 32, now 9)\""
    );
    std::fs::write(&file, "").unwrap();
    let damaged = start(dir.path(), &[]);
    assert_eq!(
        damaged,
        [
            format!("outcome=miss reason=damaged file={file} problem=\"it has another format\""),
            format!("outcome=stored file={file}")
        ]
    );
    let unwritable = start(Path::new("/proc"), &[]);
    assert_eq!(unwritable.len(), 2, "{unwritable:?}");
    assert!(
        unwritable[1].starts_with("outcome=not-stored") && unwritable[1].contains("--profile-cache-dir"),
        "{unwritable:?}"
    );
    assert!(start(dir.path(), &["--no-profile-cache"]).is_empty());
}

#[tokio::test]
async fn the_load_generator_measures_every_request() {
    let server = Server::start(&["--max-num-seqs", "4"]);
    let dir = tempfile::tempdir().unwrap();
    let json = dir.path().join("result.json");
    let run = |more: &[&str]| {
        let url = server.url("");
        let mut args = vec![
            "bench",
            "serve",
            "--base-url",
            &url,
            "--num-prompts",
            "20",
            "--ignore-eos",
        ];
        args.extend(["--random-input-len", "50", "--random-output-len", "7"]);
        args.extend(["--output-json", json.to_str().unwrap()]);
        args.extend(more);
        let output = plimsoll(&args);
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        let text = std::fs::read_to_string(&json).unwrap();
        serde_json::from_str::<Value>(&text).unwrap()
    };
    let all_at_once = run(&["--num-warmups", "6"]);
    let metrics = reqwest::get(server.url("/metrics"))
        .await
        .unwrap()
        .text()
        .await
        .unwrap();
    let submitted = metrics
        .lines()
        .find(|line| line.starts_with("plimsoll_requests_submitted_total"));
    assert!(submitted.unwrap().ends_with(" 26"), "{submitted:?}");
    assert_eq!(all_at_once["completed"], 20);
    assert_eq!(all_at_once["total_input_tokens"], 20 * 50);
    assert_eq!(all_at_once["total_output_tokens"], 20 * 7);
    for key in [
        "mean_ttft_ms",
        "p99_ttft_ms",
        "median_tpot_ms",
        "mean_itl_ms",
        "p90_e2el_ms",
    ] {
        assert!(all_at_once[key].is_number(), "{key}");
    }
    // Nineteen gaps of 20 ms on average, drawn from the seed.
    let paced = run(&["--request-rate", "50", "--max-concurrency", "2", "--seed", "1"]);
    let duration = paced["duration"].as_f64().unwrap();
    assert!((0.1..5.0).contains(&duration), "{duration}");
    assert_eq!(paced["max_concurrency"], 2);
}

#[test]
fn the_load_generator_fails_where_requests_fail() {
    let server = Server::start(&["--max-model-len", "64"]);
    let url = server.url("");
    let too_long = [
        "bench",
        "serve",
        "--base-url",
        &url,
        "--num-prompts",
        "2",
        "--random-input-len",
        "100",
    ];
    let output = plimsoll(&too_long);
    assert_eq!(output.status.code(), Some(1));
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.contains("context length"), "{stderr}");
    let output = plimsoll(&["bench", "serve", "--base-url", "http://127.0.0.1:9"]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("is the server running?"));
}

#[test]
fn offline_benchmarks_measure() {
    let dir = tempfile::tempdir().unwrap();
    let json = dir.path().join("result.json");
    let file = json.to_str().unwrap();
    let latency = [
        "bench",
        "latency",
        "sim",
        "--batch-size",
        "3",
        "--num-iters",
        "2",
        "--output-len",
        "50",
    ];
    let output = plimsoll(&[&latency[..], &["--output-json", file]].concat());
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let result: Value = serde_json::from_str(&std::fs::read_to_string(&json).unwrap()).unwrap();
    assert_eq!(result["latencies"].as_array().unwrap().len(), 2);
    assert!(result["generation_throughput"].as_f64().unwrap() > 0.0);
    assert!(result["whole_batch_step_ms"].as_f64().unwrap() > 0.0);

    let throughput = [
        "bench",
        "throughput",
        "sim",
        "--num-prompts",
        "9",
        "--output-len",
        "5",
        "--input-len",
        "40",
        "--num-warmups",
        "4",
    ];
    let output = plimsoll(&[&throughput[..], &["--output-json", file]].concat());
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let result: Value = serde_json::from_str(&std::fs::read_to_string(&json).unwrap()).unwrap();
    assert_eq!(
        (&result["total_prompt_tokens"], &result["total_output_tokens"]),
        (&360.into(), &45.into())
    );
}

/// Before a server is even looked for, or a model: nobody measures for minutes in vain.
#[test]
fn benchmarks_whose_result_cannot_be_written_do_not_begin() {
    for benchmark in ["latency", "throughput", "serve"] {
        let output = plimsoll(&[
            "bench",
            benchmark,
            "--output-json",
            "/no/such/directory/result.json",
        ]);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{errors}");
        let expected =
            "--output-json: cannot write /no/such/directory/result.json: there is no such directory";
        assert!(errors.contains(expected), "{errors}");
    }
}

#[test]
fn an_address_of_the_hub_without_a_scheme_is_named() {
    for command in ["serve", "plan", "pull"] {
        let output = Command::new(BINARY)
            .args([command, "owner/name"])
            .env("HF_ENDPOINT", "hub.example")
            .output()
            .unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{errors}");
        let message = "HF_ENDPOINT: hub.example: it must begin with http:// or https://; an example is https://huggingface.co";
        // A terminal's width does not matter to what is said.
        assert!(
            errors
                .split_whitespace()
                .collect::<Vec<_>>()
                .join(" ")
                .contains(message),
            "{errors}"
        );
    }
}

/// Large files come over hf-xet, which would report each transfer.
#[test]
fn the_hub_hears_no_telemetry() {
    // A Hub that takes the call and never answers.
    let hub = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let home = tempfile::tempdir().unwrap();
    let child = Command::new(BINARY)
        .args(["serve", "owner/name"])
        .env("HF_ENDPOINT", format!("http://{}", hub.local_addr().unwrap()))
        .env("HF_HOME", home.path())
        .env_remove("HF_XET_TELEMETRY_ENABLED")
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let server = Server {
        child,
        address: String::new(),
    };
    let _call = hub.accept().unwrap();
    let environment = std::fs::read(format!("/proc/{}/environ", server.child.id())).unwrap();
    let environment = String::from_utf8_lossy(&environment);
    assert!(
        environment
            .split('\0')
            .any(|pair| pair == "HF_XET_TELEMETRY_ENABLED=0"),
        "{environment}"
    );
}
