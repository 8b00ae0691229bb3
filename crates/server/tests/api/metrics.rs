//! `/metrics`: the right value after known work.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::http::Request;
use plimsoll_engine::Phase;
use plimsoll_server::ServerOptions;
use serde_json::json;

use crate::rig::{PATIENCE, Rig, Setup, post};
use crate::{CHAT, COMPLETIONS, chat, with};

/// A parsed page.
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

    /// The sum over the series with all of these labels; 0 if there are none.
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

    /// The sum over all series; there must be at least one.
    fn get(&self, name: &str) -> f64 {
        assert!(!self.series(name).is_empty(), "no {name} in {}", self.0);
        self.sum(name, &[])
    }
}

/// Every accepted request ended in one of three ways, under both names.
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
async fn every_request_is_counted_once() {
    let rig = Rig::new(Setup::default());
    assert_eq!(rig.post(CHAT, with(chat("x"), "n", json!(3))).await.status, 200);
    // A stop string ends it: cancelled in the engine, but a success.
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

    // One disconnected, and one timed out.
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
    // Clients cannot create labels.
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
    // This request itself.
    assert_eq!(page.get("plimsoll_http_requests_in_flight"), 1.0);
}

#[tokio::test]
async fn a_client_that_leaves_early_is_a_499() {
    let rig = Rig::new(Setup::default());
    rig.set_step(Duration::from_millis(5));
    let long = with(chat("x"), "max_tokens", json!(900)).to_string();
    tokio::select! {
        answer = rig.send(post(CHAT, long)) => panic!("{answer:?} to one that takes seconds"),
        () = rig.until_in_flight(1) => {}
    }
    rig.until_in_flight(0).await;
    let page = Page::of(&rig).await;
    let left = [("route", CHAT), ("code", "499")];
    assert_eq!(page.sum("plimsoll_http_requests_total", &left), 1.0);
    assert_eq!(page.get("plimsoll_requests_cancelled_total"), 1.0);
}

#[tokio::test]
async fn batches_blocks_and_preemptions() {
    // Two of these fit, and four arrive together.
    let rig = Rig::new(Setup {
        kv_tokens: 256,
        max_model_len: 256,
        ..Setup::default()
    });
    // The first is still running when the others arrive.
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
    // Each computes its prompt in one run, preempted ones again.
    assert!(page.get("plimsoll_step_requests_sum") >= 4.0 * 100.0);
    assert!(page.sum("plimsoll_step_requests_bucket", &[("le", "1")]) < steps);
    assert_eq!(page.get("plimsoll_kv_tail_tokens"), 0.0, "nobody runs");
}

#[tokio::test]
async fn unused_slots_of_last_blocks_are_counted() {
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
    // All three are at the same token, so that some step has unused slots.
    rig.until("a block that is not full", |rig| {
        rig.state.engine().stats().scheduler.tail_tokens > 0
    })
    .await;
    drop(stream);
    rig.until_in_flight(0).await;
}

