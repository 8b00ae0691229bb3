//! GGUF files whose bits a GPU keeps, against the CPU.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::quantized::{GgmlDType, QTensor};
use plimsoll_core::{BlockSize, Component};
use plimsoll_device::cuda::Gpu;
use plimsoll_model::cuda::{GpuFootprint, GpuModel, GpuStateShape};
use plimsoll_model::{HfOverrides, KvCacheDtype, LoadFormat, LoadOptions, Model, ModelConfig};
use tempfile::TempDir;

use crate::common::convert::*;
use crate::common::*;
use crate::setup::{LIMITS, Setup, gpu, load_file};

/// What GPUs keep.
const KEPT: [GgmlDType; 8] = [
    GgmlDType::Q4_0,
    GgmlDType::Q4_1,
    GgmlDType::Q5_0,
    GgmlDType::Q5_1,
    GgmlDType::Q8_0,
    GgmlDType::Q4K,
    GgmlDType::Q5K,
    GgmlDType::Q6K,
];

/// The same random model in these types, by turns of its tensors.
struct Files {
    directory: TempDir,
    config: ModelConfig,
    tensors: Tensors,
}

impl Files {
    fn new() -> Self {
        let config = ModelConfig::from_json(Path::new("config.json"), LLAMA_256, &HfOverrides::default());
        let config = config.unwrap();
        Self {
            directory: TempDir::new().unwrap(),
            tensors: random_tensors(&config.spec),
            config,
        }
    }

    fn write(&self, types: &[GgmlDType], tied: bool) -> PathBuf {
        let spec = &self.config.spec;
        let of_type = types
            .iter()
            .map(|&dtype| converted(spec, "llama", &self.tensors, dtype));
        let mut of_type: Vec<Vec<(String, QTensor)>> = of_type.collect();
        let count = of_type[0].len();
        let mut mixed = Vec::new();
        for at in (0..count).rev() {
            let tensor = of_type.iter_mut().map(|tensors| tensors.remove(at));
            mixed.push(tensor.collect::<Vec<_>>().remove(at % types.len()));
        }
        if tied {
            mixed.retain(|(name, _)| name != "output.weight");
        }
        let path = self.directory.path().join("model.gguf");
        write(&path, &metadata("llama", spec), &mixed);
        path
    }
}

const PROMPT: usize = 40;

fn gpu_logits(model: &Arc<GpuModel>, rows: usize) -> Vec<f32> {
    let setup = Setup {
        block_size: 16,
        tokens: 256,
        enforce_eager: true,
    };
    let prompt: Vec<u32> = (0..rows as u32).map(|i| i * 7 % 256).collect();
    let plan = plan(vec![run(1, 0, &prompt, &blocks(0..4))]);
    setup
        .build(model)
        .logits(&plan, &[0, rows / 2, rows - 1])
        .unwrap()
}

fn cpu_logits(path: &Path, rows: usize) -> Vec<f32> {
    let options = LoadOptions {
        kv_cache_dtype: KvCacheDtype::F32,
        ..Default::default()
    };
    let model = Model::load(path, options, &budget(), &mut |_| ()).unwrap();
    let prompt: Vec<u32> = (0..rows as u32).map(|i| i * 7 % 256).collect();
    let plan = plan(vec![run(1, 0, &prompt, &blocks(0..8))]);
    runner(&model, 16, 8)
        .logits(&plan, &[0, rows / 2, rows - 1])
        .unwrap()
}

fn told(path: &Path) -> u64 {
    let shape = GpuStateShape {
        limits: LIMITS,
        block_size: BlockSize::new(16).unwrap(),
        options: Default::default(),
        serve_as: Default::default(),
        shard: plimsoll_model::Shard::WHOLE,
        kv_cache_dtype: Default::default(),
    };
    GpuFootprint::assumed(path, shape).unwrap().weights_bytes()
}

fn held(gpu: &Gpu) -> u64 {
    gpu.budget().meters().by_component.get(Component::Weights)
}

