//! What the tests of this crate share: golden models, plans, a request that drives itself.
#![allow(dead_code, unreachable_pub, reason = "every test binary uses another part")]

pub mod configs;
pub mod convert;
pub mod embeddings;
pub mod experts;
pub mod fp8;
pub mod groups;
pub mod images;
pub mod int4;
pub mod malformed;
pub mod poisoned;
pub mod quantised;
pub mod requests;
pub mod scores;
pub mod smollm2;
pub mod summary;

use std::path::PathBuf;
use std::sync::Arc;

use plimsoll_core::{
    BlockSize, CacheGroups, Executor, GroupTable, KvConfig, PageId, RequestId, Run, RunInput, RunState,
    SampleSpec, SamplingParams, Scratch, StateConfig, StateSlot, StepError, StepLimits, StepPlan, TokenId,
};
use plimsoll_device::Budget;
use plimsoll_model::{KvCacheDtype, LoadOptions, Model, Runner};
use serde::Deserialize;

/// Every tiny model of `scripts/make-goldens`.
pub const MODELS: [&str; 50] = [
    "gemma2",
    "gemma3",
    "gemma3-vision",
    "gemma4",
    "gemma4-moe",
    "gemma4-shared",
    "gpt-oss",
    "gpt-oss-mxfp4",
    "llama",
    "llama-auto-round",
    "llama-bias",
    "llama-fp8-block",
    "llama-fp8-channel",
    "llama-fp8-tensor",
    "llama-gptq",
    "llama-int4-group-128",
    "llama-linear-rope",
    "llama3-tied-bf16",
    "ministral3",
    "ministral3-fp8",
    "mistral-window",
    "mistral3-vision",
    "mixtral",
    "phi3-fp8-tensor",
    "phi3-int4-channel",
    "phi3-longrope",
    "phi3-longrope-short",
    "phi3-window",
    "qwen2",
    "qwen2-auto-round-awq",
    "qwen2-fp8-tensor",
    "qwen2-int4-group-32",
    "qwen2-moe",
    "qwen2-window",
    "qwen2_5-vl",
    "qwen3-awq",
    "qwen3-f16",
    "qwen3-fp8-block",
    "qwen3-gptq-order",
    "qwen3-int4-group-128",
    "qwen3-moe",
    "qwen3-moe-awq",
    "qwen3-moe-fp8-block",
    "qwen3-next",
    "qwen3-next-moe",
    "qwen3-sharded",
    "qwen3-vl",
    "qwen3_5-moe",
    "qwen3_5-vision",
    "smollm3",
];

/// Those that GGUF files can hold, which tell of no window that begins at a layer and of no scale of Gemma's attention.
pub const GGUF_MODELS: [&str; 23] = [
    "gemma2",
    "gemma3",
    "gemma4",
    "gemma4-moe",
    "gemma4-shared",
    "gpt-oss",
    "gpt-oss-mxfp4",
    "llama",
    "llama-linear-rope",
    "llama3-tied-bf16",
    "ministral3",
    "mistral-window",
    "mixtral",
    "phi3-longrope",
    "phi3-longrope-short",
    "phi3-window",
    "qwen2",
    "qwen2-moe",
    "qwen3-f16",
    "qwen3-sharded",
    "qwen3_5-moe",
    "qwen3_5-vision",
    "smollm3",
];

/// How far logits may be from transformers', relative.
pub fn tolerance(name: &str) -> f64 {
    match name {
        // Inputs of products in four bits have 15.
        "gpt-oss-mxfp4" => 2e-4,
        // States, experts and gates round in each layer.
        "qwen3-next-moe" | "qwen3_5-moe" => 2e-5,
        _ => 1e-5,
    }
}

/// Those with windows, which all but the shortest prompts leave.
pub const WINDOW_MODELS: [&str; 11] = [
    "gemma2",
    "gemma3",
    "gemma3-vision",
    "gemma4",
    "gemma4-moe",
    "gemma4-shared",
    "gpt-oss",
    "mistral-window",
    "mixtral",
    "phi3-window",
    "qwen2-window",
];

