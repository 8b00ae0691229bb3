//! The default model against transformers, which computed with the same file's weights dequantised to f32.
//!
//! We multiply with activations rounded to 15 bits and cache f16, so logits differ by 1 to 2 parts in 10,000 of their norm.
//! Where the best token leads by more than that it must be chosen; where two tokens nearly tie either may be.

use std::fs;
use std::sync::Arc;
use std::time::Duration;

use crate::common::quantised::{checkpoints, weights};
use crate::common::smollm2::{SmolCase, cases, file};
use crate::common::*;
use plimsoll_core::TokenId;
use plimsoll_model::{KvCacheDtype, LoadOptions, Model};
use serde_json::Value;

/// In logits; their standard deviation over the vocabulary is about 4.
const NEAR_TIE: f32 = 0.01;

#[test]
fn chooses_the_tokens_that_transformers_chooses() {
    let model = Model::load(&file(), LoadOptions::default(), &budget(), &mut |_| ()).unwrap();
    assert_eq!(model.eos_token_ids(), [2]);
    assert_eq!(
        (model.kv_bytes_per_token(), model.kv_cache_dtype()),
        (2 * 30 * 192 * 2, "f16")
    );
    for case in cases() {
        let logits = every_row(&model, &case.read_text());
        assert_follows(&model, &case, &logits, 1e-3);
    }
}

/// Logits behind each token of a text.
fn every_row(model: &Arc<Model>, text: &[TokenId]) -> Vec<f32> {
    let rows: Vec<usize> = (0..text.len()).collect();
    let step = plan(vec![run(1, 0, text, &blocks(0..8))]);
    runner(model, 16, 8).logits(&step, &rows).unwrap()
}

/// The golden text is given, so that one near-tie does not end the comparison.
fn assert_follows(model: &Arc<Model>, case: &SmolCase, logits: &[f32], tolerance: f64) {
    let vocab = model.spec().vocab_size;
    let logits = &logits[(case.prompt.len() - 1) * vocab..];
    let found: Vec<f32> = case.top_tokens.iter().map(|&token| logits[token]).collect();
    let error = relative_error(&found, &case.top_logits);
    assert!(
        error < tolerance,
        "relative error {error} after {:?}",
        case.prompt
    );

    let mut decided = 0;
    for (index, logits) in logits.chunks(vocab).enumerate() {
        let best = (0..vocab)
            .max_by(|&a, &b| logits[a].total_cmp(&logits[b]))
            .unwrap();
        let expected = case.greedy[index] as usize;
        if case.leads[index] > NEAR_TIE {
            assert_eq!(best, expected, "token {index} after {:?}", case.prompt);
            decided += 1;
        } else {
            assert!(
                logits[best] - logits[expected] < NEAR_TIE,
                "token {index} after {:?}",
                case.prompt
            );
        }
    }
    assert!(
        decided >= 20,
        "only {decided} of {} tokens were no near-tie",
        case.greedy.len()
    );

    let certain = case.leads.iter().take_while(|&&lead| lead > NEAR_TIE).count();
    let found = greedy_alone(&mut runner(model, 16, 8), &case.prompt, &blocks(0..8), certain);
    assert_eq!(found, case.greedy[..certain]);
}

