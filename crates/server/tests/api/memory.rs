//! Running out of device memory while serving, and sleep mode.

use std::sync::atomic::Ordering;
use std::time::Duration;

use plimsoll_core::CacheKind;
use plimsoll_engine::Phase;
use plimsoll_server::ServerOptions;
use serde_json::{Value, json};

use crate::rig::{PATIENCE, Rig, Setup};
use crate::{CHAT, chat, oracle_text, with};

fn content(answer: &Value) -> &str {
    answer["choices"][0]["message"]["content"].as_str().unwrap()
}

/// The model's answer to `chat("x")`.
fn expected() -> String {
    oracle_text("<user>x</><assistant>", 20, 1)
}

#[tokio::test]
async fn out_of_memory_is_a_503_and_the_next_request_is_served() {
    let rig = Rig::new(Setup::default());
    rig.script.oom.store(true, Ordering::SeqCst);
    let error = rig.post(CHAT, chat("x")).await.error(503);
    assert_eq!(
        (&error["type"], &error["code"]),
        (&json!("server_error"), &json!("out_of_memory"))
    );
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("out of device memory"), "{message}");
    rig.until("readiness", |rig| {
        rig.state.engine().health().phase == Phase::Running
    })
    .await;
    let answer = rig.post(CHAT, chat("x")).await;
    assert_eq!(content(&answer.json()), expected());
    let memory = rig.get("/memory").await.json();
    assert_eq!(memory["rebuilds"], json!({ "oom": 1, "wake": 0 }));
    assert_eq!(memory["now"]["components"]["kv"], 16384 * 64);
    let last = &memory["last_oom"];
    assert_eq!(
        (&last["requested"], &last["component"]),
        (&json!(4096), &json!("arena"))
    );
    assert_eq!(
        (&last["step"]["rows"], &last["peers_delta"]),
        (&json!(1), &json!(0))
    );
    let page = rig.get("/metrics").await.text;
    for series in [
        r#"plimsoll_engine_rebuilds_total{model_name="sim",engine="0",reason="oom"} 1"#,
        r#"plimsoll_engine_rebuilds_total{model_name="sim",engine="0",reason="wake"} 0"#,
        r#"plimsoll_requests_failed_total{model_name="sim",engine="0"} 1"#,
    ] {
        assert!(page.contains(series), "{series} is not in {page}");
    }
}

#[tokio::test]
async fn a_stream_that_loses_its_memory_ends_with_an_error_event() {
    let rig = Rig::new(Setup::default());
    rig.set_step(Duration::from_millis(2));
    let body = with(with(chat("x"), "stream", json!(true)), "max_tokens", json!(900));
    let (answer, ()) = tokio::join!(rig.post(CHAT, body), async {
        rig.until_in_flight(1).await;
        rig.until("tokens", |rig| {
            rig.state.engine().stats().scheduler.generated_tokens > 3
        })
        .await;
        rig.script.oom.store(true, Ordering::SeqCst);
    });
    let events = answer.events();
    assert!(events.len() > 3);
    assert_eq!(events.last().unwrap()["error"]["code"], "out_of_memory");
}

#[tokio::test]
async fn without_memory_the_server_is_alive_and_not_ready() {
    let rig = Rig::new(Setup {
        outage_patience: Duration::ZERO,
        ..Default::default()
    });
    rig.script.full.store(true, Ordering::SeqCst);
    rig.script.oom.store(true, Ordering::SeqCst);
    rig.post(CHAT, chat("x")).await.error(503);
    rig.until("an attempt that failed", |rig| {
        let outage = rig.state.engine().health().outage;
        outage.is_some_and(|why| !why.contains("a step"))
    })
    .await;
    let ready = rig.get("/ready").await;
    assert_eq!(
        (ready.status.as_u16(), &ready.json()["status"]),
        (503, &json!("rebuilding"))
    );
    assert!(
        ready.headers["retry-after"]
            .to_str()
            .unwrap()
            .parse::<u64>()
            .unwrap()
            >= 1
    );
    assert!(
        ready.json()["reason"].as_str().unwrap().contains("memory"),
        "{}",
        ready.text
    );
    assert_eq!(rig.get("/health").await.status, 200);
    let refused = rig.post(CHAT, chat("x")).await;
    assert_eq!(refused.error(503)["code"], "rebuilding");
    assert!(refused.headers.contains_key("retry-after"));
    rig.script.full.store(false, Ordering::SeqCst);
    rig.until("memory", |rig| {
        rig.state.engine().health().phase == Phase::Running
    })
    .await;
    assert_eq!(rig.get("/ready").await.status, 200);
    assert_eq!(content(&rig.post(CHAT, chat("x")).await.json()), expected());
}

fn sleepy() -> Rig {
    let options = ServerOptions {
        enable_sleep_mode: true,
        ..Default::default()
    };
    Rig::new(Setup {
        options,
        ..Default::default()
    })
}

