//! `plimsoll selftest` against a server that holds, and against one that does not: a proxy spoils the answers of the first.

use std::process::{Command, Output};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::{Response, StatusCode, header};
use serde_json::Value;
use tokio::net::TcpListener;

use crate::serve::Server;

const BINARY: &str = env!("CARGO_BIN_EXE_plimsoll");

/// `plimsoll serve sim` with limits that are quick to reach.
fn sim() -> Server {
    let limits = "--max-model-len 256 --max-num-seqs 4 --max-num-batched-tokens 64 --no-profile-cache";
    Server::start(&limits.split(' ').collect::<Vec<_>>())
}

fn selftest(url: &str, more: &[&str]) -> Output {
    let mut command = Command::new(BINARY);
    command.args(["selftest", "--url", url, "--wait", "0"]).args(more);
    command.output().unwrap()
}

/// A verdict on the server: a machine too slow for `seconds` gets the time that the verdict itself says is enough.
fn conclusive(url: &str, seconds: u64, more: &[&str]) -> Output {
    let run = |seconds: u64| selftest(url, &[&["--duration", &seconds.to_string()], more].concat());
    let mut output = run(seconds);
    for _ in 0..2 {
        if output.status.code() == Some(10) {
            output = run(verdict(&output)["suggested_duration"].as_u64().unwrap());
        }
    }
    output
}

/// The verdict, whose line is all of stdout.
fn verdict(output: &Output) -> Value {
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(text.lines().count(), 1, "{text}\n{errors}");
    serde_json::from_str(&text).unwrap()
}

#[test]
fn a_server_that_holds_passes() {
    let sim = sim();
    // With the version in the address, as clients of the API have it.
    let url = sim.url("/v1/");
    let output = conclusive(&url, 6, &["--seed", "5"]);
    let verdict = verdict(&output);
    assert_eq!(output.status.code(), Some(0), "{verdict:#}");
    let table = String::from_utf8_lossy(&output.stderr);
    assert!(table.contains("selftest passed"), "{table}");
    assert_eq!(verdict["selftest"], "passed");
    assert_eq!(
        (&verdict["seed"], &verdict["limits"]["max_num_seqs"]),
        (&5.into(), &4.into())
    );
    assert_eq!(verdict["findings"], serde_json::json!([]));
    for goal in verdict["goals"].as_array().unwrap() {
        assert!(goal["reached"].as_f64() >= goal["wanted"].as_f64(), "{goal}");
    }
    let requests = &verdict["requests"];
    for stage in [
        "features",
        "longest",
        "rows",
        "mixed",
        "prefixes",
        "disconnects",
        "full",
        "mix",
    ] {
        assert!(
            requests["by_stage"][stage].as_u64().unwrap() > 0,
            "{stage} in {requests}"
        );
    }
    assert!(verdict["prefix_hit_tokens"].as_u64().unwrap() > 0);
    assert!(verdict["most_waiting"].as_u64().unwrap() > 0, "there is a queue");
    assert_eq!(verdict["kv_blocks_at_end"], 0);
}

#[test]
fn too_little_time_is_no_pass() {
    let sim = sim();
    let output = selftest(&sim.url(""), &["--duration", "0.05s"]);
    let verdict = verdict(&output);
    assert_eq!(output.status.code(), Some(10), "{verdict:#}");
    assert_eq!(verdict["selftest"], "inconclusive");
    assert!(verdict["suggested_duration"].as_u64().unwrap() > 0);
    let table = String::from_utf8_lossy(&output.stderr);
    assert!(
        table.contains("NOT REACHED") && table.contains("--duration"),
        "{table}"
    );
}

#[test]
fn without_a_server_there_is_nothing_to_test() {
    let output = selftest("http://127.0.0.1:9", &[]);
    assert_eq!(output.status.code(), Some(9));
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("--url") && output.stdout.is_empty(), "{text}");
}