/// Those with experts.
pub const EXPERT_MODELS: [&str; 10] = [
    "gemma4-moe",
    "gpt-oss",
    "gpt-oss-mxfp4",
    "mixtral",
    "qwen2-moe",
    "qwen3-moe",
    "qwen3-moe-awq",
    "qwen3-moe-fp8-block",
    "qwen3-next-moe",
    "qwen3_5-moe",
];

/// Those with golden vectors.
pub const VECTOR_MODELS: [&str; 11] = [
    "gemma2",
    "gemma3",
    "llama",
    "llama-linear-rope",
    "llama3-tied-bf16",
    "mistral-window",
    "qwen2",
    "qwen2-window",
    "qwen3-f16",
    "qwen3-sharded",
    "smollm3",
];

pub const LIMITS: StepLimits = StepLimits {
    max_num_batched_tokens: 256,
    max_num_seqs: 16,
    max_model_len: 128,
};

/// What transformers computed.
#[derive(Deserialize)]
pub struct Golden {
    pub cases: Vec<Case>,
}

impl Golden {
    /// Of all cases together.
    pub fn bf16_error(&self) -> f64 {
        let squares: f64 = self.cases.iter().map(|case| case.bf16_error.powi(2)).sum();
        (squares / self.cases.len() as f64).sqrt()
    }
}

#[derive(Deserialize)]
pub struct Case {
    pub prompt: Vec<TokenId>,
    /// Of the last (at most eight) positions of the prompt.
    pub last_logits: Vec<Vec<f32>>,
    /// How far they are off in bf16, with inputs of layers in eight bits rounded to these too, by norm, relative.
    pub bf16_error: f64,
    pub greedy: Vec<TokenId>,
    /// Of each greedy token over the second best.
    pub leads: Vec<f32>,
}

/// Where this was built, or else the working directory: a binary for GPUs may run on another machine.
pub fn repository() -> PathBuf {
    let built = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
    match built.exists() {
        true => built,
        false => PathBuf::from("."),
    }
}

pub fn golden_path(name: &str) -> PathBuf {
    repository().join("tests/golden").join(name)
}

pub fn golden(name: &str) -> Golden {
    let path = golden_path(name).join("golden.json");
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_str(&text).unwrap()
}

pub fn budget() -> Budget {
    Budget::new(1 << 32)
}

pub fn load(name: &str, kv_cache_dtype: KvCacheDtype) -> Arc<Model> {
    let options = LoadOptions {
        kv_cache_dtype,
        ..Default::default()
    };
    Model::load(&golden_path(name), options, &budget(), &mut |_| ()).unwrap()
}

pub fn state_config(block_size: usize, num_blocks: usize) -> StateConfig {
    StateConfig {
        kv: KvConfig {
            block_size: BlockSize::new(block_size).unwrap(),
            num_pages: num_blocks,
            groups: CacheGroups::default(),
            state_slots: LIMITS.max_num_seqs,
        },
        scratch: Scratch::Growable,
        canary_bytes: 0,
    }
}

pub fn runner(model: &Arc<Model>, block_size: usize, num_blocks: usize) -> Runner {
    model
        .build_state(
            &state_config(block_size, num_blocks),
            &LIMITS,
            &budget(),
            &mut || {},
        )
        .unwrap()
}

/// What computes, on a CPU or a GPU.
pub trait Oracle: Executor {
    /// As [`Runner::logits`].
    fn logits(&mut self, plan: &StepPlan, rows: &[usize]) -> Result<Vec<f32>, StepError>;
}

impl Oracle for Runner {
    fn logits(&mut self, plan: &StepPlan, rows: &[usize]) -> Result<Vec<f32>, StepError> {
        Self::logits(self, plan, rows)
    }
}

