//! The simulated device: what it says, and what it refuses.

use std::sync::Arc;

use plimsoll_core::{
    BlockSize, CacheGroups, Executor, GroupTable, KvConfig, Limits, PageId, Request, RequestId,
    RequestOptions, Run, RunInput, SampleSpec, SamplingOptions, SamplingParams, StepError, StepLimits,
    StepPlan, TokenId,
};
use plimsoll_sim::{Context, Fault, SimConfig, SimExecutor, SimModel, StepTime, oracle};

fn executor() -> SimExecutor {
    SimExecutor::new(SimConfig {
        kv: KvConfig {
            block_size: BlockSize::new(8).expect("8 is legal"),
            num_pages: 4,
            groups: CacheGroups::default(),
            state_slots: 0,
        },
        limits: StepLimits {
            max_num_batched_tokens: 16,
            max_num_seqs: 2,
            max_model_len: 30,
        },
        model: SimModel::uniform(50),
        step_time: StepTime::default(),
    })
}

fn run(request: u64, start: usize, tokens: &[TokenId], blocks: &[u32]) -> Run {
    let pages = blocks.iter().copied().map(PageId).collect();
    Run {
        request: RequestId(request),
        start,
        input: RunInput::Known(tokens.to_vec()),
        images: None,
        tables: vec![GroupTable::whole(pages)],
        state: None,
        sample: None,
        score: None,
        pool: None,
    }
}

fn sampling(mut run: Run, index: usize, prompt_len: usize) -> Run {
    let params = Arc::new(SamplingParams::greedy());
    run.sample = Some(SampleSpec {
        params,
        seed: 0,
        index,
        history: Vec::new(),
        prompt_len,
        constrained: false,
    });
    run
}

fn plan(step: u64, runs: Vec<Run>) -> StepPlan {
    StepPlan {
        step,
        runs,
        encode: None,
    }
}

#[test]
fn says_what_the_model_says_about_the_whole_context() {
    let mut executor = executor();
    executor
        .execute(&plan(0, vec![run(1, 0, &[1; 6], &[3])]))
        .unwrap();
    let last = sampling(run(1, 6, &[2; 3], &[3, 0]), 0, 9);
    let spec = last.sample.clone().expect("it samples");
    let output = executor.execute(&plan(1, vec![last])).unwrap();
    let expected = SimModel::uniform(50).sample(Context::of(&[1, 1, 1, 1, 1, 1, 2, 2, 2]), &spec, None);
    assert_eq!(output.samples, [Some(expected.clone())]);
    let mut next = sampling(run(1, 9, &[0], &[3, 0]), 1, 9);
    next.input = RunInput::LastSampled;
    let ahead = executor.execute(&plan(2, vec![next.clone()])).unwrap();
    next.input = RunInput::Known(vec![expected.token]);
    assert_eq!(ahead, executor.execute(&plan(3, vec![next])).unwrap());
}

#[test]
fn refuses_what_no_scheduler_may_plan() {
    let cases = [
        ("exceed", plan(0, vec![run(1, 0, &[1; 17], &[0, 1, 2])])),
        (
            "exceed",
            plan(0, (0..3).map(|id| run(id, 0, &[1], &[id as u32])).collect()),
        ),
        (
            "two runs",
            plan(0, vec![run(1, 0, &[1], &[0]), run(1, 1, &[1], &[0])]),
        ),
        ("computes tokens 0..0", plan(0, vec![run(1, 0, &[], &[0])])),
        (
            "computes tokens 29..31 of 30",
            plan(0, vec![run(1, 29, &[1, 1], &[0, 1, 2, 3])]),
        ),
        (
            "has blocks 0..1 of a full, not 0..2",
            plan(0, vec![run(1, 0, &[1; 9], &[0])]),
        ),
        ("names page 4", plan(0, vec![run(1, 0, &[1], &[4])])),
        ("outside the vocabulary", plan(0, vec![run(1, 0, &[50], &[0])])),
        (
            "two requests write page 0",
            plan(0, vec![run(1, 0, &[1], &[0]), run(2, 0, &[1], &[0])]),
        ),
        (
            "uses page 0",
            plan(0, vec![run(1, 0, &[1], &[0]), run(2, 8, &[1], &[0, 1])]),
        ),
        ("uses page 0", plan(0, vec![run(1, 0, &[1; 9], &[0, 0])])),
        ("belongs to another context", plan(0, vec![run(1, 1, &[1], &[0])])),
        (
            "wrong history",
            plan(0, vec![sampling(run(1, 0, &[1, 2], &[0]), 0, 1)]),
        ),
    ];
    for (complaint, plan) in cases {
        match executor().execute(&plan) {
            Err(StepError::Failed(message)) => {
                assert!(message.contains(complaint), "{message}, not {complaint}")
            }
            other => panic!("{complaint}: {other:?}"),
        }
    }
}

