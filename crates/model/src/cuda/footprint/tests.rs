use std::path::PathBuf;

use plimsoll_core::EncoderLimits;
use plimsoll_kernels::cuda::SampleRow;
use serde_json::Value;

use super::*;
use crate::cuda::scores::SCORE_ROWS;

/// The shape of Llama 3.1 8B.
const CONFIG: &str = r#"{
    "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", "hidden_act": "silu", "vocab_size": 128256,
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "max_position_embeddings": 131072,
    "tie_word_embeddings": false
}"#;

/// What `plimsoll profile` reported on an H200.
fn recorded(name: &str) -> Value {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/bench/h200")
        .join(name);
    let text = std::fs::read_to_string(path).unwrap();
    serde_json::from_str::<Value>(&text).unwrap()["plimsoll"]["profile"].clone()
}

fn footprint(report: &Value) -> GpuFootprint {
    footprint_with(report, KvCacheDtype::Auto)
}

fn footprint_with(report: &Value, kv_cache_dtype: KvCacheDtype) -> GpuFootprint {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), CONFIG).unwrap();
    let number = |name: &str| report[name].as_u64().unwrap() as usize;
    let shape = GpuStateShape {
        limits: StepLimits {
            max_num_batched_tokens: number("max_num_batched_tokens"),
            max_num_seqs: number("max_num_seqs"),
            max_model_len: number("max_model_len"),
        },
        block_size: BlockSize::new(number("block_size")).unwrap(),
        kv_cache_dtype,
        options: GpuOptions::default(),
        serve_as: ServeAs::default(),
        shard: Shard::WHOLE,
    };
    GpuFootprint::assumed(dir.path(), shape).unwrap()
}

fn component(report: &Value, name: &str) -> u64 {
    let lines = report["ready"]["components"].as_array().unwrap();
    let line = lines.iter().find(|line| line["name"] == name).unwrap();
    line["bytes"].as_u64().unwrap()
}

/// Elements of half the size: a token takes half, and nothing else changes but the scratch of another attention kernel.
#[test]
fn a_cache_of_8_bits_takes_half() {
    let report = recorded("kv-full.json");
    let [wide, fp8] = [KvCacheDtype::Auto, KvCacheDtype::Fp8].map(|dtype| footprint_with(&report, dtype));
    assert_eq!(wide.kv_bytes_per_token(), 2 * fp8.kv_bytes_per_token());
    let kv = KvConfig {
        block_size: wide.shape.block_size,
        num_pages: 4096,
        groups: wide.config.spec.cache_groups(wide.shape.block_size),
        state_slots: 0,
    };
    assert_eq!(wide.kv_bytes(kv), 2 * fp8.kv_bytes(kv));
    assert_eq!(wide.weights_bytes(), fp8.weights_bytes());
}

#[test]
fn caches_of_a_cpu_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), CONFIG).unwrap();
    let mut shape = footprint(&recorded("kv-full.json")).shape;
    shape.kv_cache_dtype = KvCacheDtype::F16;
    let error = GpuFootprint::assumed(dir.path(), shape).unwrap_err().to_string();
    assert!(
        error.contains("--kv-cache-dtype") && error.contains("fp8"),
        "{error}"
    );
}

fn golden(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/golden")
        .join(name)
}

/// Whole pages of memory for all slots; none where no layer has a state.
#[test]
fn states_are_as_large_as_their_slots() {
    let shape = footprint(&recorded("kv-full.json")).shape;
    let hybrid = GpuFootprint::assumed(&golden("qwen3_5-vision"), shape).unwrap();
    // Two layers, each with three states of 16 x 24 and three inputs of 2 x 16 + 72 channels.
    assert_eq!(hybrid.state_bytes(), 2 * 4 * (3 * 16 * 24 + 3 * 104));
    for slots in [1, 100, 1000] {
        let bytes = hybrid.state_bytes() * slots as u64;
        assert_eq!(hybrid.states_bytes(slots), bytes.next_multiple_of(2 << 20));
    }
    let step = StepSize {
        tokens: 8192,
        samples: 1,
        scored: 0,
    };
    assert!(hybrid.arena(&[(step, false)]).scratch[0] > 0);
    let dense = footprint(&recorded("kv-full.json"));
    assert_eq!((dense.state_bytes(), dense.states_bytes(512)), (0, 0));
}

