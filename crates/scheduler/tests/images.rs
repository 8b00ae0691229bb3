//! Prompts with images: those whose tokens see each other, among which no step ends, and those that are encoded while others generate.

use std::sync::Arc;

use plimsoll_core::{
    BlockSize, CacheGroups, EncodeCost, EncoderLimits, Image, ImageGrid, ImageInput, ImageSpan, KvConfig,
    Limits, PatchShape, Request, RequestId, RequestOptions, Sampled, StepCost, StepCosts, StepError,
    StepLimits, StepOutput, StepPlan, TokenId,
};
use plimsoll_scheduler::{PromptBudget, Scheduler, SchedulerConfig};

const PLACEHOLDER: TokenId = 7;
/// Tokens of an image.
const ROWS: usize = 12;
const PATCH: PatchShape = PatchShape { pixels: 1, frames: 1 };

fn scheduler(max_num_batched_tokens: usize) -> Scheduler {
    scheduler_of(max_num_batched_tokens, 100)
}

/// One with so many blocks of eight tokens.
fn scheduler_of(max_num_batched_tokens: usize, num_pages: usize) -> Scheduler {
    Scheduler::new(SchedulerConfig {
        limits: StepLimits {
            max_num_batched_tokens,
            max_num_seqs: 4,
            max_model_len: 1000,
        },
        kv: KvConfig {
            block_size: BlockSize::new(8).unwrap(),
            num_pages,
            groups: CacheGroups::default(),
            state_slots: 0,
        },
        state_chunk: 1,
        enable_prefix_caching: true,
        patience: 20,
    })
}

/// A prompt of `len` tokens with an image at each of `starts`, all the same, and `last` as its last token.
fn request(id: u64, len: usize, starts: &[usize], mutual: bool, last: TokenId) -> Request {
    request_for(100, 0, id, len, starts, mutual, last)
}

/// The same for so many tokens, of this priority.
fn request_for(
    max_tokens: usize,
    priority: i64,
    id: u64,
    len: usize,
    starts: &[usize],
    mutual: bool,
    last: TokenId,
) -> Request {
    let grid = ImageGrid {
        frames: 1,
        height: 1,
        width: ROWS,
    };
    let image = Arc::new(Image::blank([1; 32], grid, PATCH));
    let mut prompt: Vec<TokenId> = (0..len).map(|i| 10 + i as TokenId % 50).collect();
    for &start in starts {
        prompt[start..start + ROWS].fill(PLACEHOLDER);
    }
    prompt[len - 1] = last;
    let span = |&start| ImageSpan {
        start,
        len: ROWS,
        first: 0,
        image: Arc::clone(&image),
    };
    let options = RequestOptions {
        prompt,
        images: starts.iter().map(span).collect(),
        max_tokens: Some(max_tokens),
        priority,
        ..Default::default()
    };
    let limits = Limits {
        max_model_len: 1000,
        kv_capacity_tokens: 800,
        vocab_size: 100,
        images: Some(ImageInput {
            placeholder: PLACEHOLDER,
            patch: PATCH,
            merge: 1,
            only: None,
            mutual,
            limits: EncoderLimits {
                max_patches: ROWS,
                max_images_per_prompt: 9,
            },
        }),
    };
    Request::new(RequestId(id), options, &limits).unwrap()
}

/// Runs the next step: where the run of `id` starts and ends.
fn step(scheduler: &mut Scheduler, id: u64) -> Option<(usize, usize)> {
    let plan = next(scheduler);
    let run = plan.runs.iter().find(|run| run.request == RequestId(id));
    run.map(|run| (run.start, run.end()))
}

/// Runs the next step.
fn next(scheduler: &mut Scheduler) -> StepPlan {
    let plan = scheduler.plan();
    let token = |sampled: bool| {
        sampled.then_some(Sampled {
            token: 1,
            logprobs: None,
        })
    };
    let output = StepOutput {
        samples: plan.runs.iter().map(|run| token(run.sample.is_some())).collect(),
        ..Default::default()
    };
    scheduler.apply(&plan, output);
    plan
}

/// One in which a step takes 1 ms, and an image 2 ms.
fn patient_scheduler(max_num_batched_tokens: usize) -> Scheduler {
    let mut scheduler = scheduler(max_num_batched_tokens);
    scheduler.limit_prompts(Some(images_take(2e-3, max_num_batched_tokens)));
    scheduler
}

fn images_take(seconds: f64, max_num_batched_tokens: usize) -> PromptBudget {
    let steps = [1, max_num_batched_tokens].map(|rows| StepCost { rows, seconds: 1e-3 });
    let costs = StepCosts::new(steps.to_vec(), steps.to_vec(), 0.0).unwrap();
    let costs = costs.with_encode(Some(EncodeCost {
        patch_seconds: seconds / ROWS as f64,
        pair_seconds: 0.0,
    }));
    PromptBudget::new(costs, max_num_batched_tokens, None)
}

/// How much of an image a step encodes, if it computes no part of `id`; `None` if it does.
fn encoded(plan: &StepPlan, id: u64) -> Option<f64> {
    let waits = plan.runs.iter().all(|run| run.request != RequestId(id));
    waits.then(|| plan.encode.as_ref().map_or(0.0, |encode| encode.share))
}

/// Until the prompt is computed: the ends of its runs.
fn ends(scheduler: &mut Scheduler, id: u64, len: usize) -> Vec<usize> {
    let mut ends = Vec::new();
    while ends.last().is_none_or(|&end| end < len) {
        ends.extend(step(scheduler, id).map(|(_, end)| end));
    }
    ends
}

