//! What the scheduler promises, one promise at a time; the simulator tests them all together.

mod common;

use plimsoll_core::{
    BlockSize, CacheGroups, Event, FinishReason, KvConfig, Limits, Request, RequestId, RequestOptions,
    RunInput, SamplingOptions, StepError, StepOutput, StepPlan, TenantId, TokenId,
};
use plimsoll_scheduler::Scheduler;

use common::{LIMITS, PATIENCE, STOP, output, request, scheduler, step, with_sampling};

/// As [`request`], with log-probabilities of the prompt.
fn scored(id: u64, prompt: usize, max_tokens: usize) -> Request {
    let options = RequestOptions {
        prompt: request(id, prompt, 1).prompt().to_vec(),
        max_tokens: Some(max_tokens),
        prompt_logprobs: Some(2),
        ..Default::default()
    };
    Request::new(RequestId(id), options, &LIMITS).expect("the request is legal")
}

/// (first row, targets) that the only run of a plan scores.
fn scores(plan: &StepPlan) -> Option<(usize, Vec<TokenId>)> {
    assert_eq!(plan.runs.len(), 1);
    let score = plan.runs[0].score.as_ref()?;
    assert_eq!(score.top, 2);
    Some((score.first, score.targets.clone()))
}

/// (request, start, tokens, samples) of each run.
fn shape(plan: &StepPlan) -> Vec<(u64, usize, usize, bool)> {
    plan.runs
        .iter()
        .map(|run| (run.request.0, run.start, run.input.len(), run.sample.is_some()))
        .collect()
}

#[test]
fn chunks_of_a_prompt_run_beside_new_tokens_of_older_requests() {
    let mut scheduler = scheduler(10, 4, 20);
    scheduler.submit(request(1, 4, 9));
    scheduler.submit(request(2, 18, 9));
    scheduler.submit(request(3, 2, 9));
    assert_eq!(
        shape(&step(&mut scheduler, 0).0),
        [(1, 0, 4, true), (2, 0, 6, false)]
    );
    assert_eq!(
        shape(&step(&mut scheduler, 0).0),
        [(1, 4, 1, true), (2, 6, 9, false)]
    );
    assert_eq!(
        shape(&step(&mut scheduler, 0).0),
        [(1, 5, 1, true), (2, 15, 3, true), (3, 0, 2, true)]
    );
    let (plan, _) = step(&mut scheduler, 7);
    assert_eq!(shape(&plan), [(1, 6, 1, true), (2, 18, 1, true), (3, 2, 1, true)]);
    let index = |run: &plimsoll_core::Run| run.sample.as_ref().map(|spec| spec.index);
    assert_eq!(
        plan.runs.iter().map(index).collect::<Vec<_>>(),
        [Some(3), Some(1), Some(1)]
    );
}

#[test]
fn events_tell_the_whole_story() {
    let mut scheduler = scheduler(100, 4, 20);
    scheduler.submit(request(1, 20, 2));
    let (_, events) = step(&mut scheduler, 5);
    assert!(matches!(
        &events[0],
        (RequestId(1), Event::Admitted { cached_tokens: 0 })
    ));
    assert!(matches!(&events[1], (_, Event::Token(token)) if token.token == 5 && token.finish.is_none()));
    let (_, events) = step(&mut scheduler, 6);
    assert!(matches!(&events[..], [(_, Event::Token(t))] if t.finish == Some(FinishReason::Length)));
    // The same beginning again.
    scheduler.submit(with_sampling(1, 20, 9, SamplingOptions::default()));
    let (plan, events) = step(&mut scheduler, STOP);
    assert_eq!(shape(&plan), [(1, 16, 4, true)]);
    assert!(matches!(&events[0], (_, Event::Admitted { cached_tokens: 16 })));
    assert!(matches!(&events[1], (_, Event::Token(t)) if t.finish == Some(FinishReason::Stop)));
    assert!(scheduler.is_idle());
    let stats = scheduler.stats();
    assert_eq!(
        (stats.finished_length, stats.finished_stop, stats.pages_used),
        (1, 1, 0)
    );
    assert_eq!(
        (
            stats.prefix_queried_tokens,
            stats.prefix_hit_tokens,
            stats.computed_tokens
        ),
        (40, 16, 25)
    );
}

