//! Text and logits must not depend on scheduling: chunks, batches, block tables, preemption.

mod common;

use std::sync::Arc;

use common::*;
use plimsoll_core::{BlockId, Executor, Run, RunInput, SampleSpec, SamplingOptions, SamplingParams, TokenId};
use plimsoll_model::{KvCacheDtype, Model, Runner};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

const NUM_BLOCKS: u32 = 64;

/// One request as a scheduler would drive it.
struct Request {
    id: u64,
    prompt: Vec<TokenId>,
    params: Arc<SamplingParams>,
    max_tokens: usize,
    output: Vec<TokenId>,
    /// Tokens in the cache.
    computed: usize,
    blocks: Vec<BlockId>,
    /// Sampled in the step before.
    fresh: bool,
}

impl Request {
    fn new(id: u64, rng: &mut StdRng, vocab: usize) -> Self {
        let prompt = (0..rng.random_range(1..60))
            .map(|_| rng.random_range(0..vocab as u32))
            .collect();
        let options = match rng.random_range(0..3) {
            0 => SamplingOptions {
                temperature: Some(0.0),
                ..Default::default()
            },
            1 => SamplingOptions {
                temperature: Some(0.8),
                top_p: Some(0.9),
                ..Default::default()
            },
            _ => SamplingOptions {
                temperature: Some(1.2),
                top_k: Some(20),
                repetition_penalty: Some(1.3),
                frequency_penalty: Some(0.5),
                logprobs: Some(3),
                ..Default::default()
            },
        };
        let params = Arc::new(SamplingParams::new(&options, vocab).unwrap());
        let max_tokens = rng.random_range(1..12);
        Self {
            id,
            prompt,
            params,
            max_tokens,
            output: vec![],
            computed: 0,
            blocks: vec![],
            fresh: false,
        }
    }

    fn tokens(&self) -> Vec<TokenId> {
        [self.prompt.as_slice(), &self.output].concat()
    }

    fn is_done(&self) -> bool {
        self.output.len() == self.max_tokens
    }

    /// The next `len` tokens that are known but not computed.
    fn run(&self, len: usize, last_sampled: bool) -> Run {
        let tokens = self.tokens();
        let end = self.computed + len;
        let mut run = run(self.id, self.computed, &tokens[self.computed..end], &self.blocks);
        if last_sampled {
            run.input = RunInput::LastSampled;
        }
        run.sample = (end == tokens.len()).then(|| SampleSpec {
            params: Arc::clone(&self.params),
            seed: self.id,
            index: self.output.len(),
            history: if self.params.needs_history() {
                tokens
            } else {
                Vec::new()
            },
            prompt_len: self.prompt.len(),
        });
        run
    }
}

/// Each request alone, its whole prompt in one step, contiguous blocks.
fn undisturbed(model: &Arc<Model>, block_size: usize, seed: u64, count: u64) -> Vec<Vec<TokenId>> {
    let mut rng = StdRng::seed_from_u64(seed);
    let one = |mut request: Request| {
        let mut runner = runner(model, block_size, NUM_BLOCKS as usize);
        request.blocks = blocks(0..NUM_BLOCKS / 2);
        while !request.is_done() {
            let len = request.tokens().len() - request.computed;
            let output = runner.execute(&plan(vec![request.run(len, false)])).unwrap();
            request.computed += len;
            request.output.push(output.samples[0].as_ref().unwrap().token);
        }
        request.output
    };
    (0..count)
        .map(|id| one(Request::new(id, &mut rng, model.spec().vocab_size)))
        .collect()
}

/// The same requests together: random batches of random chunks over random blocks, with random preemptions.
fn disturbed(model: &Arc<Model>, block_size: usize, seed: u64, count: u64) -> Vec<Vec<TokenId>> {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut requests: Vec<_> = (0..count)
        .map(|id| Request::new(id, &mut rng, model.spec().vocab_size))
        .collect();
    let mut free = blocks(0..NUM_BLOCKS);
    free.shuffle(&mut rng);
    let mut runner = runner(model, block_size, NUM_BLOCKS as usize);
    while requests.iter().any(|request| !request.is_done()) {
        if rng.random_bool(0.05) {
            let victim = rng.random_range(0..requests.len());
            free.append(&mut requests[victim].blocks);
            free.shuffle(&mut rng);
            (requests[victim].computed, requests[victim].fresh) = (0, false);
        }
        step(&mut runner, &mut requests, &mut free, block_size, &mut rng);
    }
    requests.into_iter().map(|request| request.output).collect()
}

