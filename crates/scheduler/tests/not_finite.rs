//! A request whose output is NaN or infinite fails alone, and leaves nothing in the prefix cache that would make another fail.

mod common;

use plimsoll_core::{
    Event, Pooling, Request, RequestId, RequestOptions, RunInput, StepError, StepOutput, StepPlan, TokenId,
};
use plimsoll_scheduler::Scheduler;

use common::{LIMITS, STOP, output, request, scheduler, step};

/// The answer to a plan of which these runs are not finite.
fn answer_without(plan: &StepPlan, not_finite: &[usize]) -> StepOutput {
    let mut output = output(plan, 5);
    let scored = plan
        .runs
        .iter()
        .enumerate()
        .filter(|(_, run)| run.score.is_some());
    for (scores, (index, _)) in output.scores.iter_mut().zip(scored) {
        if not_finite.contains(&index) {
            scores.clear();
        }
    }
    for &index in not_finite {
        output.samples[index] = None;
    }
    output.pooled = plan.runs.iter().map(|run| run.pool.map(|_| vec![1.0])).collect();
    not_finite.iter().for_each(|&index| output.pooled[index] = None);
    output.not_finite = not_finite.to_vec();
    output
}

fn apply(scheduler: &mut Scheduler, plan: &StepPlan, output: StepOutput) -> Vec<(RequestId, Event)> {
    let events = scheduler.apply(plan, output);
    scheduler.check_invariants().expect("the bookkeeping is sound");
    events
}

fn fails(event: &(RequestId, Event), id: u64) -> bool {
    matches!(event, (request, Event::Failed(error))
        if *request == RequestId(id) && *error == StepError::NotFinite(RequestId(id)))
}

fn is_token(event: &(RequestId, Event), id: u64) -> bool {
    matches!(event, (RequestId(request), Event::Token(_)) if *request == id)
}

/// A request with these options, and a prompt that begins with its id.
fn with(id: u64, prompt: usize, options: RequestOptions) -> Request {
    let prompt = request(id, prompt, 1).prompt().to_vec();
    Request::new(RequestId(id), RequestOptions { prompt, ..options }, &LIMITS).expect("it is legal")
}

/// A request with this prompt.
fn asking(id: u64, prompt: Vec<TokenId>) -> Request {
    let options = RequestOptions {
        prompt,
        max_tokens: Some(9),
        stop_token_ids: vec![STOP],
        ..Default::default()
    };
    Request::new(RequestId(id), options, &LIMITS).expect("it is legal")
}

/// Where the only run of the next step begins, which is finite.
fn start(scheduler: &mut Scheduler) -> usize {
    let (plan, _) = step(scheduler, 5);
    assert_eq!(plan.runs.len(), 1);
    plan.runs[0].start
}

#[test]
fn it_fails_its_own_request() {
    let mut scheduler = scheduler(100, 4, 20);
    (1..=3).for_each(|id| scheduler.submit(request(id, 10, 3)));
    let plan = scheduler.plan();
    let events = apply(&mut scheduler, &plan, answer_without(&plan, &[1]));
    assert!(is_token(&events[0], 1) && fails(&events[1], 2) && is_token(&events[2], 3));
    let stats = scheduler.stats();
    assert_eq!((stats.failed, stats.running, stats.leaving), (1, 2, 0));
    // Two blocks of each of the others, and no block of this one is cached.
    assert_eq!((stats.pages_used, stats.blocks_cached()), (4, 2));
    for _ in 0..2 {
        assert_eq!(step(&mut scheduler, 5).0.runs.len(), 2);
    }
    assert!(scheduler.is_idle());
    assert_eq!(scheduler.stats().finished_length, 2);
}

/// The step behind was launched with whatever it sampled, and its blocks are still written.
#[test]
fn the_step_ahead_is_over_before_its_blocks_are_free() {
    for is_finite in [false, true] {
        let mut scheduler = scheduler(100, 4, 20);
        (1..=2).for_each(|id| scheduler.submit(request(id, 10, 9)));
        let first = scheduler.plan();
        let second = scheduler.plan();
        assert!(second.runs.iter().all(|run| run.input == RunInput::LastSampled));
        let events = apply(&mut scheduler, &first, answer_without(&first, &[0]));
        assert!(fails(&events[0], 1) && is_token(&events[1], 2) && events.len() == 2);
        let stats = scheduler.stats();
        assert_eq!((stats.leaving, stats.pages_used), (1, 4));
        let behind = if is_finite {
            answer_without(&second, &[])
        } else {
            answer_without(&second, &[0])
        };
        let events = apply(&mut scheduler, &second, behind);
        assert!(is_token(&events[0], 2) && events.len() == 1);
        let stats = scheduler.stats();
        assert_eq!((stats.leaving, stats.pages_used, stats.failed), (0, 2, 1));
        assert_eq!((stats.discarded_tokens, stats.blocks_cached()), (1, 1));
    }
}

/// Nobody looks at the rows of a chunk, so its blocks are cached by the time at which the prompt is found not to be finite.
#[test]
fn chunks_that_it_computed_before_are_forgotten() {
    let mut scheduler = scheduler(10, 1, 20);
    scheduler.submit(request(1, 18, 9));
    step(&mut scheduler, 5);
    assert_eq!(scheduler.stats().blocks_cached(), 1);
    let plan = scheduler.plan();
    assert!(fails(
        &apply(&mut scheduler, &plan, answer_without(&plan, &[0]))[0],
        1
    ));
    assert_eq!(scheduler.stats().blocks_cached(), 0);
    scheduler.submit(asking(2, request(1, 18, 9).prompt().to_vec()));
    assert_eq!(start(&mut scheduler), 0);
}