#[test]
fn whole_blocks_waste_what_is_behind_the_last_token() {
    let mut scheduler = scheduler(6, 4, 8);
    scheduler.submit(request(1, 10, 9));
    assert_eq!(scheduler.stats().tail_tokens, 0);
    let mut tails = Vec::new();
    while !scheduler.is_idle() {
        step(&mut scheduler, 3);
        tails.push(scheduler.stats().tail_tokens);
    }
    // Two blocks for ten tokens, of which a step computes six, then one token more in each; the 17th gets its block when it
    // is computed.
    assert_eq!(tails, [6, 5, 4, 3, 2, 1, 0, 0, 6, 0]);
}

#[test]
fn the_latest_is_preempted_and_returns_after_an_end() {
    // Two requests of two blocks each grow into a third: there are five.
    let mut scheduler = scheduler(100, 4, 5);
    scheduler.submit(request(1, 10, 14));
    scheduler.submit(request(2, 12, 12));
    scheduler.submit(request(3, 1, 1));
    let mut plans = Vec::new();
    while !scheduler.is_idle() {
        plans.push(shape(&step(&mut scheduler, 3).0));
    }
    // Request 2 reaches the last free block first, then 1 takes it away; nothing overtakes 2 meanwhile.
    assert_eq!(scheduler.stats().preemptions, 1);
    let without_2: Vec<_> = plans
        .iter()
        .filter(|plan| plan.iter().all(|run| run.0 == 1))
        .collect();
    assert!(!without_2.is_empty());
    let last_of_1 = plans
        .iter()
        .rposition(|plan| plan.iter().any(|run| run.0 == 1))
        .expect("1 ran");
    assert_eq!(
        (plans[last_of_1 + 1][0].0, plans[last_of_1 + 1][1].0),
        (2, 3),
        "{plans:?}"
    );
    assert_eq!(scheduler.stats().finished_length, 3);
}

#[test]
fn what_a_preempted_request_gave_up_is_for_others_once_it_is_cancelled() {
    let mut scheduler = scheduler(100, 2, 6);
    scheduler.submit(request(1, 10, 38));
    scheduler.submit(request(2, 22, 26));
    scheduler.submit(request(3, 1, 1));
    while scheduler.stats().preemptions == 0 {
        step(&mut scheduler, 3);
    }
    assert_eq!(shape(&step(&mut scheduler, 3).0).len(), 1, "2 waits for 1 to end");
    scheduler.cancel(RequestId(2));
    let plan = shape(&step(&mut scheduler, 3).0);
    assert_eq!((plan[0].0, plan[1].0), (1, 3));
}

#[test]
fn a_step_in_flight_does_not_hold_up_the_next() {
    let mut scheduler = scheduler(100, 4, 20);
    scheduler.submit(request(1, 4, 4));
    let mut before = scheduler.plan();
    for start in [4, 5, 6] {
        let plan = scheduler.plan();
        assert_eq!(shape(&plan), [(1, start, 1, true)]);
        assert_eq!(plan.runs[0].input, RunInput::LastSampled);
        scheduler.apply(&before, output(&before, 3));
        before = plan;
    }
    assert!(
        scheduler.plan().is_empty(),
        "the fourth token, in flight, is the last"
    );
    scheduler.apply(&before, output(&before, 3));
    assert!(scheduler.is_idle());
}

#[test]
fn a_sampler_that_needs_history_waits_for_it() {
    let mut scheduler = scheduler(100, 4, 20);
    let sampling = SamplingOptions {
        presence_penalty: Some(1.0),
        ..Default::default()
    };
    scheduler.submit(with_sampling(1, 4, 4, sampling));
    let first = scheduler.plan();
    assert!(scheduler.plan().is_empty());
    scheduler.apply(&first, output(&first, 7));
    let plan = scheduler.plan();
    let spec = plan.runs[0].sample.as_ref().expect("one token is asked for");
    assert_eq!(
        (spec.history.as_slice(), spec.prompt_len),
        (&[1, 1, 2, 3, 7][..], 4)
    );
}

