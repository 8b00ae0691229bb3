//! Whom the scheduler admits: those for whom nobody is soon preempted.

use plimsoll_core::{
    BlockSize, CacheGroups, KvConfig, Limits, Request, RequestId, RequestOptions, Sampled, StepLimits,
    StepOutput,
};
use plimsoll_scheduler::{Scheduler, SchedulerConfig};

/// Up to eight requests in so many blocks of eight tokens.
fn scheduler(num_blocks: usize) -> Scheduler {
    Scheduler::new(SchedulerConfig {
        limits: StepLimits {
            max_num_batched_tokens: 1000,
            max_num_seqs: 8,
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
        patience: 20,
    })
}

/// A request whose prompt begins with its id.
fn request(id: u64, prompt: usize, max_tokens: usize) -> Request {
    let limits = Limits {
        max_model_len: 1000,
        kv_capacity_tokens: 1000,
        vocab_size: 100,
        images: None,
    };
    let options = RequestOptions {
        prompt: (0..prompt as u32)
            .map(|at| if at == 0 { id as u32 } else { at })
            .collect(),
        max_tokens: Some(max_tokens),
        ..Default::default()
    };
    Request::new(RequestId(id), options, &limits).expect("the request is legal")
}

fn step(scheduler: &mut Scheduler) {
    let plan = scheduler.plan();
    let sampled = |samples: bool| {
        samples.then_some(Sampled {
            token: 3,
            logprobs: None,
        })
    };
    let samples = plan.runs.iter().map(|run| sampled(run.sample.is_some()));
    if !plan.is_empty() {
        let output = StepOutput {
            samples: samples.collect(),
            scores: Vec::new(),
            pooled: Vec::new(),
        };
        scheduler.apply(&plan, output);
    }
    scheduler.check_invariants().expect("the bookkeeping is sound");
}

/// Steps until nothing is left.
fn run_all(scheduler: &mut Scheduler) {
    while !scheduler.is_idle() {
        step(scheduler);
    }
}

#[test]
fn a_burst_is_admitted_with_what_it_will_grow_by() {
    // Eight prompts and one block more for each fit at once, and six whole requests of three blocks.
    let mut scheduler = scheduler(19);
    for id in 1..=8 {
        scheduler.submit(request(id, 8, 17));
    }
    run_all(&mut scheduler);
    let before = scheduler.stats().preemptions;
    assert!(before > 0, "nothing was known yet");
    for id in 11..=30 {
        scheduler.submit(request(id, 8, 17));
    }
    step(&mut scheduler);
    assert_eq!(scheduler.stats().running, 6);
    run_all(&mut scheduler);
    assert_eq!(scheduler.stats().preemptions, before);
    assert_eq!(scheduler.stats().finished_length, 28);
}

#[test]
fn outputs_that_clients_end_are_known_too() {
    let mut scheduler = scheduler(40);
    scheduler.submit(request(1, 8, 100));
    run_all(&mut scheduler);
    for id in 2..=10 {
        scheduler.submit(request(id, 8, 100));
        (0..2).for_each(|_| step(&mut scheduler));
        assert!(scheduler.cancel(RequestId(id)));
    }
    for id in 11..=17 {
        scheduler.submit(request(id, 8, 100));
    }
    step(&mut scheduler);
    assert_eq!(scheduler.stats().running, 7, "most outputs end early");
}

#[test]
fn those_that_live_long_leave_the_rest_of_the_cache_to_short_ones() {
    let mut scheduler = scheduler(18);
    for id in 1..=20 {
        scheduler.submit(request(id, 4, 2));
    }
    run_all(&mut scheduler);
    // In the end it will need the whole cache.
    scheduler.submit(request(21, 40, 100));
    (0..60).for_each(|_| step(&mut scheduler));
    scheduler.submit(request(22, 4, 2));
    step(&mut scheduler);
    assert_eq!(scheduler.stats().running, 2);
}
