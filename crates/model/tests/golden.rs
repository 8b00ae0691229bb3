//! Every family against Hugging Face transformers.

use crate::common::scores::{assert_close, by_definition, in_chunks};
use crate::common::*;
use plimsoll_model::KvCacheDtype;

fn logits_error(name: &str, kv_cache_dtype: KvCacheDtype) -> f64 {
    let model = load(name, kv_cache_dtype);
    let mut worst: f64 = 0.0;
    for case in golden(name).cases {
        let mut runner = runner(&model, 16, 8);
        let table = blocks(0..8);
        let rows: Vec<usize> = (case.prompt.len() - case.last_logits.len()..case.prompt.len()).collect();
        let found = runner
            .logits(&plan(vec![run(1, 0, &case.prompt, &table)]), &rows)
            .unwrap();
        worst = worst.max(relative_error(&found, &case.last_logits.concat()));
    }
    worst
}

#[test]
fn logits_equal_transformers() {
    for name in MODELS {
        let error = logits_error(name, KvCacheDtype::F32);
        assert!(error < tolerance(name), "{name}: relative error {error:e}");
    }
}

/// f16 rounds K and V to 11 bits.
#[test]
fn logits_with_an_f16_cache_are_close() {
    for name in MODELS {
        let error = logits_error(name, KvCacheDtype::F16);
        // Where experts are chosen by small leads, rounding chooses others.
        let tolerance = if name == "gemma4-moe" { 3e-2 } else { 3e-3 };
        assert!(error < tolerance, "{name}: relative error {error:e}");
        assert!(error > 1e-6, "{name}: the cache is not f16 at all");
    }
}

/// The golden prompts were chosen without near-ties, so both element types of the cache give the same text.
#[test]
fn greedy_continuations_equal_transformers() {
    for name in MODELS {
        for kv_cache_dtype in [KvCacheDtype::F32, KvCacheDtype::F16, KvCacheDtype::Auto] {
            let model = load(name, kv_cache_dtype);
            for case in golden(name).cases {
                let mut runner = runner(&model, 16, 8);
                let found = greedy_alone(&mut runner, &case.prompt, &blocks(0..8), case.greedy.len());
                assert_eq!(
                    found, case.greedy,
                    "{name}, {kv_cache_dtype:?}, prompt {:?}",
                    case.prompt
                );
            }
        }
    }
}

#[test]
fn auto_caches_f32_only_for_f32_weights() {
    let dtype = |name| load(name, KvCacheDtype::Auto).kv_cache_dtype();
    assert_eq!(
        (dtype("llama"), dtype("llama3-tied-bf16"), dtype("qwen3-f16")),
        ("f32", "f16", "f16")
    );
}

#[test]
fn end_tokens_come_from_both_configurations() {
    assert_eq!(load("llama", KvCacheDtype::Auto).eos_token_ids(), [2]);
    assert_eq!(
        load("llama3-tied-bf16", KvCacheDtype::Auto).eos_token_ids(),
        [2, 3]
    );
}

/// However the prompt is cut.
#[test]
fn prompt_logprobs_equal_transformers() {
    for name in MODELS {
        let model = load(name, KvCacheDtype::F32);
        for case in golden(name).cases.iter().filter(|case| case.prompt.len() > 1) {
            let first = case.prompt.len() - case.last_logits.len();
            // The last position's logits are about what follows the prompt.
            let expected: Vec<_> = case.prompt[first + 1..]
                .iter()
                .zip(&case.last_logits)
                .map(|(&token, logits)| by_definition(logits, token, 5))
                .collect();
            for len in [128, 40, 7, 1] {
                let mut runner = runner(&model, 16, 8);
                let found = in_chunks(&mut runner, &case.prompt, len, &blocks(0..8));
                for (found, expected) in found[first..].iter().zip(&expected) {
                    assert_close(found, expected, 1e-4, &format!("{name}, chunks of {len}"));
                }
            }
        }
    }
}
