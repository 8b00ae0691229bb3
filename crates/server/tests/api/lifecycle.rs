//! Life cycle: start, shutdown, drain, watchdog.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use plimsoll_engine::Drained;
use plimsoll_server::{ServeError, Server, ServerOptions, Start, StartPhase, StartStatus};
use serde_json::{Value, json};

use crate::rig::{PATIENCE, Rig, Setup};
use crate::{CHAT, chat, with};

/// A start whose status the test sets.
struct At(Mutex<StartStatus>);

impl Start for At {
    fn status(&self) -> StartStatus {
        self.0.lock().unwrap().clone()
    }
}

fn loading() -> StartStatus {
    StartStatus {
        phase: StartPhase::Weights,
        detail: Some("1 GiB of 2 GiB".into()),
        done: 0.2599,
        elapsed: Duration::from_secs(3),
        remaining: None,
    }
}

/// Listens on a real socket; returns its address.
async fn listening(options: &ServerOptions, start: Arc<At>) -> (String, Server) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    (address, Server::listen(listener, "sim", options, start))
}

type Served = tokio::task::JoinHandle<Result<Drained, ServeError>>;

/// Serves on a real socket; returns the address, the shutdown trigger and the result.
async fn served(rig: &Rig) -> (String, tokio::sync::oneshot::Sender<()>, Served) {
    let start = Arc::new(At(Mutex::new(loading())));
    let (address, server) = listening(&ServerOptions::default(), start).await;
    let (stop, stopped) = tokio::sync::oneshot::channel();
    let state = rig.state.clone();
    let server = tokio::spawn(server.serve(state, async {
        // A dropped trigger does not stop it.
        if stopped.await.is_err() {
            std::future::pending().await
        }
    }));
    (address, stop, server)
}

/// Sends one request over its own connection; returns the whole response.
async fn raw(address: &str, request: &str) -> String {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let mut connection = tokio::net::TcpStream::connect(address).await.unwrap();
    connection.write_all(request.as_bytes()).await.unwrap();
    let mut response = String::new();
    tokio::time::timeout(PATIENCE, connection.read_to_string(&mut response))
        .await
        .unwrap()
        .unwrap();
    response
}

fn http(path: &str, body: &str) -> String {
    let length = body.len();
    let head = "Host: x\r\nConnection: close\r\nContent-Type: application/json";
    format!("POST {path} HTTP/1.1\r\n{head}\r\nContent-Length: {length}\r\n\r\n{body}")
}

fn get(path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
}

/// Status and JSON of a response.
fn parsed(response: &str) -> (u16, Value) {
    let (head, body) = response.split_once("\r\n\r\n").expect(response);
    (
        head[9..12].parse().unwrap(),
        serde_json::from_str(body).expect(body),
    )
}

#[tokio::test]
async fn a_shutdown_drains_and_refuses() {
    let rig = Rig::new(Setup::default());
    rig.set_step(Duration::from_millis(10));
    let (address, stop, server) = served(&rig).await;
    let body = with(with(chat("x"), "stream", json!(true)), "max_tokens", json!(100)).to_string();
    let streaming = tokio::spawn({
        let address = address.clone();
        async move { raw(&address, &http(CHAT, &body)).await }
    });
    rig.until_in_flight(1).await;
    stop.send(()).unwrap();
    rig.until("the drain", |rig| {
        !rig.state.engine().health().is_moving(PATIENCE)
    })
    .await;
    let refused = raw(&address, &http(CHAT, &chat("x").to_string())).await;
    assert!(refused.starts_with("HTTP/1.1 503"), "{refused}");
    assert!(refused.contains("shutting_down"), "{refused}");
    let refused = refused.to_lowercase();
    assert!(
        refused.contains("\r\nretry-after: 1\r\n") && refused.contains("\r\nconnection: close\r\n"),
        "{refused}"
    );
    assert_eq!(rig.get("/ready").await.json()["status"], "draining");
    assert_eq!(rig.get("/health").await.status, 200);
    assert!(streaming.await.unwrap().contains("data: [DONE]"));
    assert_eq!(server.await.unwrap().unwrap(), Drained::Complete);
    assert!(
        tokio::net::TcpStream::connect(&address).await.is_err(),
        "the port is closed"
    );
}

