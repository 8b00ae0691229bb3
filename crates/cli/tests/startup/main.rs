//! Real starts on a tiny random model: what a failing allocation, a pinned size and a small budget lead to.

mod advice;
mod ballast;
mod chats;
mod gpu;
mod gpu_neighbours;
mod gpu_ranks;
mod neighbours;
mod plan_cache;
mod prediction;
mod process;
mod ranks;
mod recovery;
mod states;
mod two_servers;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use clap::Parser;
use futures::StreamExt;
use plimsoll_cli::Error;
use plimsoll_cli::args::{Cli, Command};
use plimsoll_cli::backend::{Backend, CpuBackend, CpuRank, GpuBackend, GpuPart, SimBackend};
use plimsoll_cli::plan_cache::PlanCache;
use plimsoll_cli::settings::EngineSettings;
use plimsoll_cli::source::Source;
use plimsoll_cli::start::{Loaded, Serving, StartTimes, Started};
use plimsoll_core::{Event, Request, RequestOptions, SamplingOptions, TokenId};
use plimsoll_device::Budget;
use plimsoll_device::cuda::Gpu;
use plimsoll_engine::{Drained, EngineHandle};
use plimsoll_profiler::{Cause, Phase, ProfileError};
use plimsoll_text::Renderer;

const BUDGET: u64 = 24 << 20;

/// Where the prompts of [`answers`] begin: such that no model of the tests on GPUs, whose texts depend on rounding, has two
/// tokens that nearly tie. Other models or weights need others: those whose texts stay when logits are computed in float32 and in bfloat16.
const STARTS: [TokenId; 4] = [30, 46, 52, 197];

/// Two layers, random weights.
const CONFIG: &str = r#"{
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32", "hidden_act": "silu",
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "vocab_size": 260,
    "max_position_embeddings": 4096, "tie_word_embeddings": false
}"#;

/// Three of four layers have states.
const HYBRID: &str = r#"{
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "dtype": "float32", "hidden_act": "silu",
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6, "vocab_size": 260,
    "max_position_embeddings": 4096, "tie_word_embeddings": false,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 64
}"#;

/// Every second layer has a window, and twice the keys and values of the others: blocks of these are cut into slices.
const WINDOWED: &str = r#"{
    "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "dtype": "float32",
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "global_head_dim": 16,
    "num_global_key_value_heads": 1, "attention_k_eq_v": true, "sliding_window": 20, "rms_norm_eps": 1e-6,
    "vocab_size": 260, "max_position_embeddings": 4096, "tie_word_embeddings": true, "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention",
                    "full_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.25}
    }
}"#;

struct Model {
    dir: tempfile::TempDir,
}

impl Model {
    fn new() -> Self {
        Self::of(CONFIG)
    }

    fn hybrid() -> Self {
        Self::of(HYBRID)
    }

    fn windowed() -> Self {
        Self::of(WINDOWED)
    }

    fn of(config: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("config.json"), config).unwrap();
        Self { dir }
    }

    fn source(&self) -> Source {
        let path: PathBuf = self.dir.path().to_owned();
        Source::Files {
            model: path.clone(),
            tokenizer: path,
        }
    }

    /// A start whose plans are kept nowhere.
    fn start(&self, flags: &str, budget: &Budget) -> Result<Started, Error> {
        start(&self.load(flags, budget, PlanCache::off())?)
    }

    fn load(&self, flags: &str, budget: &Budget, plans: PlanCache) -> Result<Loaded, Error> {
        let settings = self.settings(&format!("{flags} --threads 2"), plans);
        let backend = CpuBackend::new(self.dir.path(), &settings, CpuRank::whole(budget.clone()));
        self.load_on(&settings, Arc::new(backend))
    }

    fn start_on_gpu(&self, flags: &str, gpu: &Gpu) -> Result<Started, Error> {
        let settings = self.settings(flags, PlanCache::off());
        start(&self.load_on(&settings, self.on_gpu(&settings, gpu))?)
    }

    fn on_gpu(&self, settings: &Arc<EngineSettings>, gpu: &Gpu) -> Arc<dyn Backend> {
        Arc::new(GpuBackend::new(
            self.dir.path(),
            settings,
            GpuPart::whole(gpu.clone()),
        ))
    }

    fn load_on(&self, settings: &Arc<EngineSettings>, backend: Arc<dyn Backend>) -> Result<Loaded, Error> {
        Loaded::new(&self.source(), settings, backend, &StartTimes::begin())
    }

    fn settings(&self, flags: &str, plans: PlanCache) -> Arc<EngineSettings> {
        let settings = engine_settings(self.dir.path(), flags);
        Arc::new(EngineSettings { plans, ..settings })
    }
}

/// Proves and spawns, with room for four requests that wait.
fn start(loaded: &Loaded) -> Result<Started, Error> {
    let serving = Serving {
        max_queue: 4,
        ..Serving::default()
    };
    loaded.spawn(loaded.prove()?, serving)
}

