//! A small model, whose layers are one launch as a whole in decode steps of one row.

use std::sync::Arc;

use plimsoll_core::{Sampled, Scratch, StepLimits};
use plimsoll_kernels::cuda::has_hopper_kernels;
use plimsoll_model::cuda::GpuModel;
use rand::SeedableRng;
use rand::rngs::StdRng;

use crate::common::{blocks, plan, relative_error, run};
use crate::rows::{ROUNDING, random_tokens, sample};
use crate::setup::{Setup, gpu, load_dummy_with, report};

/// Layers of Qwen2.5-0.5B, but more of them than a launch takes.
const CONFIG: &str = r#"{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 896,
    "intermediate_size": 4864, "num_hidden_layers": 34, "num_attention_heads": 14, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "vocab_size": 2048, "max_position_embeddings": 16384,
    "tie_word_embeddings": true}"#;

const LIMITS: StepLimits = StepLimits {
    max_num_batched_tokens: 16_384,
    max_num_seqs: 2,
    max_model_len: 16_384,
};

/// Log-probabilities of a request that decodes alone, whose layers are one launch unless its context is long, and beside another, where they
/// are not: both are those of the kernels for any step.
fn decode(model: &Arc<GpuModel>) -> Vec<Sampled> {
    let setup = Setup {
        block_size: 16,
        tokens: 16_384,
        enforce_eager: false,
    };
    let mut runner = setup.build_for(model, &LIMITS, Scratch::Growable);
    let text = random_tokens(&mut StdRng::seed_from_u64(5), 12_001);
    let (own, other) = (blocks(0..1023), blocks(1023..1024));
    let contexts = [1, 2, 17, 250, 1001, 8065, 12_001];
    let decoded = contexts.map(|context| {
        let (prompt, last) = text[..context].split_at(context - 1);
        if !prompt.is_empty() {
            let prompt = run(0, 0, prompt, &own);
            runner.logits(&plan(vec![prompt]), &[]).unwrap();
        }
        let step = run(0, context - 1, last, &own);
        let logits = runner.logits(&plan(vec![step.clone()]), &[0]).unwrap();
        let total: f64 = logits.iter().map(|&logit| f64::from(logit).exp()).sum();
        let error = |sampled: &Sampled| {
            let top = sampled.logprobs.iter().flat_map(|logprobs| &logprobs.top);
            let pairs = top.map(|top| (top.logprob, logits[top.token as usize] - total.ln() as f32));
            let (found, expected): (Vec<f32>, Vec<f32>) = pairs.unzip();
            assert_eq!(found.len(), 20);
            relative_error(&found, &expected)
        };
        let alone = sample(&mut runner, vec![step.clone()]).remove(0);
        for _ in 0..3 {
            let again = sample(&mut runner, vec![step.clone()]).remove(0);
            assert_eq!(again, alone, "context {context}: not even the same step again");
        }
        let beside = sample(&mut runner, vec![step, run(1, 0, &[7], &other)]).remove(0);
        let errors = [&alone, &beside].map(error);
        report(format_args!(
            "context {context}: alone, beside another {errors:.5?}"
        ));
        assert!(
            errors.iter().all(|&error| error < ROUNDING),
            "context {context}: {errors:?}"
        );
        alone
    });
    decoded.into()
}

/// Also where an earlier process measured that they are faster so.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn whole_layers_decode_alone() {
    let gpu = gpu();
    if !has_hopper_kernels(&gpu) {
        return;
    }
    let model = load_dummy_with(&gpu, CONFIG, None);
    let ways = model.measured_linear_ways().expect("nothing was kept");
    let kept = serde_json::to_value(&ways).unwrap();
    let whole = kept["whole_layers"].as_array().expect("a list");
    assert_eq!(whole.len(), 1, "layers of one kind, faster as a whole");
    let decoded = decode(&model);
    drop(model);
    let model = load_dummy_with(&gpu, CONFIG, Some(ways));
    assert!(model.measured_linear_ways().is_none(), "the same GPU");
    assert_eq!(decode(&model), decoded);
}
