//! Prompts with images whose tokens see each other: no step ends among them.

use std::sync::Arc;

use plimsoll_core::{
    BlockSize, CacheGroups, EncoderLimits, Image, ImageGrid, ImageInput, ImageSpan, KvConfig, Limits,
    Request, RequestId, RequestOptions, Sampled, StepLimits, StepOutput, TokenId,
};
use plimsoll_scheduler::{Scheduler, SchedulerConfig};

const PLACEHOLDER: TokenId = 7;
/// Tokens of an image.
const ROWS: usize = 12;

fn scheduler(max_num_batched_tokens: usize) -> Scheduler {
    Scheduler::new(SchedulerConfig {
        limits: StepLimits {
            max_num_batched_tokens,
            max_num_seqs: 4,
            max_model_len: 1000,
        },
        kv: KvConfig {
            block_size: BlockSize::new(8).unwrap(),
            num_pages: 100,
            groups: CacheGroups::default(),
            state_slots: 0,
        },
        enable_prefix_caching: true,
        patience: 20,
    })
}

/// A prompt of `len` tokens with an image at each of `starts`, all the same, and `last` as its last token.
fn request(id: u64, len: usize, starts: &[usize], mutual: bool, last: TokenId) -> Request {
    let image = Arc::new(Image {
        hash: [1; 32],
        grid: ImageGrid {
            frames: 1,
            height: 1,
            width: ROWS,
        },
        patches: vec![0.0; ROWS],
    });
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
        max_tokens: Some(100),
        ..Default::default()
    };
    let limits = Limits {
        max_model_len: 1000,
        kv_capacity_tokens: 800,
        vocab_size: 100,
        images: Some(ImageInput {
            placeholder: PLACEHOLDER,
            patch_values: 1,
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
    let run = plan.runs.iter().find(|run| run.request == RequestId(id));
    let range = run.map(|run| (run.start, run.end()));
    scheduler.apply(&plan, output);
    range
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