fn engine_settings(model: &Path, flags: &str) -> EngineSettings {
    let fixed =
        "--load-format dummy --seed 7 --max-num-seqs 4 --max-num-batched-tokens 32 --max-model-len 256";
    let argv = ["plimsoll", "serve", model.to_str().unwrap()].into_iter();
    // The first of two flags loses.
    let argv = argv
        .chain(fixed.split(' '))
        .chain(flags.split(' ').filter(|flag| !flag.is_empty()));
    match Cli::try_parse_from(argv).unwrap().command {
        Command::Serve(args) => EngineSettings {
            renderer: Renderer::in_process(),
            ..EngineSettings::new(args.engine).unwrap()
        },
        other => panic!("not serve: {other:?}"),
    }
}

/// What the engine answers to four prompts at once.
async fn answers(engine: &EngineHandle) -> Vec<Vec<TokenId>> {
    let ask = |first: TokenId| async move {
        let options = RequestOptions {
            prompt: (first..first + 40).collect(),
            max_tokens: Some(24),
            sampling: SamplingOptions {
                temperature: Some(0.0),
                ..Default::default()
            },
            ..Default::default()
        };
        let request = Request::new(engine.next_id(), options, &engine.limits()).unwrap();
        let events: Vec<_> = engine.submit(request).unwrap().collect().await;
        let token = |event| match event {
            Event::Token(token) => Some(token.token),
            Event::Admitted { .. } | Event::Prompt(_) => None,
            Event::Pooled(_) => panic!("a vector for a text"),
            Event::Failed(error) => panic!("a step failed: {error}"),
        };
        events.into_iter().filter_map(token).collect::<Vec<_>>()
    };
    futures::future::join_all(STARTS.map(ask)).await
}

