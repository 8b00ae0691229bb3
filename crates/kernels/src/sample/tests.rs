use std::collections::HashMap;

use plimsoll_core::{SamplingOptions, SamplingParams};
use rand::Rng;

use super::*;
use crate::testing::{arena, normal, rng, seeds};

fn spec(options: SamplingOptions, vocab: usize) -> SampleSpec {
    let params = SamplingParams::new(&options, vocab).unwrap().into();
    SampleSpec {
        params,
        seed: 11,
        index: 0,
        history: vec![],
        prompt_len: 0,
        constrained: false,
    }
}

fn one(logits: &[f32], spec: &SampleSpec) -> Result<Sampled, SampleError> {
    let mut row = logits.to_vec();
    sample(&mut row, &[spec], &arena()).unwrap().remove(0)
}

/// Probabilities after temperature, min_p, top_k, top_p, by definition, with full sorts and in f64.
fn reference(logits: &[f32], params: &SamplingParams) -> Vec<f64> {
    let scaled: Vec<f64> = logits
        .iter()
        .map(|&l| f64::from(l) / f64::from(params.temperature()))
        .collect();
    let max = scaled.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let mut p: Vec<f64> = scaled.iter().map(|s| (s - max).exp()).collect();
    p.iter_mut()
        .for_each(|p| *p = if *p < f64::from(params.min_p()) { 0.0 } else { *p });
    let mut order: Vec<usize> = (0..p.len()).collect();
    order.sort_by(|&a, &b| p[b].total_cmp(&p[a]).then(a.cmp(&b)));
    order.iter().skip(params.top_k()).for_each(|&i| p[i] = 0.0);
    let sum: f64 = p.iter().sum();
    let mut before = 0.0;
    for &i in &order {
        let here = p[i];
        if before >= f64::from(params.top_p()) * sum {
            p[i] = 0.0;
        }
        before += here;
    }
    let sum: f64 = p.iter().sum();
    p.iter().map(|p| p / sum).collect()
}

#[test]
fn draws_follow_the_distribution() {
    let vocab = 50;
    let logits = normal(&mut rng(3), vocab)
        .iter()
        .map(|l| 2.0 * l)
        .collect::<Vec<_>>();
    let all = SamplingOptions::default();
    let cases = [
        all.clone(),
        SamplingOptions {
            temperature: Some(0.5),
            ..all.clone()
        },
        SamplingOptions {
            top_k: Some(7),
            temperature: Some(2.0),
            ..all.clone()
        },
        SamplingOptions {
            top_p: Some(0.8),
            ..all.clone()
        },
        SamplingOptions {
            min_p: Some(0.1),
            ..all.clone()
        },
        SamplingOptions {
            top_k: Some(20),
            top_p: Some(0.7),
            min_p: Some(0.02),
            temperature: Some(1.3),
            ..all
        },
    ];
    for options in cases {
        let mut spec = spec(options, vocab);
        let want = reference(&logits, &spec.params);
        let n = 20_000;
        let mut counts = vec![0f64; vocab];
        // Many rows at once: also what the parallel path does.
        for start in (0..n).step_by(100) {
            let specs: Vec<SampleSpec> = (start..start + 100)
                .map(|index| {
                    spec.index = index;
                    spec.clone()
                })
                .collect();
            let mut rows = logits.repeat(100);
            for sampled in sample(&mut rows, &specs.iter().collect::<Vec<_>>(), &arena()).unwrap() {
                counts[sampled.unwrap().token as usize] += 1.0;
            }
        }
        let likely: Vec<usize> = (0..vocab).filter(|&i| want[i] * n as f64 >= 5.0).collect();
        let chi2: f64 = likely
            .iter()
            .map(|&i| (counts[i] - want[i] * n as f64).powi(2) / (want[i] * n as f64))
            .sum();
        let freedom = likely.len() as f64;
        // Five standard deviations of chi-square; the seed is fixed.
        assert!(
            chi2 < freedom + 5.0 * (2.0 * freedom).sqrt() + 5.0,
            "chi² {chi2} of {freedom}: {:?}",
            spec.params
        );
        assert!(
            (0..vocab).all(|i| want[i] > 0.0 || counts[i] == 0.0),
            "an excluded token was drawn: {:?}",
            spec.params
        );
    }
}

