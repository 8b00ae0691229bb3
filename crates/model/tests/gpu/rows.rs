//! What a row of a batch may depend on.

use std::ops::Range;
use std::sync::Arc;

use plimsoll_core::{
    Executor, PageId, Run, SampleSpec, Sampled, SamplingOptions, SamplingParams, Scratch, StepLimits, TokenId,
};
use plimsoll_device::cuda::Gpu;
use plimsoll_model::cuda::{GpuModel, GpuRunner};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::common::fp8::is_fp8;
use crate::common::{EXPERT_MODELS, blocks, golden, greedy_spec, in_place, plan, relative_error, run};
use crate::reference::VOCAB;
use crate::setup::{LIMITS, MODELS, Setup, gpu, load, load_dummy, report};

/// Rows at the end of a run whose logits are compared.
const WATCHED: usize = 8;

/// A model, and the lengths of the contexts of a watched request and its neighbours.
struct Case {
    name: &'static str,
    model: Arc<GpuModel>,
    limits: StepLimits,
    own: usize,
    /// None is a whole number of blocks or of attention's tiles, but for one.
    neighbours: [usize; 5],
    /// Tokens that the blocks of a request hold.
    room: usize,
    /// Relative, by norm: what another order of summation may change.
    rounding: f64,
}

impl Case {
    fn tiny(gpu: &Gpu) -> impl Iterator<Item = Self> {
        Self::all_of(gpu, &MODELS)
    }

    fn all_of(gpu: &Gpu, names: &'static [&str]) -> impl Iterator<Item = Self> {
        names.iter().map(|name| {
            let least = match is_fp8(name) {
                true => FP8_ROUNDING,
                false => ROUNDING,
            };
            Self {
                name,
                model: load(gpu, name),
                limits: LIMITS,
                own: 90,
                neighbours: [5, 33, 64, 130, 1],
                room: 160,
                rounding: least.max(golden(name).bf16_error()),
            }
        })
    }

    /// Linear layers of Llama 3.1 8B, two blocks of them, where libraries and kernels have more than one way to sum.
    fn large(gpu: &Gpu) -> Self {
        let config = r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
            "intermediate_size": 14336, "num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "vocab_size": 128256, "max_position_embeddings": 2048,
            "tie_word_embeddings": true}"#;
        Self {
            name: "Llama 3.1 8B's layers",
            model: load_dummy(gpu, config),
            limits: StepLimits {
                max_num_batched_tokens: 4096,
                max_num_seqs: 256,
                max_model_len: 2048,
            },
            own: 900,
            neighbours: [5, 333, 640, 1300, 1],
            room: 1600,
            rounding: ROUNDING,
        }
    }

    fn setups(&self) -> Vec<Setup> {
        let all = Setup::all((self.neighbours.len() + 1) * self.room);
        match self.limits == LIMITS {
            true => all.collect(),
            // Every graph of a large model takes time and memory.
            false => all.filter(|setup| setup.block_size == 16).collect(),
        }
    }

    fn table(&self, setup: &Setup, slot: u32) -> Vec<PageId> {
        let blocks_each = (self.room / setup.block_size) as u32;
        blocks(slot * blocks_each..(slot + 1) * blocks_each)
    }

    /// A prompt step, a step of chunks and decoding runs, and a decode step, of the watched request at `place` among
    /// neighbours whose tokens are random.
    fn watch(&self, setup: &Setup, place: usize, neighbours: u64) -> Seen {
        let mut rng = StdRng::seed_from_u64(neighbours);
        let mut own = StdRng::seed_from_u64(1000);
        let mut lengths = self.neighbours.to_vec();
        lengths.insert(place, self.own);
        let text = |(at, len): (usize, &usize)| {
            let rng = if at == place { &mut own } else { &mut rng };
            random_tokens(rng, len + 4)
        };
        let texts: Vec<Vec<TokenId>> = lengths.iter().enumerate().map(text).collect();
        let runs = |range: &dyn Fn(usize, usize) -> Range<usize>| -> Vec<Run> {
            let one = |(at, text): (usize, &Vec<TokenId>)| {
                let range = range(at, lengths[at]);
                // Everyone has the same blocks wherever the watched request's place is.
                let slot = match at == place {
                    true => self.neighbours.len(),
                    false => at - usize::from(at > place),
                };
                let table = self.table(setup, slot as u32);
                run(at as u64, range.start, &text[range], &table)
            };
            texts.iter().enumerate().map(one).collect()
        };
        let mut runner = setup.build_for(&self.model, &self.limits, Scratch::Growable);
        let mut logits = |runs: &[Run]| {
            let end: usize = runs[..=place].iter().map(|run| run.input.len()).sum();
            let rows = end - runs[place].input.len().min(WATCHED)..end;
            runner
                .logits(&plan(runs.to_vec()), &rows.collect::<Vec<_>>())
                .unwrap()
        };
        let prompts = runs(&|_, len| 0..len);
        // Every second one decodes, but not the watched one.
        let chunks = runs(&|at, len| len..len + 1 + 3 * usize::from(at % 2 == place % 2));
        let decode = runs(&|_, len| len..len + 1);
        let logits = [logits(&prompts), logits(&chunks), logits(&decode)];
        Seen {
            logits,
            sampled: sample(&mut runner, decode).swap_remove(place),
        }
    }
}

/// What the watched request gets to see.
#[derive(Clone, Debug, PartialEq)]
struct Seen {
    /// Of its last rows: prompt, chunk, decode.
    logits: [Vec<f32>; 3],
    /// Of the decode step, with a graph where there are graphs.
    sampled: Sampled,
}