/// The largest image, and rows of two; nothing where text alone is served.
#[test]
fn images_take_what_the_largest_needs() {
    let mut shape = footprint(&recorded("kv-full.json")).shape;
    let text = GpuFootprint::assumed(&golden("qwen3-vl"), shape.clone()).unwrap();
    assert_eq!(text.encoder_bytes(), 0);
    shape.serve_as.images = Some(EncoderLimits {
        max_patches: 1 << 16,
        max_images_per_prompt: 1,
    });
    let images = GpuFootprint::assumed(&golden("qwen3-vl"), shape.clone()).unwrap();
    let (patches, rows) = (1_u64 << 16, 1 << 14);
    // Three parts of 64 elements that are kept of each row; of each patch three activations of 48, q, k and v, and 12 angles.
    let kept = 2 * rows * 3 * 64 * 2;
    let activations = patches * (3 * 48 + 3 * 48) * 2 + patches * 24 * 4 + rows * 64 * 2 + rows / 16 * 4;
    assert_eq!(
        images.encoder_bytes(),
        (kept + activations).next_multiple_of(2 << 20)
    );
    assert!(images.weights_bytes() > text.weights_bytes());
    assert!(images.staging_bytes() > text.staging_bytes());

    // Each rank encodes all of an image.
    let of_rank = |mut shape: GpuStateShape, with_images: bool| {
        shape.shard = Shard { rank: 1, ranks: 2 };
        shape.serve_as.images = shape.serve_as.images.filter(|_| with_images);
        GpuFootprint::assumed(&golden("qwen3-vl"), shape).unwrap()
    };
    let [with, without] = [true, false].map(|with_images| of_rank(shape.clone(), with_images));
    assert_eq!(with.encoder_bytes(), images.encoder_bytes());
    assert_eq!(
        with.weights_bytes() - without.weights_bytes(),
        images.weights_bytes() - text.weights_bytes()
    );
    assert!(with.weights_bytes() < images.weights_bytes());

    let config = std::fs::read_to_string(golden("qwen3-vl").join("config.json")).unwrap();
    for (field, value) in [("num_heads", 4), ("intermediate_size", 60)] {
        let mut config: Value = serde_json::from_str(&config).unwrap();
        config["vision_config"][field] = value.into();
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
        let error = GpuFootprint::assumed(dir.path(), shape.clone())
            .unwrap_err()
            .to_string();
        for said in [field, "--device cpu", "--limit-mm-per-prompt"] {
            assert!(error.contains(said), "{error}");
        }
    }
}

/// Gated MLPs, and the lists of windows.
#[test]
fn images_of_other_families_take_what_they_need() {
    let mut shape = footprint(&recorded("kv-full.json")).shape;
    let max_patches = 1 << 16;
    shape.serve_as.images = Some(EncoderLimits {
        max_patches,
        max_images_per_prompt: 1,
    });
    let (patches, rows, part) = (1_u64 << 16, 1 << 14, 2048);
    let mlp = part * 3 * 56 * 2;
    let activations = patches * (3 * 48 + 3 * 48) * 2 + patches * 16 * 4 + rows / 16 * 4 + mlp;
    let lists = (2 * rows + 1) * 4;
    for (name, out, lists) in [("mistral3-vision", 64, 0), ("qwen2_5-vl", 128, lists)] {
        let found = GpuFootprint::assumed(&golden(name), shape.clone()).unwrap();
        // Rows of two images that are kept, and those that are made.
        let bytes = 3 * rows * out * 2 + activations + lists;
        assert_eq!(found.encoder_bytes(), bytes.next_multiple_of(2 << 20), "{name}");
    }
}

#[test]
fn states_without_kernels_are_refused_by_name() {
    let text = std::fs::read_to_string(golden("qwen3_5-vision").join("config.json")).unwrap();
    let shape = footprint(&recorded("kv-full.json")).shape;
    for (field, value) in [
        ("linear_key_head_dim", 20),
        ("linear_value_head_dim", 12),
        ("linear_conv_kernel_dim", 5),
    ] {
        let mut config: Value = serde_json::from_str(&text).unwrap();
        config["text_config"][field] = value.into();
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
        let error = GpuFootprint::assumed(dir.path(), shape.clone()).unwrap_err();
        let text = error.to_string();
        assert!(text.contains(field) && text.contains("--device cpu"), "{text}");
    }
}