/// As close to the CPU as a file of floats is, whether weights are streamed, for few rows, or become `bf16`, for many.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn every_type_computes_as_on_a_cpu() {
    let gpu = gpu();
    let files = Files::new();
    let errors = |types: &[GgmlDType], tied: bool| {
        let path = files.write(types, tied);
        let model = load_file(&gpu, &path);
        assert_eq!(held(&gpu), told(&path), "{types:?}");
        [5, PROMPT].map(|rows| relative_error(&gpu_logits(&model, rows), &cpu_logits(&path, rows)))
    };
    let floats = errors(&[GgmlDType::F32], false);
    let mut mixes: Vec<Vec<GgmlDType>> = KEPT.iter().map(|&dtype| vec![dtype]).collect();
    mixes.push(vec![GgmlDType::Q4K, GgmlDType::Q6K]);
    mixes.push(vec![
        GgmlDType::Q5_0,
        GgmlDType::Q8_0,
        GgmlDType::Q3K,
        GgmlDType::F16,
    ]);
    for types in mixes {
        for tied in [false, true] {
            for (error, floats) in errors(&types, tied).into_iter().zip(floats) {
                assert!(
                    error < 2.0 * floats + 2e-3,
                    "{types:?}: {error:e}, floats {floats:e}"
                );
            }
        }
    }
}

/// To the bit, the table and the head among them.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn kept_types_arrive_to_the_bit() {
    let gpu = gpu();
    let files = Files::new();
    for dtype in KEPT {
        let path = files.write(&[dtype], false);
        let model = load_file(&gpu, &path);
        for (name, tensor) in &files.tensors {
            if tensor.rank() != 2 {
                continue;
            }
            let stored = QTensor::quantize(tensor, dtype).unwrap();
            let stored = stored.dequantize(&candle_core::Device::Cpu).unwrap();
            let want: Vec<f32> = stored.flatten_all().unwrap().to_vec1().unwrap();
            let found = model.tensor(name).unwrap().unwrap();
            // Candle multiplies in another order.
            let near = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-5 * b.abs().max(1e-2);
            assert!(found.iter().zip(&want).all(near), "{dtype:?}: {name}");
        }
    }
}

/// Tensor by tensor, through buffers of a fixed size: never two copies of a model.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn loading_takes_little_beside_the_weights() {
    const GIB: u64 = 1 << 30;
    let gpu = gpu();
    let files = Files::new();
    for dtype in [GgmlDType::Q4K, GgmlDType::Q8_0, GgmlDType::F32] {
        let path = files.write(&[dtype], false);
        gpu.reset_high_water().unwrap();
        let before = gpu.budget().meters().reserved;
        let model = load_file(&gpu, &path);
        let peak = gpu.budget().meters().reserved_high - before;
        let weights = held(&gpu);
        assert!(
            peak >= weights && peak <= weights + GIB,
            "{dtype:?}: {peak} of {weights}"
        );
        drop(model);
    }
    // The widest layers there are, of which products are measured.
    let wide = r#"{"architectures": ["LlamaForCausalLM"], "vocab_size": 262144, "hidden_size": 16384,
        "intermediate_size": 53248, "num_hidden_layers": 1, "num_attention_heads": 128, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "rope_theta": 500000.0, "torch_dtype": "bfloat16"}"#;
    let directory = TempDir::new().unwrap();
    std::fs::write(directory.path().join("config.json"), wide).unwrap();
    let options = LoadOptions {
        format: LoadFormat::Dummy { seed: 1 },
        ..Default::default()
    };
    gpu.reset_high_water().unwrap();
    let before = gpu.budget().meters().reserved;
    let model = GpuModel::load(directory.path(), options, &gpu, &mut |_| ()).unwrap();
    let peak = gpu.budget().meters().reserved_high - before;
    assert!(peak <= held(&gpu) + GIB, "{peak} of {}", held(&gpu));
    drop(model);
}
