//! Weights in device memory against what the files hold, as candle reads them.

use std::path::Path;
use std::time::Instant;

use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device};
use half::bf16;
use plimsoll_core::Component;
use plimsoll_device::Pod;
use plimsoll_device::cuda::{Gpu, GpuOptions, GpuSlice};
use plimsoll_kernels::cuda::FusedKernels;
use plimsoll_model::cuda::GpuWeights;
use plimsoll_model::{DecoderSpec, LoadFormat, ModelConfig, ModelError, OutputHead, Progress};
use tempfile::TempDir;

use crate::common::convert::*;
use crate::common::*;

fn load_to(gpu: &Gpu, path: &Path, format: LoadFormat) -> Result<GpuWeights, ModelError> {
    let kernels = FusedKernels::load(gpu).unwrap();
    GpuWeights::load(path, format, gpu, &kernels, &mut |_| ())
}

/// Everything on the device, in one order, with names.
fn contents(gpu: &Gpu, weights: &GpuWeights) -> Vec<(String, Vec<f32>)> {
    let wide = |slice: GpuSlice<'_, bf16>| down(gpu, slice).into_iter().map(bf16::to_f32).collect();
    let mut all = vec![
        ("embedding".to_owned(), wide(weights.embedding())),
        ("lm_head".to_owned(), wide(weights.lm_head().unwrap())),
        ("final_norm".to_owned(), down(gpu, weights.final_norm())),
    ];
    for index in 0..weights.spec().num_layers {
        let layer = weights.layer(index);
        let mut add = |name: &str, values| all.push((format!("{index}.{name}"), values));
        add("attention_norm", down(gpu, layer.attention_norm));
        add("qkv", wide(layer.qkv));
        if let Some(bias) = layer.qkv_bias {
            add("qkv_bias", wide(bias));
        }
        if let Some([q, k]) = layer.qk_norm {
            add("q_norm", down(gpu, q));
            add("k_norm", down(gpu, k));
        }
        add("output", wide(layer.output));
        add("mlp_norm", down(gpu, layer.mlp_norm));
        add("gate_up", wide(layer.gate_up));
        add("down", wide(layer.down));
    }
    all
}

fn down<T: Pod>(gpu: &Gpu, slice: GpuSlice<'_, T>) -> Vec<T> {
    gpu.download(slice).unwrap()
}

/// What [`contents`] should be: matrices and biases rounded to `bf16`, norms as they are.
fn expected(spec: &DecoderSpec, tensors: &Tensors) -> Vec<(String, Vec<f32>)> {
    let wide = |name: &str| -> Vec<f32> {
        let tensor = tensors[name].to_dtype(DType::F32).unwrap();
        tensor.flatten_all().unwrap().to_vec1().unwrap()
    };
    let rounded = |names: &[String]| -> Vec<f32> {
        let values = names.iter().flat_map(|name| wide(name));
        values.map(|value| bf16::from_f32(value).to_f32()).collect()
    };
    let one = |name: &str| rounded(&[name.to_owned()]);
    let embedding = "model.embed_tokens.weight";
    let head = if spec.head == OutputHead::Tied {
        embedding
    } else {
        "lm_head.weight"
    };
    let mut all = vec![
        ("embedding".to_owned(), one(embedding)),
        ("lm_head".to_owned(), one(head)),
        ("final_norm".to_owned(), wide("model.norm.weight")),
    ];
    for index in 0..spec.num_layers {
        let name = |part: &str| format!("model.layers.{index}.{part}");
        let qkv = |kind: &str| ["q", "k", "v"].map(|x| name(&format!("self_attn.{x}_proj.{kind}")));
        let mut add = |name: &str, values| all.push((format!("{index}.{name}"), values));
        add("attention_norm", wide(&name("input_layernorm.weight")));
        add("qkv", rounded(&qkv("weight")));
        if spec.qkv_bias {
            add("qkv_bias", rounded(&qkv("bias")));
        }
        if spec.qk_norm {
            add("q_norm", wide(&name("self_attn.q_norm.weight")));
            add("k_norm", wide(&name("self_attn.k_norm.weight")));
        }
        add("output", one(&name("self_attn.o_proj.weight")));
        add("mlp_norm", wide(&name("post_attention_layernorm.weight")));
        add(
            "gate_up",
            rounded(&[name("mlp.gate_proj.weight"), name("mlp.up_proj.weight")]),
        );
        add("down", one(&name("mlp.down_proj.weight")));
    }
    all
}