fn step(
    runner: &mut Runner,
    requests: &mut [Request],
    free: &mut Vec<BlockId>,
    block_size: usize,
    rng: &mut StdRng,
) {
    let mut order: Vec<usize> = (0..requests.len()).collect();
    order.shuffle(rng);
    let (mut runs, mut planned) = (Vec::new(), Vec::new());
    for index in order {
        let request = &mut requests[index];
        let pending = request.tokens().len() - request.computed;
        let len = rng.random_range(1..=pending);
        let missing = (request.computed + len)
            .div_ceil(block_size)
            .saturating_sub(request.blocks.len());
        if request.is_done() || missing > free.len() || rng.random_bool(0.3) {
            continue;
        }
        request.blocks.extend(free.drain(..missing));
        let last_sampled = request.fresh && pending == 1 && rng.random_bool(0.5);
        runs.push(request.run(len, last_sampled));
        planned.push((index, len));
    }
    requests.iter_mut().for_each(|request| request.fresh = false);
    if runs.is_empty() {
        return;
    }
    let output = runner.execute(&plan(runs)).unwrap();
    for ((index, len), sample) in planned.into_iter().zip(output.samples) {
        let request = &mut requests[index];
        request.computed += len;
        if let Some(sampled) = sample {
            request.output.push(sampled.token);
            request.fresh = true;
            assert_eq!(sampled.logprobs.is_some(), request.params.logprobs().is_some());
        }
        if request.is_done() {
            free.append(&mut request.blocks);
        }
    }
}

#[test]
fn text_does_not_depend_on_scheduling() {
    for (round, name) in MODELS.iter().enumerate() {
        let model = load(name, KvCacheDtype::Auto);
        for block_size in [8, 16, 32] {
            let seed = (round * 100 + block_size) as u64;
            let expected = undisturbed(&model, block_size, seed, 8);
            let found = disturbed(&model, block_size, seed, 8);
            assert_eq!(found, expected, "{name}, blocks of {block_size}, seed {seed}");
        }
    }
}

/// Not only the text: every bit of the logits.
#[test]
fn logits_do_not_depend_on_scheduling() {
    for name in MODELS {
        let model = load(name, KvCacheDtype::Auto);
        let mut rng = StdRng::seed_from_u64(5);
        let prompt: Vec<TokenId> = (0..50)
            .map(|_| rng.random_range(0..model.spec().vocab_size as u32))
            .collect();
        for block_size in [8, 16, 32] {
            let mut whole = runner(&model, block_size, NUM_BLOCKS as usize);
            let expected = whole
                .logits(&plan(vec![run(1, 0, &prompt, &blocks(0..8))]), &[48, 49])
                .unwrap();

            let mut table = blocks(0..NUM_BLOCKS);
            table.shuffle(&mut rng);
            let (table, other) = table.split_at(8);
            let cut = rng.random_range(1..48);
            let mut chunked = runner(&model, block_size, NUM_BLOCKS as usize);
            chunked
                .logits(&plan(vec![run(1, 0, &prompt[..cut], table)]), &[])
                .unwrap();
            let neighbour = run(2, 0, &prompt[..7], other);
            let rest = run(1, cut, &prompt[cut..], table);
            let rows = [7 + 48 - cut, 7 + 49 - cut];
            let found = chunked.logits(&plan(vec![neighbour, rest]), &rows).unwrap();
            assert!(found == expected, "{name}, blocks of {block_size}, cut at {cut}");
        }
    }
}

