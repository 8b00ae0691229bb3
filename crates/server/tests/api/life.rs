//! Failing steps, disconnected and slow clients, stalls.

use std::sync::atomic::Ordering;
use std::time::Duration;

use futures::StreamExt;
use plimsoll_server::ServerOptions;
use serde_json::{Value, json};

use crate::rig::{Answer, PATIENCE, Rig, Setup, post};
use crate::{CHAT, chat, with};

#[tokio::test]
async fn a_failed_step_is_an_error_and_the_server_continues() {
    let rig = Rig::new(Setup::default());
    rig.script.panic.store(true, Ordering::SeqCst);
    let error = rig.post(CHAT, chat("x")).await.error(500);
    assert_eq!(
        (&error["type"], &error["code"]),
        (&json!("server_error"), &json!("step_failed"))
    );
    assert!(error["message"].as_str().unwrap().contains("told to panic"));

    rig.set_step(Duration::from_millis(5));
    let body = with(with(chat("x"), "stream", json!(true)), "max_tokens", json!(500));
    let mut stream = rig
        .send(post(CHAT, body.to_string()))
        .await
        .into_body()
        .into_data_stream();
    let mut text = String::from_utf8(stream.next().await.unwrap().unwrap().to_vec()).unwrap();
    rig.script.panic.store(true, Ordering::SeqCst);
    while let Some(part) = stream.next().await {
        text += std::str::from_utf8(&part.unwrap()).unwrap();
    }
    let events: Vec<_> = text
        .trim()
        .split("\n\n")
        .map(|event| event.strip_prefix("data: ").unwrap())
        .collect();
    assert_eq!(events.last(), Some(&"[DONE]"));
    let error: Value = serde_json::from_str(events[events.len() - 2]).unwrap();
    assert_eq!(error["error"]["code"], "step_failed");

    rig.set_step(Duration::ZERO);
    assert_eq!(rig.post(CHAT, chat("x")).await.status, 200);
    let health = rig.get("/health").await;
    assert_eq!(
        (health.status.as_u16(), &health.json()["status"]),
        (200, &json!("ok"))
    );
    assert!(
        health.json()["last_error"]
            .as_str()
            .unwrap()
            .contains("told to panic")
    );
    assert!(
        rig.get("/metrics")
            .await
            .text
            .contains("plimsoll_steps_failed_total{model_name=\"sim\",engine=\"0\"} 2")
    );
}

/// One of several answers has no next token: their request fails, and not that beside it, nor the step.
#[tokio::test]
async fn an_answer_that_is_not_finite_fails_its_request_alone() {
    let rig = Rig::new(Setup::default());
    rig.set_step(Duration::from_millis(2));
    let answer = |text: &str| rig.post(CHAT, with(chat(text), "n", json!(3)));
    let expected = [answer("x").await.json(), answer("y").await.json()];
    rig.script.not_finite.store(true, Ordering::SeqCst);
    let (x, y) = tokio::join!(answer("x"), answer("y"));
    let (failed, other, expected) = match x.status.as_u16() {
        200 => (y, x, &expected[0]),
        _ => (x, y, &expected[1]),
    };
    assert_eq!(other.json()["choices"], expected["choices"]);
    let error = failed.error(500);
    assert_eq!(error["code"], "step_failed");
    assert!(error["message"].as_str().unwrap().contains("is NaN or infinite"));
    assert_eq!(rig.post(CHAT, chat("x")).await.status, 200);
    let metrics = rig.get("/metrics").await.text;
    for line in ["plimsoll_steps_failed_total", "plimsoll_requests_failed_total"] {
        let count = u8::from(line.contains("requests"));
        let line = format!("{line}{{model_name=\"sim\",engine=\"0\"}} {count}");
        assert!(metrics.contains(&line), "{line}");
    }
    assert!(rig.get("/health").await.json()["last_error"].is_null());
}

#[tokio::test]
async fn a_client_that_does_not_read_is_disconnected() {
    let options = ServerOptions {
        slow_client_timeout: Duration::from_millis(200),
        ..Default::default()
    };
    let rig = Rig::new(Setup {
        options,
        max_model_len: 8192,
        ..Default::default()
    });
    rig.set_step(Duration::from_millis(1));
    let body = with(with(chat("x"), "stream", json!(true)), "max_tokens", json!(8000));
    let response = rig.send(post(CHAT, body.to_string())).await;
    rig.until("the cut", |rig| {
        rig.state.engine().stats().scheduler.cancelled == 1
    })
    .await;
    rig.until_in_flight(0).await;
    drop(response);
}

