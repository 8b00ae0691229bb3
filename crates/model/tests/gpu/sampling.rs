//! The sampler behind the model: what it chooses is what the CPU's chooses from the same logits.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use plimsoll_core::{Executor, SampleSpec, SamplingOptions, SamplingParams, TokenId};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::common::{blocks, plan, run};
use crate::reference::{Judge, VOCAB, expect};
use crate::setup::{Setup, gpu, load};

/// One request each; as many as a graph has rows.
fn options() -> [SamplingOptions; 8] {
    let base = SamplingOptions::default;
    let greedy = || SamplingOptions {
        temperature: Some(0.0),
        ..base()
    };
    [
        greedy(),
        SamplingOptions {
            logprobs: Some(20),
            ..greedy()
        },
        SamplingOptions {
            repetition_penalty: Some(1.7),
            logprobs: Some(3),
            ..greedy()
        },
        SamplingOptions {
            temperature: Some(0.7),
            top_p: Some(0.9),
            logprobs: Some(0),
            ..base()
        },
        SamplingOptions {
            top_k: Some(5),
            ..base()
        },
        SamplingOptions {
            temperature: Some(1.5),
            min_p: Some(0.1),
            ..base()
        },
        SamplingOptions {
            presence_penalty: Some(0.8),
            frequency_penalty: Some(0.5),
            logprobs: Some(5),
            ..base()
        },
        SamplingOptions {
            logit_bias: vec![(3, 5.0), (9, -100.0), (150, 4.0)],
            logprobs: Some(2),
            ..base()
        },
    ]
}

/// Many draws from the same logits: with graphs, whose linear layers may sum in another order than those of
/// [`GpuRunner::logits`](plimsoll_model::cuda::GpuRunner::logits), and without.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn chooses_what_the_cpu_chooses_from_the_same_logits() {
    let gpu = gpu();
    let model = load(&gpu, "qwen3-f16");
    for setup in Setup::all(1024) {
        let noise = if setup.enforce_eager { 1e-4 } else { 0.03 };
        let mut runner = setup.build(&model);
        let mut rng = StdRng::seed_from_u64(8);
        let requests: Vec<(SamplingParams, Vec<TokenId>)> = options()
            .map(|options| {
                let len = rng.random_range(20..64);
                let tokens = (0..len).map(|_| rng.random_range(0..VOCAB as TokenId)).collect();
                (SamplingParams::new(&options, VOCAB).unwrap(), tokens)
            })
            .into();
        let per_request = (setup.num_blocks() / requests.len()) as u32;
        let runs = |start: &dyn Fn(usize) -> usize| -> Vec<_> {
            let one = |(at, (_, tokens)): (usize, &(_, Vec<TokenId>))| {
                let (at, start) = (at as u32, start(tokens.len()));
                let table = blocks(at * per_request..(at + 1) * per_request);
                run(u64::from(at), start, &tokens[start..], &table)
            };
            requests.iter().enumerate().map(one).collect()
        };
        runner.logits(&plan(runs(&|_| 0)), &[]).unwrap();
        let decode = runs(&|len| len - 1);
        let rows: Vec<usize> = (0..decode.len()).collect();
        let logits = runner.logits(&plan(decode.clone()), &rows).unwrap();
        let mut judge = Judge::default();
        for index in 0..40 {
            let specs = requests
                .iter()
                .enumerate()
                .map(|(at, (params, tokens))| SampleSpec {
                    params: Arc::new(params.clone()),
                    seed: 1000 + at as u64,
                    index,
                    history: if params.needs_history() {
                        tokens.clone()
                    } else {
                        vec![]
                    },
                    prompt_len: tokens.len() / 2,
                    constrained: false,
                });
            let specs: Vec<SampleSpec> = specs.collect();
            let mut runs = decode.clone();
            for (run, spec) in runs.iter_mut().zip(&specs) {
                run.sample = Some(spec.clone());
            }
            let output = runner.execute(&plan(runs)).unwrap();
            for ((sample, spec), logits) in output.samples.iter().zip(&specs).zip(logits.chunks(VOCAB)) {
                let sampled = sample.as_ref().unwrap();
                assert_eq!(sampled.logprobs.is_some(), spec.params.logprobs().is_some());
                let expected = expect(logits, spec, noise);
                judge.judge(
                    &format!("{setup:?}, draw {index}, {:?}", spec.params),
                    sampled,
                    &expected,
                );
                if let (Some(found), Some(expected), true) =
                    (&sampled.logprobs, &expected.sampled.logprobs, setup.enforce_eager)
                {
                    let difference = (found.sampled - expected.sampled).abs();
                    assert!(
                        difference < 1e-2 || sampled.token != expect(logits, spec, 0.0).sampled.token,
                        "{setup:?}, draw {index}: {found:?}, not {expected:?}"
                    );
                }
            }
        }
        judge.finish(&format!("{setup:?}"));
    }
}

/// Masks that panic end their step alone: what comes after has its own tokens, not those of the step before.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn masks_that_panic_leave_no_step_behind() {
    let gpu = gpu();
    let model = load(&gpu, "qwen3-f16");
    for setup in Setup::all(1024) {
        let mut runner = setup.build(&model);
        let spec = |constrained| SampleSpec {
            params: Arc::new(SamplingParams::greedy()),
            seed: 0,
            index: 0,
            history: vec![],
            prompt_len: 9,
            constrained,
        };
        let step = |request: u64, constrained| {
            let tokens: Vec<TokenId> = (0..9).map(|i| request as TokenId * 10 + i).collect();
            let mut one = run(request, 0, &tokens, &blocks(0..2));
            one.sample = Some(spec(constrained));
            plan(vec![one])
        };
        let expected = runner.execute(&step(2, false)).unwrap();
        runner.launch(&step(1, true)).unwrap();
        let unwound = catch_unwind(AssertUnwindSafe(|| runner.sample(&mut |_| panic!("told to"))));
        assert!(unwound.is_err());
        for constrained in [false, true, false] {
            let output = runner.execute(&step(2, constrained)).unwrap();
            assert_eq!(output, expected, "{setup:?}, {constrained}");
        }
        assert!(runner.finish().is_err(), "no step is in flight");
    }
}
