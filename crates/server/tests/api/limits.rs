//! API keys, rate limits, timeouts, and the records of requests.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::{Body, to_bytes};
use axum::http::{Request, Response};
use plimsoll_server::{ApiKey, ApiKeys, KeyLimits, RequestRecord, RequestSink, ServerOptions};
use serde_json::{Value, json};

use crate::rig::{PATIENCE, Rig, Setup, post};
use crate::{CHAT, chat, with};

fn rig(options: ServerOptions) -> Rig {
    Rig::new(Setup {
        options,
        ..Default::default()
    })
}

/// Options with the keys of alice and bob.
fn keyed() -> ServerOptions {
    let key = |name, secret| ApiKey::new(Some(name), secret).unwrap();
    ServerOptions {
        keys: ApiKeys::new(vec![key("alice", "secret-a"), key("bob", "secret-b")]),
        ..Default::default()
    }
}

fn by(key: &str, body: &Value) -> Request<Body> {
    let mut request = post(CHAT, body.to_string());
    let value = format!("Bearer {key}").parse().unwrap();
    request.headers_mut().insert("authorization", value);
    request
}

fn short() -> Value {
    with(chat("x"), "max_tokens", json!(2))
}

fn long() -> Value {
    let body = with(chat("x"), "max_tokens", json!(900));
    with(with(body, "ignore_eos", json!(true)), "stream", json!(true))
}

async fn json(response: Response<Body>) -> Value {
    let bytes = tokio::time::timeout(PATIENCE, to_bytes(response.into_body(), usize::MAX)).await;
    serde_json::from_slice(&bytes.unwrap().unwrap()).unwrap()
}