#[tokio::test]
async fn sleep_releases_the_state_and_waking_restores_it() {
    let rig = sleepy();
    let before = rig.get("/memory").await.json()["now"]["reserved"].clone();
    let post = async |path: &str| rig.post_raw(path, "").await;
    let is_sleeping = async || rig.get("/is_sleeping").await.json()["is_sleeping"].clone();
    assert_eq!(is_sleeping().await, false);
    assert_eq!(post("/wake_up").await.json(), json!({ "is_sleeping": false }));
    assert_eq!(
        post("/sleep?level=1").await.json(),
        json!({ "is_sleeping": true })
    );
    assert_eq!(is_sleeping().await, true);
    assert_eq!(rig.get("/memory").await.json()["now"]["reserved"], 0);
    let ready = rig.get("/ready").await;
    assert_eq!(
        (ready.status.as_u16(), &ready.json()["status"]),
        (503, &json!("sleeping"))
    );
    assert_eq!(rig.get("/health").await.status, 200);
    let refused = rig.post(CHAT, chat("x")).await;
    assert_eq!(refused.error(503)["code"], "sleeping");
    assert!(refused.headers.contains_key("retry-after"));

    rig.script.full.store(true, Ordering::SeqCst);
    let refused = post("/wake_up").await;
    assert_eq!(refused.error(503)["code"], "rebuilding");
    assert!(refused.headers.contains_key("retry-after"));
    rig.script.full.store(false, Ordering::SeqCst);
    rig.until("waking", |rig| {
        rig.state.engine().health().phase == Phase::Running
    })
    .await;
    assert_eq!(rig.get("/memory").await.json()["now"]["reserved"], before);
    assert_eq!(content(&rig.post(CHAT, chat("x")).await.json()), expected());
    assert_eq!(post("/sleep").await.status, 200);
    assert_eq!(post("/wake_up").await.json(), json!({ "is_sleeping": false }));
    assert_eq!(content(&rig.post(CHAT, chat("x")).await.json()), expected());
}

#[tokio::test]
async fn a_busy_server_does_not_sleep() {
    let rig = sleepy();
    rig.set_step(Duration::from_millis(2));
    let body = with(chat("x"), "max_tokens", json!(500));
    let (answer, refused) = tokio::join!(rig.post(CHAT, body), async {
        rig.until_in_flight(1).await;
        rig.post_raw("/sleep?timeout=0.01", "").await
    });
    let error = refused.error(409);
    assert!(
        error["message"]
            .as_str()
            .unwrap()
            .contains("1 requests are still in progress")
    );
    assert_eq!(answer.status, 200);
    assert_eq!(rig.get("/ready").await.status, 200);
}

#[tokio::test]
async fn unsupported_parameters_are_named() {
    let rig = sleepy();
    for (path, named) in [
        ("/sleep?level=2", "level must be 1"),
        ("/sleep?level=x", "level"),
        ("/sleep?mode=wait", "mode"),
        ("/sleep?timeout=-1", "timeout"),
        ("/wake_up?tags=weights", "tags"),
    ] {
        let error = rig.post_raw(path, "").await.error(400);
        assert!(
            error["message"].as_str().unwrap().contains(named),
            "{path}: {error}"
        );
    }
    assert_eq!(rig.get("/ready").await.status, 200);
    let off = Rig::new(Setup::default());
    off.post_raw("/sleep", "").await.error(404);
    off.post_raw("/wake_up", "").await.error(404);
    off.get("/is_sleeping").await.error(404);
}

/// A server of a model with sliding windows, whose KV cache holds two requests of full length.
fn with_windows() -> Rig {
    let mut layers = vec![CacheKind::Window(40); 4];
    layers[1] = CacheKind::Full;
    Rig::new(Setup {
        max_model_len: 256,
        kv_tokens: 512,
        layers,
        options: ServerOptions {
            enable_sleep_mode: true,
            ..Setup::default().options
        },
        ..Default::default()
    })
}

