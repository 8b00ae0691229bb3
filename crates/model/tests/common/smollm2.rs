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
    /// KL divergence from the model in bfloat16 behind each token of prompt and answer, in nats; of quantised models.
    #[serde(default)]
    pub divergence: Vec<f64>,
    /// The same with inputs of layers in eight bits rounded to these too, as GPUs round them.
    #[serde(default)]
    pub divergence_of_rounded_inputs: Vec<f64>,
}

impl SmolCase {
    /// The prompt and all of the answer but its last token, which nothing follows.
    pub fn read_text(&self) -> Vec<TokenId> {
        [self.prompt.as_slice(), &self.greedy[..self.greedy.len() - 1]].concat()
    }
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