async fn code(response: Response<Body>, status: u16) -> String {
    assert_eq!(response.status(), status);
    json(response).await["error"]["code"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn keys_are_required_if_there_are_any() {
    let rig = rig(keyed());
    let missing = rig.post(CHAT, short()).await;
    assert_eq!(missing.headers["www-authenticate"], "Bearer");
    let error = missing.error(401);
    assert_eq!(
        (&error["type"], &error["code"]),
        (&json!("invalid_request_error"), &json!("invalid_api_key"))
    );
    let wrong = rig.send(by("secret-c", &short())).await;
    assert_eq!(wrong.status(), 401);
    let wrong = json(wrong).await.to_string();
    assert!(!wrong.contains("secret-c"), "{wrong}");
    assert_eq!(rig.send(by("secret-b", &short())).await.status(), 200);
    for closed in ["/v1/models", "/memory", "/version", "/sleep", "/no/such/path"] {
        assert_eq!(rig.get(closed).await.status, 401, "{closed}");
    }
    for open in ["/health", "/ready", "/metrics"] {
        assert_eq!(rig.get(open).await.status, 200, "{open}");
    }
}

#[tokio::test]
async fn metrics_can_require_a_key() {
    let rig = rig(ServerOptions {
        metrics_require_key: true,
        ..keyed()
    });
    assert_eq!(rig.get("/metrics").await.status, 401);
    assert_eq!(rig.get("/health").await.status, 200);
}

#[tokio::test]
async fn each_key_has_its_own_rate() {
    let rig = rig(ServerOptions {
        key_limits: KeyLimits {
            requests_per_minute: Some(2),
            ..Default::default()
        },
        ..keyed()
    });
    for left in ["1", "0"] {
        let response = rig.send(by("secret-a", &short())).await;
        assert_eq!(response.status(), 200);
        assert_eq!(response.headers()["x-ratelimit-limit-requests"], "2");
        assert_eq!(response.headers()["x-ratelimit-remaining-requests"], left);
    }
    let refused = rig.send(by("secret-a", &short())).await;
    let after: u64 = refused.headers()["retry-after"]
        .to_str()
        .unwrap()
        .parse()
        .unwrap();
    assert!((1..=30).contains(&after), "{after}");
    assert_eq!(code(refused, 429).await, "rate_limit_exceeded");
    assert_eq!(rig.send(by("secret-b", &short())).await.status(), 200);
}

#[tokio::test]
async fn every_token_is_counted() {
    let rig = rig(ServerOptions {
        key_limits: KeyLimits {
            tokens_per_minute: Some(50),
            ..Default::default()
        },
        ..keyed()
    });
    let body = with(
        with(chat("x"), "max_tokens", json!(60)),
        "ignore_eos",
        json!(true),
    );
    let first = rig.send(by("secret-a", &body)).await;
    assert_eq!(first.headers()["x-ratelimit-remaining-tokens"], "50");
    json(first).await;
    let refused = rig.send(by("secret-a", &short())).await;
    assert!(refused.headers().contains_key("retry-after"));
    assert_eq!(code(refused, 429).await, "rate_limit_exceeded");
    assert_eq!(rig.send(by("secret-b", &short())).await.status(), 200);
}

#[tokio::test]
async fn tokens_are_counted_while_streaming() {
    let rig = rig(ServerOptions {
        key_limits: KeyLimits {
            tokens_per_minute: Some(60),
            ..Default::default()
        },
        ..keyed()
    });
    let stream = rig.send(by("secret-a", &long())).await;
    assert_eq!(stream.status(), 200);
    let begin = std::time::Instant::now();
    loop {
        // A request that generates nothing needs no tokens.
        let look = Request::get("/v1/models").header("x-api-key", "secret-a");
        let look = rig.send(look.body(Body::empty()).unwrap()).await;
        assert_eq!(look.status(), 200);
        if look.headers()["x-ratelimit-remaining-tokens"] == "0" {
            break;
        }
        assert!(begin.elapsed() < PATIENCE, "a stream that goes on costs nothing");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let refused = rig.send(by("secret-a", &short())).await;
    assert_eq!(refused.headers()["x-ratelimit-limit-tokens"], "60");
    assert_eq!(code(refused, 429).await, "rate_limit_exceeded");
    // The stream is not read, so it cannot be over.
    drop(stream);
}

#[tokio::test]
async fn a_stream_counts_until_it_is_read_or_dropped() {
    let rig = rig(ServerOptions {
        key_limits: KeyLimits {
            concurrent_requests: Some(1),
            ..Default::default()
        },
        ..keyed()
    });
    rig.set_step(Duration::from_millis(5));
    let stream = rig.send(by("secret-a", &long())).await;
    assert_eq!(stream.status(), 200);
    assert_eq!(
        code(rig.send(by("secret-a", &short())).await, 429).await,
        "rate_limit_exceeded"
    );
    assert_eq!(rig.send(by("secret-b", &short())).await.status(), 200);
    drop(stream);
    rig.until_in_flight(0).await;
    let begin = std::time::Instant::now();
    while rig.send(by("secret-a", &short())).await.status() != 200 {
        assert!(begin.elapsed() < PATIENCE, "the slot was not released");
    }
}

#[tokio::test]
async fn no_key_fills_the_queue_alone() {
    let rig = Rig::new(Setup {
        max_num_seqs: 1,
        max_queue: 17,
        options: keyed(),
        ..Default::default()
    });
    rig.set_step(Duration::from_millis(20));
    let mut streams = Vec::new();
    let refused = loop {
        let stream = rig.send(by("secret-a", &long())).await;
        if stream.status() != 200 {
            break stream;
        }
        streams.push(stream);
    };
    assert_eq!(streams.len(), 16, "two of eighteen places are for others");
    assert_eq!(code(refused, 429).await, "queue_full");
    assert_eq!(rig.send(by("secret-b", &long())).await.status(), 200);
}

#[tokio::test]
async fn the_queue_timeout_applies() {
    let rig = Rig::new(Setup {
        max_num_seqs: 1,
        options: ServerOptions {
            queue_timeout: Some(Duration::from_millis(100)),
            ..Default::default()
        },
        ..Default::default()
    });
    rig.set_step(Duration::from_millis(5));
    let running = rig.send(post(CHAT, long().to_string())).await;
    rig.until("a running request", |rig| {
        rig.state.engine().stats().scheduler.running == 1
    })
    .await;
    let refused = rig.post(CHAT, short()).await;
    assert!(refused.headers.contains_key("retry-after"));
    assert_eq!(refused.error(429)["code"], "queue_timeout");
    // It left the queue, and the running one continues.
    rig.until_in_flight(1).await;
    drop(running);
}

#[tokio::test]
async fn a_long_first_step_is_not_queueing() {
    let rig = rig(ServerOptions {
        queue_timeout: Some(Duration::from_secs(2)),
        ..Default::default()
    });
    rig.set_step(Duration::from_secs(3));
    assert_eq!(
        rig.post(CHAT, with(chat("x"), "max_tokens", json!(1)))
            .await
            .status,
        200
    );
}

#[tokio::test]
async fn a_deadline_ends_the_request_and_frees_its_kv() {
    let records = Arc::new(Records::default());
    let rig = rig(ServerOptions {
        sinks: vec![Arc::clone(&records) as _],
        ..ServerOptions::default()
    });
    rig.set_step(Duration::from_millis(10));
    let whole = with(with(long(), "stream", json!(false)), "timeout", json!(0.15));
    let late = rig.post(CHAT, whole).await.error(504);
    assert_eq!(late["code"], "deadline_exceeded");
    assert_eq!(records.next().await.error, Some("deadline_exceeded"));
    rig.until_in_flight(0).await;
    rig.until("free blocks", |rig| {
        rig.state.engine().stats().scheduler.pages_used == 0
    })
    .await;
    let events = rig
        .post(CHAT, with(long(), "timeout", json!(0.15)))
        .await
        .events();
    assert!(events.len() > 1, "some tokens came in time: {events:?}");
    assert_eq!(events.last().unwrap()["error"]["code"], "deadline_exceeded");
    // Its status was sent long before.
    let record = records.next().await;
    assert_eq!(
        (record.status.as_u16(), record.error),
        (200, Some("deadline_exceeded"))
    );
    rig.until_in_flight(0).await;
    assert_eq!(rig.state.engine().stats().scheduler.cancelled, 2);
    // The header works for every endpoint; invalid values in either are refused by name.
    let mut request = post(CHAT, with(long(), "stream", json!(false)).to_string());
    request
        .headers_mut()
        .insert("x-request-timeout", "0.1".parse().unwrap());
    assert_eq!(code(rig.send(request).await, 504).await, "deadline_exceeded");
    for wrong in [json!(0), json!(-1), json!("soon")] {
        let error = rig.post(CHAT, with(short(), "timeout", wrong)).await.error(400);
        assert_eq!(error["param"], "timeout");
    }
}

#[tokio::test]
async fn priorities_need_the_scheduling_policy() {
    let body = with(short(), "priority", json!(3));
    let fcfs = rig(ServerOptions::default());
    assert_eq!(
        fcfs.post(CHAT, body.clone()).await.error(400)["param"],
        "priority"
    );
    assert_eq!(
        fcfs.post(CHAT, with(short(), "priority", json!(0))).await.status,
        200
    );
    let priority = rig(ServerOptions {
        priorities: true,
        ..Default::default()
    });
    assert_eq!(priority.post(CHAT, body).await.status, 200);
}

#[tokio::test]
async fn valid_request_ids_are_accepted() {
    let rig = rig(ServerOptions::default());
    let mut request = post(CHAT, short().to_string());
    request
        .headers_mut()
        .insert("x-request-id", "trace-17".parse().unwrap());
    let response = rig.send(request).await;
    assert_eq!(response.headers()["x-request-id"], "trace-17");
    assert_eq!(json(response).await["id"], "chatcmpl-trace-17");
    for insane in ["a b", "\"", &"x".repeat(200)] {
        let mut request = post(CHAT, short().to_string());
        request
            .headers_mut()
            .insert("x-request-id", insane.parse().unwrap());
        let id = rig.send(request).await.headers()["x-request-id"].clone();
        assert_eq!(id.len(), 32, "{id:?}");
    }
}

#[derive(Debug, Default)]
struct Records(Mutex<Vec<RequestRecord>>);

impl RequestSink for Records {
    fn ended(&self, record: &RequestRecord) {
        self.0.lock().unwrap().push(record.clone());
    }
}

impl Records {
    async fn next(&self) -> RequestRecord {
        let begin = std::time::Instant::now();
        loop {
            if let Some(record) = self.0.lock().unwrap().pop() {
                return record;
            }
            assert!(begin.elapsed() < PATIENCE, "no record");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}

#[tokio::test]
async fn every_request_leaves_one_record_at_its_end() {
    let records = Arc::new(Records::default());
    let rig = rig(ServerOptions {
        sinks: vec![Arc::clone(&records) as _],
        ..keyed()
    });
    let body = with(with(chat("x"), "max_tokens", json!(5)), "ignore_eos", json!(true));
    let answer = json(rig.send(by("secret-a", &body)).await).await;
    let record = records.next().await;
    assert_eq!((record.status.as_u16(), record.complete), (200, true));
    assert_eq!(
        (record.key.as_deref(), record.path.as_str()),
        (Some("alice"), CHAT)
    );
    let generation = record.generation.unwrap();
    assert_eq!(answer["usage"]["prompt_tokens"], json!(generation.prompt_tokens));
    assert_eq!(
        (generation.output_tokens, generation.finish_reasons),
        (5, vec!["length"])
    );
    assert!(generation.queued.unwrap() <= generation.first_token.unwrap());
    assert!(generation.first_token.unwrap() <= record.duration);

    rig.get("/version").await;
    let record = records.next().await;
    assert_eq!(
        (record.status.as_u16(), record.error),
        (401, Some("invalid_api_key"))
    );
    assert!(record.generation.is_none() && record.key.is_none());

    // Disconnected while streaming, and before the response.
    rig.set_step(Duration::from_millis(5));
    drop(rig.send(by("secret-b", &long())).await);
    let record = records.next().await;
    assert_eq!((record.status.as_u16(), record.complete), (200, false));
    let waiting = rig.send(by("secret-b", &with(long(), "stream", json!(false))));
    assert!(
        tokio::time::timeout(Duration::from_millis(100), waiting)
            .await
            .is_err()
    );
    assert_eq!(records.next().await.status.as_u16(), 499);
    rig.until_in_flight(0).await;
    assert!(records.0.lock().unwrap().is_empty());
}
