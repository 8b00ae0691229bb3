//! What a row of a batch may depend on.

use std::sync::Arc;

use plimsoll_core::{Executor, Run, SampleSpec, Sampled, SamplingOptions, SamplingParams, TokenId};
use plimsoll_model::cuda::GpuModel;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::common::{blocks, greedy_spec, plan, relative_error, run};
use crate::reference::VOCAB;
use crate::setup::{MODELS, Setup, gpu, load, report};

/// Lengths of the neighbours' contexts: none is a whole number of blocks or of attention's tiles.
const NEIGHBOURS: [usize; 5] = [5, 33, 64, 130, 1];
/// Length of the context of the request that is watched.
const OWN: usize = 90;
/// Blocks of a request, in tokens.
const ROOM: usize = 160;

/// What the watched request gets to see.
#[derive(Clone, Debug, PartialEq)]
struct Seen {
    /// Of its rows, step after step: prompt, chunk, decode.
    logits: Vec<Vec<f32>>,
    /// Of the decode step, with a graph where there are graphs.
    sampled: Sampled,
}

/// A prompt step, a step of chunks and decoding runs, and a decode step, of the watched request at `place` among
/// neighbours with random tokens.
fn watch(model: &Arc<GpuModel>, setup: Setup, place: usize, neighbours: u64) -> Seen {
    let mut rng = StdRng::seed_from_u64(neighbours);
    let mut own = StdRng::seed_from_u64(1000);
    let mut lengths = NEIGHBOURS.to_vec();
    lengths.insert(place, OWN);
    let texts: Vec<Vec<TokenId>> = lengths
        .iter()
        .enumerate()
        .map(|(at, &len)| {
            let rng = if at == place { &mut own } else { &mut rng };
            (0..len + 5)
                .map(|_| rng.random_range(0..VOCAB as TokenId))
                .collect()
        })
        .collect();
    let per_request = (ROOM / setup.block_size) as u32;
    let runs = |from: &dyn Fn(usize, usize) -> std::ops::Range<usize>| -> Vec<Run> {
        let one = |(at, text): (usize, &Vec<TokenId>)| {
            let range = from(at, lengths[at]);
            // The same blocks wherever its place is.
            let slot = if at == place {
                5
            } else {
                (at - usize::from(at > place)) as u32
            };
            let table = blocks(slot * per_request..(slot + 1) * per_request);
            run(at as u64, range.start, &text[range], &table)
        };
        texts.iter().enumerate().map(one).collect()
    };
    let mut runner = setup.build(model);
    let mut logits = |runs: &[Run]| {
        let before: usize = runs[..place].iter().map(|run| run.input.len()).sum();
        let rows: Vec<usize> = (before..before + runs[place].input.len()).collect();
        runner.logits(&plan(runs.to_vec()), &rows).unwrap()
    };
    let prompts = runs(&|_, len| 0..len);
    let chunks = runs(&|at, len| len..len + 1 + 3 * usize::from(at % 2 == place % 2));
    let decode = runs(&|_, len| len..len + 1);
    let logits = vec![logits(&prompts), logits(&chunks), logits(&decode)];
    let options = SamplingOptions {
        temperature: Some(0.0),
        logprobs: Some(20),
        ..Default::default()
    };
    let params = Arc::new(SamplingParams::new(&options, VOCAB).unwrap());
    let with_sample = |mut run: Run| {
        run.sample = Some(SampleSpec {
            params: Arc::clone(&params),
            ..greedy_spec(0)
        });
        run
    };
    let output = runner
        .execute(&plan(decode.into_iter().map(with_sample).collect()))
        .unwrap();
    Seen {
        logits,
        sampled: output.samples[place].clone().unwrap(),
    }
}

/// The same shapes, other tokens beside it: every bit is the same.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn a_row_does_not_see_its_neighbours() {
    let gpu = gpu();
    for name in MODELS {
        let model = load(&gpu, name);
        for setup in Setup::all(1024) {
            for place in [0, 3, 5] {
                let expected = watch(&model, setup, place, 1);
                assert!(
                    watch(&model, setup, place, 1) == expected,
                    "{name}, {setup:?}, place {place}: not even the same step again"
                );
                for neighbours in 2..5 {
                    let found = watch(&model, setup, place, neighbours);
                    assert!(
                        found == expected,
                        "{name}, {setup:?}, place {place}, neighbours {neighbours}"
                    );
                }
            }
        }
    }
}

/// Another place in the same batch may change the order of sums, so not every bit, but nothing beyond rounding.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn a_place_in_the_batch_changes_nothing_but_rounding() {
    let gpu = gpu();
    for name in MODELS {
        let model = load(&gpu, name);
        for setup in Setup::all(1024) {
            // Chunks go to places of the same parity, so the watched request always has one.
            let expected = watch(&model, setup, 0, 1);
            for place in 1..=NEIGHBOURS.len() {
                let found = watch(&model, setup, place, 1);
                let errors: Vec<f64> = found
                    .logits
                    .iter()
                    .zip(&expected.logits)
                    .map(|(found, expected)| relative_error(found, expected))
                    .collect();
                report(format_args!(
                    "{name}, {setup:?}, place {place}: prompt, chunk, decode {errors:.5?}"
                ));
                assert!(
                    errors.iter().all(|&error| error < ROUNDING),
                    "{name}, {setup:?}, place {place}: {errors:?}"
                );
            }
        }
    }
}

/// Relative, by norm: what other orders of summation make of a model in bf16.
const ROUNDING: f64 = 0.03;

/// A decoding request in batches of all sizes.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn the_size_of_the_batch_changes_nothing_but_rounding() {
    let gpu = gpu();
    for name in MODELS {
        let model = load(&gpu, name);
        let setup = Setup {
            block_size: 16,
            tokens: 24 * ROOM,
            enforce_eager: true,
        };
        let mut rng = StdRng::seed_from_u64(3);
        let text: Vec<TokenId> = (0..OWN).map(|_| rng.random_range(0..VOCAB as TokenId)).collect();
        let mut runner = setup.build(&model);
        let table = |slot: u32| blocks(slot * (ROOM / 16) as u32..(slot + 1) * (ROOM / 16) as u32);
        for slot in 0..24 {
            let prompt = run(u64::from(slot), 0, &text[..OWN - 1], &table(slot));
            runner.logits(&plan(vec![prompt]), &[]).unwrap();
        }
        let mut decode = |size: u32| {
            let runs = (0..size).map(|slot| run(u64::from(slot), OWN - 1, &text[OWN - 1..], &table(slot)));
            runner.logits(&plan(runs.collect()), &[0]).unwrap()
        };
        let expected = decode(1);
        let errors: Vec<(u32, f64)> = (2..=24)
            .map(|size| (size, relative_error(&decode(size), &expected)))
            .collect();
        report(format_args!(
            "{name}: batch size and relative distance to a batch of one {errors:.5?}"
        ));
        assert!(
            errors.iter().all(|&(_, error)| error < ROUNDING),
            "{name}: {errors:?}"
        );
    }
}
