//! Models and states on the GPU.

use std::path::Path;
use std::sync::Arc;

use plimsoll_core::{KvConfig, Scratch, StateConfig, StepError, StepLimits, StepPlan};
use plimsoll_device::cuda::Gpu;
use plimsoll_kernels::cuda::LinearWays;
use plimsoll_model::cuda::{GpuModel, GpuOptions, GpuRunner};
use plimsoll_model::{LoadFormat, LoadOptions};

use crate::common::{Oracle, golden_path, state_config};

/// The tiny models whose heads have a size that the kernels know. Random requests are those of a model's place here, so new ones come last.
pub(crate) const MODELS: [&str; 36] = [
    "gemma2",
    "gemma3",
    "gemma3-vision",
    "gemma4",
    "gemma4-shared",
    "llama",
    "llama-auto-round",
    "llama-fp8-block",
    "llama-fp8-channel",
    "llama-gptq",
    "llama-int4-group-128",
    "llama3-tied-bf16",
    "ministral3",
    "ministral3-fp8",
    "mistral-window",
    "phi3-fp8-tensor",
    "phi3-int4-channel",
    "phi3-longrope",
    "phi3-longrope-short",
    "phi3-window",
    "qwen2",
    "qwen2-fp8-tensor",
    "qwen2-int4-group-32",
    "qwen2-window",
    "qwen3-awq",
    "qwen3-f16",
    "qwen3-fp8-block",
    "qwen3-gptq-order",
    "qwen3-sharded",
    "qwen3-vl",
    "qwen3_5-vision",
    "smollm3",
    "llama-fp8-tensor",
    "qwen2-auto-round-awq",
    "qwen3-int4-group-128",
    "llama-bias",
];

/// Those of which some layers keep a state and others have experts. Their text is not compared where rows are computed in other
/// company: rounding may send a token to another expert.
pub(crate) const HYBRID_EXPERT_MODELS: [&str; 2] = ["qwen3-next-moe", "qwen3_5-moe"];

/// All of which some layers keep a state.
pub(crate) const HYBRID_MODELS: [&str; 3] =
    ["qwen3_5-vision", HYBRID_EXPERT_MODELS[0], HYBRID_EXPERT_MODELS[1]];

pub(crate) const BLOCK_SIZES: [usize; 3] = [8, 16, 32];

/// Contexts of more than one tile of keys, batches between and on the sizes of graphs.
pub(crate) const LIMITS: StepLimits = StepLimits {
    max_num_batched_tokens: 512,
    max_num_seqs: 24,
    max_model_len: 256,
};

/// What was measured; a passing test shows it with `--nocapture`.
#[expect(clippy::print_stdout, reason = "measurements, when asked for")]
pub(crate) fn report(what: std::fmt::Arguments<'_>) {
    println!("{what}");
}

/// The first GPU.
pub(crate) fn gpu() -> Gpu {
    Gpu::open(0).expect("an NVIDIA GPU")
}

pub(crate) fn load(gpu: &Gpu, name: &str) -> Arc<GpuModel> {
    load_file(gpu, &golden_path(name))
}

pub(crate) fn load_file(gpu: &Gpu, path: &Path) -> Arc<GpuModel> {
    GpuModel::load(path, LoadOptions::default(), gpu, &mut |_| ()).unwrap()
}

/// A model of this configuration with random weights.
pub(crate) fn load_dummy(gpu: &Gpu, config: &str) -> Arc<GpuModel> {
    load_dummy_with(gpu, config, None)
}

/// The same with linear layers as they were measured earlier.
pub(crate) fn load_dummy_with(gpu: &Gpu, config: &str, linear_ways: Option<LinearWays>) -> Arc<GpuModel> {
    let directory = tempfile::TempDir::new().unwrap();
    std::fs::write(directory.path().join("config.json"), config).unwrap();
    let options = LoadOptions {
        format: LoadFormat::Dummy { seed: 1 },
        linear_ways,
        ..Default::default()
    };
    GpuModel::load(directory.path(), options, gpu, &mut |_| ()).unwrap()
}

/// How to build a state.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Setup {
    pub(crate) block_size: usize,
    /// Tokens that fit the cache.
    pub(crate) tokens: usize,
    pub(crate) enforce_eager: bool,
}

impl Setup {
    pub(crate) fn num_blocks(&self) -> usize {
        self.tokens / self.block_size
    }

    pub(crate) fn build(&self, model: &Arc<GpuModel>) -> GpuRunner {
        self.build_for(model, &LIMITS, Scratch::Growable)
    }

    pub(crate) fn build_for(
        &self,
        model: &Arc<GpuModel>,
        limits: &StepLimits,
        scratch: Scratch,
    ) -> GpuRunner {
        let kv = KvConfig {
            state_slots: limits.max_num_seqs,
            ..state_config(self.block_size, self.num_blocks()).kv
        };
        self.build_state(model, kv, limits, scratch)
    }

    /// Over a KV cache of this form.
    pub(crate) fn build_over(&self, model: &Arc<GpuModel>, kv: KvConfig) -> GpuRunner {
        self.build_state(model, kv, &LIMITS, Scratch::Growable)
    }

    fn build_state(
        &self,
        model: &Arc<GpuModel>,
        kv: KvConfig,
        limits: &StepLimits,
        scratch: Scratch,
    ) -> GpuRunner {
        let config = StateConfig {
            kv,
            scratch,
            ..state_config(self.block_size, 0)
        };
        let options = GpuOptions {
            enforce_eager: self.enforce_eager,
        };
        model
            .build_state(&config, limits, options, &mut |_, _| {})
            .unwrap()
    }

    /// Every block size, with graphs and without.
    pub(crate) fn all(tokens: usize) -> impl Iterator<Item = Self> {
        BLOCK_SIZES.into_iter().flat_map(move |block_size| {
            [false, true].map(|enforce_eager| Self {
                block_size,
                tokens,
                enforce_eager,
            })
        })
    }

    /// Blocks of one size, with graphs and without. Tests of many models give each its turn, so that every size has a third of them: what a size
    /// changes is tested with the kernels, and all sizes of all models take three times as long.
    pub(crate) fn in_turn(turn: usize, tokens: usize) -> impl Iterator<Item = Self> {
        let block_size = BLOCK_SIZES[turn % BLOCK_SIZES.len()];
        Self::all(tokens).filter(move |setup| setup.block_size == block_size)
    }

    /// That without graphs.
    pub(crate) fn eager_in_turn(turn: usize, tokens: usize) -> Self {
        let mut setups = Self::in_turn(turn, tokens);
        setups.find(|setup| setup.enforce_eager).expect("one is")
    }
}

impl Oracle for GpuRunner {
    fn logits(&mut self, plan: &StepPlan, rows: &[usize]) -> Result<Vec<f32>, StepError> {
        Self::logits(self, plan, rows)
    }
}
