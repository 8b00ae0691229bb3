//! Choosing tokens: the GPU against the CPU twin, row by row, and both against the distribution.

mod distribution;
mod masks;

use plimsoll_core::{Logprobs, SampleSpec, SamplingOptions, SamplingParams, Scratch};
use plimsoll_device::cuda::{Gpu, GpuSlice};
use plimsoll_device::{Arena, Budget, Pod};
use plimsoll_kernels::cuda::{
    RankArgs, RowLogprobs, SampleArgs, SampleKernels, SampleLists, SampleRow, TokenBias, TokenRank,
};
use plimsoll_kernels::{SampleError, ScoreRow, sample, score};
use rand::Rng;
use rand::rngs::StdRng;

use crate::common::{download, gpu, poisoned, rng, upload};

/// What a row gave: token and log-probabilities.
type Choice = Result<(u32, Option<Logprobs>), SampleError>;

/// Rows of a step.
struct Batch {
    vocab: usize,
    logits: Vec<f32>,
    specs: Vec<SampleSpec>,
}

fn spec(options: &SamplingOptions, vocab: usize, seed: u64, index: usize) -> SampleSpec {
    SampleSpec {
        params: SamplingParams::new(options, vocab)
            .expect("legal parameters")
            .into(),
        seed,
        index,
        history: Vec::new(),
        prompt_len: 0,
        constrained: false,
    }
}

fn on_cpu(batch: &Batch) -> Vec<Choice> {
    let arena = Arena::new(&Budget::new(1 << 32), Scratch::Growable).expect("an arena");
    let mut logits = batch.logits.clone();
    let specs: Vec<&SampleSpec> = batch.specs.iter().collect();
    let results = sample(&mut logits, &specs, &arena).expect("room");
    results
        .into_iter()
        .map(|r| r.map(|s| (s.token, s.logprobs)))
        .collect()
}

/// Everything of `values`, or one element where there are none.
fn all<'a, T: Pod>(slab: &'a plimsoll_device::cuda::GpuSlab, values: &[T]) -> GpuSlice<'a, T> {
    slab.slice::<T>().range(0..values.len())
}

struct OnGpu {
    gpu: Gpu,
    kernels: SampleKernels,
}

impl OnGpu {
    fn new() -> Self {
        let gpu = gpu();
        let kernels = SampleKernels::load(&gpu).expect("kernels");
        Self { gpu, kernels }
    }

    fn without_clusters() -> Self {
        let gpu = gpu();
        let kernels = SampleKernels::load(&gpu).expect("kernels").without_clusters();
        Self { gpu, kernels }
    }

    fn run(&self, batch: &Batch) -> Vec<Choice> {
        let mut lists = SampleLists::default();
        let rows: Vec<SampleRow> = batch
            .specs
            .iter()
            .map(|spec| SampleRow::new(spec, None, &mut lists))
            .collect();
        self.run_rows(batch, &rows, &lists, &[], None)
    }

    fn run_rows(
        &self,
        batch: &Batch,
        rows: &[SampleRow],
        lists: &SampleLists,
        resolved: &[i32],
        masks: Option<&[u32]>,
    ) -> Vec<Choice> {
        let gpu = &self.gpu;
        let (n, guard) = (rows.len(), 4);
        let logits = upload(gpu, &batch.logits);
        let rows_ = upload(gpu, rows);
        let (history, biases) = (upload(gpu, &lists.history), upload(gpu, &lists.biases));
        let resolved_ = upload(gpu, resolved);
        let masks_ = masks.map(|masks| (upload(gpu, masks), masks));
        let sampled = poisoned::<i32>(gpu, n + guard);
        let logprobs = poisoned::<RowLogprobs>(gpu, n + guard);
        let args = SampleArgs {
            logits: all(&logits, &batch.logits),
            rows: all(&rows_, rows),
            history: all(&history, &lists.history),
            biases: all(&biases, &lists.biases),
            resolved: all(&resolved_, resolved),
            masks: masks_.as_ref().map(|(slab, masks)| all(slab, masks)),
            sampled: sampled.slice().range(0..n),
            logprobs: logprobs.slice().range(0..n),
        };
        self.kernels.sample(&args).expect("a launch");
        let tokens: Vec<i32> = download(gpu, &sampled, n + guard);
        assert!(tokens[n..].iter().all(|&t| t == -1), "written beyond the rows");
        let logprobs: Vec<RowLogprobs> = download(gpu, &logprobs, n);
        let choice = |row: usize| match u32::try_from(tokens[row]) {
            Ok(token) => {
                let wanted = batch
                    .specs
                    .get(row)
                    .is_some_and(|s| s.params.logprobs().is_some());
                Ok((token, wanted.then(|| Logprobs::from(&logprobs[row]))))
            }
            Err(_) => Err(SampleError::NotFinite),
        };
        (0..n).map(choice).collect()
    }
}