pub(crate) fn random_tokens(rng: &mut StdRng, len: usize) -> Vec<TokenId> {
    (0..len).map(|_| rng.random_range(0..VOCAB as TokenId)).collect()
}

/// Greedy, with the most log-probabilities that there can be.
pub(crate) fn sample(runner: &mut GpuRunner, mut runs: Vec<Run>) -> Vec<Sampled> {
    let options = SamplingOptions {
        temperature: Some(0.0),
        logprobs: Some(20),
        ..Default::default()
    };
    let params = Arc::new(SamplingParams::new(&options, VOCAB).unwrap());
    for run in &mut runs {
        run.sample = Some(SampleSpec {
            params: Arc::clone(&params),
            ..greedy_spec(0)
        });
    }
    let output = runner.execute(&plan(runs)).unwrap();
    output.samples.into_iter().map(Option::unwrap).collect()
}

fn check_neighbours(case: &Case) {
    for setup in case.setups() {
        for place in [0, 3, 5] {
            let what = format!("{}, {setup:?}, place {place}", case.name);
            let expected = case.watch(&setup, place, 1);
            assert!(
                case.watch(&setup, place, 1) == expected,
                "{what}: not even the same step again"
            );
            for neighbours in 2..4 {
                let found = case.watch(&setup, place, neighbours);
                assert!(found == expected, "{what}, neighbours {neighbours}");
            }
        }
    }
}

/// The same shapes, other tokens beside it: every bit is the same.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn a_row_does_not_see_its_neighbours() {
    let gpu = gpu();
    Case::tiny(&gpu).for_each(|case| check_neighbours(&case));
    check_neighbours(&Case::large(&gpu));
}

/// Nor where its neighbours go.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn a_row_does_not_see_its_neighbours_experts() {
    let gpu = gpu();
    Case::all_of(&gpu, &EXPERT_MODELS).for_each(|case| check_neighbours(&case));
}

/// Relative, by norm: what other orders of summation make of a model in bf16, or as much as transformers' rounding to bf16, if that is
/// more. A sum that is off by the last bit of an f32 now and then rounds to another bf16, and a few layers later all roundings are
/// others.
pub(crate) const ROUNDING: f64 = 0.015;
/// As [`ROUNDING`] where products of many rows take inputs of eight bits, and those of few rows take them as they are.
const FP8_ROUNDING: f64 = 0.03;

fn check_places(case: &Case) {
    for setup in case.setups() {
        let expected = case.watch(&setup, 0, 1);
        for place in 1..=case.neighbours.len() {
            let found = case.watch(&setup, place, 1);
            let pairs = found.logits.iter().zip(&expected.logits);
            let errors: Vec<f64> = pairs
                .map(|(found, expected)| relative_error(found, expected))
                .collect();
            report(format_args!(
                "{}, {setup:?}, place {place}: prompt, chunk, decode {errors:.6?}",
                case.name
            ));
            assert!(
                errors.iter().all(|&error| error < case.rounding),
                "{}, {setup:?}, place {place}: {errors:?}",
                case.name
            );
        }
    }
}

/// Another place in the same batch. On an H200 it changes nothing in six digits, but libraries do not promise that.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn a_place_in_the_batch_changes_nothing_but_rounding() {
    let gpu = gpu();
    Case::tiny(&gpu).for_each(|case| check_places(&case));
    check_places(&Case::large(&gpu));
}

fn check_sizes(case: &Case) {
    let most = case.limits.max_num_seqs as u32;
    let setup = Setup {
        block_size: 16,
        tokens: 16 + most as usize * 16 + case.room,
        enforce_eager: true,
    };
    let text = random_tokens(&mut StdRng::seed_from_u64(3), case.own);
    let mut runner = setup.build_for(&case.model, &case.limits, Scratch::Growable);
    let own = case.table(&setup, 0);
    let first_free = own.len() as u32;
    let mut decode = |size: u32| {
        // Every time, as a state cannot go back by a token.
        let prompt = run(0, 0, &text[..case.own - 1], &own);
        runner.logits(&plan(vec![prompt]), &[]).unwrap();
        let own = run(0, case.own - 1, &text[case.own - 1..], &own);
        let other = |at: u32| {
            let table = blocks(first_free + at..first_free + at + 1);
            Run {
                state: Some(in_place(at, 0, 1)),
                ..run(u64::from(at), 0, &[7], &table)
            }
        };
        let runs = std::iter::once(own).chain((1..size).map(other));
        runner.logits(&plan(runs.collect()), &[0]).unwrap()
    };
    let alone = decode(1);
    // Neighbouring sizes with the same logits, and their distance to a batch of one.
    let mut groups: Vec<(Vec<u32>, f64)> = vec![(vec![1], 0.0)];
    let mut last = alone.clone();
    for size in (2..=24).chain([32, 48, 64, 96, 128, 200, 256]) {
        if size > most {
            break;
        }
        let found = decode(size);
        if found == last {
            groups.last_mut().unwrap().0.push(size);
            continue;
        }
        groups.push((vec![size], relative_error(&found, &alone)));
        last = found;
    }
    report(format_args!(
        "{}: batch sizes, and distance to a batch of one {groups:.5?}",
        case.name
    ));
    assert!(
        groups.iter().all(|&(_, error)| error < case.rounding),
        "{}: {groups:?}",
        case.name
    );
}

/// A decoding request in batches of all sizes. On an H200 the tiny models' logits are the same to six digits in all of
/// them; with Llama 3.1 8B's linear layers, which sum in other orders for other sizes, they are 0.8 % apart.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn the_size_of_the_batch_changes_nothing_but_rounding() {
    let gpu = gpu();
    Case::tiny(&gpu).for_each(|case| check_sizes(&case));
    check_sizes(&Case::large(&gpu));
}
