//! What the scheduler promises where layers keep states: where prompts are cut for snapshots, and who finds them.

use plimsoll_core::{
    BlockSize, CacheGroups, KvConfig, Limits, Request, RequestId, RequestOptions, Sampled, StepError,
    StepLimits, StepOutput, StepPlan, TokenId,
};
use plimsoll_scheduler::{Scheduler, SchedulerConfig};

const STEP: usize = 64;

fn scheduler(num_pages: usize, state_slots: usize) -> Scheduler {
    in_chunks_of(1, num_pages, state_slots)
}

fn in_chunks_of(state_chunk: usize, num_pages: usize, state_slots: usize) -> Scheduler {
    Scheduler::new(SchedulerConfig {
        limits: StepLimits {
            max_num_batched_tokens: STEP,
            max_num_seqs: 4,
            max_model_len: 1000,
        },
        kv: kv(num_pages, state_slots),
        state_chunk,
        enable_prefix_caching: true,
        patience: 20,
    })
}

fn kv(num_pages: usize, state_slots: usize) -> KvConfig {
    KvConfig {
        block_size: BlockSize::new(8).expect("8 is legal"),
        num_pages,
        groups: CacheGroups::default().with_states(3),
        state_slots,
    }
}

/// A request whose prompt begins with `first`.
fn request(id: u64, first: TokenId, prompt: usize, max_tokens: usize) -> Request {
    let limits = Limits {
        max_model_len: 1000,
        kv_capacity_tokens: 1000,
        vocab_size: 1000,
        images: None,
    };
    let options = RequestOptions {
        prompt: (0..prompt as u32)
            .map(|at| if at == 0 { first } else { at })
            .collect(),
        max_tokens: Some(max_tokens),
        ..Default::default()
    };
    Request::new(RequestId(id), options, &limits).expect("the request is legal")
}

fn output(plan: &StepPlan) -> StepOutput {
    let samples = plan.runs.iter().map(|run| {
        run.sample.as_ref().map(|_| Sampled {
            token: 500,
            logprobs: None,
        })
    });
    StepOutput {
        samples: samples.collect(),
        ..StepOutput::default()
    }
}

/// (request, start, tokens) of each run of the next step.
fn step(scheduler: &mut Scheduler) -> Vec<(u64, usize, usize)> {
    let plan = scheduler.plan();
    if !plan.is_empty() {
        scheduler.apply(&plan, output(&plan));
    }
    scheduler.check_invariants().expect("the bookkeeping is sound");
    let runs = plan.runs.iter();
    runs.map(|run| (run.request.0, run.start, run.input.len()))
        .collect()
}

fn run_to_the_end(scheduler: &mut Scheduler) {
    while !scheduler.is_idle() {
        step(scheduler);
    }
}

#[test]
fn a_prompt_is_cut_where_a_snapshot_is_kept_and_the_rest_of_the_step_is_for_others() {
    let mut scheduler = scheduler(100, 8);
    scheduler.submit(request(1, 1, 60, 2));
    scheduler.submit(request(2, 2, 30, 2));
    assert_eq!(step(&mut scheduler), [(1, 0, 48), (2, 0, 16)]);
    assert_eq!(step(&mut scheduler), [(1, 48, 12), (2, 16, 14)]);
    run_to_the_end(&mut scheduler);
    // The same again, and one that parts within the prompt.
    scheduler.submit(request(3, 1, 60, 2));
    assert_eq!(step(&mut scheduler), [(3, 48, 12)]);
    scheduler.submit(request(4, 1, 70, 2));
    assert_eq!(step(&mut scheduler)[1..], [(4, 48, 22)]);
    run_to_the_end(&mut scheduler);
    let stats = scheduler.stats();
    assert_eq!(stats.prefix_hit_tokens, 48 + 48);
    assert_eq!(stats.prefix_queried_tokens, 60 + 30 + 60 + 70);
}

#[test]
fn chunks_of_long_prompts_end_with_blocks() {
    let mut scheduler = scheduler(100, 8);
    scheduler.submit(request(1, 1, 5, 30));
    step(&mut scheduler);
    scheduler.submit(request(2, 2, 200, 2));
    assert_eq!(step(&mut scheduler), [(1, 5, 1), (2, 0, 56)]);
    assert_eq!(step(&mut scheduler), [(1, 6, 1), (2, 56, 56)]);
}