#[test]
fn a_stop_discards_the_step_behind_it_and_keeps_its_blocks_till_then() {
    let mut scheduler = scheduler(100, 4, 20);
    scheduler.submit(request(1, 4, 9));
    let (first, second) = (scheduler.plan(), scheduler.plan());
    assert_eq!(
        (
            scheduler.admitted(&first).len(),
            scheduler.admitted(&second).len()
        ),
        (1, 0)
    );
    assert_eq!(scheduler.apply(&first, output(&first, STOP)).len(), 1);
    assert_eq!((scheduler.stats().leaving, scheduler.stats().pages_used), (1, 1));
    assert!(!scheduler.cancel(RequestId(1)), "it has ended by itself");
    assert!(scheduler.apply(&second, output(&second, 5)).is_empty());
    assert!(scheduler.is_idle());
    assert_eq!(
        (scheduler.stats().discarded_tokens, scheduler.stats().pages_used),
        (1, 0)
    );
}

#[test]
fn cancel_works_at_any_moment() {
    let mut scheduler = scheduler(4, 1, 20);
    for id in 1..=3 {
        scheduler.submit(request(id, 6, 9));
    }
    assert!(!scheduler.cancel(RequestId(9)));
    assert!(scheduler.cancel(RequestId(2)), "waiting");
    let plan = scheduler.plan();
    assert!(scheduler.cancel(RequestId(1)), "in flight");
    assert!(!scheduler.cancel(RequestId(1)));
    assert!(scheduler.apply(&plan, output(&plan, 5)).is_empty());
    step(&mut scheduler, 5);
    assert!(scheduler.cancel(RequestId(3)), "running");
    assert!(scheduler.is_idle());
    assert_eq!(
        (scheduler.stats().cancelled, scheduler.stats().pages_used),
        (3, 0)
    );
}

#[test]
fn a_failed_step_ends_its_requests_and_no_others() {
    let mut scheduler = scheduler(6, 4, 20);
    scheduler.submit(request(1, 6, 9));
    scheduler.submit(request(2, 6, 9));
    let plan = scheduler.plan();
    let error = StepError::Failed("it broke".into());
    let events = scheduler.fail(&plan, &error);
    assert!(matches!(&events[..], [(RequestId(1), Event::Failed(e))] if *e == error));
    assert_eq!(
        (
            scheduler.stats().failed,
            scheduler.stats().pages_used,
            scheduler.stats().blocks_cached()
        ),
        (1, 0, 0)
    );
    assert_eq!(shape(&step(&mut scheduler, 0).0), [(2, 0, 6, true)]);
}

#[test]
fn an_output_that_does_not_answer_the_plan_is_a_failure() {
    let mut scheduler = scheduler(100, 4, 20);
    for (id, samples) in [(1, vec![]), (2, vec![None])] {
        scheduler.submit(request(id, 6, 9));
        let plan = scheduler.plan();
        let output = StepOutput {
            samples,
            ..Default::default()
        };
        let events = scheduler.apply(&plan, output);
        assert!(
            matches!(&events[..], [(_, Event::Failed(StepError::Failed(_)))]),
            "{events:?}"
        );
    }
    assert!(scheduler.is_idle());
}

#[test]
#[should_panic(expected = "made with other limits")]
fn a_request_that_can_never_fit_is_a_mistake_of_the_caller() {
    scheduler(100, 4, 2).submit(request(1, 10, 10));
}

/// A lost KV cache costs the requests in it time, not their text.
#[test]
fn a_lost_cache_sends_everybody_back_with_their_tokens() {
    let mut scheduler = scheduler(100, 2, 20);
    for (id, prompt, max_tokens) in [(1, 8, 20), (2, 8, 60), (3, 4, 4)] {
        scheduler.submit(request(id, prompt, max_tokens));
    }
    for token in [5, 6] {
        step(&mut scheduler, token);
    }
    let kv = |num_blocks| KvConfig {
        block_size: BlockSize::new(8).expect("8 is legal"),
        num_pages: num_blocks,
        groups: CacheGroups::default(),
        state_slots: 0,
    };
    // 68 tokens no longer fit, 28 do.
    let events = scheduler.reset(kv(5));
    let needed = StepError::KvTooSmall {
        needed: 68,
        capacity: 40,
    };
    assert!(matches!(&events[..], [(RequestId(2), Event::Failed(error))] if *error == needed));
    assert!(scheduler.fits(&request(9, 20, 20)) && !scheduler.fits(&request(9, 20, 21)));
    let stats = scheduler.stats();
    assert_eq!((stats.waiting, stats.running, stats.restarts), (2, 0, 2));
    assert_eq!((stats.pages_total, stats.pages_used, stats.failed), (5, 0, 1));
    // The first computes its prompt and what it has said, and goes on with its third token.
    let (plan, _) = step(&mut scheduler, 7);
    assert_eq!(shape(&plan), [(1, 0, 10, true), (3, 0, 4, true)]);
    assert_eq!(plan.runs[0].sample.as_ref().map(|spec| spec.index), Some(2));
    assert_eq!(
        plan.runs[0].input,
        RunInput::Known(vec![1, 1, 2, 3, 4, 5, 6, 7, 5, 6])
    );
}

