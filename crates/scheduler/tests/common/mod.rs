//! A scheduler and requests for its tests.

use plimsoll_core::{
    BlockSize, CacheGroups, Event, KvConfig, Limits, PromptLogprob, Request, RequestId, RequestOptions,
    Sampled, SamplingOptions, StepLimits, StepOutput, StepPlan, TokenId,
};
use plimsoll_scheduler::{Scheduler, SchedulerConfig};

/// Ends a request.
pub(crate) const STOP: TokenId = 99;
pub(crate) const PATIENCE: u64 = 20;

/// Of all requests.
pub(crate) const LIMITS: Limits = Limits {
    max_model_len: 1000,
    kv_capacity_tokens: 1000,
    vocab_size: 100,
    images: None,
};

/// Of blocks of eight tokens.
pub(crate) fn scheduler(max_num_batched_tokens: usize, max_num_seqs: usize, num_blocks: usize) -> Scheduler {
    Scheduler::new(SchedulerConfig {
        limits: StepLimits {
            max_num_batched_tokens,
            max_num_seqs,
            max_model_len: 1000,
        },
        kv: KvConfig {
            block_size: BlockSize::new(8).expect("8 is legal"),
            num_pages: num_blocks,
            groups: CacheGroups::default(),
            state_slots: 0,
        },
        state_chunk: 1,
        enable_prefix_caching: true,
        patience: PATIENCE,
    })
}

/// A request whose prompt begins with its id.
pub(crate) fn request(id: u64, prompt: usize, max_tokens: usize) -> Request {
    with_sampling(id, prompt, max_tokens, SamplingOptions::default())
}

pub(crate) fn with_sampling(id: u64, prompt: usize, max_tokens: usize, sampling: SamplingOptions) -> Request {
    let prompt = (0..prompt as u32)
        .map(|i| if i == 0 { id as u32 } else { i % 90 })
        .collect();
    let stop_token_ids = vec![STOP];
    let options = RequestOptions {
        prompt,
        max_tokens: Some(max_tokens),
        sampling,
        seed: id,
        stop_token_ids,
        ..Default::default()
    };
    Request::new(RequestId(id), options, &LIMITS).expect("the request is legal")
}

/// Every run that samples gets `token`.
pub(crate) fn output(plan: &StepPlan, token: TokenId) -> StepOutput {
    let samples = plan.runs.iter().map(|run| {
        run.sample.as_ref().map(|_| Sampled {
            token,
            logprobs: None,
        })
    });
    let scored = |&target: &TokenId| PromptLogprob {
        token: target,
        logprob: -1.0,
        rank: 1,
        top: Vec::new(),
    };
    let scores = plan.runs.iter().filter_map(|run| run.score.as_ref());
    StepOutput {
        samples: samples.collect(),
        scores: scores
            .map(|score| score.targets.iter().map(scored).collect())
            .collect(),
        ..Default::default()
    }
}

/// Plans a step and applies it: every run that samples gets `token`.
pub(crate) fn step(scheduler: &mut Scheduler, token: TokenId) -> (StepPlan, Vec<(RequestId, Event)>) {
    let plan = scheduler.plan();
    let mut events = scheduler.admitted(&plan);
    if !plan.is_empty() {
        events.extend(scheduler.apply(&plan, output(&plan, token)));
    }
    scheduler.check_invariants().expect("the bookkeeping is sound");
    (plan, events)
}
