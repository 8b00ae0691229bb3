//! Ranks that each have a part of a model, as threads: text and logits are those of the whole.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread;

use crate::common::images::{self, IMAGE_LIMITS, IMAGE_MODELS, ImageCase, golden_images};
use crate::common::requests::{Disturbance, Request, serve};
use crate::common::*;
use crate::images::{greedy, last_logits};
use plimsoll_core::{Component, Executor, StepError, TokenId};
use plimsoll_device::Budget;
use plimsoll_kernels::Exchange;
use plimsoll_model::{Footprint, KvCacheDtype, LoadFormat, LoadOptions, Model, ModelError, Runner, Shard};

/// One rank with its part of a model.
struct Rank {
    rank: usize,
    model: Arc<Model>,
    budget: Budget,
}

impl Rank {
    fn runner(&self, block_size: usize, num_blocks: usize) -> Runner {
        let config = state_config(block_size, num_blocks);
        self.model
            .build_state(&config, &LIMITS, &self.budget, &mut || {})
            .unwrap()
    }
}

/// What each rank of `ranks` comes to with a golden model, or why it cannot be divided so.
fn on_ranks<T: Send>(
    name: &str,
    ranks: usize,
    kv_cache_dtype: KvCacheDtype,
    work: impl Fn(&Rank) -> T + Sync,
) -> Result<Vec<T>, ModelError> {
    let options = LoadOptions {
        kv_cache_dtype,
        ..Default::default()
    };
    on_ranks_of(&golden_path(name), &options, ranks, work)
}