/// To the byte, what an H200 was measured to hold.
#[test]
fn formulas_give_what_an_h200_measured() {
    for name in ["kv-full.json", "kv-default.json"] {
        let report = recorded(name);
        let footprint = footprint(&report);
        assert_eq!(footprint.weights_bytes(), component(&report, "weights"));
        // Rows that graphs sample behind their logits were added after these recordings.
        let late_rows = pooled(footprint.shape.limits.max_num_seqs * size_of::<SampleRow>());
        let staging = component(&report, "staging");
        assert_eq!(footprint.staging_bytes(), staging + late_rows);
        // So was the room behind the libraries' workspace of 32 MiB.
        let late_room = pooled(Linears::WORKSPACE_BYTES) - (32 << 20);
        assert_eq!(
            footprint.slack_bytes(staging) + late_room,
            report["ready"]["unattributed"].as_u64().unwrap()
        );
        let kv = KvConfig {
            block_size: footprint.shape.block_size,
            num_pages: report["kv_pages"].as_u64().unwrap() as usize,
            groups: plimsoll_core::CacheGroups::default(),
            state_slots: 0,
        };
        assert_eq!(footprint.kv_bytes(kv), component(&report, "kv"));

        let scenarios = report["probe_scenarios"].as_array().unwrap();
        let number = |scenario: &Value, name: &str| scenario[name].as_u64().unwrap();
        let steps: Vec<_> = scenarios
            .iter()
            .map(|scenario| {
                let (tokens, samples) = (
                    number(scenario, "tokens") as usize,
                    number(scenario, "rows") as usize,
                );
                // A mixed step scores the prompts that it reads.
                let scored = if scenario["kind"] == "mixed" {
                    tokens - samples
                } else {
                    0
                };
                let step = StepSize {
                    tokens,
                    samples,
                    scored,
                };
                (step, scenario["kind"] == "decode")
            })
            .collect();
        let arena = footprint.arena(&steps);
        let measured: Vec<_> = scenarios
            .iter()
            .map(|scenario| number(scenario, "scratch_bytes"))
            .collect();
        assert_eq!(arena.scratch, measured);
        let scratch = arena.scratch.into_iter().max().unwrap();
        assert_eq!(footprint.fixed_arena(scratch), component(&report, "arena"));
        for (name, predicted) in [
            ("graphs", footprint.graph_bytes()),
            ("runtime", GpuFootprint::ASSUMED_RUNTIME_BYTES),
        ] {
            let measured = component(&report, name);
            assert!(
                predicted.abs_diff(measured) <= 4 << 20,
                "{name}: {predicted} {measured}"
            );
        }
    }
}

#[test]
fn without_graphs_there_is_nothing_to_capture() {
    let mut footprint = footprint(&recorded("kv-full.json"));
    let step = StepSize {
        tokens: 1,
        samples: 1,
        scored: 0,
    };
    let with_graphs = footprint.arena(&[(step, true)]);
    footprint.shape.options.enforce_eager = true;
    assert_eq!(footprint.graph_bytes(), 0);
    let without = footprint.arena(&[(step, true)]);
    assert!(without.peak < with_graphs.peak && without.scratch[0] > 0);
}

/// Memory for graphs is that of the largest step that has one.
#[test]
fn no_decode_step_takes_more_than_a_larger_one() {
    let dense = footprint(&recorded("kv-full.json"));
    let of_golden = |name| GpuFootprint::assumed(&golden(name), dense.shape.clone()).unwrap();
    let others = [
        "qwen3-next-moe",
        "gemma4-moe",
        "qwen3-moe-fp8-block",
        "qwen3-gptq-order",
    ]
    .map(of_golden);
    for mut footprint in others.into_iter().chain([dense]) {
        footprint.shape.options.enforce_eager = true;
        let step = |rows| StepSize {
            tokens: rows,
            samples: rows,
            scored: 0,
        };
        let steps: Vec<_> = ladder(1024).into_iter().map(|rows| (step(rows), true)).collect();
        let scratch = footprint.arena(&steps).scratch;
        assert!(scratch.is_sorted() && scratch[0] > 0, "{scratch:?}");
    }
}

/// A step with prompts takes as much as one of the rows to which it is padded, logits and scores included.
#[test]
fn padded_rows_are_counted() {
    let footprint = footprint(&recorded("kv-full.json"));
    let scratch = |tokens: usize| {
        let step = StepSize {
            tokens,
            samples: 1,
            scored: tokens - 1,
        };
        footprint.arena(&[(step, false), (step, false)]).scratch[1]
    };
    for tokens in [33_usize, 65, 8189] {
        let padded = tokens.next_multiple_of(4);
        assert!(
            (tokens..padded).all(|tokens| scratch(tokens) == scratch(padded)),
            "{tokens}"
        );
        assert!(scratch(padded) > scratch(padded - 4), "{tokens}");
    }
    // Few rows have kernels that take any number.
    assert!(scratch(31) > scratch(30));
}

