//! The API in one process, over a simulated model: successful requests and everything that can go wrong.

mod about;
mod answers;
mod bodies;
mod embeddings;
pub mod fuzz;
mod images;
mod life;
mod lifecycle;
mod limits;
mod memory;
mod metrics;
mod openapi;
mod origins;
mod pages;
mod refusals;
pub mod rig;
mod templates;
mod tool_grammars;
mod tools;
mod unknown;
mod wrong_tools;

use plimsoll_core::{Limits, Request, RequestId, RequestOptions, SamplingOptions};
use plimsoll_sim::{SimModel, oracle};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

/// The simulated model's text for `prompt`.
fn oracle_text(prompt: &str, max_tokens: usize, seed: u64) -> String {
    let options = RequestOptions {
        prompt: prompt.bytes().map(u32::from).collect(),
        max_tokens: Some(max_tokens),
        sampling: SamplingOptions::default(),
        seed,
        ..Default::default()
    };
    let limits = Limits {
        max_model_len: 1 << 20,
        kv_capacity_tokens: 1 << 20,
        vocab_size: 257,
        images: None,
    };
    let request = Request::new(RequestId(0), options, &limits).unwrap();
    let tokens = oracle(&SimModel::text(), &request).0.into_iter();
    String::from_utf8(
        tokens
            .filter(|&token| token < 256)
            .map(|token| token as u8)
            .collect(),
    )
    .unwrap()
}

fn chat(content: &str) -> Value {
    json!({ "messages": [{ "role": "user", "content": content }], "max_tokens": 20, "ignore_eos": true, "seed": 1 })
}

fn with(mut body: Value, field: &str, value: Value) -> Value {
    body[field] = value;
    body
}

/// The text of each choice of a chat stream.
fn streamed(events: &[Value], n: usize) -> Vec<String> {
    let mut texts = vec![String::new(); n];
    for choice in events
        .iter()
        .flat_map(|event| event["choices"].as_array().unwrap())
    {
        texts[choice["index"].as_u64().unwrap() as usize] +=
            choice["delta"]["content"].as_str().unwrap_or("");
    }
    texts
}