fn on_ranks_of<T: Send>(
    path: &Path,
    options: &LoadOptions,
    ranks: usize,
    work: impl Fn(&Rank) -> T + Sync,
) -> Result<Vec<T>, ModelError> {
    thread::scope(|scope| {
        let threads: Vec<_> = Exchange::group(ranks)
            .into_iter()
            .map(|exchange| {
                let work = &work;
                scope.spawn(move || {
                    let shard = Shard {
                        rank: exchange.rank(),
                        ranks,
                    };
                    let options = LoadOptions {
                        shard,
                        ..options.clone()
                    };
                    let budget = budget();
                    let exchange = (ranks > 1).then(|| Arc::new(Mutex::new(exchange)));
                    let model = Model::load_rank(path, options, &budget, exchange, &mut |_| ())?;
                    Ok(work(&Rank {
                        rank: shard.rank,
                        model,
                        budget,
                    }))
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Models of an odd number of heads, and those with blocks of inputs that would be cut.
const ALONE: [&str; 14] = [
    "gpt-oss-mxfp4",
    "llama-auto-round",
    "llama-fp8-block",
    "phi3-longrope-short",
    "phi3-window",
    "qwen2-auto-round-awq",
    "qwen2-int4-group-32",
    "qwen2-moe",
    "qwen3-gptq-order",
    "qwen3-moe-fp8-block",
    "qwen3-sharded",
    "qwen3_5-moe",
    "qwen3_5-vision",
    "smollm3",
];

/// Sums of parts are rounded otherwise than those of the whole, in every layer.
fn rank_tolerance(name: &str) -> f64 {
    3.0 * tolerance(name)
}

#[test]
fn logits_and_text_of_ranks_equal_transformers() {
    let mut served = Vec::new();
    for name in MODELS {
        for ranks in [2, 3, 4, 8] {
            let cases = golden(name).cases;
            let found = on_ranks(name, ranks, KvCacheDtype::F32, |rank| {
                let mut all = Vec::new();
                for case in &cases {
                    let mut runner = rank.runner(16, 8);
                    let table = blocks(0..8);
                    let rows: Vec<usize> =
                        (case.prompt.len() - case.last_logits.len()..case.prompt.len()).collect();
                    let logits = runner
                        .logits(&plan(vec![run(1, 0, &case.prompt, &table)]), &rows)
                        .unwrap();
                    let mut runner = rank.runner(16, 8);
                    let text = greedy_alone(&mut runner, &case.prompt, &table, case.greedy.len());
                    all.push((logits, text));
                }
                all
            });
            let found = match found {
                Ok(found) => found,
                Err(error) => {
                    let error = error.to_string();
                    assert!(
                        error.contains("--tensor-parallel-size"),
                        "{name}, {ranks}: {error}"
                    );
                    continue;
                }
            };
            let mut worst: f64 = 0.0;
            for other in &found[1..] {
                assert!(
                    *other == found[0],
                    "{name}: {ranks} ranks came to different logits"
                );
            }
            for ((logits, text), case) in found[0].iter().zip(&cases) {
                worst = worst.max(relative_error(logits, &case.last_logits.concat()));
                assert_eq!(
                    *text, case.greedy,
                    "{name} on {ranks} ranks, prompt {:?}",
                    case.prompt
                );
            }
            assert!(worst < rank_tolerance(name), "{name} on {ranks} ranks: {worst:e}");
            served.push((name, ranks));
        }
    }
    for name in MODELS {
        let is_served = served.iter().any(|(served, _)| *served == name);
        assert_eq!(is_served, !ALONE.contains(&name), "{name}");
    }
    assert!(
        served.iter().any(|&(_, ranks)| ranks == 8),
        "a key head is on 8 ranks: {served:?}"
    );
    assert!(served.contains(&("gemma2", 3)), "{served:?}");
}

/// Golden models whose blocks would be cut, made wider, with random weights: the whole is the oracle.
#[test]
fn blocks_and_groups_are_divided_whole() {
    for (name, field, width, ranks) in [
        ("gpt-oss-mxfp4", "intermediate_size", 128, 2),
        ("llama-auto-round", "intermediate_size", 256, 4),
        ("llama-fp8-block", "intermediate_size", 512, 2),
        ("qwen2-int4-group-32", "intermediate_size", 128, 4),
        ("qwen3-moe-fp8-block", "moe_intermediate_size", 256, 2),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let config = std::fs::read_to_string(golden_path(name).join("config.json")).unwrap();
        let mut config: serde_json::Value = serde_json::from_str(&config).unwrap();
        config[field] = width.into();
        // As many keys and values as queries: a block of each rank.
        if name == "llama-fp8-block" {
            config["num_key_value_heads"] = config["num_attention_heads"].clone();
        }
        std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
        let prompt: Vec<TokenId> = (3..40).collect();
        let logits = |ranks| {
            let options = LoadOptions {
                format: LoadFormat::Dummy { seed: 3 },
                kv_cache_dtype: KvCacheDtype::F32,
                ..Default::default()
            };
            let found = on_ranks_of(dir.path(), &options, ranks, |rank| {
                let prompt = plan(vec![run(1, 0, &prompt, &blocks(0..8))]);
                rank.runner(16, 8).logits(&prompt, &[5, 20, 36]).unwrap()
            });
            found.unwrap_or_else(|error| panic!("{name}: {error}"))
        };
        let (whole, parts) = (logits(1), logits(ranks));
        let error = relative_error(&parts[0], &whole[0]);
        assert!(parts.iter().all(|part| *part == parts[0]), "{name}");
        // As of inputs in four bits, which round otherwise where they differ in the last bit.
        let tolerance = if name.contains("mxfp4") { 1e-2 } else { 1e-5 };
        assert!(error < tolerance, "{name}: {error:e}");
    }
}

/// Every rank encodes all of an image: its rows have the bits of one device's, and what is made of them is transformers'.
#[test]
fn images_in_prompts_of_ranks_equal_transformers() {
    let mut served = Vec::new();
    for name in IMAGE_MODELS {
        let cases = golden_images(name).cases;
        let work = |rank: &Rank| {
            let of_case = |case: &ImageCase| {
                let logits = [128, 5].map(|most| last_logits(&mut rank.runner(16, 8), case, most));
                let mut runner = rank.runner(16, 8);
                let rows = case
                    .images
                    .iter()
                    .map(|image| runner.encode(&image.image()).unwrap());
                (rows.collect::<Vec<_>>(), logits, greedy(&mut runner, case))
            };
            cases.iter().map(of_case).collect::<Vec<_>>()
        };
        let options = images::options(KvCacheDtype::F32, IMAGE_LIMITS);
        let on = |ranks| on_ranks_of(&golden_path(name), &options, ranks, work);
        let alone = on(1).unwrap().swap_remove(0);
        for ranks in [2, 4] {
            let found = match on(ranks) {
                Ok(found) => found,
                Err(error) => {
                    let error = error.to_string();
                    assert!(error.contains("--tensor-parallel-size"), "{name}: {error}");
                    continue;
                }
            };
            assert!(
                found.iter().all(|of_rank| *of_rank == found[0]),
                "{name}: {ranks} ranks differ"
            );
            for (case, (of_ranks, of_one)) in cases.iter().zip(found[0].iter().zip(&alone)) {
                let (rows, [whole, chunks], text) = of_ranks;
                assert_eq!((rows, text), (&of_one.0, &case.greedy), "{name} on {ranks} ranks");
                assert_eq!(whole, chunks, "{name} on {ranks} ranks");
                let error = relative_error(whole, &case.last_logits.concat());
                assert!(error < 6e-5, "{name} on {ranks} ranks: relative error {error:e}");
            }
            served.push((name, ranks));
        }
    }
    // Windows, features for the first layers, rows that see each other; with lines of an image apart.
    for name in ["qwen2_5-vl", "qwen3-vl", "gemma3-vision", "mistral3-vision"] {
        assert!(served.contains(&(name, 2)), "{name}: {served:?}");
    }
    assert!(served.iter().any(|&(_, ranks)| ranks == 4), "{served:?}");
}

/// All ranks go through the same steps, disturbed in the same way.
#[test]
fn text_of_ranks_does_not_depend_on_scheduling() {
    for (name, ranks) in [
        ("llama", 2),
        ("qwen3-f16", 2),
        ("gemma3", 4),
        ("mixtral", 4),
        ("qwen3-next-moe", 2),
    ] {
        let texts = |depth: Option<usize>| {
            on_ranks(name, ranks, KvCacheDtype::Auto, |rank| {
                let vocab_size = rank.model.spec().vocab_size;
                let mut requests = Request::random(6, 11, vocab_size, 60);
                match depth {
                    None => requests.into_iter().map(|request| alone(rank, request)).collect(),
                    Some(depth) => {
                        let mut runner = rank.runner(16, 64);
                        let how = Disturbance {
                            block_size: 16,
                            num_blocks: 64,
                            limits: LIMITS,
                            seed: 5,
                            depth,
                        };
                        serve(&mut runner, &mut requests, how, &mut |_, sampled| sampled.token);
                        requests
                            .into_iter()
                            .map(|request| request.output)
                            .collect::<Vec<_>>()
                    }
                }
            })
            .unwrap()
        };
        let expected = texts(None);
        for depth in [1, 2] {
            assert_eq!(
                texts(Some(depth)),
                expected,
                "{name} on {ranks} ranks, {depth} in flight"
            );
        }
    }
}

fn alone(rank: &Rank, mut request: Request) -> Vec<TokenId> {
    let mut runner = rank.runner(16, 64);
    request.blocks = blocks(0..32);
    while !request.is_done() {
        let len = request.tokens().len() - request.computed;
        let output = request.execute(&mut runner, len);
        request.computed += len;
        request.output.push(output.samples[0].as_ref().unwrap().token);
    }
    request.output
}

/// Whichever rank finds no memory for a step, none waits for it, and the next step is right on all.
#[test]
fn a_step_that_fails_on_one_rank_ends_on_all() {
    for bad in 0..4 {
        let case = &golden("llama").cases[0];
        on_ranks("llama", 4, KvCacheDtype::F32, |rank| {
            let mut runner = rank.runner(16, 8);
            let prompt = plan(vec![run(1, 0, &case.prompt, &blocks(0..8))]);
            if rank.rank == bad {
                rank.budget.fail_step(1);
            }
            match runner.launch(&prompt).unwrap_err() {
                StepError::Oom(_) => assert_eq!(rank.rank, bad),
                error => assert_eq!(error, StepError::OtherRank(bad), "rank {}", rank.rank),
            }
            let text = greedy_alone(&mut runner, &case.prompt, &blocks(0..8), case.greedy.len());
            assert_eq!(text, case.greedy, "rank {}", rank.rank);
        })
        .unwrap();
    }
}

#[test]
fn what_cannot_be_divided_is_named_with_what_can() {
    for (name, ranks, parts) in [
        (
            "llama",
            3,
            ["3 ranks cannot share 4 attention heads", "1, 2, 4 can"],
        ),
        ("smollm3", 2, ["2 ranks cannot share 1 attention heads", "1 can"]),
        (
            "qwen3-moe",
            8,
            ["8 ranks cannot share 4 attention heads", "1, 2, 4 can"],
        ),
        (
            "qwen3-next-moe",
            4,
            ["4 ranks cannot share 2 key heads of linear attention", "1, 2 can"],
        ),
        (
            "qwen2-int4-group-32",
            2,
            ["48 of its 96 inputs", "multiple of 32"],
        ),
    ] {
        let error = on_ranks(name, ranks, KvCacheDtype::Auto, |_| ())
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("--tensor-parallel-size") && parts.iter().all(|part| error.contains(part)),
            "{name}: {error}"
        );
    }
}

/// Each rank has its part of everything that is divided, and is predicted to the byte.
#[test]
fn footprints_of_ranks_are_those_of_their_parts() {
    for (name, ranks) in [
        ("llama", 4),
        ("llama3-tied-bf16", 2),
        ("gpt-oss", 2),
        ("qwen3-next-moe", 2),
        ("gemma4", 2),
    ] {
        let whole = load(name, KvCacheDtype::Auto);
        let footprint = |shard| {
            let options = LoadOptions {
                shard,
                ..Default::default()
            };
            Footprint::read(&golden_path(name), options).unwrap()
        };
        let found = on_ranks(name, ranks, KvCacheDtype::Auto, |rank| {
            let footprint = footprint(Shard {
                rank: rank.rank,
                ranks,
            });
            let weights = rank.budget.meters().by_component.get(Component::Weights);
            assert_eq!(footprint.weights_bytes(), weights, "{name}, rank {}", rank.rank);
            assert_eq!(footprint.kv_bytes_per_token(), rank.model.kv_bytes_per_token());
            if rank.rank == 0 {
                // Biases of what is added are its alone.
                assert_eq!(rank.model.spec().num_parameters(), whole.spec().num_parameters());
            }
            (weights, rank.model.kv_bytes_per_token())
        })
        .unwrap();
        let all: u64 = found.iter().map(|(weights, _)| weights).sum();
        let of_whole = footprint(Shard::WHOLE);
        assert!(all >= of_whole.weights_bytes(), "{name}: nothing is left out");
        assert!(found[0].0 < of_whole.weights_bytes() * 3 / 4, "{name}: {found:?}");
        assert!(
            found.iter().all(|(_, kv)| *kv <= whole.kv_bytes_per_token()),
            "{name}"
        );
    }
}

/// An encoder is whole on every rank, and its memory that of one device.
#[test]
fn every_rank_holds_all_of_an_encoder() {
    let options = images::options(KvCacheDtype::Auto, IMAGE_LIMITS);
    for name in ["qwen3-vl", "gemma3-vision"] {
        let told = |shard, with_images: bool| {
            let mut options = LoadOptions {
                shard,
                ..options.clone()
            };
            options.serve_as.images = options.serve_as.images.filter(|_| with_images);
            Footprint::read(&golden_path(name), options).unwrap()
        };
        let encoder = |shard| told(shard, true).weights_bytes() - told(shard, false).weights_bytes();
        on_ranks_of(&golden_path(name), &options, 2, |rank| {
            let shard = Shard {
                rank: rank.rank,
                ranks: 2,
            };
            assert_eq!(encoder(shard), encoder(Shard::WHOLE), "{name}");
            let _runner = rank.runner(16, 8);
            let held = rank.budget.meters().by_component;
            let predicted = told(shard, true);
            assert_eq!(
                [Component::Weights, Component::Encoder].map(|component| held.get(component)),
                [predicted.weights_bytes(), predicted.encoder_bytes()],
                "{name}, rank {}",
                rank.rank
            );
            assert_eq!(
                predicted.encoder_bytes(),
                told(Shard::WHOLE, true).encoder_bytes()
            );
        })
        .unwrap();
    }
}
