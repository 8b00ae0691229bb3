//! Text must not depend on scheduling, as far as bf16 allows: see `reference`.

use plimsoll_core::{Executor, RunInput, Scratch, StepLimits, TokenId};
use plimsoll_device::cuda::Gpu;

use crate::common::malformed::refuses_malformed_plans;
use crate::common::requests::{Disturbance, Request, serve};
use crate::common::{blocks, continued, greedy_spec, plan, run};
use crate::reference::{Judge, VOCAB, expected_texts};
use crate::setup::{self, HYBRID_EXPERT_MODELS, HYBRID_MODELS, LIMITS, MODELS, Setup, gpu, load};

/// Serves random requests in batches of random chunks over random blocks, with preemptions, each step finished before the
/// next is launched, or two in flight, the second continuing what the first samples.
fn check_texts(gpu: &Gpu, (seed, name): (u64, &str), load: &Load) {
    let model = setup::load(gpu, name);
    let mut requests = Request::random(load.requests, seed, VOCAB, load.longest);
    let has_state = HYBRID_MODELS.contains(&name);
    requests
        .iter_mut()
        .for_each(|request| request.has_state = has_state);
    let expected = expected_texts(name, &requests, &load.limits);
    let mut judge = Judge::default();
    for setup in Setup::in_turn(seed as usize, load.cached) {
        for depth in [1, 2] {
            let how = Disturbance {
                block_size: setup.block_size,
                num_blocks: setup.num_blocks() as u32,
                limits: load.limits,
                seed: seed + setup.block_size as u64,
                depth,
            };
            let mut runner = setup.build_for(&model, &load.limits, Scratch::Growable);
            serve(
                &mut runner,
                &mut requests.clone(),
                how,
                &mut |request, sampled| {
                    let index = request.output.len();
                    let what = format!(
                        "{name}, {setup:?}, {depth} in flight, request {}, token {index}, {:?}",
                        request.id, request.params
                    );
                    judge.judge(&what, sampled, &expected[request.id as usize][index])
                },
            );
        }
    }
    judge.finish(name);
}

/// So many requests with prompts of up to so many tokens, more together than the cache holds.
struct Load {
    requests: u64,
    longest: usize,
    cached: usize,
    limits: StepLimits,
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn text_does_not_depend_on_scheduling() {
    let gpu = gpu();
    let load = Load {
        requests: 14,
        longest: 200,
        cached: 1280,
        limits: LIMITS,
    };
    for model in (0..).zip(MODELS) {
        check_texts(&gpu, model, &load);
    }
}

/// Contexts that attention cuts into parts.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn text_of_long_contexts_does_not_depend_on_scheduling() {
    let gpu = gpu();
    let load = Load {
        requests: 8,
        longest: 2500,
        cached: 8192,
        limits: StepLimits {
            max_num_batched_tokens: 4096,
            max_num_seqs: 8,
            max_model_len: 2560,
        },
    };
    for model in (10..).zip(MODELS) {
        check_texts(&gpu, model, &load);
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn a_malformed_plan_is_an_error_and_nothing_more() {
    let model = load(&gpu(), "llama");
    for enforce_eager in [false, true] {
        let setup = Setup {
            block_size: 8,
            tokens: 64,
            enforce_eager,
        };
        refuses_malformed_plans(&mut setup.build_for(&model, &crate::common::LIMITS, Scratch::Growable));
    }
}

/// Steps finish in the order in which they were launched; the second may continue what the first samples; a third must
/// wait.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn two_steps_may_be_in_flight() {
    let gpu = gpu();
    for (turn, name) in MODELS.into_iter().chain(HYBRID_EXPERT_MODELS).enumerate() {
        let model = load(&gpu, name);
        for setup in Setup::in_turn(turn, 256) {
            let prompt = [5, 6, 7];
            let table = blocks(0..setup.num_blocks() as u32);
            let step = |start: usize, index: usize, known: Option<TokenId>| {
                let mut step = run(1, start, known.as_slice(), &table);
                if known.is_none() {
                    step.input = RunInput::LastSampled;
                }
                step.sample = Some(greedy_spec(index));
                plan(vec![step])
            };
            let mut first = run(1, 0, &prompt, &table);
            first.sample = Some(greedy_spec(0));
            let first = plan(vec![first]);
            let token =
                |runner: &mut dyn Executor| runner.finish().unwrap().samples[0].as_ref().unwrap().token;

            // One step after the other, its token known: the same arithmetic, so the same text.
            let mut alone = setup.build(&model);
            alone.launch(&first).unwrap();
            let mut expected = vec![token(&mut alone)];
            for index in 1..20 {
                let known = Some(expected[index - 1]);
                alone.launch(&step(2 + index, index, known)).unwrap();
                expected.push(token(&mut alone));
            }

            let mut ahead = setup.build(&model);
            ahead.launch(&first).unwrap();
            let mut found = Vec::new();
            for index in 1..20 {
                ahead.launch(&step(2 + index, index, None)).unwrap();
                let third = ahead
                    .launch(&step(3 + index, index, None))
                    .unwrap_err()
                    .to_string();
                assert!(third.contains("in flight"), "{third}");
                assert!(ahead.logits(&first, &[]).is_err(), "beside a step in flight");
                found.push(token(&mut ahead));
            }
            found.push(token(&mut ahead));
            assert_eq!(found, expected, "{name}, {setup:?}");
            assert!(ahead.finish().is_err(), "nothing is in flight");
        }
    }
}

/// More sampling rows than logits exist at one time, and more than the largest graph has.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn every_row_of_a_full_batch_samples() {
    let gpu = gpu();
    let model = load(&gpu, "llama");
    for setup in Setup::all(4096) {
        let limits = StepLimits {
            // The largest graph has a number of rows to which others would be padded.
            max_num_seqs: 102,
            ..LIMITS
        };
        let mut runner = setup.build_for(&model, &limits, Scratch::Growable);
        let prompt = |id: u64| [id as TokenId + 3, 9];
        let runs = (0..100).map(|id| {
            let mut run = run(id, 0, &prompt(id), &blocks(id as u32..id as u32 + 1));
            run.sample = Some(greedy_spec(0));
            run
        });
        let all = runner.execute(&plan(runs.collect())).unwrap();
        let requests: Vec<Request> = (0..100)
            .map(|id| Request::greedy(id, prompt(id).to_vec(), 1))
            .collect();
        let expected = expected_texts("llama", &requests, &LIMITS);
        let mut judge = Judge::default();
        for (sample, expected) in all.samples.iter().zip(&expected) {
            judge.judge(&format!("{setup:?}"), sample.as_ref().unwrap(), &expected[0]);
        }
        judge.finish("a full batch");
    }
}

/// In steps of the same shapes, so that products round alike, with graphs and without.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn a_prefix_with_a_snapshot_is_as_good_as_computed() {
    let gpu = gpu();
    let prompt: Vec<TokenId> = (0..80).map(|at| (at * at + 3) % VOCAB as u32).collect();
    for name in HYBRID_MODELS {
        let model = load(&gpu, name);
        for setup in Setup::all(32 * 64) {
            let mut runner = setup.build(&model);
            let at = (64, setup.block_size);
            let expected = continued(&mut runner, &prompt, at, false);
            let found = continued(&mut runner, &prompt, at, true);
            assert!(found == expected, "{name}, {setup:?}");
        }
    }
}