/// A step with more sampling rows than logits exist at one time.
#[test]
fn many_rows_sample_in_chunks() {
    let model = load("llama", KvCacheDtype::Auto);
    let limits = plimsoll_core::StepLimits {
        max_num_seqs: 100,
        ..LIMITS
    };
    let mut runner = model
        .build_state(&state_config(8, 100), &limits, &budget())
        .unwrap();
    let with_sample = |id: u64| {
        let mut run = run(id, 0, &[id as u32 + 3, 9], &[BlockId(id as u32)]);
        run.sample = (id % 7 != 3).then(|| greedy_spec(0));
        run
    };
    let together = runner
        .execute(&plan((0..100).map(with_sample).collect()))
        .unwrap()
        .samples;
    for id in 0..100 {
        let alone = runner.execute(&plan(vec![with_sample(id)])).unwrap().samples;
        assert_eq!(alone[0], together[id as usize], "request {id}");
        assert_eq!(alone[0].is_none(), id % 7 == 3);
    }
}

#[test]
fn a_malformed_plan_is_an_error_and_nothing_more() {
    let model = load("llama", KvCacheDtype::Auto);
    let mut runner = runner(&model, 8, 8);
    let good = || run(1, 0, &[5; 20], &blocks(0..3));
    let penalised = SamplingOptions {
        repetition_penalty: Some(1.5),
        ..Default::default()
    };
    let penalised = Arc::new(SamplingParams::new(&penalised, 160).unwrap());
    let mut short_history = good();
    short_history.sample = Some(SampleSpec {
        params: penalised,
        prompt_len: 1,
        ..greedy_spec(0)
    });
    let mut unknown_history = good();
    unknown_history.sample = Some(SampleSpec {
        history: vec![160],
        ..greedy_spec(0)
    });
    let cases = [
        (vec![run(1, 0, &[], &blocks(0..3))], "without tokens"),
        (vec![run(1, 0, &[160], &blocks(0..3))], "token 160"),
        (vec![run(1, 5, &[5; 20], &blocks(0..3))], "4 are needed"),
        (vec![run(1, 0, &[5], &blocks(8..9))], "block 8 of 8"),
        (vec![run(1, 120, &[5; 9], &blocks(0..3))], "longest context"),
        (
            vec![run(1, usize::MAX, &[5; 9], &blocks(0..3))],
            "longest context",
        ),
        (
            vec![run(1, 0, &[5; 20], &[BlockId(1), BlockId(1), BlockId(2)])],
            "twice",
        ),
        (vec![good(), good()], "twice"),
        (
            vec![Run {
                input: RunInput::LastSampled,
                ..good()
            }],
            "nothing was sampled",
        ),
        (vec![short_history], "history"),
        (vec![unknown_history], "token 160"),
        (
            (0..17).map(|id| run(id, 0, &[5], &blocks(0..1))).collect(),
            "17 runs",
        ),
        (vec![run(1, 0, &[5; 257], &blocks(0..8))], "257 tokens"),
    ];
    let expected = runner.logits(&plan(vec![good()]), &[19]).unwrap();
    for (runs, message) in cases {
        let error = runner.execute(&plan(runs)).unwrap_err().to_string();
        assert!(error.contains(message), "{error:?} does not say {message:?}");
    }
    assert!(runner.logits(&plan(vec![good()]), &[20]).is_err());
    assert!(runner.logits(&plan(vec![good()]), &[3, 2]).is_err());
    assert!(runner.finish().is_err(), "nothing was launched");
    assert!(runner.execute(&plan(vec![])).unwrap().samples.is_empty());
    assert_eq!(runner.logits(&plan(vec![good()]), &[19]).unwrap(), expected);
}

/// Steps finish in the order in which they were launched, and the second may continue what the first sampled.
#[test]
fn two_steps_may_be_under_way() {
    let model = load("qwen2", KvCacheDtype::Auto);
    let prompt = [5, 6, 7];
    let expected = greedy_alone(&mut runner(&model, 8, 8), &prompt, &blocks(0..2), 2);
    let mut runner = runner(&model, 8, 8);
    let mut first = run(1, 0, &prompt, &blocks(0..2));
    first.sample = Some(greedy_spec(0));
    let mut second = run(1, 3, &[0], &blocks(0..2));
    second.input = RunInput::LastSampled;
    second.sample = Some(greedy_spec(1));
    runner.launch(&plan(vec![first])).unwrap();
    runner.launch(&plan(vec![second])).unwrap();
    let found: Vec<TokenId> = (0..2)
        .map(|_| runner.finish().unwrap().samples[0].as_ref().unwrap().token)
        .collect();
    assert_eq!(found, expected);
}
