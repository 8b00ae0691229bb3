//! A second oracle: candle-transformers, which shares no code with ours or with the golden files.

use crate::common::*;
use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::llama;
use plimsoll_model::{KvCacheDtype, OutputHead};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

#[test]
fn llama3_equals_candle_transformers() {
    let name = "llama3-tied-bf16";
    let model = load(name, KvCacheDtype::F32);
    let config: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(golden_path(name).join("config.json")).unwrap())
            .unwrap();
    let rope = &config["rope_parameters"];
    let float = |value: &serde_json::Value| value.as_f64().unwrap() as f32;
    let spec = model.spec();
    let (layer, attention) = (&spec.layers[0], spec.layers[0].attention().unwrap());
    let candle_config = llama::Config {
        hidden_size: spec.hidden_size,
        intermediate_size: layer.dense_mlp().intermediate_size,
        vocab_size: spec.vocab_size,
        num_hidden_layers: spec.layers.len(),
        num_attention_heads: attention.heads,
        num_key_value_heads: attention.kv_heads,
        use_flash_attn: false,
        rms_norm_eps: f64::from(layer.norm.eps),
        rope_theta: float(&rope["rope_theta"]),
        bos_token_id: None,
        eos_token_id: None,
        rope_scaling: Some(llama::Llama3RopeConfig {
            factor: float(&rope["factor"]),
            low_freq_factor: float(&rope["low_freq_factor"]),
            high_freq_factor: float(&rope["high_freq_factor"]),
            original_max_position_embeddings: rope["original_max_position_embeddings"].as_u64().unwrap()
                as usize,
            rope_type: llama::Llama3RopeType::Llama3,
        }),
        max_position_embeddings: spec.max_position_embeddings,
        tie_word_embeddings: spec.head == OutputHead::Tied,
    };
    let device = Device::Cpu;
    let tensors =
        candle_core::safetensors::load(golden_path(name).join("model.safetensors"), &device).unwrap();
    let weights = VarBuilder::from_tensors(tensors, DType::F32, &device);
    let oracle = llama::Llama::load(weights, &candle_config).unwrap();

    for seed in 0..10 {
        let mut rng = StdRng::seed_from_u64(seed);
        let prompt: Vec<u32> = (0..rng.random_range(1..100))
            .map(|_| rng.random_range(0..160))
            .collect();
        let mut cache = llama::Cache::new(false, DType::F32, &candle_config, &device).unwrap();
        let input = Tensor::new(prompt.as_slice(), &device)
            .unwrap()
            .unsqueeze(0)
            .unwrap();
        let logits = oracle.forward(&input, 0, &mut cache).unwrap();
        let expected: Vec<f32> = logits.flatten_all().unwrap().to_vec1().unwrap();
        let mut runner = runner(&model, 16, 8);
        let found = runner
            .logits(
                &plan(vec![run(1, 0, &prompt, &blocks(0..8))]),
                &[prompt.len() - 1],
            )
            .unwrap();
        let error = relative_error(&found, &expected);
        assert!(error < 1e-4, "seed {seed}: relative error {error:e}");
    }
}
