//! The default model, and what transformers computed with its weights dequantised to f32.

use std::path::PathBuf;

use plimsoll_core::TokenId;
use serde::Deserialize;

use super::{golden_path, repository};

#[derive(Deserialize)]
struct SmolGolden {
    cases: Vec<SmolCase>,
}

#[derive(Deserialize)]
pub struct SmolCase {
    pub prompt: Vec<TokenId>,
    /// The 64 best after the prompt.
    pub top_tokens: Vec<usize>,
    pub top_logits: Vec<f32>,
    pub greedy: Vec<TokenId>,
    /// Lead of each greedy token over the second best.
    pub leads: Vec<f32>,
}

pub fn cases() -> Vec<SmolCase> {
    let text = std::fs::read_to_string(golden_path("smollm2/golden.json")).unwrap();
    serde_json::from_str::<SmolGolden>(&text).unwrap().cases
}

pub fn file() -> PathBuf {
    let path = repository().join(".cache/models/SmolLM2-135M-Instruct.Q4_1.gguf");
    assert!(
        path.exists(),
        "{} is missing: run scripts/fetch-default-model",
        path.display()
    );
    path
}
