//! Log-probabilities of prompts: from the GPU's own logits exactly, from the CPU's as closely as bf16 allows.

use std::collections::VecDeque;

use plimsoll_core::{Executor, RequestId, Scratch, StepLimits, StepPlan, TokenId};
use plimsoll_model::KvCacheDtype;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::common::scores::{by_definition, in_chunks, scored_run};
use crate::common::{blocks, golden, greedy_spec, in_place, load as load_cpu, plan, run, runner};
use crate::setup::{MODELS, Setup, gpu, load};

/// More rows in a step than are scored at one time.
const LIMITS: StepLimits = StepLimits {
    max_num_batched_tokens: 1024,
    max_num_seqs: 24,
    max_model_len: 256,
};
const PROMPTS: u32 = 3;
const LEN: usize = 240;

fn setup(enforce_eager: bool) -> Setup {
    Setup {
        block_size: 16,
        tokens: 1024,
        enforce_eager,
    }
}

fn prompts(vocab: usize) -> Vec<Vec<TokenId>> {
    let mut rng = StdRng::seed_from_u64(7);
    let mut token = || rng.random_range(0..vocab as u32);
    (0..PROMPTS)
        .map(|_| (0..LEN).map(|_| token()).collect())
        .collect()
}

/// The first `len` tokens of all prompts, scored, between the first tokens of the others.
fn scored_step(prompts: &[Vec<TokenId>], len: usize) -> StepPlan {
    let scored = prompts.iter().zip(0..).map(|(prompt, index)| {
        let table = blocks(15 * index..15 * (index + 1));
        let mut run = scored_run(&prompt[..len], 0, len, 0, &table);
        run.request = RequestId(u64::from(index));
        run.state = Some(in_place(index, 0, len));
        run
    });
    let neighbours = (0..4).map(|index| {
        let table = blocks(50 + index..51 + index);
        let mut run = run(10 + u64::from(index), 0, &prompts[0][..9], &table);
        run.sample = Some(greedy_spec(0));
        run
    });
    let (mut scored, mut runs): (VecDeque<_>, Vec<_>) = (scored.collect(), neighbours.collect());
    runs.extend(scored.pop_front());
    runs.splice(0..0, scored);
    plan(runs)
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn scores_are_those_of_the_same_logits() {
    let gpu = gpu();
    for name in MODELS {
        let model = load(&gpu, name);
        let vocab = model.spec().vocab_size;
        let prompts = prompts(vocab);
        let step = scored_step(&prompts, LEN);
        let mut oracle = setup(true).build_for(&model, &LIMITS, Scratch::Growable);
        let rows: Vec<usize> = (0..step.num_tokens()).collect();
        let logits = oracle.logits(&step, &rows).unwrap();
        let mut runner = setup(true).build_for(&model, &LIMITS, Scratch::Growable);
        let found = runner.execute(&step).unwrap();
        let mut found = found.scores.iter().flatten();
        let mut first_row = 0;
        for run in &step.runs {
            let targets = run.score.as_ref().map_or(&[][..], |score| &score.targets);
            for (row, &target) in (first_row..).zip(targets) {
                let found = found.next().unwrap();
                let expected = by_definition(&logits[row * vocab..(row + 1) * vocab], target, 5);
                let context = format!("{name}, row {row}: {found:?} for {expected:?}");
                assert_eq!(found.token, target, "{context}");
                // The head is multiplied for 256 rows at a time there, for all of them here.
                assert!((found.logprob - expected.logprob).abs() < 0.05, "{context}");
                assert!(found.rank.abs_diff(expected.rank) <= 3, "{context}");
                let own = found.top.iter().find(|top| top.token == target);
                assert!(own.is_none_or(|own| own.logprob == found.logprob), "{context}");
                assert!(found.rank > 5 || own.is_some(), "{context}");
            }
            first_row += run.input.len();
        }
        assert!(found.next().is_none());
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn scores_are_as_close_to_the_cpu_as_bf16_allows() {
    let gpu = gpu();
    for (turn, name) in MODELS.into_iter().enumerate() {
        let (model, cpu) = (load(&gpu, name), load_cpu(name, KvCacheDtype::F32));
        for case in golden(name).cases.iter().filter(|case| case.prompt.len() > 1) {
            let mut reference = runner(&cpu, 16, 8);
            let expected = in_chunks(&mut reference, &case.prompt, case.prompt.len(), &blocks(0..8));
            let scale = case
                .last_logits
                .concat()
                .iter()
                .fold(0.0f32, |most, logit| most.max(logit.abs()));
            for setup in Setup::in_turn(turn, 256) {
                for len in [128, 17, 1] {
                    let mut runner = setup.build(&model);
                    let table = blocks(0..setup.num_blocks() as u32);
                    let found = in_chunks(&mut runner, &case.prompt, len, &table);
                    let pairs = found.iter().zip(&expected);
                    let worst = pairs.fold(0.0f32, |worst, (found, expected)| {
                        worst.max((found.logprob - expected.logprob).abs())
                    });
                    let allowed = 8.0 * case.bf16_error as f32 * scale.max(1.0);
                    assert!(
                        worst < allowed,
                        "{name}, {setup:?}, chunks of {len}: {worst} of {allowed}"
                    );
                }
            }
        }
    }
}

/// Behind a step in flight, and with nothing allocated once the arena has its size.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn scores_take_no_memory_beyond_the_proved_arena() {
    let gpu = gpu();
    let model = load(&gpu, "llama");
    let prompts = prompts(model.spec().vocab_size);
    let steps = [scored_step(&prompts, LEN), scored_step(&prompts, 90)];
    let mut probe = setup(false).build_for(&model, &LIMITS, Scratch::Growable);
    let expected = steps.each_ref().map(|step| probe.execute(step).unwrap());
    let fixed = Scratch::Fixed(probe.take_arena_high_water());
    drop(probe);
    let mut proved = setup(false).build_for(&model, &LIMITS, fixed);
    let held = gpu.budget().meters().reserved;
    for step in &steps {
        proved.launch(step).unwrap();
    }
    for expected in expected {
        assert_eq!(proved.finish().unwrap(), expected);
    }
    assert_eq!(gpu.budget().meters().reserved, held);
}