async fn stop(ready: Started, budget: &Budget) {
    assert_eq!(
        ready.engine.drain(Duration::from_secs(10)).await,
        Drained::Complete
    );
    drop(ready);
    // The engine's thread frees its state as it ends.
    for _ in 0..1000 {
        if budget.meters().reserved == 0 {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("{} bytes are still held after the end", budget.meters().reserved);
}

/// Whichever allocation of a start fails, the end is a smaller server that works, or an error with its own exit code
/// and nothing held.
#[tokio::test(flavor = "multi_thread")]
async fn every_allocation_of_a_start_may_fail() {
    // Weights and probe cannot be made smaller, the final state can.
    for model in [Model::new(), Model::hybrid(), Model::windowed()] {
        let Ends { smaller, refused, .. } = fail_each_allocation(&model, "").await;
        assert!(smaller > 0 && refused > 0, "{smaller} smaller, {refused} refused");
    }
}

/// An error of the driver ends the start in whatever phase it comes, with its words and its own exit code: memory is not to
/// blame, and nothing smaller is tried.
#[tokio::test(flavor = "multi_thread")]
async fn an_error_of_the_driver_ends_a_start_wherever_it_comes() {
    let mut phases = Vec::new();
    for n in 1.. {
        let model = format!("sim:device={n}");
        let settings = EngineSettings {
            plans: PlanCache::off(),
            ..engine_settings(Path::new(&model), "")
        };
        let settings = Arc::new(settings);
        let backend = Arc::new(SimBackend::new(&settings, Budget::new(1 << 30)));
        let loaded = Loaded::new(&Source::Sim, &settings, backend, &StartTimes::begin());
        match loaded.and_then(|loaded| start(&loaded)) {
            Err(Error::Profile(error)) => {
                let ProfileError::Device { phase, error: words } = &error else {
                    panic!("use {n}: {error}")
                };
                assert!(words.contains("CUDA_ERROR_ILLEGAL_ADDRESS"), "{words}");
                phases.push(*phase);
                assert_eq!(Error::from(error).exit_code(), 7);
            }
            Err(other) => panic!("use {n}: {other}"),
            // The start asks less often.
            Ok(ready) => {
                assert_eq!(
                    ready.engine.drain(Duration::from_secs(10)).await,
                    Drained::Complete
                );
                break;
            }
        }
    }
    phases.dedup();
    assert_eq!(
        phases,
        [Phase::Probe, Phase::Rebuild, Phase::Validate, Phase::Timing]
    );
}

/// A pinned size is that size or an error.
#[tokio::test(flavor = "multi_thread")]
async fn every_allocation_of_a_pinned_start_may_fail() {
    let Ends { smaller, refused, .. } =
        fail_each_allocation(&Model::new(), "--max-total-token-num 4096").await;
    assert!(
        smaller == 0 && refused > 0,
        "{smaller} smaller, {refused} refused"
    );
}

/// How the starts ended of which one allocation failed.
#[derive(Debug, Default)]
struct Ends {
    served: usize,
    /// Of those served: with less KV than where nothing fails.
    smaller: usize,
    refused: usize,
}

async fn fail_each_allocation(model: &Model, flags: &str) -> Ends {
    let budget = Budget::new(BUDGET);
    let clean = model.start(flags, &budget).unwrap();
    let expected = answers(&clean.engine).await;
    assert!(expected.iter().all(|tokens| tokens.len() == 24));
    let full = clean.report.sizing.kv_tokens;
    let allocations = budget.meters().allocations;
    stop(clean, &budget).await;

    let mut ends = Ends::default();
    for n in 1..=allocations {
        let budget = Budget::new(BUDGET);
        budget.fail_allocation(n);
        match model.start(flags, &budget) {
            Ok(ready) => {
                assert!(ready.report.sizing.kv_tokens <= full, "allocation {n}");
                ends.smaller += usize::from(ready.report.sizing.kv_tokens < full);
                ends.served += 1;
                assert_eq!(answers(&ready.engine).await, expected, "allocation {n}");
                stop(ready, &budget).await;
            }
            Err(error) => {
                let typed = matches!(
                    error,
                    Error::WeightsDoNotFit(_) | Error::Profile(ProfileError::DoesNotFit(_))
                );
                assert!(typed && error.exit_code() == 4, "allocation {n}: {error:?}");
                assert_eq!(budget.meters().reserved, 0, "allocation {n}");
                ends.refused += 1;
            }
        }
    }
    assert_eq!(ends.served + ends.refused, allocations as usize, "{ends:?}");
    ends
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pinned_size_is_proved_or_refused_with_the_largest_that_fits() {
    let model = Model::new();
    let budget = Budget::new(BUDGET);
    let error = model
        .start("--max-total-token-num 10000000", &budget)
        .unwrap_err();
    let Error::Profile(ProfileError::DoesNotFit(diagnostic)) = &error else {
        panic!("{error:?}")
    };
    let Cause::PinnedTooLarge {
        asked_tokens,
        largest_tokens,
        ..
    } = diagnostic.cause
    else {
        panic!("{error}")
    };
    assert_eq!(asked_tokens, 10_000_000);
    assert!(error.to_string().contains(&largest_tokens.to_string()), "{error}");
    assert_eq!((error.exit_code(), budget.meters().reserved), (4, 0));

    let ready = model
        .start(&format!("--max-total-token-num {largest_tokens}"), &budget)
        .unwrap();
    assert_eq!(ready.report.sizing.kv_tokens, largest_tokens);
    assert_eq!(answers(&ready.engine).await.len(), 4);
    stop(ready, &budget).await;

    let ready = model.start("--kv-cache-memory-bytes 1MiB", &budget).unwrap();
    assert!(
        ready.report.sizing.kv_bytes <= 1 << 20 && ready.report.sizing.kv_bytes > 900 << 10,
        "{}",
        ready.report.sizing.kv_bytes
    );
    stop(ready, &budget).await;
    let error = model.start("--kv-cache-memory-bytes 1GiB", &budget).unwrap_err();
    assert!(
        matches!(&error, Error::Profile(ProfileError::DoesNotFit(_))),
        "{error:?}"
    );
    // One request of full length must fit.
    let error = model.start("--max-total-token-num 64", &budget).unwrap_err();
    assert!(
        matches!(&error, Error::Profile(ProfileError::DoesNotFit(_))),
        "{error:?}"
    );
}

/// The fraction is of the room for KV.
#[tokio::test(flavor = "multi_thread")]
async fn the_fraction_scales_the_cache() {
    let model = Model::new();
    let budget = Budget::new(BUDGET);
    // So many tokens would be of use that memory is the bound.
    let tokens = |fraction: &str| {
        let flags = format!("--mem-fraction {fraction} --max-num-seqs 32 --max-model-len 4096");
        let ready = model.start(&flags, &budget).unwrap();
        let tokens = ready.report.sizing.kv_tokens;
        (ready, tokens)
    };
    let (ready, whole) = tokens("1.0");
    stop(ready, &budget).await;
    let (ready, half) = tokens("0.5");
    stop(ready, &budget).await;
    assert!(half.abs_diff(whole / 2) <= 16, "{half} is not half of {whole}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_budget_that_is_too_small_is_an_error_with_advice() {
    let model = Model::new();
    let weights = model.start("", &Budget::new(10 << 10)).unwrap_err();
    assert!(matches!(weights, Error::WeightsDoNotFit(_)), "{weights:?}");
    assert!(weights.to_string().contains("--device-memory"), "{weights}");
    // The smaller one cannot hold even a part of the step, so that nothing is measured.
    for budget in [400 << 10, 1 << 20] {
        let probe = model.start("", &Budget::new(budget)).unwrap_err();
        assert!(
            matches!(&probe, Error::Profile(ProfileError::DoesNotFit(_))),
            "{probe:?}"
        );
        let text = probe.to_string();
        let (_, advice) = text.split_once("--device-memory=").expect(&text);
        let value = advice.split(|c: char| !c.is_ascii_alphanumeric()).next().unwrap();
        let settings = model.settings(&format!("--device-memory {value}"), PlanCache::off());
        assert!(settings.device_memory.unwrap() > budget, "{budget}: {text}");
    }
}

#[test]
fn limits_that_contradict_each_other_are_refused() {
    let model = Model::new();
    // What the model cannot do is no contradiction of flags.
    for (flags, exit_code) in [("--max-model-len 4097", 3), ("--max-num-seqs 33", 2)] {
        let error = model.start(flags, &Budget::new(BUDGET)).unwrap_err();
        assert_eq!(error.exit_code(), exit_code, "{flags}: {error:?}");
    }
}