/// Logits of a language model's kind: a bulk, and a few that stand out; sometimes flat, with ties, with holes or all the same.
fn random_logits(rng: &mut StdRng, vocab: usize) -> Vec<f32> {
    let spread = [0.1, 1.0, 3.0, 8.0][rng.random_range(0..4)];
    let mut bell = || (0..4).map(|_| rng.random_range(-1.0f32..1.0)).sum::<f32>();
    let mut logits: Vec<f32> = (0..vocab).map(|_| bell() * spread).collect();
    for _ in 0..rng.random_range(0..12) {
        logits[rng.random_range(0..vocab)] += rng.random_range(0.0..12.0);
    }
    match rng.random_range(0..10) {
        0 => logits.iter_mut().for_each(|x| *x = (*x * 4.0).round() / 4.0),
        1 => logits.iter_mut().for_each(|x| {
            if rng.random_bool(0.3) {
                *x = [f32::NAN, f32::NEG_INFINITY][rng.random_range(0..2)];
            }
        }),
        2 => logits.fill(1.5),
        _ => {}
    }
    logits
}

fn random_spec(rng: &mut StdRng, vocab: usize) -> SampleSpec {
    let pick = |rng: &mut StdRng, p: f64, range: std::ops::Range<f64>| {
        rng.random_bool(p).then(|| rng.random_range(range))
    };
    let most = vocab.min(5000) as i64;
    let options = SamplingOptions {
        temperature: pick(rng, 0.8, 0.2..2.0),
        top_p: pick(rng, 0.5, 0.05..1.0),
        top_k: rng.random_bool(0.5).then(|| {
            let most = [5, 60, most][rng.random_range(0..3)];
            rng.random_range(1..=most)
        }),
        min_p: pick(rng, 0.2, 0.0..0.3),
        presence_penalty: pick(rng, 0.3, -2.0..2.0),
        frequency_penalty: pick(rng, 0.3, -2.0..2.0),
        repetition_penalty: pick(rng, 0.3, 0.5..2.0),
        logit_bias: (0..rng.random_range(0..6))
            .map(|_| {
                (
                    rng.random_range(0..vocab.min(40) as u32),
                    rng.random_range(-5.0..5.0),
                )
            })
            .collect(),
        logprobs: rng.random_bool(0.4).then(|| rng.random_range(0..=20)),
    };
    let mut spec = spec(&options, vocab, rng.random(), rng.random_range(0..5000));
    if spec.params.needs_history() {
        let len = rng.random_range(1..3000);
        let few = [20, vocab as u32][rng.random_range(0..2)].min(vocab as u32);
        spec.history = (0..len).map(|_| rng.random_range(0..few)).collect();
        spec.prompt_len = rng.random_range(0..=len);
    }
    spec
}

fn random_batch(rng: &mut StdRng, vocab: usize, rows: usize) -> Batch {
    Batch {
        vocab,
        logits: (0..rows).flat_map(|_| random_logits(rng, vocab)).collect(),
        specs: (0..rows).map(|_| random_spec(rng, vocab)).collect(),
    }
}

/// Log-probabilities agree to the rounding of single precision; tokens exactly.
#[track_caller]
fn assert_same_logprobs(got: &Logprobs, want: &Logprobs, context: &str) {
    let close = |a: f32, b: f32| a == b || (a - b).abs() <= 2e-5 * (1.0 + b.abs());
    assert!(
        close(got.sampled, want.sampled),
        "{context}: {} for {}",
        got.sampled,
        want.sampled
    );
    assert_eq!(got.top.len(), want.top.len(), "{context}");
    for (g, w) in got.top.iter().zip(&want.top) {
        assert!(
            g.token == w.token && close(g.logprob, w.logprob),
            "{context}: {g:?} for {w:?}"
        );
    }
}