#[tokio::test]
async fn dropping_a_handler_cancels_its_request() {
    let rig = Rig::new(Setup::default());
    rig.set_step(Duration::from_millis(5));
    let body = with(with(chat("x"), "max_tokens", json!(500)), "n", json!(3)).to_string();
    tokio::select! {
        answer = rig.send(post(CHAT, body)) => panic!("{answer:?} to one that takes seconds"),
        () = rig.until_in_flight(3) => {}
    }
    rig.until_in_flight(0).await;
    assert_eq!(rig.state.engine().stats().scheduler.cancelled, 3);
}

#[tokio::test]
async fn a_stall_shows_in_ready_and_not_in_health() {
    let options = ServerOptions {
        ready_patience: Duration::from_millis(50),
        ..Default::default()
    };
    let rig = Rig::new(Setup {
        options,
        ..Default::default()
    });
    assert_eq!(rig.get("/ready").await.json()["status"], "ready");
    rig.set_step(PATIENCE);
    let response = rig
        .send(post(CHAT, with(chat("x"), "stream", json!(true)).to_string()))
        .await;
    rig.until("a stall", |rig| {
        let stalled = rig.state.engine().health().stalled_for;
        stalled.is_some_and(|stalled| stalled > Duration::from_millis(50))
    })
    .await;
    let ready = rig.get("/ready").await;
    assert_eq!(
        (ready.status.as_u16(), &ready.json()["status"]),
        (503, &json!("stalled"))
    );
    assert_eq!(rig.get("/health").await.status, 200);
    rig.set_step(Duration::ZERO);
    drop(response);
}

#[tokio::test]
async fn a_panic_in_a_handler_is_a_500_in_openais_shape() {
    let rig = Rig::new(Setup::default());
    rig.script.meters_panic.store(true, Ordering::SeqCst);
    assert_eq!(rig.get("/memory").await.error(500)["code"], "internal_error");
    assert_eq!(rig.get("/version").await.status, 200);
}

/// A slow driver delays only requests that need it, even with few threads.
#[tokio::test]
async fn health_answers_while_the_device_does_not() {
    let rig = Rig::new(Setup::default());
    rig.script.meters_hold.store(true, Ordering::SeqCst);
    let (memory, metrics, ()) = tokio::join!(rig.get("/memory"), rig.get("/metrics"), async {
        rig.until("a question", |rig| {
            rig.script.meters_waiting.load(Ordering::SeqCst) == 1
        })
        .await;
        assert_eq!(rig.get("/health").await.status, 200);
        assert_eq!(rig.get("/ready").await.status, 200);
    });
    // Nor those forever: metrics matter most while a device hangs.
    assert_eq!((memory.status.as_u16(), metrics.status.as_u16()), (200, 200));
    assert!(metrics.text.contains("plimsoll_engine_stalled_seconds"));
    assert_eq!(
        rig.script.meters_waiting.load(Ordering::SeqCst),
        1,
        "one thread is lost to it"
    );
    rig.script.meters_hold.store(false, Ordering::SeqCst);
}

/// The process's own counters alone would show other processes' memory as free.
#[tokio::test]
async fn an_unresponsive_device_shows_its_last_known_memory() {
    let rig = Rig::new(Setup::default());
    let shown = |answer: Answer| {
        let now = answer.json()["now"].take();
        ["reserved", "free", "peers"].map(|part| now[part].as_u64().unwrap())
    };
    let hold = |hold| rig.script.meters_hold.store(hold, Ordering::SeqCst);
    let peers = |bytes| rig.script.peers.store(bytes, Ordering::SeqCst);
    peers(1000);
    hold(true);
    let at_ready = shown(rig.get("/memory").await);
    assert!(
        at_ready[0] > 0 && at_ready[1] > 0 && at_ready[2] == 0,
        "{at_ready:?}"
    );
    hold(false);
    let read = shown(rig.get("/memory").await);
    assert_eq!(read, [at_ready[0], at_ready[1] - 1000, 1000]);
    peers(0);
    hold(true);
    assert_eq!(shown(rig.get("/memory").await), read);
    hold(false);
}
