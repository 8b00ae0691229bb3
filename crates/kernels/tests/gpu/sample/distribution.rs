//! Many draws from one row of logits, against the probabilities by definition.

use super::*;

/// Probabilities after temperature, min_p, top_k, top_p, with full sorts and in `f64`.
fn reference(logits: &[f32], params: &SamplingParams) -> Vec<f64> {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut p: Vec<f64> = logits
        .iter()
        .map(|&l| ((f64::from(l) - f64::from(max)) / f64::from(params.temperature())).exp())
        .map(|p| if p < f64::from(params.min_p()) { 0.0 } else { p })
        .collect();
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

fn check(run: impl Fn(&Batch) -> Vec<Choice>) {
    let mut rng = rng("distribution");
    let vocab = 50;
    let logits: Vec<f32> = (0..vocab).map(|_| rng.random_range(-4.0..4.0)).collect();
    let with = |temperature, top_k, top_p, min_p| SamplingOptions {
        temperature: Some(temperature),
        top_k: Some(top_k),
        top_p: Some(top_p),
        min_p: Some(min_p),
        ..Default::default()
    };
    for options in [
        with(1.0, 0, 1.0, 0.0),
        with(0.5, 0, 1.0, 0.0),
        with(2.0, 7, 1.0, 0.0),
        with(1.0, 0, 0.8, 0.0),
        with(1.0, 0, 1.0, 0.1),
        with(1.3, 20, 0.7, 0.02),
    ] {
        let seed = rng.random();
        let want = reference(&logits, &spec(&options, vocab, seed, 0).params);
        let n = 20_000;
        let batch = Batch {
            vocab,
            logits: logits.repeat(n),
            specs: (0..n).map(|index| spec(&options, vocab, seed, index)).collect(),
        };
        let mut counts = vec![0f64; vocab];
        for choice in run(&batch) {
            counts[choice.expect("a token").0 as usize] += 1.0;
        }
        assert!(
            (0..vocab).all(|i| want[i] > 0.0 || counts[i] == 0.0),
            "an excluded token was drawn: {options:?}"
        );
        let likely: Vec<usize> = (0..vocab).filter(|&i| want[i] * n as f64 >= 5.0).collect();
        let chi2: f64 = likely
            .iter()
            .map(|&i| (counts[i] - want[i] * n as f64).powi(2) / (want[i] * n as f64))
            .sum();
        let freedom = likely.len() as f64;
        assert!(
            chi2 < freedom + 6.0 * (2.0 * freedom).sqrt() + 6.0,
            "chi² {chi2} of {freedom}: {options:?}"
        );
    }
}

#[test]
fn sample_distribution_on_the_cpu() {
    check(on_cpu);
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn sample_distribution() {
    let on_gpu = OnGpu::new();
    check(|batch| on_gpu.run(batch));
}