/// Products of routes have the shared expert in them where there are few rows: larger steps have no more room for it.
#[test]
fn shared_experts_have_places_in_small_steps_alone() {
    let shape = footprint(&recorded("kv-full.json")).shape;
    let config = std::fs::read_to_string(golden("qwen2-moe").join("config.json")).unwrap();
    let with_shared = |inner: usize| {
        let mut config: Value = serde_json::from_str(&config).unwrap();
        config["shared_expert_intermediate_size"] = inner.into();
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
        GpuFootprint::assumed(dir.path(), shape.clone()).unwrap()
    };
    // Of 6 experts 3 are for a row: 17 rows have 8 routes for each expert, rounded down. A shared expert of another size is none of them.
    let (hidden, inner, other, top_k, most) = (64, 40, 32, 3, 17);
    let [without, with] = [other, inner].map(with_shared);
    for tokens in [1, 16, 17, 18, 32, 8192] {
        let step = StepSize {
            tokens,
            samples: 1,
            scored: 0,
        };
        // Capturing graphs counts to the first step.
        let scratch = |footprint: &GpuFootprint| footprint.arena(&[(step, false), (step, false)]).scratch[1];
        let room = |rows: usize, widths: [usize; 2]| {
            let bytes = widths.map(|width| (rows * width * 2).next_multiple_of(256));
            bytes[0] + bytes[1]
        };
        let (routes, shared) = (tokens * top_k, tokens.min(most));
        let places = room(routes + shared, [inner, hidden]) - room(routes, [inner, hidden]);
        // Where it is computed apart: gate and up, and their product.
        let apart = room(tokens, [2 * inner, inner]) - room(tokens, [2 * other, other]);
        assert_eq!(
            scratch(&with) - scratch(&without),
            (places + apart) as u64,
            "{tokens} tokens"
        );
    }
}

/// However long the prompt, there are logits of so many rows at a time; what comes with them is small.
#[test]
fn scores_of_a_prompt_take_as_much_as_a_few_hundred_samples() {
    let footprint = footprint(&recorded("kv-full.json"));
    let scratch = |tokens, samples, scored| {
        let step = StepSize {
            tokens,
            samples,
            scored,
        };
        // Capturing graphs counts to the first step.
        footprint.arena(&[(step, false), (step, false)]).scratch[1]
    };
    for tokens in [512, 8192, 131_072] {
        let with = scratch(tokens, 1, tokens - 1);
        assert_eq!(with, scratch(tokens, 1, 1), "memory depends on the rows alone");
        assert!(with > scratch(tokens, 1, 0));
        let few_samples = scratch(tokens, SCORE_ROWS, 0);
        assert!(with - few_samples <= 256 * tokens as u64 + (1 << 16), "{tokens}");
    }
}

/// What is too narrow only because it is divided is the flag's fault, and what is so undivided is not.
#[test]
fn parts_that_kernels_cannot_take_name_the_flag() {
    let refused = |directory: &Path, ranks| {
        let mut shape = footprint(&recorded("kv-full.json")).shape;
        shape.shard = Shard { rank: 0, ranks };
        let told = GpuFootprint::assumed(directory, shape);
        told.err().map(|error| error.to_string())
    };
    let (mut divided, mut errors) = (0, String::new());
    for entry in std::fs::read_dir(golden("")).unwrap() {
        let path = entry.unwrap().path();
        if !path.join("config.json").is_file() || refused(&path, 1).is_some() {
            continue;
        }
        for ranks in [2, 4, 8] {
            match refused(&path, ranks) {
                None => divided += 1,
                Some(error) => {
                    assert!(
                        error.contains("--tensor-parallel-size"),
                        "{}: {error}",
                        path.display()
                    );
                    errors += &error;
                }
            }
        }
    }
    assert!(divided > 40, "{divided}");
    for said in ["MXFP4 for 48 inputs", "of shape [64, 128]"] {
        assert!(errors.contains(said), "{said} is missing: {errors}");
    }
    // Undivided it is no better.
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), CONFIG.replace("14336", "14340")).unwrap();
    let error = refused(dir.path(), 2).unwrap();
    assert!(
        error.contains("intermediate_size") && error.contains("on a GPU"),
        "{error}"
    );
    assert!(!error.contains("--tensor-parallel-size"), "{error}");
}