/// Compares with the twin; describes the rows whose drawn token differs.
fn differing(on_gpu: &OnGpu, batch: &Batch) -> Vec<String> {
    let (got, want) = (on_gpu.run(batch), on_cpu(batch));
    let mut differ = Vec::new();
    for (row, (got, want)) in got.iter().zip(&want).enumerate() {
        let spec = &batch.specs[row];
        let context = format!("vocabulary {}, row {row}: {:?}", batch.vocab, spec.params);
        match (got, want) {
            (Ok(got), Ok(want)) if got.0 == want.0 => {
                if let (Some(got), Some(want)) = (&got.1, &want.1) {
                    assert_same_logprobs(got, want, &context);
                }
            }
            (Ok(got), Ok(want)) => {
                assert!(!spec.params.is_greedy(), "{context}: {} for {}", got.0, want.0);
                differ.push(format!("{context}: {} for {}", got.0, want.0));
            }
            (got, want) => assert_eq!(got.is_err(), want.is_err(), "{context}: {got:?} for {want:?}"),
        }
    }
    differ
}

fn compare(name: &str, on_gpu: &OnGpu, shapes: &[(usize, usize)]) {
    let mut rng = rng(name);
    let mut differ = Vec::new();
    for &(vocab, rows) in shapes {
        differ.extend(differing(on_gpu, &random_batch(&mut rng, vocab, rows)));
    }
    let rows: usize = shapes.iter().map(|(_, rows)| rows).sum();
    let count = differ.len();
    differ.truncate(10);
    assert!(
        count * 1000 <= rows,
        "{count} of {rows} rows differ:\n{}",
        differ.join("\n")
    );
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn sample_equals_the_twin() {
    let shapes = [
        (1, 20),
        (2, 50),
        (7, 400),
        (31, 300),
        (1000, 800),
        (1001, 300),
        (49_152, 150),
        (128_256, 120),
        (151_936, 60),
        (256_000, 40),
        (262_147, 20),
    ];
    compare("sample", &OnGpu::new(), &shapes);
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn sample_equals_the_twin_without_clusters() {
    let shapes = [(7, 200), (1000, 600), (49_152, 100), (128_256, 100)];
    compare("sample without clusters", &OnGpu::without_clusters(), &shapes);
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn rank_equals_the_twin() {
    for on_gpu in [OnGpu::new(), OnGpu::without_clusters()] {
        let mut rng = rng("rank");
        for (vocab, n) in [
            (1, 5),
            (7, 90),
            (1001, 60),
            (49_152, 40),
            (128_256, 256),
            (262_147, 7),
        ] {
            let logits: Vec<f32> = (0..n).flat_map(|_| random_logits(&mut rng, vocab)).collect();
            let top = vocab.min([0, 1, 20][rng.random_range(0..3)]);
            let rows: Vec<_> = (0..n)
                .map(|_| ScoreRow {
                    target: rng.random_range(0..vocab as u32),
                    top,
                })
                .collect();
            let gpu = &on_gpu.gpu;
            let uploaded = upload(gpu, &logits);
            let sample_rows = upload(gpu, &vec![SampleRow::likeliest(top); n]);
            let targets = upload(gpu, &rows.iter().map(|row| row.target as i32).collect::<Vec<_>>());
            let (none, none_biased) = (upload::<i32>(gpu, &[]), upload::<TokenBias>(gpu, &[]));
            let best = poisoned::<i32>(gpu, n);
            let likeliest = poisoned::<RowLogprobs>(gpu, n);
            let ranks = poisoned::<TokenRank>(gpu, n);
            let args = SampleArgs {
                logits: all(&uploaded, &logits),
                rows: sample_rows.slice().range(0..n),
                history: none.slice().range(0..0),
                biases: none_biased.slice().range(0..0),
                resolved: none.slice().range(0..0),
                masks: None,
                sampled: best.slice().range(0..n),
                logprobs: likeliest.slice().range(0..n),
            };
            on_gpu.kernels.sample(&args).expect("a launch");
            let args = RankArgs {
                logits: all(&uploaded, &logits),
                targets: targets.slice().range(0..n),
                best: args.sampled,
                likeliest: args.logprobs,
                ranks: ranks.slice().range(0..n),
            };
            on_gpu.kernels.rank(&args).expect("a launch");
            let best: Vec<i32> = download(gpu, &best, n);
            let likeliest: Vec<RowLogprobs> = download(gpu, &likeliest, n);
            let ranks: Vec<TokenRank> = download(gpu, &ranks, n);
            for (row, want) in score(&mut logits.clone(), &rows).into_iter().enumerate() {
                let context = format!("vocabulary {vocab}, row {row}");
                let Ok(want) = want else {
                    assert_eq!(best[row], -1, "{context}");
                    continue;
                };
                assert_eq!(ranks[row].rank, want.rank, "{context}");
                let got = Logprobs {
                    sampled: ranks[row].logprob,
                    ..Logprobs::from(&likeliest[row])
                };
                let want = Logprobs {
                    sampled: want.logprob,
                    top: want.top,
                };
                assert_same_logprobs(&got, &want, &context);
            }
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn sample_greedy_takes_the_lowest_of_equals_and_fails_alone() {
    let on_gpu = OnGpu::new();
    let greedy = SamplingOptions {
        temperature: Some(0.0),
        ..Default::default()
    };
    let vocab = 10_000;
    let mut logits = vec![0f32; 6 * vocab];
    let mut set =
        |row: usize, values: &[(usize, f32)]| values.iter().for_each(|&(i, x)| logits[row * vocab + i] = x);
    set(0, &[(9000, 3.0), (9001, 3.0), (7, 3.0), (8191, 3.0)]);
    set(1, &[(0, -0.0)]);
    set(4, &[(9999, f32::INFINITY)]);
    set(5, &[(9999, 1e-30)]);
    logits[2 * vocab..3 * vocab].fill(f32::NAN);
    logits[3 * vocab..4 * vocab].fill(f32::NEG_INFINITY);
    let batch = Batch {
        vocab,
        logits,
        specs: (0..6).map(|i| spec(&greedy, vocab, i, 0)).collect(),
    };
    let tokens: Vec<Option<u32>> = on_gpu
        .run(&batch)
        .into_iter()
        .map(|c| c.ok().map(|c| c.0))
        .collect();
    assert_eq!(tokens, [Some(7), Some(0), None, None, None, Some(9999)]);
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn sample_draw_does_not_depend_on_the_batch() {
    let on_gpu = OnGpu::new();
    let batch = random_batch(&mut rng("batch"), 32_003, 24);
    let together = on_gpu.run(&batch);
    for (row, together) in together.iter().enumerate() {
        let alone = Batch {
            vocab: batch.vocab,
            logits: batch.logits[row * batch.vocab..][..batch.vocab].to_vec(),
            specs: vec![batch.specs[row].clone()],
        };
        assert_eq!(&on_gpu.run(&alone)[0], together, "row {row}");
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn sample_pending_tokens_padding_and_masks() {
    let on_gpu = OnGpu::new();
    let mut rng = rng("pending");
    let vocab = 5003;
    let mut batch = random_batch(&mut rng, vocab, 40);
    batch.specs.iter_mut().for_each(|spec| {
        let options = SamplingOptions {
            temperature: Some(0.0),
            frequency_penalty: Some(2.0),
            repetition_penalty: Some(1.7),
            logprobs: Some(5),
            ..Default::default()
        };
        *spec = self::spec(&options, vocab, 1, 1);
        spec.history = (0..rng.random_range(1..50))
            .map(|_| rng.random_range(0..vocab as u32))
            .collect();
        spec.prompt_len = rng.random_range(0..spec.history.len());
    });
    // The last token of each history is known to the device alone; in reversed order.
    let resolved: Vec<i32> = batch
        .specs
        .iter()
        .rev()
        .map(|s| s.history[s.history.len() - 1] as i32)
        .collect();
    let words = vocab.div_ceil(32);
    let masks: Vec<u32> = (0..40 * words).map(|_| rng.random()).collect();
    let mut lists = SampleLists::default();
    let rows: Vec<SampleRow> = batch
        .specs
        .iter()
        .enumerate()
        .map(|(i, spec)| {
            let mut known = spec.clone();
            known.history.pop();
            let row = SampleRow::new(&known, Some(39 - i), &mut lists);
            match i % 4 {
                0 => SampleRow::padding(),
                1 => row.masked(),
                _ => row,
            }
        })
        .collect();
    let got = on_gpu.run_rows(&batch, &rows, &lists, &resolved, Some(&masks));
    for row in (1..40).step_by(4) {
        for token in 0..vocab {
            if masks[row * words + token / 32] >> (token % 32) & 1 == 0 {
                batch.logits[row * vocab + token] = f32::NEG_INFINITY;
            }
        }
    }
    let want = on_cpu(&batch);
    for row in 0..40 {
        let got = got[row].as_ref().expect("a token");
        if row % 4 == 0 {
            assert_eq!(got.0, 0, "padding row {row}");
            continue;
        }
        let want = want[row].as_ref().expect("a token");
        assert_eq!(got.0, want.0, "row {row}");
        let (got, want) = (got.1.as_ref(), want.1.as_ref());
        assert_same_logprobs(
            got.expect("logprobs"),
            want.expect("logprobs"),
            &format!("row {row}"),
        );
    }
}
