//! `/metrics`: the right value after known work.

use std::time::Duration;

use axum::body::Body;
use axum::http::Request;
use serde_json::json;

use crate::rig::{Rig, Setup, post};
use crate::{CHAT, COMPLETIONS, chat, with};

/// A page, read.
struct Page(String);

impl Page {
    async fn of(rig: &Rig) -> Self {
        Self(rig.get("/metrics").await.text)
    }

    /// The series of a name with their values.
    fn series(&self, name: &str) -> Vec<(&str, f64)> {
        let lines = self.0.lines().filter_map(|line| {
            let (series, value) = line.rsplit_once(' ')?;
            let labels = series.strip_prefix(name)?;
            (labels.is_empty() || labels.starts_with('{')).then(|| (labels, value.parse().unwrap()))
        });
        lines.collect()
    }

    /// The sum over the series that have all of these labels; 0 where there is none.
    fn sum(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let wanted: Vec<String> = labels
            .iter()
            .map(|(label, value)| format!("{label}={value:?}"))
            .collect();
        let series = self.series(name).into_iter();
        series
            .filter(|(has, _)| wanted.iter().all(|label| has.contains(label)))
            .map(|(_, value)| value)
            .sum()
    }

    /// The sum over all series, of which there is one at least.
    fn get(&self, name: &str) -> f64 {
        assert!(!self.series(name).is_empty(), "no {name} in {}", self.0);
        self.sum(name, &[])
    }
}

/// Whoever was admitted has ended in one of three ways, under both names.
fn assert_all_accounted_for(page: &Page) {
    let submitted = page.get("plimsoll_requests_submitted_total");
    let ours = [
        "plimsoll_requests_finished_total",
        "plimsoll_requests_cancelled_total",
        "plimsoll_requests_failed_total",
    ];
    assert_eq!(ours.map(|name| page.get(name)).iter().sum::<f64>(), submitted);
    assert_eq!(page.get("vllm:request_success_total"), submitted);
}

#[tokio::test]
async fn every_request_is_accounted_for_once() {
    let rig = Rig::new(Setup::default());
    assert_eq!(rig.post(CHAT, with(chat("x"), "n", json!(3))).await.status, 200);
    // One that a stop string ends, which the engine knows as cancelled: it ended well.
    let said = rig.post(CHAT, chat("x")).await.json();
    let text = said["choices"][0]["message"]["content"].as_str().unwrap();
    let stop = with(chat("x"), "stop", json!(&text[4..7]));
    let stopped = rig.post(CHAT, stop).await.json();
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop");
    let page = Page::of(&rig).await;
    let reason =
        |page: &Page, reason| page.sum("plimsoll_requests_finished_total", &[("finished_reason", reason)]);
    assert_eq!((reason(&page, "length"), reason(&page, "stop")), (4.0, 1.0));
    assert_eq!(page.get("plimsoll_requests_cancelled_total"), 0.0);
    assert_all_accounted_for(&page);

    // One whose client leaves, and one whose time is over.
    rig.set_step(Duration::from_millis(5));
    let long = with(chat("x"), "max_tokens", json!(900));
    drop(
        rig.send(post(CHAT, with(long.clone(), "stream", json!(true)).to_string()))
            .await,
    );
    assert_eq!(
        rig.post(CHAT, with(long, "timeout", json!(0.05))).await.status,
        504
    );
    rig.until_in_flight(0).await;
    let page = Page::of(&rig).await;
    assert_eq!(page.get("plimsoll_requests_cancelled_total"), 1.0);
    assert_eq!(page.get("plimsoll_requests_failed_total"), 1.0);
    assert_all_accounted_for(&page);
}

#[tokio::test]
async fn http_is_counted_by_route_method_and_code() {
    let rig = Rig::new(Setup::default());
    let body = chat("x").to_string();
    let mut sent = 0;
    for _ in 0..2 {
        let answer = rig.post_raw(CHAT, body.clone()).await;
        assert_eq!(answer.status, 200);
        sent += answer.text.len();
    }
    assert_eq!(rig.post(CHAT, json!({})).await.status, 400);
    for model in ["sim", "org%2Fsim", "gpt"] {
        rig.get(&format!("/v1/models/{model}")).await;
    }
    // What clients make up is no label.
    for path in ["/nowhere", "/v1/elsewhere", "/%ff"] {
        assert_eq!(rig.get(path).await.status, 404);
    }
    let brew = Request::builder()
        .method("BREW")
        .uri(CHAT)
        .body(Body::empty())
        .unwrap();
    assert_eq!(rig.send(brew).await.status(), 405);

    let page = Page::of(&rig).await;
    let count = |route, method, code| {
        page.sum(
            "plimsoll_http_requests_total",
            &[("route", route), ("method", method), ("code", code)],
        )
    };
    assert_eq!(
        (count(CHAT, "POST", "200"), count(CHAT, "POST", "400")),
        (2.0, 1.0)
    );
    assert_eq!(count("/v1/models/{*id}", "GET", "200"), 2.0);
    assert_eq!(count("/v1/models/{*id}", "GET", "404"), 1.0);
    assert_eq!(count("none", "GET", "404"), 3.0);
    assert_eq!(count(CHAT, "other", "405"), 1.0);
    let labels = page.series("plimsoll_http_requests_total");
    assert_eq!(labels.len(), 6, "{labels:?}");

    let chats = [("route", CHAT), ("method", "POST")];
    assert_eq!(page.sum("plimsoll_http_request_seconds_count", &chats), 3.0);
    let received = page.sum("plimsoll_http_request_bytes_sum", &chats);
    assert_eq!(received, (2 * body.len() + 2) as f64);
    let refused = page.sum("plimsoll_http_response_bytes_sum", &chats) - sent as f64;
    assert!((50.0..500.0).contains(&refused), "an error takes {refused} bytes");
    // The one that reads this.
    assert_eq!(page.get("plimsoll_http_requests_in_flight"), 1.0);
}