/// `/memory` and `/metrics` agree about the blocks of each cache group: those used, and those cached.
async fn blocks(rig: &Rig) -> [(u64, u64); 2] {
    let kv = rig.get("/memory").await.json()["kv"].take();
    let page = rig.get("/metrics").await.text;
    let groups = [("full", 1, 1, 128), ("window", 3, 3, 42)];
    let mut pages = 0;
    let found = std::array::from_fn(|index| {
        let (kind, layers, pages_per_block, total) = groups[index];
        let group = &kv["groups"][index];
        assert_eq!(
            (
                &group["kind"],
                &group["layers"],
                &group["pages_per_block"],
                &group["blocks"]
            ),
            (
                &json!(kind),
                &json!(layers),
                &json!(pages_per_block),
                &json!(total)
            )
        );
        let labels = format!(r#"{{model_name="sim",engine="0",group="{index}",kind="{kind}""#);
        let count = |state: &str| {
            let blocks = group[format!("blocks_{state}")].as_u64().unwrap();
            let series = format!(r#"plimsoll_kv_group_blocks{labels},state="{state}"}} {blocks}"#);
            assert!(page.contains(&series), "{series} is not in {page}");
            blocks
        };
        let window = if index == 0 { "" } else { "40" };
        let info = format!(
            r#"plimsoll_kv_group_info{labels},window="{window}",layers="{layers}",pages_per_block="{pages_per_block}"}} 1"#
        );
        assert!(page.contains(&info), "{info} is not in {page}");
        assert!(
            page.contains(&format!("plimsoll_kv_rounding_bytes{labels}}} 0")),
            "{page}"
        );
        let (used, cached) = (count("used"), count("cached"));
        pages += used * pages_per_block;
        (used, cached)
    });
    assert_eq!((&kv["pages"], &kv["pages_used"]), (&json!(128), &json!(pages)));
    found
}

#[tokio::test]
async fn a_model_with_windows_survives_preemption_cancellation_loss_and_sleep() {
    let rig = with_windows();
    assert_eq!(blocks(&rig).await, [(0, 0), (0, 0)]);
    let body = |seed: u64| with(with(chat("x"), "max_tokens", json!(200)), "seed", json!(seed));
    let expected = |seed| oracle_text("<user>x</><assistant>", 200, seed);

    // Preemption: more requests than fit.
    rig.set_step(PATIENCE);
    let answers = futures::future::join_all((0..6).map(|seed| rig.post(CHAT, body(seed))));
    let (answers, ()) = tokio::join!(answers, async {
        rig.until_in_flight(6).await;
        rig.set_step(Duration::ZERO);
    });
    for (seed, answer) in answers.iter().enumerate() {
        assert_eq!(content(&answer.json()), expected(seed as u64));
    }
    assert!(rig.state.engine().stats().scheduler.preemptions > 0);

    // Cancellation while it runs: its blocks come back, and those behind the window did before.
    rig.set_step(Duration::from_millis(2));
    let stream = rig.post(CHAT, with(body(9), "stream", json!(true)));
    let watch = async {
        rig.until("a long request", |rig| {
            rig.state.engine().stats().scheduler.groups[0].used > 10
        })
        .await;
        let [(full, _), (window, _)] = blocks(&rig).await;
        assert!(full > 10 && window <= 4, "{full} and {window} blocks");
    };
    tokio::select! {
        _ = stream => panic!("the request ended before it was cancelled"),
        () = watch => {}
    }
    rig.set_step(Duration::ZERO);
    rig.until("an empty cache", |rig| {
        rig.state.engine().stats().scheduler.pages_used == 0
    })
    .await;
    let [full, window] = blocks(&rig).await;
    assert!((full.0, window.0) == (0, 0) && full.1 > 0 && window.1 > 0);

    // Loss of the state, and sleep: nothing is cached, and the text is the same.
    rig.script.oom.store(true, Ordering::SeqCst);
    rig.post(CHAT, body(1)).await.error(503);
    rig.until("readiness", |rig| {
        rig.state.engine().health().phase == Phase::Running
    })
    .await;
    assert_eq!(blocks(&rig).await, [(0, 0), (0, 0)]);
    assert_eq!(content(&rig.post(CHAT, body(2)).await.json()), expected(2));
    assert_eq!(rig.post_raw("/sleep", "").await.status, 200);
    assert_eq!(rig.post_raw("/wake_up", "").await.status, 200);
    assert_eq!(blocks(&rig).await, [(0, 0), (0, 0)]);
    assert_eq!(content(&rig.post(CHAT, body(3)).await.json()), expected(3));
}

/// Where several ranks serve the model together, what is said of memory is said of each.
#[tokio::test]
async fn ranks_have_memory_and_metrics_of_their_own() {
    let rig = Rig::new(Setup::default());
    let alone = rig.get("/memory").await.json();
    assert_eq!(alone["ranks"], json!(null));
    let page = rig.get("/metrics").await.text;
    assert!(!page.contains("rank="), "{page}");

    let rig = Rig::new(Setup::default());
    rig.script.more_ranks.store(2, Ordering::SeqCst);
    let memory = rig.get("/memory").await.json();
    let ranks = memory["ranks"].as_array().unwrap();
    assert_eq!(ranks.len(), 3);
    let page = rig.get("/metrics").await.text;
    for (rank, of) in ranks.iter().enumerate() {
        assert_eq!(of["rank"], rank);
        let metrics = [
            ("device_memory_total_bytes", "", &of["total"]),
            ("device_memory_proved_peak_bytes", "", &of["proved_peak"]),
            (
                "device_memory_bytes",
                ",component=\"kv\"",
                &of["components"]["kv"],
            ),
            ("headroom_bytes", "", &of["headroom"]),
        ];
        for (name, label, value) in metrics {
            let line =
                format!("plimsoll_{name}{{model_name=\"sim\",engine=\"0\",rank=\"{rank}\"{label}}} {value}");
            assert!(page.contains(&line), "{line} is not in {page}");
        }
    }
    let mut first = ranks[0].clone();
    first.as_object_mut().unwrap().remove("rank");
    assert_eq!(memory["now"], first);
}