#[test]
fn refuses_to_touch_what_a_step_in_flight_writes() {
    let mut executor = executor();
    executor.launch(&plan(0, vec![run(1, 0, &[1], &[0])])).unwrap();
    assert!(executor.launch(&plan(1, vec![run(2, 0, &[1], &[0])])).is_err());
    executor.launch(&plan(1, vec![run(2, 0, &[1], &[1])])).unwrap();
    executor.finish().unwrap();
    executor.finish().unwrap();
    assert!(executor.finish().is_err(), "nothing is in flight");
}

#[test]
fn a_failed_step_leaves_garbage() {
    let mut executor = executor();
    executor.inject(0, Fault::Finish);
    executor.inject(1, Fault::Launch);
    assert!(
        executor
            .execute(&plan(0, vec![run(1, 0, &[1, 2], &[0])]))
            .is_err()
    );
    assert!(executor.launch(&plan(1, vec![run(2, 0, &[1], &[1])])).is_err());
    assert!(
        executor.execute(&plan(2, vec![run(1, 2, &[3], &[0])])).is_err(),
        "the KV is not what was planned"
    );
    executor
        .execute(&plan(3, vec![run(1, 0, &[1, 2, 3], &[0])]))
        .unwrap();
}

#[test]
fn synthetic_plans_run_on_kv_that_was_never_computed() {
    let mut executor = executor();
    executor.allow_synthetic(true);
    let runs = vec![
        sampling(run(1, 20, &[1], &[0, 1, 2]), 0, 1),
        sampling(run(2, 20, &[1], &[0, 1, 2]), 0, 1),
    ];
    assert!(executor.execute(&plan(0, runs)).is_ok());
}

/// The answer to a prompt of one byte.
fn text(model: &SimModel, seed: u64, sampling: SamplingOptions) -> Vec<TokenId> {
    let limits = Limits {
        max_model_len: 500,
        kv_capacity_tokens: 500,
        vocab_size: model.vocab_size(),
        images: None,
    };
    let stop_token_ids = vec![SimModel::END];
    let options = RequestOptions {
        prompt: vec![65],
        max_tokens: None,
        sampling,
        seed,
        stop_token_ids,
        ..Default::default()
    };
    let (tokens, _) = oracle(
        model,
        &Request::new(RequestId(0), options, &limits).expect("the request is legal"),
    );
    tokens
}

#[test]
fn the_text_model_writes_text_and_stops() {
    let model = SimModel::text();
    let texts: Vec<_> = (0..50)
        .map(|seed| text(&model, seed, SamplingOptions::default()))
        .collect();
    let ended = texts
        .iter()
        .filter(|text| text.last() == Some(&SimModel::END))
        .count();
    assert!(ended > 40, "{ended} of 50 texts end by themselves");
    for text in &texts {
        let bytes = text.iter().filter(|&&token| token != SimModel::END);
        assert!(
            bytes
                .into_iter()
                .all(|&token| u8::try_from(token).is_ok_and(|b| matches!(b, b' '..=b'~')))
        );
    }
    assert_ne!(texts[0], texts[1], "the seed decides");
    let greedy = || SamplingOptions {
        temperature: Some(0.0),
        ..Default::default()
    };
    assert_eq!(
        text(&model, 1, greedy()),
        text(&model, 2, greedy()),
        "but not where sampling is greedy"
    );
}

#[test]
fn a_bias_forces_and_bans() {
    let model = SimModel::text();
    let biased = |bias| SamplingOptions {
        logit_bias: bias,
        ..Default::default()
    };
    let forced = text(&model, 0, biased(vec![(66, 100.0)]));
    assert!(forced.len() == 499 && forced.iter().all(|&token| token == 66));
    let banned = text(&model, 0, biased(vec![(SimModel::END, -100.0)]));
    assert_eq!(banned.len(), 499, "without an end there is none");
}