/// Of the checkpoints that compressed-tensors writes, against transformers with the weights that these hold: greedy text, and how far
/// quantising moves the distributions, by our arithmetic and by its. What is recorded is what is found.
#[test]
fn quantised_checkpoints_are_as_close_to_bf16_as_the_library_has_them() {
    let recorded = repository().join("tests/bench/cpu/quantised-smollm2.json");
    let recorded: Value = serde_json::from_str(&std::fs::read_to_string(recorded).unwrap()).unwrap();
    let weights = weights();
    let options = LoadOptions {
        kv_cache_dtype: KvCacheDtype::F32,
        ..Default::default()
    };
    let mut plain: Option<Arc<Model>> = None;
    for checkpoint in checkpoints() {
        let directory = tempfile::tempdir().unwrap();
        checkpoint.write(&weights, directory.path());
        let model = Model::load(directory.path(), options.clone(), &budget(), &mut |_| ()).unwrap();
        let vocab = model.spec().vocab_size;
        let (mut ours, mut theirs): (Vec<f64>, Vec<f64>) = Default::default();
        for case in &checkpoint.cases {
            let text = case.read_text();
            let logits = every_row(&model, &text);
            assert_follows(&model, case, &logits, 1e-4);
            if let Some(plain) = &plain {
                let expected = every_row(plain, &text);
                let rows = expected.chunks(vocab).zip(logits.chunks(vocab));
                ours.extend(rows.map(|(expected, found)| divergence(expected, found)));
                theirs.extend(&case.divergence);
            }
        }
        if plain.is_none() {
            plain = Some(model);
            continue;
        }
        assert_eq!(ours.len(), theirs.len());
        for (index, (ours, theirs)) in ours.iter().zip(&theirs).enumerate() {
            let what = format!("{}, row {index}: {ours}, library {theirs}", checkpoint.name);
            assert!((ours - theirs).abs() < 1e-4 + 0.02 * theirs, "{what}");
        }
        let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
        let recorded = &recorded["checkpoints"][&checkpoint.name];
        let rounded = checkpoint.cases.iter();
        let rounded: Vec<f64> = rounded
            .flat_map(|case| case.divergence_of_rounded_inputs.clone())
            .collect();
        for (who, values) in [
            ("plimsoll", &ours),
            ("transformers", &theirs),
            ("transformers, inputs in 8 bits", &rounded),
        ] {
            if values.is_empty() {
                continue;
            }
            let largest = values.iter().copied().fold(0.0, f64::max);
            for (field, found) in [("mean", mean(values)), ("largest", largest)] {
                let expected = recorded[who][field].as_f64().unwrap();
                let what = format!("{}, {who}, {field}: {found}", checkpoint.name);
                report(&what);
                assert!((found / expected - 1.0).abs() < 0.01, "{what}");
            }
        }
    }
}

/// What was measured; a passing test shows it with `--nocapture`.
#[expect(clippy::print_stdout, reason = "measurements, when asked for")]
fn report(what: &str) {
    println!("{what}");
}

/// KL divergence of the distribution that logits mean from the expected one, in nats.
fn divergence(expected: &[f32], found: &[f32]) -> f64 {
    let log_sum = |logits: &[f32]| {
        let largest = logits.iter().copied().fold(f32::MIN, f32::max);
        let sum: f64 = logits.iter().map(|x| f64::from(x - largest).exp()).sum();
        f64::from(largest) + sum.ln()
    };
    let (expected_sum, found_sum) = (log_sum(expected), log_sum(found));
    let terms = expected.iter().zip(found).map(|(&expected, &found)| {
        let (expected, found) = (f64::from(expected) - expected_sum, f64::from(found) - found_sum);
        expected.exp() * (expected - found)
    });
    terms.sum()
}

/// Time on a processor of this thread, which other work on the machine does not lengthen.
fn processor_time() -> Duration {
    let stat = fs::read_to_string("/proc/thread-self/stat").unwrap();
    let (_, fields) = stat.rsplit_once(')').unwrap();
    // In user mode and in the kernel, in hundredths of a second: fields 14 and 15, of which two come before the parenthesis.
    let ticks: u64 = fields
        .split_whitespace()
        .skip(11)
        .take(2)
        .map(|field| field.parse::<u64>().unwrap())
        .sum();
    Duration::from_millis(10 * ticks)
}

#[test]
fn loads_quickly() {
    let file = file();
    let start = processor_time();
    Model::load(&file, LoadOptions::default(), &budget(), &mut |_| ()).unwrap();
    let took = processor_time() - start;
    // Half a second is usual in a release build; this is for a debug build.
    assert!(took < Duration::from_secs(5), "loading took {took:?}");
}