#[test]
fn truncation_keeps_exactly_the_right_tokens() {
    for seed in seeds(20) {
        let mut rng = rng(seed);
        let vocab = rng.random_range(2..3000);
        // Few distinct values, so that ties occur.
        let logits: Vec<f32> = (0..vocab)
            .map(|_| rng.random_range(-40i32..40) as f32 / 8.0)
            .collect();
        let options = SamplingOptions {
            top_k: Some(rng.random_range(0..60)),
            top_p: Some(rng.random_range(0.05..1.0)),
            min_p: Some(rng.random_range(0.0..0.2)),
            temperature: Some(rng.random_range(0.3..2.0)),
            ..Default::default()
        };
        let mut spec = spec(options, vocab);
        let want = reference(&logits, &spec.params);
        for index in 0..50 {
            spec.index = index;
            let token = one(&logits, &spec).unwrap().token;
            assert!(
                want[token as usize] > 0.0,
                "seed {seed} drew {token}: {:?}",
                spec.params
            );
        }
    }
}

#[test]
fn greedy_takes_the_largest_and_the_lowest_of_equals() {
    let greedy = spec(
        SamplingOptions {
            temperature: Some(0.0),
            ..Default::default()
        },
        4,
    );
    assert_eq!(one(&[1.0, 3.0, 3.0, 2.0], &greedy).unwrap().token, 1);
    assert_eq!(
        one(&[f32::NAN, -3.0, f32::NEG_INFINITY, -4.0], &greedy)
            .unwrap()
            .token,
        1
    );
    let top_1 = spec(
        SamplingOptions {
            top_k: Some(1),
            ..Default::default()
        },
        4,
    );
    assert_eq!(one(&[1.0, 3.0, 3.0, 2.0], &top_1).unwrap().token, 1);
    let cold = spec(
        SamplingOptions {
            temperature: Some(1e-38),
            ..Default::default()
        },
        4,
    );
    assert_eq!(one(&[1.0, 3.0, 2.9, 2.0], &cold).unwrap().token, 1);
}

#[test]
fn rows_without_a_number_fail_alone() {
    let spec = spec(SamplingOptions::default(), 3);
    let mut logits = [
        [f32::NAN; 3],
        [f32::NEG_INFINITY; 3],
        [0.0, f32::INFINITY, 0.0],
        [f32::NAN, 1.0, f32::NAN],
    ]
    .concat();
    let results = sample(&mut logits, &[&spec; 4], &arena()).unwrap();
    assert_eq!(results[..3], [const { Err(SampleError::NotFinite) }; 3]);
    assert_eq!(results[3].as_ref().unwrap().token, 1);
}

#[test]
fn bias_and_penalties_are_vllms() {
    let options = SamplingOptions {
        temperature: Some(0.0),
        repetition_penalty: Some(2.0),
        presence_penalty: Some(0.25),
        frequency_penalty: Some(0.5),
        logit_bias: vec![(0, 1.0), (4, -100.0)],
        logprobs: Some(5),
        ..Default::default()
    };
    let mut spec = spec(options, 5);
    // Token 0 twice in the prompt; 1 once and 2 twice in the output; 3 in both.
    (spec.history, spec.prompt_len) = (vec![0, 3, 0, 1, 2, 3, 2], 3);
    let got = one(&[3.0, 2.0, -1.0, 4.0, 9.0], &spec).unwrap();
    let penalised = [
        4.0 / 2.0,
        2.0 / 2.0 - 0.75,
        -2.0 - 1.25,
        4.0 / 2.0 - 0.75,
        9.0 - 100.0,
    ];
    let sum: f64 = penalised.iter().map(|l| f64::exp(*l)).sum();
    let logprobs: HashMap<u32, f32> = got
        .logprobs
        .unwrap()
        .top
        .iter()
        .map(|t| (t.token, t.logprob))
        .collect();
    for (token, logit) in penalised.iter().enumerate() {
        let want = logit - sum.ln();
        assert!(
            (f64::from(logprobs[&(token as u32)]) - want).abs() < 1e-5,
            "token {token}"
        );
    }
    assert_eq!(got.token, 0);
}

