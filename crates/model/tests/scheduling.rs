//! Text and logits must not depend on scheduling: chunks, batches, block tables, preemption.

use std::sync::Arc;

use crate::common::malformed::refuses_malformed_plans;
use crate::common::requests::{Disturbance, Request, serve};
use crate::common::scores::{in_chunks, scored_run};
use crate::common::*;
use plimsoll_core::{Executor, PageId, RunInput, TokenId};
use plimsoll_model::{KvCacheDtype, Model};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

const NUM_BLOCKS: u32 = 64;

/// Each request alone, its whole prompt in one step, contiguous blocks.
fn undisturbed(model: &Arc<Model>, block_size: usize, requests: &[Request]) -> Vec<Vec<TokenId>> {
    let one = |mut request: Request| {
        let mut runner = runner(model, block_size, NUM_BLOCKS as usize);
        request.blocks = blocks(0..NUM_BLOCKS / 2);
        while !request.is_done() {
            let len = request.tokens().len() - request.computed;
            let output = request.execute(&mut runner, len);
            request.computed += len;
            request.output.push(output.samples[0].as_ref().unwrap().token);
        }
        request.output
    };
    requests.iter().cloned().map(one).collect()
}

#[test]
fn text_does_not_depend_on_scheduling() {
    for (round, name) in MODELS.iter().enumerate() {
        let model = load(name, KvCacheDtype::Auto);
        for block_size in [8, 16, 32] {
            let seed = (round * 100 + block_size) as u64;
            let requests = Request::random(8, seed, model.spec().vocab_size, 60);
            let expected = undisturbed(&model, block_size, &requests);
            for depth in [1, 2] {
                let mut runner = runner(&model, block_size, NUM_BLOCKS as usize);
                let mut requests = requests.clone();
                let how = Disturbance {
                    block_size,
                    num_blocks: NUM_BLOCKS,
                    limits: LIMITS,
                    seed,
                    depth,
                };
                serve(&mut runner, &mut requests, how, &mut |_, sampled| sampled.token);
                let found: Vec<_> = requests.into_iter().map(|request| request.output).collect();
                assert_eq!(
                    found, expected,
                    "{name}, blocks of {block_size}, seed {seed}, {depth} in flight"
                );
            }
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
        .build_state(&state_config(8, 100), &limits, &budget(), &mut || {})
        .unwrap();
    let with_sample = |id: u64| {
        let mut run = run(id, 0, &[id as u32 + 3, 9], &[PageId(id as u32)]);
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
    refuses_malformed_plans(&mut runner(&model, 8, 8));
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

/// Every bit of them: chunks, neighbours, and a prompt of which the beginning was told before.
#[test]
fn prompt_logprobs_do_not_depend_on_scheduling() {
    for name in MODELS {
        let model = load(name, KvCacheDtype::Auto);
        let mut rng = StdRng::seed_from_u64(6);
        let prompt: Vec<TokenId> = (0..90)
            .map(|_| rng.random_range(0..model.spec().vocab_size as u32))
            .collect();
        let mut whole = runner(&model, 16, NUM_BLOCKS as usize);
        let expected = in_chunks(&mut whole, &prompt, prompt.len(), &blocks(0..8));
        for len in [50, 33, 8, 1] {
            let mut chunked = runner(&model, 16, NUM_BLOCKS as usize);
            let found = in_chunks(&mut chunked, &prompt, len, &blocks(0..8));
            assert_eq!(found, expected, "{name}, chunks of {len}");
        }
        let mut runner = runner(&model, 16, NUM_BLOCKS as usize);
        let neighbour = |id: u64, blocks: &[PageId]| {
            let mut run = run(id, 0, &prompt[..20], blocks);
            run.sample = Some(greedy_spec(0));
            run
        };
        let step = plan(vec![
            neighbour(2, &blocks(10..12)),
            scored_run(&prompt, 0, prompt.len(), 30, &blocks(0..8)),
            neighbour(3, &blocks(12..14)),
        ]);
        let output = runner.execute(&step).unwrap();
        assert_eq!(output.scores, [expected[30..].to_vec()], "{name}");
        assert_eq!(output.samples[0], output.samples[2], "{name}");
    }
}