#[test]
#[should_panic(expected = "in flight")]
fn a_cache_is_not_replaced_under_a_step() {
    let mut scheduler = scheduler(100, 4, 20);
    scheduler.submit(request(1, 4, 9));
    let _plan = scheduler.plan();
    let kv = KvConfig {
        block_size: BlockSize::default(),
        num_pages: 20,
        groups: CacheGroups::default(),
        state_slots: 0,
    };
    scheduler.reset(kv);
}

#[test]
fn prompt_tokens_are_scored_once_in_chunks_whatever_is_cached() {
    let mut scheduler = scheduler(12, 4, 20);
    // Leaves all of the prompt in the cache.
    scheduler.submit(request(1, 20, 1));
    while !scheduler.is_idle() {
        step(&mut scheduler, STOP);
    }
    scheduler.submit(scored(1, 20, 2));
    let (plan, events) = step(&mut scheduler, 5);
    assert_eq!(shape(&plan), [(1, 0, 12, false)]);
    assert_eq!(scores(&plan), Some((0, (1..=12).collect())));
    assert!(matches!(&events[0], (_, Event::Admitted { cached_tokens: 0 })));
    assert!(matches!(&events[1], (_, Event::Prompt(e)) if e.logprobs.len() == 12 && e.finish.is_none()));
    // The last position of the prompt is sampled from: nothing of the prompt follows it.
    let (plan, events) = step(&mut scheduler, 5);
    assert_eq!(shape(&plan), [(1, 12, 8, true)]);
    assert_eq!(scores(&plan), Some((0, (13..=19).collect())));
    assert!(matches!(
        &events[..],
        [(_, Event::Prompt(_)), (_, Event::Token(_))]
    ));
    let (plan, _) = step(&mut scheduler, STOP);
    assert_eq!((shape(&plan), scores(&plan)), (vec![(1, 20, 1, true)], None));
}

#[test]
fn a_request_for_no_output_ends_with_its_prompt() {
    let mut scheduler = scheduler(12, 4, 20);
    scheduler.submit(scored(1, 14, 0));
    let (_, events) = step(&mut scheduler, 0);
    assert!(matches!(&events[1], (_, Event::Prompt(e)) if e.logprobs.len() == 12 && e.finish.is_none()));
    let (plan, events) = step(&mut scheduler, 0);
    assert_eq!(shape(&plan), [(1, 12, 2, false)]);
    assert_eq!(scores(&plan), Some((0, vec![13])));
    assert!(matches!(
        &events[..],
        [(_, Event::Prompt(e))] if e.logprobs.len() == 1 && e.finish == Some(FinishReason::Length)
    ));
    assert!(scheduler.is_idle());
    // Nothing to say about the first token, and nothing to generate.
    scheduler.submit(scored(2, 1, 0));
    let (plan, events) = step(&mut scheduler, 0);
    assert_eq!((shape(&plan), scores(&plan)), (vec![(2, 0, 1, false)], None));
    assert!(matches!(
        &events[1..],
        [(_, Event::Prompt(e))] if e.logprobs.is_empty() && e.finish.is_some()
    ));
    assert!(scheduler.is_idle());
}

#[test]
fn what_was_scored_is_not_scored_again_after_a_loss() {
    let mut scheduler = scheduler(12, 4, 20);
    scheduler.submit(scored(1, 30, 2));
    step(&mut scheduler, 0);
    scheduler.reset(KvConfig {
        block_size: BlockSize::new(8).expect("8 is legal"),
        num_pages: 20,
        groups: CacheGroups::default(),
        state_slots: 0,
    });
    let (plan, events) = step(&mut scheduler, 0);
    assert_eq!((shape(&plan), scores(&plan)), (vec![(1, 0, 12, false)], None));
    assert!(matches!(&events[..], [(_, Event::Admitted { .. })]));
    let (plan, _) = step(&mut scheduler, 0);
    assert_eq!(scores(&plan), Some((0, (13..=24).collect())));
}