#[tokio::test]
async fn start_and_process_metrics_exist() {
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

/// As in vLLM: queue time ends when the request is scheduled, and the first step belongs to prefill.
#[tokio::test]
async fn the_first_step_is_not_queue_time() {
    let rig = Rig::new(Setup::default());
    rig.set_step(Duration::from_secs(1));
    let one = with(chat("x"), "max_tokens", json!(1)).to_string();
    let (answer, ()) = tokio::join!(rig.post_raw(CHAT, one), async {
        rig.until("a running request", |rig| {
            rig.state.engine().stats().scheduler.running == 1
        })
        .await;
        let page = Page::of(&rig).await;
        let waiting = page.get("vllm:num_requests_waiting");
        assert_eq!((page.get("vllm:num_requests_running"), waiting), (1.0, 0.0));
        assert!(
            page.get("vllm:kv_cache_usage_perc") > 0.0,
            "while its first step runs"
        );
    });
    assert_eq!(answer.status, 200);
    let page = Page::of(&rig).await;
    for (queue, prefill) in [
        (
            "vllm:request_queue_time_seconds_sum",
            "vllm:request_prefill_time_seconds_sum",
        ),
        (
            "plimsoll_request_queue_seconds_sum",
            "plimsoll_request_prefill_seconds_sum",
        ),
    ] {
        let (queue, prefill) = (page.get(queue), page.get(prefill));
        assert!(
            queue < prefill && prefill > 0.5,
            "queue {queue}, prefill {prefill}"
        );
    }
}

/// As in vLLM: hits of a request's own blocks after a preemption do not count.
#[tokio::test]
async fn each_request_looks_up_its_prompt_once() {
    let rig = Rig::new(Setup {
        kv_tokens: 256,
        max_model_len: 256,
        ..Setup::default()
    });
    rig.set_step(Duration::from_millis(1));
    // Different prompts, which share nothing.
    let prompts: Vec<_> = (97..101).map(|token| vec![token; 40]).collect();
    let request = json!({ "prompt": prompts, "max_tokens": 100, "ignore_eos": true });
    assert_eq!(rig.post(COMPLETIONS, request).await.status, 200);
    let page = Page::of(&rig).await;
    assert!(page.get("vllm:num_preemptions_total") > 0.0);
    assert_eq!(page.get("vllm:prompt_tokens_total"), 160.0);
    assert_eq!(page.get("vllm:prefix_cache_queries_total"), 160.0);
    assert_eq!(page.get("vllm:prefix_cache_hits_total"), 0.0);
}

#[tokio::test]
async fn refused_requests_record_no_parameters() {
    let rig = Rig::new(Setup {
        max_num_seqs: 2,
        max_queue: 0,
        ..Setup::default()
    });
    rig.set_step(Duration::from_millis(5));
    let long = with(with(chat("x"), "stream", json!(true)), "max_tokens", json!(900));
    let running = rig.send(post(CHAT, long.to_string())).await;
    rig.until_in_flight(1).await;
    // There is capacity for one of the two.
    rig.post(CHAT, with(chat("x"), "n", json!(2))).await.error(429);
    rig.until_in_flight(1).await;
    let page = Page::of(&rig).await;
    assert_eq!(page.get("vllm:request_params_n_count"), 1.0);
    assert_eq!(page.get("plimsoll_requests_refused_total"), 1.0);
    drop(running);
}

/// The status that is 1; all others are 0.
fn status(page: &Page) -> String {
    let series = page.series("plimsoll_server_status");
    assert_eq!(series.len(), 8, "{series:?}");
    let now: Vec<_> = series.iter().filter(|(_, value)| *value == 1.0).collect();
    assert_eq!(now.len(), 1, "{series:?}");
    let (_, label) = now[0].0.split_once("status=\"").unwrap();
    label.trim_end_matches("\"}").to_owned()
}

#[tokio::test]
async fn the_status_matches_ready() {
    // So short that whatever counts as a stall is reported as one.
    const READY_PATIENCE: Duration = Duration::from_millis(1);
    let rig = Rig::new(Setup {
        max_num_seqs: 1,
        options: ServerOptions {
            enable_sleep_mode: true,
            ready_patience: READY_PATIENCE,
            ..Default::default()
        },
        ..Setup::default()
    });
    let check = async |expected: &str| {
        let page = Page::of(&rig).await;
        assert_eq!(status(&page), expected);
        assert_eq!(rig.get("/ready").await.json()["status"], expected);
        page
    };
    check("ready").await;
    assert_eq!(rig.post_raw("/sleep", "").await.status, 200);
    check("sleeping").await;
    assert_eq!(rig.post_raw("/wake_up", "").await.status, 200);
    check("ready").await;

    // One loses its memory and one waits for the rebuild: neither is a stall for the watchdog.
    rig.set_step(Duration::from_millis(5));
    let long = with(chat("x"), "max_tokens", json!(900));
    let first = rig
        .send(post(CHAT, with(long.clone(), "stream", json!(true)).to_string()))
        .await;
    let (second, ()) = tokio::join!(rig.post(CHAT, long), async {
        rig.until_in_flight(2).await;
        rig.script.full.store(true, Ordering::SeqCst);
        rig.script.oom.store(true, Ordering::SeqCst);
        rig.until("a try that failed", |rig| {
            let outage = rig.state.engine().health().outage;
            outage.is_some_and(|why| !why.contains("a step"))
        })
        .await;
        let began = Instant::now();
        let page = loop {
            let page = Page::of(&rig).await;
            // The time between two tries is no stall. One look may fall into a try.
            if page.get("plimsoll_engine_stalled_seconds") == 0.0 {
                break page;
            }
            assert!(began.elapsed() < PATIENCE, "waiting for memory counts as a stall");
            tokio::time::sleep(Duration::from_millis(20)).await;
        };
        assert_eq!(page.get("plimsoll_requests_in_flight"), 1.0);
        assert_eq!(status(&page), "rebuilding");
        assert_eq!(rig.get("/ready").await.json()["status"], "rebuilding");
        rig.script.full.store(false, Ordering::SeqCst);
        rig.until("memory", |rig| {
            rig.state.engine().health().phase == Phase::Running
        })
        .await;
        rig.set_step(Duration::ZERO);
    });
    assert_eq!(second.status, 200);
    drop(first);
    rig.until_in_flight(0).await;

    rig.set_step(PATIENCE);
    let hanging = rig
        .send(post(CHAT, with(chat("x"), "stream", json!(true)).to_string()))
        .await;
    rig.until("a stall", |rig| {
        let stalled = rig.state.engine().health().stalled_for;
        stalled.is_some_and(|stalled| stalled > READY_PATIENCE)
    })
    .await;
    let page = check("stalled").await;
    assert!(page.get("plimsoll_engine_stalled_seconds") > page.get("plimsoll_engine_stall_timeout_seconds"));
    rig.set_step(Duration::ZERO);
    drop(hanging);
}

/// Latencies are measured at the engine: slow readers do not distort them.
#[tokio::test]
async fn a_slow_reader_does_not_distort_latencies() {
    let rig = Rig::new(Setup::default());
    let body = with(with(chat("x"), "stream", json!(true)), "max_tokens", json!(900));
    let began = Instant::now();
    let response = rig.send(post(CHAT, body.to_string())).await;
    rig.until_in_flight(0).await;
    // Nothing was read so far: latencies measured at the reader would be longer than this.
    let generated_in = began.elapsed().as_secs_f64();
    let bytes = axum::body::to_bytes(response.into_body(), usize::MAX)
        .await
        .unwrap();
    assert!(bytes.ends_with(b"data: [DONE]\n\n"));
    let page = Page::of(&rig).await;
    assert_eq!(page.get("vllm:inter_token_latency_seconds_count"), 899.0);
    for name in [
        "vllm:inter_token_latency_seconds_sum",
        "vllm:e2e_request_latency_seconds_sum",
    ] {
        assert!(
            page.get(name) <= generated_in,
            "{name}: {} > {generated_in}",
            page.get(name)
        );
    }
}