#[tokio::test]
async fn a_client_that_leaves_early_is_a_499() {
    let rig = Rig::new(Setup::default());
    rig.set_step(Duration::from_millis(5));
    let long = with(chat("x"), "max_tokens", json!(900)).to_string();
    let waiting = rig.send(post(CHAT, long));
    assert!(
        tokio::time::timeout(Duration::from_millis(50), waiting)
            .await
            .is_err()
    );
    rig.until_in_flight(0).await;
    let page = Page::of(&rig).await;
    let left = [("route", CHAT), ("code", "499")];
    assert_eq!(page.sum("plimsoll_http_requests_total", &left), 1.0);
    assert_eq!(page.get("plimsoll_requests_cancelled_total"), 1.0);
}

#[tokio::test]
async fn batches_blocks_and_preemptions() {
    // Two of these fit, and four come at once.
    let rig = Rig::new(Setup {
        kv_tokens: 256,
        max_model_len: 256,
        ..Setup::default()
    });
    // The first is not done before the others come.
    rig.set_step(Duration::from_millis(1));
    let request = json!({ "prompt": vec![97; 40], "max_tokens": 100, "ignore_eos": true, "n": 4 });
    assert_eq!(rig.post(COMPLETIONS, request).await.status, 200);
    let page = Page::of(&rig).await;
    let kv_full = page.sum("plimsoll_preemptions_total", &[("cause", "kv_full")]);
    assert!(kv_full > 0.0);
    assert_eq!(
        page.sum("plimsoll_preemptions_total", &[("cause", "kv_lost")]),
        0.0
    );
    assert_eq!(page.get("vllm:num_preemptions_total"), kv_full);
    let steps = page.get("plimsoll_steps_total");
    assert_eq!(page.get("plimsoll_step_requests_count"), steps);
    // Each computes its prompt in one run, and those who are preempted again.
    assert!(page.get("plimsoll_step_requests_sum") >= 4.0 * 100.0);
    assert!(page.sum("plimsoll_step_requests_bucket", &[("le", "1")]) < steps);
    assert_eq!(page.get("plimsoll_kv_tail_tokens"), 0.0, "nobody runs");
}

#[tokio::test]
async fn running_requests_waste_the_rest_of_their_last_blocks() {
    let rig = Rig::new(Setup::default());
    rig.set_step(Duration::from_millis(20));
    let request =
        json!({ "prompt": vec![97; 40], "max_tokens": 900, "ignore_eos": true, "stream": true, "n": 3 });
    let stream = rig.send(post(COMPLETIONS, request.to_string())).await;
    rig.until("running requests", |rig| {
        rig.state.engine().stats().scheduler.running == 3
    })
    .await;
    let stats = rig.state.engine().stats().scheduler;
    assert!((0..=3 * 15).contains(&stats.tail_tokens), "{stats:?}");
    // All three are at the same token, so that some step shows some waste.
    rig.until("a block that is not full", |rig| {
        rig.state.engine().stats().scheduler.tail_tokens > 0
    })
    .await;
    drop(stream);
    rig.until_in_flight(0).await;
}

#[tokio::test]
async fn the_start_and_the_process_are_told_of() {
    let rig = Rig::new(Setup::default());
    let page = Page::of(&rig).await;
    let stage = |name| page.sum("plimsoll_start_stage_seconds", &[("stage", name)]);
    assert_eq!((stage("weights"), stage("validate")), (1.5, 0.25));
    let tried = |outcome| page.sum("plimsoll_profile_attempts", &[("outcome", outcome)]);
    assert_eq!((tried("proved"), tried("out_of_memory")), (1.0, 2.0));

    let files = std::fs::read_dir("/proc/self/fd").unwrap().count() as f64;
    let open = page.get("process_open_fds");
    assert!(open > 2.0 && (open - files).abs() < 1000.0 && open <= page.get("process_max_fds"));
    assert!(page.get("process_threads") >= 2.0);
    let resident = page.get("process_resident_memory_bytes");
    assert!((1e6..1e12).contains(&resident) && page.get("process_virtual_memory_bytes") >= resident);
    let cpu = page.get("process_cpu_seconds_total");
    assert!((0.0..1e6).contains(&cpu));
    let now = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap()
        .as_secs_f64();
    let age = now - page.get("process_start_time_seconds");
    assert!((-2.0..3600.0).contains(&age), "{age} s old");
}