/// Greedy sampling.
pub fn greedy_spec(index: usize) -> SampleSpec {
    SampleSpec {
        params: Arc::new(SamplingParams::greedy()),
        seed: 0,
        index,
        history: Vec::new(),
        prompt_len: 0,
        constrained: false,
    }
}

/// The state of a run of `len` tokens that begins at `start`, in one slot. One token is an answer's.
pub fn in_place(slot: u32, start: usize, len: usize) -> RunState {
    RunState {
        before: (start > 0).then_some(StateSlot(slot)),
        after: StateSlot(slot),
        in_chunks: len > 1,
    }
}

pub fn run(request: u64, start: usize, tokens: &[TokenId], blocks: &[PageId]) -> Run {
    Run {
        request: RequestId(request),
        start,
        input: RunInput::Known(tokens.to_vec()),
        images: None,
        tables: vec![GroupTable::whole(blocks.to_vec())],
        // Read where layers have states.
        state: Some(in_place(
            (request % LIMITS.max_num_seqs as u64) as u32,
            start,
            tokens.len(),
        )),
        sample: None,
        score: None,
        pool: None,
    }
}

/// What follows the first `cut` tokens of a prompt, a whole number of blocks: the logits of its last token, and the token that a
/// decode step behind the cut samples. Either of a request whose state stays in one slot, or of one that finds it in a
/// snapshot, which another one has used already.
pub fn continued(
    runner: &mut impl Oracle,
    prompt: &[TokenId],
    (cut, block_size): (usize, usize),
    from_snapshot: bool,
) -> (Vec<f32>, Option<TokenId>) {
    let table = [blocks(0..(cut / block_size) as u32), blocks(20..30)].concat();
    let mut logits = Vec::new();
    let mut token = None;
    for len in [prompt.len() - cut, 1] {
        let prefix = Run {
            state: Some(in_place(5, 0, cut)),
            ..run(1, 0, &prompt[..cut], &table)
        };
        runner.logits(&plan(vec![prefix]), &[]).unwrap();
        let after = if from_snapshot { vec![6, 7] } else { vec![5] };
        for after in after {
            let mut rest = run(2, cut, &prompt[cut..cut + len], &table);
            rest.state = Some(RunState {
                before: Some(StateSlot(5)),
                after: StateSlot(after),
                in_chunks: len > 1,
            });
            if len > 1 {
                logits = runner.logits(&plan(vec![rest]), &[len - 1]).unwrap();
            } else {
                rest.sample = Some(greedy_spec(0));
                let output = runner.execute(&plan(vec![rest])).unwrap();
                token = output.samples[0].as_ref().map(|sampled| sampled.token);
            }
        }
    }
    (logits, token)
}

pub fn plan(runs: Vec<Run>) -> StepPlan {
    StepPlan {
        runs,
        ..Default::default()
    }
}

pub fn blocks(range: std::ops::Range<u32>) -> Vec<PageId> {
    range.map(PageId).collect()
}

/// Continues `prompt` alone in `runner`: the whole prompt in one step, then token after token.
pub fn greedy_alone(
    runner: &mut impl Executor,
    prompt: &[TokenId],
    blocks: &[PageId],
    len: usize,
) -> Vec<TokenId> {
    let mut out = Vec::new();
    let mut step = run(7, 0, prompt, blocks);
    for index in 0..len {
        step.sample = Some(greedy_spec(index));
        let token = runner.execute(&plan(vec![step])).unwrap().samples[0]
            .as_ref()
            .unwrap()
            .token;
        out.push(token);
        step = run(7, prompt.len() + index, &[token], blocks);
    }
    out
}

/// Distance by norm, relative to the expected.
pub fn relative_error(found: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let square = |x: f32| f64::from(x) * f64::from(x);
    let difference: f64 = found.iter().zip(expected).map(|(a, b)| square(a - b)).sum();
    let norm: f64 = expected.iter().map(|&x| square(x)).sum();
    (difference / norm).sqrt()
}