#[test]
fn steps_end_where_images_do() {
    let mut scheduler = scheduler(16);
    scheduler.submit(request(1, 60, &[5, 20, 40], false, 9));
    assert_eq!(ends(&mut scheduler, 1, 60), [16, 32, 48, 60]);
    scheduler.cancel(RequestId(1));
    scheduler.forget_cached();
    scheduler.submit(request(2, 60, &[5, 20, 40], true, 9));
    // Before what does not fit, and behind what fits.
    assert_eq!(ends(&mut scheduler, 2, 60), [5, 20, 36, 52, 60]);
}

#[test]
fn a_prompt_goes_on_within_an_image_whose_beginning_is_cached() {
    let mut scheduler = scheduler(100);
    scheduler.submit(request(1, 30, &[2], true, 9));
    assert_eq!(step(&mut scheduler, 1), Some((0, 30)));
    // The first block ends within the image, and the second is another.
    scheduler.submit(request(2, 15, &[2], true, 99));
    assert_eq!(step(&mut scheduler, 2), Some((8, 15)));
}

#[test]
fn an_image_is_encoded_in_parts_while_others_generate() {
    let mut scheduler = patient_scheduler(64);
    scheduler.submit(request(1, 20, &[], false, 9));
    assert_eq!(step(&mut scheduler, 1), Some((0, 20)));
    // It begins with its image.
    scheduler.submit(request(2, 30, &[0], false, 9));
    let mut shares = Vec::new();
    while let Some(share) = {
        let plan = next(&mut scheduler);
        assert!(
            plan.runs.iter().any(|run| run.request == RequestId(1)),
            "a reader waits"
        );
        encoded(&plan, 2)
    } {
        shares.push(share);
    }
    // A fifth of a millisecond of two, step after step; the last part in the step that has its rows.
    assert_eq!(shares.len(), 9, "{shares:?}");
    for (step, share) in shares.iter().enumerate() {
        assert!((share - 0.1 * (step + 1) as f64).abs() < 1e-9, "{shares:?}");
    }
    // Rows of the same image are there, and what the prefix cache has needs none.
    scheduler.submit(request(3, 30, &[1], false, 9));
    assert_eq!(step(&mut scheduler, 3), Some((0, 30)));
    scheduler.submit(request(4, 30, &[0], false, 11));
    assert_eq!(step(&mut scheduler, 4), Some((24, 30)));
    assert!(next(&mut scheduler).encode.is_none());
}

#[test]
fn nobody_who_reads_is_no_reason_to_wait() {
    let mut scheduler = patient_scheduler(64);
    scheduler.submit(request(1, 30, &[0], false, 9));
    let plan = next(&mut scheduler);
    assert_eq!((encoded(&plan, 1), plan.encode), (None, None));
}

/// Text before an image is computed meanwhile.
#[test]
fn a_prompt_goes_on_up_to_its_image() {
    let mut scheduler = patient_scheduler(64);
    scheduler.submit(request(1, 20, &[], false, 9));
    step(&mut scheduler, 1);
    // Of its beginning, the prefix cache has a block.
    scheduler.submit(request(2, 40, &[12], false, 9));
    let plan = next(&mut scheduler);
    let run = plan.runs.iter().find(|run| run.request == RequestId(2));
    assert_eq!(run.map(|run| (run.start, run.end())), Some((8, 12)));
    assert!(plan.encode.is_some_and(|encode| encode.share < 0.2));
    let mut steps = 1;
    while encoded(&next(&mut scheduler), 2).is_some() {
        steps += 1;
    }
    assert_eq!(steps, 9);
}

/// The only request that generates lacks a block, and is preempted for its own sake: nobody is left whom the image should spare.
#[test]
fn an_image_that_spares_nobody_any_more_is_encoded() {
    let mut scheduler = scheduler_of(80, 18);
    scheduler.limit_prompts(Some(images_take(1.0, 80)));
    // Less important than what comes later, and so the first to be preempted.
    scheduler.submit(request_for(100, 1, 2, 20, &[], false, 8));
    step(&mut scheduler, 2);
    scheduler.submit(request_for(4, 0, 1, 72, &[56], false, 9));
    let mut steps = 0;
    loop {
        let plan = next(&mut scheduler);
        assert!(!plan.is_empty(), "nothing is planned after {steps} steps");
        if plan.runs.iter().any(|run| run.image_rows().next().is_some()) {
            break;
        }
        steps += 1;
    }
    assert!(steps > 60, "{steps}: the blocks were to run out first");
    assert_eq!(scheduler.stats().preemptions, 1);
}

/// What a failed step was to encode is lost, and what steps before it have encoded.
#[test]
fn an_encode_begins_again_after_a_failed_step() {
    let mut scheduler = patient_scheduler(64);
    let mut first_shares = Vec::new();
    for (reader, viewer) in [(1, 2), (3, 4)] {
        scheduler.submit(request(reader, 20, &[], false, 9));
        step(&mut scheduler, reader);
        scheduler.submit(request(viewer, 30, &[0], false, 9));
        first_shares.push(encoded(&next(&mut scheduler), viewer).unwrap());
        let plan = scheduler.plan();
        scheduler.fail(&plan, &StepError::Failed("injected".to_owned()));
        scheduler.cancel(RequestId(viewer));
    }
    assert!(
        first_shares.iter().all(|share| (share - 0.1).abs() < 1e-9),
        "{first_shares:?}"
    );
}