/// What the proxy does to the server's answers.
#[derive(Clone, Copy, Debug)]
enum Spoil {
    /// On the pages of `/metrics`, once requests were answered: what stands after this beginning of a line.
    Metric(&'static str, &'static str),
    /// Every seventh answer to a completion.
    Answer(StatusCode, &'static str),
    /// What stands in whole answers.
    Text(&'static str, &'static str),
    /// Every seventh completion gets this answer and is told to come again, as from a full queue.
    Later(StatusCode, &'static str),
    /// Every seventh completion is never answered.
    Silence,
    /// `/ready`, once requests were answered.
    Ready,
    /// `/metrics` always says that somebody else's request is in.
    Busy,
}

struct Proxy {
    server: String,
    client: reqwest::Client,
    spoil: Spoil,
    completions: AtomicUsize,
}

impl Proxy {
    /// A proxy that spoils; its address.
    async fn start(server: &str, spoil: Spoil) -> String {
        let proxy = Arc::new(Self {
            server: server.to_owned(),
            client: reqwest::Client::builder().no_proxy().build().unwrap(),
            spoil,
            completions: AtomicUsize::new(0),
        });
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let app = axum::Router::new().fallback(pass).with_state(proxy);
        tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        url
    }

    /// The answer in place of the server's, if there is one; never, for a silence.
    async fn spoiled_status(&self, path: &str) -> Option<(StatusCode, &'static str)> {
        let is_completion = path.ends_with("completions");
        let before = self
            .completions
            .fetch_add(usize::from(is_completion), Ordering::SeqCst);
        match self.spoil {
            Spoil::Answer(status, text) if is_completion && before % 7 == 6 => Some((status, text)),
            Spoil::Later(status, text) if is_completion && before % 7 == 6 => Some((status, text)),
            Spoil::Silence if is_completion && before % 7 == 6 => std::future::pending().await,
            Spoil::Ready if path == "/ready" && before > 0 => {
                Some((StatusCode::SERVICE_UNAVAILABLE, "stalled"))
            }
            _ => None,
        }
    }

    fn spoiled_text(&self, path: &str, text: &str) -> String {
        let line = |beginning: &str, value: &str| {
            let lines = text.lines().map(|line| match line.rsplit_once(' ') {
                Some((head, _)) if head.starts_with(beginning) => format!("{head} {value}\n"),
                _ => format!("{line}\n"),
            });
            lines.collect()
        };
        let answered = self.completions.load(Ordering::SeqCst) > 20;
        match self.spoil {
            Spoil::Metric(beginning, value) if path == "/metrics" && answered => line(beginning, value),
            Spoil::Busy if path == "/metrics" => line("plimsoll_requests_in_flight", "1"),
            Spoil::Text(from, to) if path.ends_with("completions") => text.replace(from, to),
            _ => text.to_owned(),
        }
    }
}

async fn pass(State(proxy): State<Arc<Proxy>>, request: Request) -> Response<Body> {
    let path = request.uri().path().to_owned();
    if let Some((status, text)) = proxy.spoiled_status(&path).await {
        let mut answer = Response::builder().status(status);
        if matches!(proxy.spoil, Spoil::Later(..)) {
            answer = answer.header(header::RETRY_AFTER, "1");
        }
        return answer.body(text.into()).unwrap();
    }
    let (parts, body) = request.into_parts();
    let body: Bytes = axum::body::to_bytes(body, usize::MAX).await.unwrap();
    let forwarded = proxy
        .client
        .request(parts.method, format!("{}{path}", proxy.server))
        .header(header::CONTENT_TYPE, "application/json")
        .body(body);
    let answer = forwarded.send().await.unwrap();
    let answered = Response::builder().status(answer.status());
    let kind = answer.headers().get(header::CONTENT_TYPE).cloned();
    if kind.is_some_and(|kind| kind == "text/event-stream") {
        return answered.body(Body::from_stream(answer.bytes_stream())).unwrap();
    }
    let text = answer.text().await.unwrap();
    answered.body(proxy.spoiled_text(&path, &text).into()).unwrap()
}

/// Each way to misbehave is found, named, and ends with code 1.
#[tokio::test]
async fn a_server_that_misbehaves_fails_with_what_it_did() {
    let sim = sim();
    let cases = [
        (
            Spoil::Metric("plimsoll_device_allocs_after_ready_total", "2"),
            "device allocations after ready rose from 0 to 2",
        ),
        (
            Spoil::Metric("plimsoll_kv_blocks{", "3"),
            "3 KV blocks are in use",
        ),
        (
            Spoil::Metric("plimsoll_engine_rebuilds_total", "1"),
            "states built again rose",
        ),
        (
            Spoil::Metric("plimsoll_steps_failed_total", "1"),
            "failed steps rose",
        ),
        (
            Spoil::Metric("plimsoll_high_water_above_proof_total", "4"),
            "above the proved memory rose from 0 to 4",
        ),
        (
            Spoil::Metric("plimsoll_device_memory_high_bytes", "99999999999"),
            "high-water mark rose",
        ),
        (
            Spoil::Answer(StatusCode::INTERNAL_SERVER_ERROR, "oops"),
            "500: oops",
        ),
        (
            Spoil::Answer(StatusCode::TOO_MANY_REQUESTS, "later"),
            "429 without Retry-After",
        ),
        (
            Spoil::Later(StatusCode::SERVICE_UNAVAILABLE, "starting"),
            "503: starting",
        ),
        (Spoil::Answer(StatusCode::OK, "{}"), "without choices"),
        (
            Spoil::Text(r#""completion_tokens":4"#, r#""completion_tokens":3"#),
            "3 tokens instead of 4",
        ),
        (
            Spoil::Text(r#""finish_reason":"length""#, r#""finish_reason":"stop""#),
            "finished with Some(\"stop\")",
        ),
        (Spoil::Ready, "/ready: 503"),
        (Spoil::Silence, "no answer within 1 s"),
    ];
    for (spoil, finding) in cases {
        let url = Proxy::start(&sim.url(""), spoil).await;
        let output = tokio::task::spawn_blocking(move || conclusive(&url, 2, &["--request-timeout", "1"]));
        let output = output.await.unwrap();
        let verdict = verdict(&output);
        assert_eq!(output.status.code(), Some(1), "{spoil:?}: {verdict:#}");
        assert_eq!(verdict["selftest"], "failed");
        let findings = verdict["findings"].as_array().unwrap();
        let found = findings
            .iter()
            .any(|line| line.as_str().unwrap().contains(finding));
        assert!(found, "{spoil:?}: {findings:#?}");
        let table = String::from_utf8_lossy(&output.stderr);
        assert!(
            table.contains("FOUND") && table.contains("selftest FAILED"),
            "{table}"
        );
    }
}

#[tokio::test]
async fn a_server_with_other_clients_is_not_tested() {
    let sim = sim();
    let url = Proxy::start(&sim.url(""), Spoil::Busy).await;
    let output = tokio::task::spawn_blocking(move || selftest(&url, &[]))
        .await
        .unwrap();
    assert_eq!(output.status.code(), Some(9));
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("1 requests of other clients"), "{text}");
}

/// A full queue is no defect, and neither are others' large requests: the request comes again when it was told to.
#[tokio::test]
async fn a_server_that_is_full_is_asked_again() {
    let no_memory = r#"{"error": {"code": "too_many_large_requests"}}"#;
    for (status, text) in [
        (StatusCode::TOO_MANY_REQUESTS, ""),
        (StatusCode::SERVICE_UNAVAILABLE, no_memory),
    ] {
        let sim = sim();
        let url = Proxy::start(&sim.url(""), Spoil::Later(status, text)).await;
        let output = tokio::task::spawn_blocking(move || selftest(&url, &["--duration", "3s"]));
        let verdict = verdict(&output.await.unwrap());
        assert_eq!(verdict["findings"], serde_json::json!([]), "{verdict:#}");
        let requests = &verdict["requests"];
        assert!(
            requests["busy"].as_u64() > Some(0) && requests["done"].as_u64() > requests["busy"].as_u64(),
            "{requests}"
        );
    }
}