#[tokio::test]
async fn a_shutdown_does_not_wait_for_clients_that_do_not_read() {
    let options = ServerOptions {
        drain_timeout: Duration::from_millis(300),
        ..Default::default()
    };
    let rig = Rig::new(Setup {
        options,
        ..Default::default()
    });
    rig.set_step(Duration::from_millis(20));
    let (address, stop, server) = served(&rig).await;
    let body = with(with(chat("x"), "stream", json!(true)), "max_tokens", json!(1000)).to_string();
    let mut idle = tokio::net::TcpStream::connect(&address).await.unwrap();
    tokio::io::AsyncWriteExt::write_all(&mut idle, http(CHAT, &body).as_bytes())
        .await
        .unwrap();
    rig.until_in_flight(1).await;
    let began = Instant::now();
    stop.send(()).unwrap();
    assert_eq!(server.await.unwrap().unwrap(), Drained::Failed(1));
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
}

/// The port answers immediately, and connections survive the start.
#[tokio::test]
async fn a_start_reports_progress_and_refuses_the_rest() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let start = Arc::new(At(Mutex::new(loading())));
    let rig = Rig::new(Setup::default());
    let (address, server) = listening(&ServerOptions::default(), Arc::clone(&start)).await;
    let ready = raw(&address, &get("/ready")).await;
    assert!(ready.to_lowercase().contains("\r\nretry-after: 5\r\n"), "{ready}");
    let (status, body) = parsed(&ready);
    assert_eq!(
        (status, body),
        (
            503,
            json!({
                "status": "starting", "phase": "weights", "detail": "1 GiB of 2 GiB", "percent": 25.9,
                "elapsed_seconds": 3.0, "estimated_seconds": null,
            })
        )
    );
    let health = parsed(&raw(&address, &get("/health")).await);
    assert_eq!((health.0, &health.1["status"]), (200, &json!("starting")));
    let page = raw(&address, &get("/metrics")).await;
    let line = "plimsoll_start_progress_ratio{model_name=\"sim\",engine=\"0\",phase=\"weights\"} 0.2599";
    assert!(page.starts_with("HTTP/1.1 200") && page.contains(line), "{page}");

    for (path, part) in [
        ("/", "assets/chat.js"),
        ("/docs", "assets/docs.js"),
        ("/assets/start.js", "POLL_MS"),
    ] {
        let page = raw(&address, &get(path)).await;
        assert!(page.starts_with("HTTP/1.1 200") && page.contains(part), "{page}");
    }

    start.0.lock().unwrap().remaining = Some(Duration::from_millis(2500));
    for request in [
        http(CHAT, &chat("x").to_string()),
        get("/v1/models"),
        get("/nothing"),
    ] {
        let refused = raw(&address, &request).await;
        assert!(
            refused.to_lowercase().contains("\r\nretry-after: 3\r\n"),
            "{refused}"
        );
        assert!(refused.contains("\r\nx-request-id: "), "{refused}");
        let (status, body) = parsed(&refused);
        assert_eq!((status, &body["error"]["code"]), (503, &json!("starting")));
        let message = body["error"]["message"].as_str().unwrap();
        assert!(
            message.contains("weights, 25.9 %") && message.contains("/ready"),
            "{message}"
        );
    }
    let anthropic = parsed(&raw(&address, &http("/v1/messages", "{}")).await);
    assert_eq!((anthropic.0, &anthropic.1["type"]), (503, &json!("error")));

    let mut connection = tokio::net::TcpStream::connect(&address).await.unwrap();
    let mut answer = async || {
        connection
            .write_all(b"GET /ready HTTP/1.1\r\nHost: x\r\n\r\n")
            .await
            .unwrap();
        let mut bytes = [0; 4096];
        let count = connection.read(&mut bytes).await.unwrap();
        String::from_utf8_lossy(&bytes[..count]).into_owned()
    };
    assert!(answer().await.starts_with("HTTP/1.1 503"));
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let server = tokio::spawn(server.serve(rig.state.clone(), async {
        let _ = stopped.await;
    }));
    rig.until("the handover", |_| !server.is_finished()).await;
    let began = Instant::now();
    while !answer().await.starts_with("HTTP/1.1 200") {
        assert!(began.elapsed() < PATIENCE, "it is never ready");
    }
    drop(stop);
    assert_eq!(server.await.unwrap().unwrap(), Drained::Complete);
}

