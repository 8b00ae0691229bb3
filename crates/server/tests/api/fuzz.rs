//! The fuzz target of the request types: any bytes as the body of any endpoint, through the whole server. `fuzz/` runs it under
//! libFuzzer.

use std::cell::LazyCell;

use serde_json::{Map, Value};
use tokio::runtime::Runtime;

use crate::rig::{Rig, Setup};

/// A path to requests that it accepts.
pub fn valid() -> Map<String, Value> {
    serde_json::from_str(include_str!("../../../../tests/http/requests.json")).expect("a file of ours")
}

/// All example requests, each with the byte that selects its endpoint.
pub fn corpus() -> Vec<String> {
    let valid = valid();
    let bodies = valid.values().enumerate().flat_map(|(i, bodies)| {
        let bodies = bodies.as_array().expect("a list");
        bodies
            .iter()
            .map(move |body| format!("{}{body}", char::from(i as u8)))
    });
    bodies.collect()
}

/// Names and values from all requests, to combine fields with endpoints that do not have them.
pub fn words() -> Vec<String> {
    let odd = [
        "{",
        "}",
        "[",
        "]",
        ",",
        "\"",
        "null",
        "1e400",
        "-1",
        "\u{0}",
        "[[",
        "\\ud800",
        "999999999999999999999999999999",
    ];
    let mut words: Vec<String> = odd.map(str::to_owned).into();
    for bodies in valid().values() {
        for body in bodies.as_array().expect("a list") {
            let fields = body.as_object().expect("an object");
            words.extend(
                fields
                    .iter()
                    .map(|(name, value)| format!("\"{name}\": {value}, ")),
            );
        }
    }
    words
}

struct Server {
    runtime: Runtime,
    rig: Rig,
    paths: Vec<String>,
}

thread_local! {
    static SERVER: LazyCell<Server> = LazyCell::new(|| {
        let runtime = Runtime::new().expect("threads");
        // Keeps accepted requests short.
        let setup = Setup { max_model_len: 512, ..Setup::default() };
        let rig = runtime.block_on(async { Rig::new(setup) });
        Server { runtime, rig, paths: valid().keys().cloned().collect() }
    });
}

/// The first byte selects the endpoint. The response must not be a 5xx.
pub fn request(data: &[u8]) {
    let Some((&first, body)) = data.split_first() else {
        return;
    };
    SERVER.with(|server| {
        let path = &server.paths[usize::from(first) % server.paths.len()];
        server.runtime.block_on(async {
            let answer = server.rig.post_raw(path, body.to_vec()).await;
            let status = answer.status.as_u16();
            let failed = status >= 500 || answer.text.contains("\"server_error\"");
            assert!(!failed, "{path}: {}", answer.text);
            if status >= 400 && path.starts_with("/v1/messages") {
                answer.anthropic_error(status);
            } else if status >= 400 {
                answer.error(status);
            }
            server.rig.until_in_flight(0).await;
        });
    });
}
