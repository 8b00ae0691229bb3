//! What is predicted of a start is what it measures: on the CPU to the byte, whatever the model and the limits.

use std::sync::Arc;

use clap::Parser;
use plimsoll_cli::Error;
use plimsoll_cli::args::{Cli, Command};
use plimsoll_cli::backend::{Backend, CpuBackend, CpuRank, SimBackend};
use plimsoll_cli::plan_cache::PlanCache;
use plimsoll_cli::settings::EngineSettings;
use plimsoll_cli::source::Source;
use plimsoll_cli::start::{Loaded, StartTimes, predict};
use plimsoll_device::Budget;
use plimsoll_profiler::{Bound, Cause, Prediction, ProfileError, Report, Setting};
use plimsoll_text::Renderer;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::json;

use crate::Model;

/// The prediction and the measurement of the same start.
pub(crate) fn both(
    source: &Source,
    flags: &str,
    bytes: u64,
) -> (Result<Prediction, Error>, Result<Report, Error>) {
    let argv: &[&str] = match source {
        Source::Sim => &["plimsoll", "profile", "sim"],
        Source::Files { .. } => &["plimsoll", "profile", "--load-format", "dummy", "--threads", "2"],
    };
    let argv = argv.iter().copied().chain(flags.split_whitespace());
    let settings = match Cli::try_parse_from(argv).unwrap().command {
        Command::Profile(args) => EngineSettings {
            renderer: Renderer::in_process(),
            ..EngineSettings::new(args.serve.engine).unwrap()
        },
        other => panic!("not profile: {other:?}"),
    };
    let settings = Arc::new(EngineSettings {
        plans: PlanCache::off(),
        ..settings
    });
    let backend = || -> Arc<dyn Backend> {
        let budget = Budget::new(bytes);
        match source {
            Source::Sim => Arc::new(SimBackend::new(&settings, budget)),
            Source::Files { model, .. } => {
                Arc::new(CpuBackend::new(model, &settings, CpuRank::whole(budget)))
            }
        }
    };
    let predicted = predict(&settings, &*backend());
    let loaded = Loaded::new(source, &settings, backend(), &StartTimes::begin());
    let proved = loaded.and_then(|loaded| loaded.prove());
    (predicted, proved.map(|proof| proof.report().clone()))
}

pub(crate) fn compare(prediction: &Prediction, report: &Report, context: &str) {
    assert_eq!(
        (prediction.sizing.kv_tokens, prediction.sizing.bound),
        (report.sizing.kv_tokens, report.sizing.bound),
        "{context}"
    );
    assert_eq!(prediction.baseline, report.baseline, "{context}");
    assert_eq!(prediction.ready, report.ready, "{context}");
    assert_eq!(prediction.sizing.states, report.sizing.states, "{context}");
    for compared in prediction.compare(report) {
        let error = compared.error.unwrap_or(0.0);
        assert!(error.abs() < 0.03, "{context}: {compared:?}");
    }
    if let Some(probe) = &report.probe {
        assert_eq!(prediction.probe, *probe, "{context}");
        assert_eq!(
            Some(&prediction.arithmetic),
            report.arithmetic.as_ref(),
            "{context}"
        );
        let predicted: Vec<_> = prediction
            .probe_scenarios
            .iter()
            .map(|s| (s.shape.kind, s.scratch_bytes))
            .collect();
        let measured: Vec<_> = report
            .probe_scenarios
            .iter()
            .map(|s| (s.kind, s.scratch_bytes))
            .collect();
        assert_eq!(predicted, measured, "{context}");
    }
}

/// Random models of all families, limits and budgets; some do not fit, and then both say so.
#[test]
fn the_prediction_is_what_the_profile_measures() {
    let (mut fit, mut memory_bound, mut pinned, mut unfit, mut advised) = (0, 0, 0, 0, 0);
    for seed in (0..48).chain([rand::random()]) {
        let mut rng = StdRng::seed_from_u64(seed);
        let config = random_config(&mut rng);
        let (flags, bytes) = random_flags(&mut rng);
        let context = format!("seed {seed}: {flags}, {bytes} bytes, {config}");
        let model = Model::of(&config);
        let source = model.source();
        match both(&source, &flags, bytes) {
            (Ok(prediction), Ok(report)) => {
                compare(&prediction, &report, &context);
                fit += 1;
                memory_bound += usize::from(report.sizing.bound == Bound::Memory);
                pinned += usize::from(report.sizing.bound == Bound::PinnedTokens);
            }
            (Err(predicted), Err(measured)) => {
                assert_eq!((predicted.exit_code(), measured.exit_code()), (4, 4), "{context}");
                unfit += 1;
                advised += follow(&predicted, &source, &flags, bytes, &context);
                follow(&measured, &source, &flags, bytes, &context);
            }
            (predicted, measured) => panic!("{context}: {predicted:?} but {measured:?}"),
        }
    }
    assert!(
        fit > 20 && memory_bound > 5 && pinned > 2 && unfit > 2 && advised > 4,
        "{fit} {memory_bound} {pinned} {unfit} {advised}"
    );
}

/// The same for the simulated model.
#[test]
fn what_is_advised_for_the_simulated_model_fits_and_little_more_does() {
    let mut advised = 0;
    for seed in (0..60).chain([rand::random()]) {
        let mut rng = StdRng::seed_from_u64(seed);
        let seqs = rng.random_range(1..200);
        let flags = format!(
            "--max-num-seqs {seqs} --max-num-batched-tokens {} --max-model-len {} --mem-fraction {}",
            rng.random_range(seqs..10_000),
            rng.random_range(1..40_000),
            rng.random_range(0.3..1.0),
        );
        let bytes = rng.random_range(100..800) << 20;
        let context = format!("seed {seed}: {flags}, {bytes} bytes");
        match both(&Source::Sim, &flags, bytes) {
            (Ok(prediction), Ok(report)) => compare(&prediction, &report, &context),
            (Err(predicted), Err(measured)) => {
                for error in [predicted, measured] {
                    advised += follow(&error, &Source::Sim, &flags, bytes, &context);
                }
            }
            (predicted, measured) => panic!("{context}: {predicted:?} but {measured:?}"),
        }
    }
    assert!(advised > 40, "{advised}");
}