/// Whoever computed them: the request was cancelled before anybody looked.
#[test]
fn blocks_of_others_that_no_row_has_confirmed_are_forgotten() {
    let mut scheduler = scheduler(10, 1, 20);
    let prompt = request(1, 18, 9).prompt().to_vec();
    scheduler.submit(asking(1, prompt.clone()));
    step(&mut scheduler, 5);
    assert!(scheduler.cancel(RequestId(1)));
    scheduler.submit(asking(2, prompt.clone()));
    let plan = scheduler.plan();
    assert_eq!((plan.runs[0].start, plan.runs[0].input.len()), (8, 10));
    assert!(fails(
        &apply(&mut scheduler, &plan, answer_without(&plan, &[0]))[0],
        2
    ));
    assert_eq!(scheduler.stats().blocks_cached(), 0);
    scheduler.submit(asking(3, prompt));
    assert_eq!(start(&mut scheduler), 0);
}

/// What many requests begin with stays, as a finite row has seen it; and so does what others put behind it.
#[test]
fn a_prefix_that_was_finite_stays() {
    let mut scheduler = scheduler(100, 4, 40);
    let system = request(1, 16, 9).prompt().to_vec();
    let prompt = |own: TokenId| [system.clone(), vec![own; 20]].concat();
    scheduler.submit(asking(1, prompt(31)));
    step(&mut scheduler, STOP);
    assert!(scheduler.is_idle());
    let cached = scheduler.stats().blocks_cached();
    assert_eq!(cached, 4);
    scheduler.submit(asking(2, prompt(32)));
    let plan = scheduler.plan();
    assert_eq!(plan.runs[0].start, 16);
    assert!(fails(
        &apply(&mut scheduler, &plan, answer_without(&plan, &[0]))[0],
        2
    ));
    assert_eq!(scheduler.stats().blocks_cached(), cached);
    for (id, own, found) in [(3, 32, 16), (4, 31, 32)] {
        scheduler.submit(asking(id, prompt(own)));
        assert_eq!(start(&mut scheduler), found);
        scheduler.cancel(RequestId(id));
    }
}

/// Those who came while nobody knew fail by themselves or not at all; what they compute is not cached.
#[test]
fn who_shares_its_blocks_goes_on_without_the_cache() {
    let mut scheduler = scheduler(12, 2, 40);
    let prompt = request(1, 34, 9).prompt().to_vec();
    scheduler.submit(asking(1, prompt.clone()));
    step(&mut scheduler, 5);
    scheduler.submit(asking(2, prompt[..18].to_vec()));
    step(&mut scheduler, 5);
    // The first has its prompt's end in this step, and the second what follows the blocks that it found.
    let plan = scheduler.plan();
    let shape: Vec<_> = plan.runs.iter().map(|run| (run.request.0, run.start)).collect();
    assert_eq!(shape, [(1, 24), (2, 16)]);
    let events = apply(&mut scheduler, &plan, answer_without(&plan, &[0]));
    assert!(fails(&events[0], 1) && is_token(&events[1], 2));
    assert_eq!(scheduler.stats().blocks_cached(), 0);
    for _ in 0..12 {
        step(&mut scheduler, 5);
    }
    assert!(scheduler.is_idle());
    assert_eq!(
        (
            scheduler.stats().finished_length,
            scheduler.stats().blocks_cached()
        ),
        (1, 0)
    );
}

#[test]
fn prompts_that_are_scored_or_pooled_fail_alone_too() {
    let mut scheduler = scheduler(100, 8, 40);
    let scored = |max_tokens| RequestOptions {
        max_tokens: Some(max_tokens),
        prompt_logprobs: Some(2),
        ..Default::default()
    };
    let pooled = || RequestOptions {
        pooling: Some(Pooling::Mean),
        ..Default::default()
    };
    for (id, options) in (1..).zip([scored(0), scored(0), scored(4), scored(4), pooled(), pooled()]) {
        scheduler.submit(with(id, 9, options));
    }
    let plan = scheduler.plan();
    let events = apply(&mut scheduler, &plan, answer_without(&plan, &[0, 2, 4]));
    let failed: Vec<_> = events
        .iter()
        .filter(|(_, event)| matches!(event, Event::Failed(_)))
        .collect();
    assert!(failed.iter().zip([1, 3, 5]).all(|(event, id)| fails(event, id)) && failed.len() == 3);
    let heard: Vec<_> = events.iter().map(|(id, _)| id.0).collect();
    assert_eq!(
        heard,
        [1, 2, 3, 4, 4, 5, 6],
        "only the last event of one that fails"
    );
    assert!(matches!(&events[1].1, Event::Prompt(prompt) if prompt.logprobs.len() == 8));
    assert!(matches!(&events[6].1, Event::Pooled(_)));
    assert_eq!(scheduler.stats().running, 1);
}

/// An executor that answers and says at once that it cannot, or names a run that there is not, is broken.
#[test]
fn contradictions_fail_the_step() {
    for wrong in [
        |output: &mut StepOutput| output.not_finite = vec![2],
        |output: &mut StepOutput| output.not_finite = vec![0],
        |output: &mut StepOutput| output.samples[0] = None,
        |output: &mut StepOutput| {
            output.samples = vec![None, None];
            output.not_finite = vec![1, 0];
        },
    ] {
        let mut scheduler = scheduler(100, 4, 20);
        (1..=2).for_each(|id| scheduler.submit(request(id, 6, 9)));
        let plan = scheduler.plan();
        let mut output = output(&plan, 5);
        wrong(&mut output);
        let events = apply(&mut scheduler, &plan, output);
        let failed = |event: &(_, _)| matches!(event, (_, Event::Failed(StepError::Failed(_))));
        assert!(events.len() == 2 && events.iter().all(failed), "{events:?}");
    }
}