/// `POST /admin/drain` shuts down; queued requests were accepted and are answered too.
#[tokio::test]
async fn a_drain_by_request_finishes_running_and_queued_requests() {
    let options = ServerOptions {
        enable_admin_api: true,
        ..Default::default()
    };
    let rig = Rig::new(Setup {
        max_num_seqs: 1,
        options,
        ..Default::default()
    });
    // No request finishes before the drain.
    rig.set_step(Duration::from_millis(500));
    let (address, _stop, server) = served(&rig).await;
    let answers: Vec<_> = (0..3)
        .map(|_| {
            let (address, body) = (address.clone(), chat("x").to_string());
            tokio::spawn(async move { raw(&address, &http(CHAT, &body)).await })
        })
        .collect();
    rig.until_in_flight(3).await;
    for wrong in [
        http("/admin/drain", r#"{"timeout": 1}"#),
        http("/admin/drain?timeout=1", ""),
    ] {
        assert_eq!(parsed(&raw(&address, &wrong).await).0, 400);
    }
    let page = http("/admin/drain", "{}").replace("Host: x", "Host: x\r\nOrigin: http://evil.example");
    let (status, body) = parsed(&raw(&address, &page).await);
    assert_eq!(
        (status, &body["error"]["code"]),
        (403, &json!("origin_not_allowed"))
    );
    assert_eq!(rig.get("/ready").await.status, 200, "nothing was asked for");

    let (status, body) = parsed(&raw(&address, &http("/admin/drain", "")).await);
    assert_eq!((status, &body["status"]), (202, &json!("draining")));
    assert_eq!(body["timeout_seconds"], 30.0);
    assert_eq!(body["requests_in_flight"], 3);
    assert_eq!(rig.get("/ready").await.json()["status"], "draining");
    rig.set_step(Duration::ZERO);
    for answer in answers {
        let (status, body) = parsed(&answer.await.unwrap());
        assert_eq!((status, &body["usage"]["completion_tokens"]), (200, &json!(20)));
    }
    assert_eq!(server.await.unwrap().unwrap(), Drained::Complete);
}

#[tokio::test]
async fn the_admin_api_is_off_by_default() {
    let rig = Rig::new(Setup::default());
    assert_eq!(rig.post("/admin/drain", json!({})).await.status, 404);
    assert_eq!(rig.get("/ready").await.status, 200);
}

/// A hung step ends the server, after clients get an error.
#[tokio::test]
async fn the_watchdog_ends_a_server_whose_step_hangs() {
    let options = ServerOptions {
        watchdog_timeout: Some(Duration::from_secs(2)),
        ..Default::default()
    };
    let rig = Rig::new(Setup {
        options,
        ..Default::default()
    });
    let (address, _stop, server) = served(&rig).await;
    // Together longer than the watchdog's timeout, but each of the 20 steps is short.
    rig.set_step(Duration::from_millis(110));
    assert_eq!(rig.post(CHAT, chat("x")).await.status, 200);
    rig.set_step(Duration::from_secs(60));
    // The meters may hang too; the watchdog logs them.
    rig.script.meters_hold.store(true, Ordering::SeqCst);
    let request = http(CHAT, &with(chat("x"), "stream", json!(true)).to_string());
    let began = Instant::now();
    let (whole, streamed, ended) = tokio::join!(rig.post(CHAT, chat("x")), raw(&address, &request), server);
    let Err(ServeError::Stalled(why)) = ended.unwrap() else {
        panic!("it hangs and serves on");
    };
    assert!(began.elapsed() < Duration::from_secs(50), "{:?}", began.elapsed());
    assert!(
        why.contains("no step had ended for") && why.contains("rows="),
        "{why}"
    );
    assert!(whole.error(500)["message"].as_str().unwrap().contains("watchdog"));
    assert!(
        streamed.contains("watchdog") && streamed.contains("data: [DONE]"),
        "{streamed}"
    );
    assert_eq!(rig.get("/health").await.status, 503);
    rig.script.meters_hold.store(false, Ordering::SeqCst);
}
