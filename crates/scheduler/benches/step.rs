//! What a step costs on the host: `cargo bench -p plimsoll-scheduler`.

use plimsoll_core::{
    BlockSize, CacheGroups, KvConfig, Limits, Request, RequestId, RequestOptions, Sampled, StepLimits,
    StepOutput, StepPlan,
};
use plimsoll_scheduler::{Scheduler, SchedulerConfig};

const MAX_TOKENS: usize = 100_000;

fn main() {
    divan::main();
}

/// `requests` running requests with prompts of `prompt` tokens that differ.
fn running(requests: usize, prompt: usize) -> Scheduler {
    let kv = KvConfig {
        block_size: BlockSize::default(),
        num_pages: 1 << 20,
        groups: CacheGroups::default(),
        state_slots: 0,
    };
    let limits = StepLimits {
        max_num_batched_tokens: requests * prompt,
        max_num_seqs: requests,
        max_model_len: prompt + MAX_TOKENS,
    };
    let mut scheduler = Scheduler::new(SchedulerConfig {
        limits,
        kv,
        state_chunk: 1,
        enable_prefix_caching: true,
        patience: 1000,
    });
    let limits = Limits {
        max_model_len: limits.max_model_len,
        kv_capacity_tokens: kv.capacity_tokens(),
        vocab_size: requests.max(2),
        images: None,
    };
    for id in 0..requests {
        let prompt = vec![id as u32; prompt];
        let options = RequestOptions {
            prompt,
            max_tokens: Some(MAX_TOKENS),
            ..Default::default()
        };
        scheduler.submit(Request::new(RequestId(id as u64), options, &limits).expect("the request is legal"));
    }
    step(&mut scheduler);
    scheduler
}

fn step(scheduler: &mut Scheduler) {
    let plan = scheduler.plan();
    let output = answer(&plan);
    divan::black_box(scheduler.apply(&plan, output));
}

fn answer(plan: &StepPlan) -> StepOutput {
    let samples = plan.runs.iter().map(|run| {
        run.sample.as_ref().map(|_| Sampled {
            token: 1,
            logprobs: None,
        })
    });
    StepOutput {
        samples: samples.collect(),
        ..Default::default()
    }
}

/// `plan` and `apply` of one new token for each of 256 requests.
#[divan::bench(args = [128, 1024, 8192])]
fn decode_256(bencher: divan::Bencher, prompt: usize) {
    let mut scheduler = running(256, prompt);
    bencher.bench_local(|| step(&mut scheduler));
}