/// Equal up to `tolerance` of each value; 0 is to the bit.
#[track_caller]
fn assert_contents(found: &[(String, Vec<f32>)], want: &[(String, Vec<f32>)], tolerance: f32, context: &str) {
    assert_eq!(found.len(), want.len(), "{context}");
    for ((name, found), (same, want)) in found.iter().zip(want) {
        assert_eq!((name, found.len()), (same, want.len()), "{context}");
        let wrong = found
            .iter()
            .zip(want)
            .position(|(f, w)| (f - w).abs() > tolerance * w.abs() || f.is_nan());
        if let Some(at) = wrong {
            panic!("{context}: {name}[{at}] is {}, not {}", found[at], want[at]);
        }
    }
}

fn assert_turns(gpu: &Gpu, weights: &GpuWeights, frequencies: &[f32], context: &str) {
    let turns = down(gpu, weights.turns());
    assert_eq!(turns.len(), 2 * frequencies.len(), "{context}");
    for (turns, &frequency) in turns.chunks_exact(2).zip(frequencies) {
        let found = (f64::from(turns[0]) + f64::from(turns[1])) * std::f64::consts::TAU;
        let error = (found / f64::from(frequency) - 1.0).abs();
        // Factors of GGUF files are rounded to f32.
        assert!(error < 2e-7, "{context}: {found} for {frequency}");
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn golden_models_arrive_as_stored() {
    let gpu = Gpu::open(0).unwrap();
    let directory = TempDir::new().unwrap();
    for name in MODELS {
        let mut last = Progress { done: 0, total: 0 };
        let kernels = FusedKernels::load(&gpu).unwrap();
        let weights = GpuWeights::load(
            &golden_path(name),
            LoadFormat::Auto,
            &gpu,
            &kernels,
            &mut |progress| {
                assert!(progress.done > last.done, "{name}");
                last = progress;
            },
        )
        .unwrap();
        assert!(last.total > 0 && last.done == last.total, "{name}: {last:?}");
        let want = expected(weights.spec(), &golden_tensors(name));
        assert_contents(&contents(&gpu, &weights), &want, 0.0, name);
        let spec = weights.spec();
        let frequencies = spec.rope.frequencies(spec.head_dim);
        assert_turns(&gpu, &weights, &frequencies, name);
        let meters = gpu.budget().meters();
        assert!(meters.by_component.get(Component::Weights) >= weights.bytes() as u64);

        // llama.cpp has no window for qwen2.
        if name != "qwen2-window" {
            let weights = load_to(&gpu, &golden_gguf(directory.path(), name), LoadFormat::Auto).unwrap();
            assert_contents(&contents(&gpu, &weights), &want, 0.0, &format!("{name} as GGUF"));
            // Llama 3's scaling is in the file's factors then.
            assert_turns(&gpu, &weights, &frequencies, name);
        }
    }
    assert_eq!(gpu.budget().meters().by_component.get(Component::Weights), 0);
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn quantised_files_arrive_dequantised() {
    use GgmlDType::*;
    let gpu = Gpu::open(0).unwrap();
    let directory = TempDir::new().unwrap();
    let config = ModelConfig::from_json(Path::new("config.json"), LLAMA_256).unwrap();
    let tensors = random_tensors(&config.spec);
    let meta = metadata("llama", &config.spec);
    for dtype in [
        F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2K, Q3K, Q4K, Q5K, Q6K,
    ] {
        let path = directory.path().join("stored.gguf");
        write(&path, &meta, &converted(&config.spec, "llama", &tensors, dtype));
        let dequantised = tensors.iter().map(|(name, tensor)| {
            // Rows of whole blocks: quantising before or after the permutation of rows is the same.
            let dtype = if tensor.rank() == 2 { dtype } else { F32 };
            let stored = QTensor::quantize(tensor, dtype).unwrap();
            (name.clone(), stored.dequantize(&Device::Cpu).unwrap())
        });
        let want = expected(&config.spec, &dequantised.collect());
        let weights = load_to(&gpu, &path, LoadFormat::Auto).unwrap();
        // Another order of products may round to the other neighbour.
        let tolerance = if matches!(dtype, F32 | F16 | BF16) {
            0.0
        } else {
            1.0 / 128.0
        };
        assert_contents(&contents(&gpu, &weights), &want, tolerance, &format!("{dtype:?}"));
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn what_does_not_fit_or_is_wrong_leaves_nothing() {
    let cap = GpuOptions {
        cap: Some(4 << 20),
        ..Default::default()
    };
    let gpu = Gpu::open_with(0, cap).unwrap();
    let directory = model_directory(&shape(4));
    let dummy = LoadFormat::Dummy { seed: 1 };
    match load_to(&gpu, directory.path(), dummy).unwrap_err() {
        ModelError::Oom(oom) => assert_eq!(oom.component, Component::Weights),
        other => panic!("{other}"),
    }
    let name = "model.layers.1.mlp.up_proj.weight";
    let mut tensors = golden_tensors("qwen2");
    let whole = tensors[name].clone();
    let load_changed = |tensors: &Tensors| {
        let directory = TempDir::new().unwrap();
        let config = golden_path("qwen2").join("config.json");
        std::fs::copy(config, directory.path().join("config.json")).unwrap();
        let tensors: std::collections::HashMap<_, _> = tensors.clone().into_iter().collect();
        candle_core::safetensors::save(&tensors, directory.path().join("model.safetensors")).unwrap();
        load_to(&gpu, directory.path(), LoadFormat::Auto).map(|_| ())
    };
    load_changed(&tensors).unwrap();
    let before = gpu.allocations();
    tensors.insert(name.to_owned(), whole.t().unwrap().contiguous().unwrap());
    assert!(matches!(
        load_changed(&tensors),
        Err(ModelError::MisshapenTensor { .. })
    ));
    tensors.remove(name);
    assert!(matches!(
        load_changed(&tensors),
        Err(ModelError::MissingTensor { .. })
    ));
    tensors.insert(name.to_owned(), whole.clone());
    tensors.insert("model.layers.9.mlp.up_proj.weight".to_owned(), whole);
    assert!(matches!(
        load_changed(&tensors),
        Err(ModelError::UnusedTensors { .. })
    ));
    assert_eq!(gpu.allocations(), before, "checked before anything is allocated");
    assert_eq!(gpu.budget().meters().by_component.get(Component::Weights), 0);
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn dummy_weights_keep_the_variance_and_differ() {
    let gpu = Gpu::open(0).unwrap();
    let directory = model_directory(&shape(2));
    let load = |seed| load_to(&gpu, directory.path(), LoadFormat::Dummy { seed }).unwrap();
    let weights = load(7);
    let sample = |weights: &GpuWeights, layer| {
        let layer = weights.layer(layer);
        [layer.qkv, layer.output, layer.gate_up, layer.down].map(|slice| {
            let values = down(&gpu, slice.range(slice.len() - 100_000..slice.len()));
            values.into_iter().map(bf16::to_f32).collect::<Vec<_>>()
        })
    };
    let spec = weights.spec().clone();
    let inputs = [
        spec.hidden_size,
        spec.q_size(),
        spec.hidden_size,
        spec.intermediate_size,
    ];
    for (values, inputs) in sample(&weights, 1).iter().zip(inputs) {
        let n = values.len() as f32;
        let mean = values.iter().sum::<f32>() / n;
        let deviation = (values.iter().map(|v| v * v).sum::<f32>() / n).sqrt();
        let want = 1.0 / (inputs as f32).sqrt();
        assert!(
            mean.abs() < 0.02 * want && (deviation / want - 1.0).abs() < 0.02,
            "{mean} {deviation} {want}"
        );
    }
    assert_ne!(sample(&weights, 0), sample(&weights, 1));
    assert_eq!(sample(&weights, 1), sample(&load(7), 1));
    assert_ne!(sample(&weights, 1), sample(&load(8), 1));
    let norm = down(&gpu, weights.layer(1).mlp_norm);
    // One tenth about 1, rounded.
    assert!(norm.iter().all(|v| (0.89..=1.11).contains(v)));
}

/// Llama 3.1 8B's shape with so many blocks.
fn shape(layers: usize) -> String {
    format!(
        r#"{{"architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": {layers}, "num_attention_heads": 32,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192,
        "rope_theta": 500000.0, "torch_dtype": "bfloat16"}}"#
    )
}

fn model_directory(config: &str) -> TempDir {
    let directory = TempDir::new().unwrap();
    std::fs::write(directory.path().join("config.json"), config).unwrap();
    directory
}

/// Time to load Llama 3.1 8B's shape, made up and from files in `PLIMSOLL_WEIGHTS_BENCH` (17 GB each).
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
#[expect(clippy::print_stdout, reason = "a measurement, when asked for")]
fn loading_speed() {
    let Some(place) = std::env::var_os("PLIMSOLL_WEIGHTS_BENCH") else {
        println!("set PLIMSOLL_WEIGHTS_BENCH to a directory with room for 17 GB, such as /dev/shm");
        return;
    };
    let gpu = Gpu::open(0).unwrap();
    let time = |what: &str, path: &Path, format| {
        let start = Instant::now();
        let weights = load_to(&gpu, path, format).unwrap();
        let seconds = start.elapsed().as_secs_f64();
        let gigabytes = weights.bytes() as f64 / 1e9;
        println!(
            "{what:<12} {gigabytes:6.2} GB {seconds:7.3} s {:7.1} GB/s",
            gigabytes / seconds
        );
    };
    let directory = tempfile::tempdir_in(place).unwrap();
    let config = shape(32);
    std::fs::write(directory.path().join("config.json"), &config).unwrap();
    for _ in 0..3 {
        time("dummy", directory.path(), LoadFormat::Dummy { seed: 0 });
    }
    let spec = ModelConfig::from_json(Path::new("config.json"), &config)
        .unwrap()
        .spec;
    for (what, dtype, bytes) in [("bf16", "BF16", 2), ("f32", "F32", 4)] {
        // Half the blocks of wide elements, to be as large.
        let layers = spec.num_layers * 2 / bytes;
        std::fs::write(directory.path().join("config.json"), shape(layers)).unwrap();
        write_checkpoint(
            directory.path(),
            &DecoderSpec {
                num_layers: layers,
                ..spec.clone()
            },
            dtype,
            bytes,
        );
        for _ in 0..3 {
            time(what, directory.path(), LoadFormat::Auto);
        }
    }
}

/// A safetensors file of the right shapes, written by several threads, of bytes that are small numbers in every type.
fn write_checkpoint(directory: &Path, spec: &DecoderSpec, dtype: &str, element: usize) {
    use std::os::unix::fs::FileExt;
    let (hidden, inner) = (spec.hidden_size, spec.intermediate_size);
    let mut shapes = vec![
        (
            "model.embed_tokens.weight".to_owned(),
            vec![spec.vocab_size, hidden],
        ),
        ("lm_head.weight".to_owned(), vec![spec.vocab_size, hidden]),
        ("model.norm.weight".to_owned(), vec![hidden]),
    ];
    for index in 0..spec.num_layers {
        let parts = [
            ("input_layernorm", vec![hidden]),
            ("self_attn.q_proj", vec![spec.q_size(), hidden]),
            ("self_attn.k_proj", vec![spec.kv_size(), hidden]),
            ("self_attn.v_proj", vec![spec.kv_size(), hidden]),
            ("self_attn.o_proj", vec![hidden, spec.q_size()]),
            ("post_attention_layernorm", vec![hidden]),
            ("mlp.gate_proj", vec![inner, hidden]),
            ("mlp.up_proj", vec![inner, hidden]),
            ("mlp.down_proj", vec![hidden, inner]),
        ];
        shapes.extend(parts.map(|(part, shape)| (format!("model.layers.{index}.{part}.weight"), shape)));
    }
    let mut end = 0;
    let entries = shapes.iter().map(|(name, shape)| {
        let start = end;
        end += shape.iter().product::<usize>() * element;
        format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{start},{end}]}}"#)
    });
    let mut header = format!("{{{}}}", entries.collect::<Vec<_>>().join(","));
    header.push_str(&" ".repeat(header.len().next_multiple_of(8) - header.len()));
    let path = directory.join("model.safetensors");
    let file = std::fs::File::create(&path).unwrap();
    file.write_all_at(&(header.len() as u64).to_le_bytes(), 0)
        .unwrap();
    file.write_all_at(header.as_bytes(), 8).unwrap();
    let data = 8 + header.len() as u64;
    let block = vec![0x3c_u8; 16 << 20];
    let next = std::sync::atomic::AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                loop {
                    let at = next.fetch_add(block.len(), std::sync::atomic::Ordering::Relaxed);
                    if at >= end {
                        break;
                    }
                    let len = block.len().min(end - at);
                    file.write_all_at(&block[..len], data + at as u64).unwrap();
                }
            });
        }
    });
}