/// Each advice starts when it is followed; returns how many there were. With 2 % less memory or a longer context it does
/// not, where the whole step was measured or computed.
fn follow(error: &Error, source: &Source, flags: &str, bytes: u64, context: &str) -> usize {
    let (error, predicted) = match error {
        Error::Predicted(error) => (&**error, true),
        error => (error, false),
    };
    // Weights that do not fit have no advice but other weights.
    let Error::Profile(ProfileError::DoesNotFit(diagnostic)) = error else {
        return 0;
    };
    let whole = predicted || diagnostic.cause == Cause::ContextDoesNotFit;
    let start = |settings: &[Setting]| {
        let device = settings.iter().find_map(|setting| match setting {
            Setting::DeviceMemory(bytes) => Some(*bytes),
            _ => None,
        });
        let settings: Vec<_> = settings.iter().map(Setting::to_string).collect();
        let flags = format!("{flags} {}", settings.join(" "));
        both(source, &flags, device.unwrap_or(bytes))
    };
    for knob in &diagnostic.knobs {
        let (predicted, measured) = start(&knob.settings);
        assert!(predicted.is_ok(), "{context}: {knob:?}: {predicted:?}");
        assert!(measured.is_ok(), "{context}: {knob:?}: {measured:?}");
        let more = match knob.settings[..] {
            [Setting::DeviceMemory(bytes)] if !flags.contains("--max-total-token-num") => {
                Setting::DeviceMemory(bytes - bytes / 50)
            }
            [Setting::MaxModelLen(len)] => Setting::MaxModelLen(len + (len / 50).max(32)),
            _ => continue,
        };
        let (predicted, measured) = start(&[more]);
        assert!(
            !whole || predicted.is_err(),
            "{context}: {more} is enough: {predicted:?}"
        );
        assert!(
            !whole || measured.is_err(),
            "{context}: {more} is enough: {measured:?}"
        );
    }
    diagnostic.knobs.len()
}

fn random_flags(rng: &mut StdRng) -> (String, u64) {
    let seqs = rng.random_range(1..24);
    let mut flags = format!(
        "--max-num-seqs {seqs} --max-num-batched-tokens {} --max-model-len {} --block-size {} --mem-fraction {}",
        rng.random_range(seqs..100),
        rng.random_range(1..4096),
        [8, 16, 32][rng.random_range(0..3)],
        rng.random_range(0.3..1.0),
    );
    match rng.random_range(0..6) {
        0 => flags += &format!(" --max-total-token-num {}", rng.random_range(500..40_000)),
        1 => flags += " --kv-cache-dtype float32",
        2 => flags += " --runner pooling",
        3 => flags += r#" --runner pooling --pooler-config {"pooling_type":"MEAN"}"#,
        _ => {}
    }
    (flags, rng.random_range(1..24) << 20)
}

fn random_config(rng: &mut StdRng) -> String {
    let families = [
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
    ];
    let dtypes = ["float32", "float16", "bfloat16"];
    let kv_heads = rng.random_range(1..3);
    let mut config = json!({
        "architectures": [families[rng.random_range(0..families.len())]],
        "dtype": dtypes[rng.random_range(0..dtypes.len())],
        "hidden_act": "silu",
        "hidden_size": rng.random_range(8..130),
        "intermediate_size": rng.random_range(8..200),
        "num_hidden_layers": rng.random_range(1..4),
        "num_attention_heads": kv_heads * rng.random_range(1..4),
        "num_key_value_heads": kv_heads,
        "head_dim": 2 * rng.random_range(2..20),
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "vocab_size": rng.random_range(258..1500),
        "max_position_embeddings": 4096,
        "tie_word_embeddings": rng.random::<bool>(),
        "sliding_window": null,
    });
    if rng.random_bool(0.3) {
        // Layers with states beside those with attention.
        let key_heads = rng.random_range(1..3);
        config["architectures"] = json!(["Qwen3_5ForCausalLM"]);
        // A quarter of a head is rotated, in pairs.
        config["head_dim"] = json!(8 * rng.random_range(1..6));
        config["num_hidden_layers"] = json!(rng.random_range(2..6));
        config["full_attention_interval"] = json!(2);
        config["linear_num_key_heads"] = json!(key_heads);
        config["linear_num_value_heads"] = json!(key_heads * rng.random_range(1..4));
        config["linear_key_head_dim"] = json!(rng.random_range(1..70));
        config["linear_value_head_dim"] = json!(rng.random_range(1..70));
        config["linear_conv_kernel_dim"] = json!(rng.random_range(2..6));
    }
    config.to_string()
}

/// The parts sum to what the device says is in use.
#[test]
fn parts_sum_to_what_the_device_reports_used() {
    let (_, report) = both(
        &Model::new().source(),
        "--max-num-seqs 4 --max-num-batched-tokens 32 --max-model-len 256",
        24 << 20,
    );
    for memory in [
        &report.as_ref().unwrap().baseline,
        &report.as_ref().unwrap().ready,
    ] {
        assert_eq!(memory.attributed + memory.peers, memory.device_used);
        assert_eq!(memory.device_used + memory.free, memory.total);
    }
}