#[test]
fn logprobs_ignore_temperature_and_truncation_and_come_best_first() {
    let options = SamplingOptions {
        temperature: Some(3.0),
        top_k: Some(1),
        logprobs: Some(2),
        ..Default::default()
    };
    let got = one(&[0.0, 2.0, 1.0, 2.0], &spec(options, 4)).unwrap();
    let sum = 1.0 + 2.0 * f64::exp(2.0) + f64::exp(1.0);
    let want = (2.0 - sum.ln()) as f32;
    let logprobs = got.logprobs.unwrap();
    assert_eq!(logprobs.top.iter().map(|t| t.token).collect::<Vec<_>>(), [1, 3]);
    assert!(
        logprobs.top.iter().all(|t| (t.logprob - want).abs() < 1e-6)
            && (logprobs.sampled - want).abs() < 1e-6
    );
    let none = spec(
        SamplingOptions {
            logprobs: Some(0),
            ..Default::default()
        },
        4,
    );
    assert!(one(&[0.0; 4], &none).unwrap().logprobs.unwrap().top.is_empty());
}

#[test]
fn a_draw_depends_on_seed_and_index_alone() {
    let mut rng = rng(1);
    let vocab = 1000;
    let rows = 9;
    let logits = normal(&mut rng, rows * vocab);
    let specs: Vec<SampleSpec> = (0..rows)
        .map(|i| SampleSpec {
            index: i * 3,
            ..spec(
                SamplingOptions {
                    top_p: Some(0.9),
                    ..Default::default()
                },
                vocab,
            )
        })
        .collect();
    let together = sample(&mut logits.clone(), &specs.iter().collect::<Vec<_>>(), &arena()).unwrap();
    for (row, spec) in specs.iter().enumerate() {
        assert_eq!(one(&logits[row * vocab..(row + 1) * vocab], spec), together[row]);
    }
}

#[test]
fn a_mask_comes_before_all_else() {
    let mut rng = rng(12);
    for _ in 0..200 {
        let vocab = rng.random_range(1..150);
        let mut logits = normal(&mut rng, vocab);
        let mut mask: Vec<u32> = (0..vocab.div_ceil(32)).map(|_| rng.random()).collect();
        mask[0] |= 1;
        let allowed = |token: usize| mask[token / 32] >> (token % 32) & 1 == 1;
        let options = SamplingOptions {
            top_k: Some(1),
            logprobs: Some(2),
            // A bias does not bring back what is forbidden.
            logit_bias: (0..vocab as u32)
                .filter(|&t| !allowed(t as usize))
                .map(|t| (t, 100.0))
                .collect(),
            ..Default::default()
        };
        let best = (0..vocab)
            .filter(|&t| allowed(t))
            .max_by(|&a, &b| logits[a].total_cmp(&logits[b]));
        let sum: f64 = (0..vocab)
            .filter(|&t| allowed(t))
            .map(|t| f64::from(logits[t]).exp())
            .sum();
        let expected = f64::from(logits[best.unwrap()]) - sum.ln();
        apply_mask(&mut logits, &mask);
        let sampled = one(&logits, &spec(options, vocab)).unwrap();
        assert_eq!(sampled.token as usize, best.unwrap());
        let logprob = f64::from(sampled.logprobs.unwrap().sampled);
        assert!(
            (logprob - expected).abs() < 1e-4,
            "among what is allowed: {logprob}, {expected}"
        );
    }
}