/// Where a recurrence goes through chunks, the rest of a step that has no room for one stays empty.
#[test]
fn prompts_wait_for_room_for_a_chunk() {
    let mut scheduler = in_chunks_of(32, 100, 8);
    scheduler.submit(request(1, 1, 5, 30));
    assert_eq!(step(&mut scheduler), [(1, 0, 5)]);
    scheduler.submit(request(2, 2, 100, 2));
    assert_eq!(step(&mut scheduler), [(1, 5, 1), (2, 0, 32)]);
    scheduler.submit(request(3, 3, 40, 2));
    assert_eq!(step(&mut scheduler), [(1, 6, 1), (2, 32, 32)]);
    assert_eq!(step(&mut scheduler), [(1, 7, 1), (2, 64, 36)]);
    // The rest of a prompt may be less than a chunk.
    assert_eq!(step(&mut scheduler), [(1, 8, 1), (2, 100, 1), (3, 0, 32)]);
    assert_eq!(step(&mut scheduler), [(1, 9, 1), (3, 32, 8)]);
    run_to_the_end(&mut scheduler);
}

/// Without a slot to go on with, a cut would be a step for nothing.
#[test]
fn no_prompt_is_cut_where_no_snapshot_can_be_kept() {
    let mut scheduler = scheduler(100, 1);
    scheduler.submit(request(1, 1, 60, 2));
    assert_eq!(step(&mut scheduler), [(1, 0, 60)]);
    run_to_the_end(&mut scheduler);
}

#[test]
fn a_preempted_request_goes_on_from_its_last_snapshot() {
    let mut scheduler = scheduler(24, 8);
    scheduler.submit(request(1, 1, 60, 60));
    scheduler.submit(request(2, 2, 60, 60));
    while scheduler.stats().preemptions == 0 {
        step(&mut scheduler);
    }
    assert_eq!(scheduler.stats().running, 1);
    let again = loop {
        if let Some(&run) = step(&mut scheduler).iter().find(|run| run.0 == 2) {
            break run;
        }
    };
    // Both had 96 tokens when blocks ran out, and the other took three of its blocks, and so the snapshot of its output.
    assert_eq!(again.1, 48);
    run_to_the_end(&mut scheduler);
    assert_eq!(scheduler.stats().finished_length, 2);
}

#[test]
fn nothing_of_a_failed_step_or_a_lost_cache_is_found() {
    let mut scheduler = scheduler(100, 8);
    scheduler.submit(request(1, 1, 60, 2));
    let first = scheduler.plan();
    let second = scheduler.plan();
    assert_eq!((first.num_tokens(), second.num_tokens()), (48, 12));
    scheduler.fail(&first, &StepError::Failed("injected".into()));
    scheduler.apply(&second, output(&second));
    scheduler.check_invariants().expect("the bookkeeping is sound");
    assert_eq!(scheduler.stats().slots.snapshots, 0);

    for id in [2, 3] {
        scheduler.submit(request(id, 1, 60, 9));
        assert_eq!(step(&mut scheduler), [(id, 0, 48)]);
        scheduler.reset(kv(100, 8));
        assert_eq!(step(&mut scheduler), [(id, 0, 48)]);
        assert_eq!(step(&mut scheduler), [(id, 48, 12)]);
        scheduler.cancel(RequestId(id));
        assert_eq!(scheduler.stats().slots.snapshots, 1);
        scheduler.forget_cached();
    }
    assert_eq!(scheduler.stats().slots.used, 0);
}

/// A snapshot within the prompt, which a later chunk leaves behind before anybody looks at a row.
#[test]
fn a_snapshot_that_no_finite_row_has_seen_goes_with_a_request_that_is_not_finite() {
    let mut scheduler = scheduler(100, 8);
    scheduler.submit(request(1, 1, 60, 2));
    let first = scheduler.plan();
    let second = scheduler.plan();
    scheduler.apply(&first, output(&first));
    assert_eq!(scheduler.stats().slots.snapshots, 1);
    let mut rest = output(&second);
    (rest.samples, rest.not_finite) = (vec![None], vec![0]);
    scheduler.apply(&second, rest);
    scheduler.check_invariants().expect("the bookkeeping is sound");
    let stats = scheduler.stats();
    assert_eq!(
        (stats.slots.used, stats.slots.snapshots, stats.blocks_cached()),
        (0, 0, 0)
    );

    // One that was seen stays.
    scheduler.submit(request(2, 1, 60, 2));
    run_to_the_end(&mut scheduler);
    let snapshots = scheduler.stats().slots.snapshots;
    scheduler.submit(request(3, 1, 60, 2));
    let plan = scheduler.plan();
    assert_eq!(plan.runs[0].start, 48);
    let mut rest = output(&plan);
    (rest.samples, rest.not_finite) = (vec![None], vec![0]);
    scheduler.apply(&plan, rest);
    scheduler.check_invariants().expect("the bookkeeping is sound");
    assert!(snapshots > 0 && scheduler.stats().slots.snapshots == snapshots);
}