#[test]
fn other_scores_than_were_asked_for_fail_the_step() {
    let mut scheduler = scheduler(100, 4, 20);
    scheduler.submit(scored(1, 9, 2));
    let plan = scheduler.plan();
    let mut wrong = output(&plan, 0);
    wrong.scores[0].pop();
    let events = scheduler.apply(&plan, wrong);
    assert!(
        matches!(&events[..], [(_, Event::Failed(StepError::Failed(_)))]),
        "{events:?}"
    );
}

/// A request of one token of prompt and one of output.
fn of(id: u64, tenant: u64, priority: i64) -> Request {
    let options = RequestOptions {
        prompt: vec![1],
        max_tokens: Some(1),
        priority,
        tenant: TenantId(tenant),
        ..Default::default()
    };
    Request::new(RequestId(id), options, &LIMITS).expect("the request is legal")
}

/// Who runs in each of the next steps, of which each has room for one.
fn turns(scheduler: &mut Scheduler, count: usize) -> Vec<u64> {
    (0..count)
        .map(|_| step(scheduler, 0).0.runs[0].request.0)
        .collect()
}

#[test]
fn tenants_take_turns_however_much_each_wants() {
    let mut scheduler = scheduler(10, 1, 20);
    (0..500).for_each(|id| scheduler.submit(of(id, 1, 0)));
    assert_eq!(turns(&mut scheduler, 3), [0, 1, 2]);
    (500..503).for_each(|id| scheduler.submit(of(id, 2, 0)));
    scheduler.submit(of(503, 3, 0));
    // Those that come new do not catch up on what was before them.
    assert_eq!(turns(&mut scheduler, 8), [500, 503, 3, 501, 4, 502, 5, 6]);
    // Nor does one gain a turn by asking only when it is served.
    scheduler.submit(of(504, 2, 0));
    assert_eq!(turns(&mut scheduler, 1), [504]);
    scheduler.submit(of(505, 2, 0));
    assert_eq!(turns(&mut scheduler, 2), [7, 505]);
}

#[test]
fn a_lower_priority_is_served_earlier_but_not_for_ever() {
    let mut scheduler = scheduler(10, 1, 20);
    scheduler.submit(of(1, 0, 5));
    scheduler.submit(of(2, 0, 0));
    scheduler.submit(of(3, 0, -7));
    scheduler.submit(of(4, 0, 0));
    assert_eq!(turns(&mut scheduler, 4), [3, 2, 4, 1]);
    scheduler.submit(of(5, 0, 1));
    let mut waited = 0;
    loop {
        scheduler.submit(of(10 + waited, 0, 0));
        match turns(&mut scheduler, 1)[0] {
            5 => break,
            _ => waited += 1,
        }
    }
    assert_eq!(waited, PATIENCE);
}

#[test]
fn the_lowest_priority_gives_up_its_blocks_first() {
    let mut scheduler = scheduler(100, 4, 4);
    let long = |id: u64, prompt: usize, max_tokens: usize, priority: i64| {
        let limits = Limits {
            max_model_len: 1000,
            kv_capacity_tokens: 32,
            vocab_size: 100,
            images: None,
        };
        let options = RequestOptions {
            prompt: vec![id as TokenId; prompt],
            max_tokens: Some(max_tokens),
            priority,
            ..Default::default()
        };
        Request::new(RequestId(id), options, &limits).expect("the request is legal")
    };
    scheduler.submit(long(1, 14, 18, 5));
    step(&mut scheduler, 0);
    scheduler.submit(long(2, 7, 20, 0));
    let preempted = loop {
        let (plan, _) = step(&mut scheduler, 0);
        if scheduler.stats().preemptions > 0 {
            break plan;
        }
    };
    assert_eq!(shape(&preempted).iter().map(|run| run.0).collect::<Vec<_>>(), [2]);
    while !scheduler.is_idle() {
        step(&mut scheduler, 0);
    }
    assert!(scheduler.stats().admissions > 2);
    assert_eq!(scheduler.stats().prefix_queried_tokens, 14 + 7, "once for each");
}
