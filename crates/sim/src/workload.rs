use std::sync::Arc;
use std::time::Duration;

use plimsoll_core::{
    Bans, BlockSize, CacheGroups, CacheKind, CacheLayout, Constraint, EncodeCost, EncoderLimits, Image,
    ImageGrid, ImageInput, ImageSpan, KvConfig, Limits, PatchShape, Pooling, Request, RequestId,
    RequestOptions, SamplingOptions, StepCost, StepCosts, StepLimits, StepPlan, TenantId, TokenId,
};
use plimsoll_scheduler::{PromptBudget, SchedulerConfig};
use rand::{
    Rng, SeedableRng,
    rngs::StdRng,
    seq::{IndexedRandom, SliceRandom},
};

use crate::{
    constraint::SimConstraint,
    executor::{Fault, SimConfig, SimExecutor, StepTime},
    model::{SimModel, oracle},
};

/// Everything that happens to an engine in one simulated life, drawn from a seed.
#[derive(Clone, Debug)]
pub struct Workload {
    /// The engine.
    pub scheduler: SchedulerConfig,
    /// The model.
    pub model: SimModel,
    /// Requests in the order of arrival, each with the tick (turn of the engine's loop) at which it arrives.
    pub arrivals: Vec<(u64, Request)>,
    /// Cancellations, at any time: before the request, while it waits, runs or is in flight, and after its end.
    pub cancels: Vec<Cancel>,
    /// Steps that fail.
    pub faults: Vec<(u64, Fault)>,
    /// Losses of the KV cache, in the order of time.
    pub resets: Vec<Reset>,
    /// Ticks at which the prefix cache is emptied.
    pub forgets: Vec<u64>,
    /// Limits the prompts beside requests that generate.
    pub prompt_budget: Option<PromptBudget>,
}

/// The KV cache is lost and built again, perhaps at another size.
#[derive(Clone, Copy, Debug)]
pub struct Reset {
    /// At which turn of the engine's loop.
    pub tick: u64,
    /// Pages of the new one.
    pub num_pages: usize,
}

/// A client goes away.
#[derive(Clone, Copy, Debug)]
pub struct Cancel {
    /// At which turn of the engine's loop.
    pub tick: u64,
    /// Between launch and finish rather than before the plan.
    pub in_flight: bool,
    /// Who.
    pub request: RequestId,
}

impl Workload {
    /// A random small engine, so small that it often runs out of everything, and its clients.
    pub fn random(seed: u64) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let rng = &mut rng;
        let block_size = *[8, 16, 32].choose(rng).expect("there are sizes");
        let block_size = BlockSize::new(block_size).expect("these sizes are legal");
        let num_blocks = if rng.random_bool(0.7) {
            rng.random_range(2..=12)
        } else {
            rng.random_range(12..=80)
        };
        let groups = random_groups(rng);
        let num_pages = num_blocks * groups.pages_per_block();
        let mut limits = StepLimits {
            max_num_batched_tokens: *[1, 3, 8, 17, 64, 500].choose(rng).expect("there are limits"),
            max_num_seqs: rng.random_range(1..=10),
            max_model_len: rng.random_range(16..=256),
        };
        let (groups, state_slots, state_chunk) = with_states(seed, groups, limits.max_num_seqs);
        if state_chunk > 1 {
            let fewest = limits.max_num_seqs - 1 + state_chunk;
            limits.max_num_batched_tokens = limits.max_num_batched_tokens.max(fewest);
        }
        let kv = KvConfig {
            block_size,
            num_pages,
            groups,
            state_slots,
        };
        let scheduler = SchedulerConfig {
            limits,
            kv,
            state_chunk,
            enable_prefix_caching: rng.random_bool(0.75),
            patience: *[1, 4, 12, 1000].choose(rng).expect("there are patiences"),
        };
        // A tiny vocabulary makes prompts collide by chance.
        let model = SimModel::uniform(*[3, 8, 50].choose(rng).expect("there are sizes"));
        let arrivals = arrivals(rng, &scheduler, &model);
        let last = arrivals.last().map_or(0, |(tick, _)| tick + 60);
        let mut cancels = Vec::new();
        if rng.random_bool(0.5) {
            for _ in 0..rng.random_range(1..=arrivals.len()) {
                let request = arrivals.choose(rng).expect("there are requests").1.id();
                let tick = rng.random_range(0..=last);
                cancels.push(Cancel {
                    tick,
                    in_flight: rng.random(),
                    request,
                });
            }
        }
        let mut faults = Vec::new();
        if rng.random_bool(0.2) {
            for _ in 0..rng.random_range(1..=3) {
                let fault = [Fault::Launch, Fault::Sample, Fault::Finish].choose(rng);
                faults.push((rng.random_range(0..=last), *fault.expect("there are faults")));
            }
        }
        faults.extend(overflows(seed, last));
        let mut resets = Vec::new();
        if rng.random_bool(0.2) {
            for _ in 0..rng.random_range(1..=3) {
                let num_pages = if rng.random() {
                    num_pages
                } else {
                    rng.random_range(1..=num_pages + 4)
                };
                let tick = rng.random_range(0..=last);
                resets.push(Reset { tick, num_pages });
            }
            resets.sort_by_key(|reset| reset.tick);
        }
        Self {
            scheduler,
            model,
            arrivals,
            cancels,
            faults,
            resets,
            forgets: forgets(seed, last),
            prompt_budget: prompt_budget(seed, limits.max_num_batched_tokens),
        }
    }

    /// An empty device with its faults.
    pub(crate) fn executor(&self, kv: KvConfig) -> SimExecutor {
        let mut executor = SimExecutor::new(SimConfig {
            kv,
            limits: self.scheduler.limits,
            model: self.model,
            step_time: StepTime::default(),
        });
        for &(step, fault) in &self.faults {
            executor.inject(step, fault);
        }
        let costs = self.prompt_budget.as_ref().map(PromptBudget::costs);
        if costs.is_some_and(|costs| costs.encode().is_some()) {
            executor.spare_readers();
        }
        executor
    }
}

/// In one model of three, some layers have states: mostly in as many slots as requests run at once and some for snapshots, or in
/// fewer. Returns how many, and the tokens at whose multiples prompts are cut.
fn with_states(seed: u64, groups: CacheGroups, max_num_seqs: usize) -> (CacheGroups, usize, usize) {
    // Draws of its own: all else is as without.
    let mut rng = StdRng::seed_from_u64(seed.rotate_left(32));
    if !rng.random_bool(0.33) {
        return (groups, 0, 1);
    }
    let slots = match rng.random_bool(0.7) {
        true => max_num_seqs + rng.random_range(0..=8),
        false => rng.random_range(1..=max_num_seqs),
    };
    let groups = groups.with_states(rng.random_range(1..=5));
    (
        groups,
        slots,
        *[1, 1, 16, 64].choose(&mut rng).expect("there are sizes"),
    )
}

/// In one life of four, up to tick `last`.
fn forgets(seed: u64, last: u64) -> Vec<u64> {
    // Draws of its own: all else is as without.
    let mut rng = StdRng::seed_from_u64(seed.rotate_left(16));
    match rng.random_bool(0.25) {
        true => (0..8).map(|_| rng.random_range(0..=last)).collect(),
        false => Vec::new(),
    }
}

/// In one life of four, up to step `last`.
fn overflows(seed: u64, last: u64) -> Vec<(u64, Fault)> {
    // Draws of its own: all else is as without.
    let mut rng = StdRng::seed_from_u64(seed.rotate_left(48));
    match rng.random_bool(0.25) {
        true => (0..3)
            .map(|_| (rng.random_range(0..=last), Fault::NotFinite))
            .collect(),
        false => Vec::new(),
    }
}

/// That of a small device, for one engine in four.
fn prompt_budget(seed: u64, most: usize) -> Option<PromptBudget> {
    // Draws of its own: all else is as without.
    let mut rng = StdRng::seed_from_u64(!seed);
    let rng = &mut rng;
    let limited = rng.random_bool(0.25);
    let mut steps = |sizes: [usize; 3]| {
        let mut seconds = 0.0;
        let step = |rows| {
            seconds += rng.random_range(0.1..1.0);
            StepCost { rows, seconds }
        };
        sizes.map(step).to_vec()
    };
    let costs = StepCosts::new(steps([1, 4, 8]), steps([2, 8, 64]), 0.001)?;
    let target = rng
        .random_bool(0.5)
        .then(|| Duration::from_secs_f64(rng.random_range(0.1..3.0)));
    let encode = rng.random_bool(0.7).then(|| EncodeCost {
        patch_seconds: rng.random_range(0.001..0.05),
        pair_seconds: 0.0,
    });
    let costs = costs.with_encode(encode);
    limited.then(|| PromptBudget::new(costs, most, target))
}

/// One kind of layers, or up to three with windows that no block size divides, in numbers that take several pages.
pub fn random_groups(rng: &mut StdRng) -> CacheGroups {
    if rng.random_bool(0.4) {
        return CacheGroups::default();
    }
    let full = rng.random_bool(0.7);
    let windows = rng.random_range(1..=CacheGroups::MAX - usize::from(full));
    let mut kinds = vec![CacheKind::Full; if full { rng.random_range(1..=3) } else { 0 }];
    for _ in 0..windows {
        // Without full attention, a window of one token would see no context at all.
        let least = if full { 1 } else { 2 };
        let most = *[4, 20, 100].choose(rng).expect("there are windows");
        let window = CacheKind::Window(rng.random_range(least..=most));
        kinds.extend(vec![window; rng.random_range(1..=4)]);
    }
    kinds.shuffle(rng);
    let layout = CacheLayout::new(&kinds, usize::MAX);
    layout.expect("there are few kinds").groups
}

fn arrivals(rng: &mut StdRng, config: &SchedulerConfig, model: &SimModel) -> Vec<(u64, Request)> {
    let limits = Limits {
        max_model_len: config.limits.max_model_len,
        kv_capacity_tokens: config.kv.longest_request(config.limits.max_num_batched_tokens),
        vocab_size: model.vocab_size(),
        images: Some(images(&mut rng.clone(), config)),
    };
    let longest = limits.max_request_tokens();
    let mut pictures = Pictures::new(rng.clone());
    let pause = *[0, 0, 2, 20].choose(rng).expect("there are pauses");
    let documents: [Vec<TokenId>; 3] =
        std::array::from_fn(|_| random_tokens(rng, model, config.kv.block_size.tokens()));
    let constrained = *[0.0, 0.0, 0.3, 1.0].choose(rng).expect("there are shares");
    // Many short requests about the documents alone keep their blocks coming and going.
    let library = rng.random_bool(0.25);
    let (most_requests, most_words, most_tokens) = if library { (40, 4, 24) } else { (16, 40, longest) };
    let tenants = *[1, 1, 2, 4].choose(rng).expect("there are numbers");
    let priorities = if rng.random_bool(0.6) { 3 } else { 1 };
    let mut tick = 0;
    let mut requests: Vec<(u64, Request)> = Vec::new();
    for id in 0..rng.random_range(1..=most_requests) {
        tick += rng.random_range(0..=pause);
        let mut prompt = match requests.choose(rng) {
            // The next turn of a conversation, the same prompt again, or one with the same beginning.
            Some((_, earlier)) if !library && rng.random_bool(0.5) => {
                let mut prompt = earlier.prompt().to_vec();
                match rng.random_range(0..4) {
                    0 => {}
                    1 => prompt.truncate(rng.random_range(0..=prompt.len())),
                    _ => prompt.extend(oracle(model, earlier).0),
                }
                prompt
            }
            // Known documents in any order: equal blocks after different beginnings.
            _ if library || rng.random_bool(0.5) => {
                let count = rng.random_range(1..=3);
                (0..count)
                    .flat_map(|_| documents.choose(rng).expect("there are documents").clone())
                    .collect()
            }
            _ => Vec::new(),
        };
        if prompt.is_empty() || rng.random_bool(0.7) {
            let more = rng.random_range(1..=longest.min(most_words));
            prompt.extend(random_tokens(rng, model, more));
        }
        prompt.truncate(longest - 1);
        let room = longest - prompt.len();
        let prompt_logprobs = rng.random_bool(0.2).then(|| rng.random_range(0..3));
        let fewest = usize::from(prompt_logprobs.is_none());
        let max_tokens = (!rng.random_bool(0.1)).then(|| rng.random_range(fewest..=room.min(most_tokens)));
        let mut bans = bans(rng, model, max_tokens.unwrap_or(room));
        let constraints: Vec<Box<dyn Constraint>> = if rng.random_bool(constrained) {
            // Together they may leave nothing, which is an error.
            bans.allowed = None;
            let length = rng.random_range(1..=room.min(30));
            vec![Box::new(SimConstraint::new(
                rng.random(),
                length,
                model.vocab_size(),
            ))]
        } else {
            Vec::new()
        };
        let images = pictures.show(&mut prompt);
        let options = RequestOptions {
            prompt,
            images,
            max_tokens,
            sampling: sampling(rng),
            seed: rng.random(),
            stop_token_ids: if rng.random_bool(0.3) {
                random_tokens(rng, model, 1)
            } else {
                Vec::new()
            },
            constraints,
            prompt_logprobs,
            bans,
            cache_salt: rng
                .random_bool(0.1)
                .then(|| ["ours", "theirs"][rng.random_range(0..2)].into()),
            pooling: rng
                .random_bool(0.15)
                .then(|| *[Pooling::Last, Pooling::Mean].choose(rng).expect("there are two")),
            priority: rng.random_range(0..priorities),
            tenant: TenantId(rng.random_range(0..tenants)),
        };
        let request =
            Request::new(RequestId(id), options, &limits).expect("the workload keeps to the limits");
        requests.push((tick, request));
    }
    requests
}

/// What images the simulated model takes.
const IMAGES: ImageInput = ImageInput {
    placeholder: 0,
    patch: PatchShape { pixels: 1, frames: 1 },
    merge: 1,
    only: None,
    mutual: false,
    limits: EncoderLimits {
        max_patches: 12,
        max_images_per_prompt: usize::MAX,
    },
};

/// The same, in half of the models whose steps have room for it with tokens that see each other: without states, of which none is
/// kept inside a span.
fn images(rng: &mut StdRng, config: &SchedulerConfig) -> ImageInput {
    let mutual = ImageInput {
        mutual: true,
        ..IMAGES
    };
    let StepLimits {
        max_num_batched_tokens,
        max_num_seqs,
        ..
    } = config.limits;
    let fits = mutual.tokens_at_once() + max_num_seqs <= max_num_batched_tokens + 1;
    let has_states = config.kv.groups.state_layers() > 0;
    match fits && !has_states && rng.random_bool(0.5) {
        true => mutual,
        false => IMAGES,
    }
}

/// A plan in which tokens that see each other are computed at once.
pub(crate) fn whole_spans<'a>(
    plan: StepPlan,
    request: impl Fn(RequestId) -> Option<&'a Request>,
) -> Result<StepPlan, String> {
    for run in &plan.runs {
        let request = request(run.request).filter(|request| request.has_mutual_spans());
        let spans = request
            .and_then(Request::images)
            .map_or(&[][..], |images| &images[..]);
        if let Some(span) = spans.iter().find(|span| span.is_cut_at(run.end())) {
            let (id, end, start) = (run.request, run.end(), span.start);
            return Err(format!(
                "a run of {id} ends at {end}, in the tokens {start}..{}",
                span.end()
            ));
        }
    }
    Ok(plan)
}

/// Where layers have states, a run of a prompt that goes on ends at a multiple of `chunk` tokens, or before another image in the
/// chunk that has rows of one. No run goes on into an answer that is computed again.
pub(crate) fn ends_of_chunks<'a>(
    plan: &StepPlan,
    chunk: usize,
    request: impl Fn(RequestId) -> Option<&'a Request>,
) -> Result<(), String> {
    for run in &plan.runs {
        let (id, end) = (run.request, run.end());
        let Some((state, request)) = run.state.zip(request(id)) else {
            continue;
        };
        let prompt = request.prompt().len();
        if state.in_chunks != (run.start < prompt) || (state.in_chunks && end > prompt) {
            return Err(format!(
                "tokens {}..{end} of {id}, whose prompt has {prompt}: {state:?}",
                run.start
            ));
        }
        let mut images = request.images().into_iter().flat_map(|images| images.iter());
        let before_image = images.any(|span| span.start == end) && run.image_rows().next().is_some();
        let is_cut = state.in_chunks && end < prompt && !end.is_multiple_of(chunk);
        if is_cut && !(before_image && end / chunk * chunk <= run.start) {
            return Err(format!(
                "a run of {id} ends at {end}, not at a multiple of {chunk}"
            ));
        }
    }
    Ok(())
}

/// A few pictures, which some requests show at the same places of equal prompts.
struct Pictures {
    /// Draws of its own: all else is as without.
    rng: StdRng,
    all: Vec<Arc<Image>>,
    /// The part of places at which there is one.
    share: f64,
    /// Tokens from one place to the next.
    distance: usize,
}

impl Pictures {
    fn new(mut rng: StdRng) -> Self {
        let count = rng.random_range(1..=4);
        // Some have one shape and differ in their content alone.
        let size = rng.random_range(1..=12);
        let image = |index: u8| {
            let width = if index < 2 { size } else { rng.random_range(1..=12) };
            let grid = ImageGrid {
                frames: 1,
                height: 1,
                width,
            };
            Arc::new(Image::blank([index; 32], grid, IMAGES.patch))
        };
        Self {
            all: (0..count).map(image).collect(),
            share: *[0.0, 0.0, 0.2, 0.9].choose(&mut rng).expect("there are shares"),
            distance: rng.random_range(12..=40),
            rng,
        }
    }

    /// Puts placeholders into a prompt, and says of which pictures.
    fn show(&mut self, prompt: &mut [TokenId]) -> Vec<ImageSpan> {
        let mut images = Vec::new();
        for start in (0..prompt.len()).step_by(self.distance) {
            let image = self.all.choose(&mut self.rng).expect("there are pictures");
            let len = image.grid.width;
            if !self.rng.random_bool(self.share) {
                continue;
            }
            // In one line or in two, between which there is another token.
            let split = self.rng.random_range(1..=len);
            let split = if self.rng.random_bool(0.3) { split } else { len };
            let room = self.distance.min(prompt.len() - start);
            if len + usize::from(split < len) > room {
                continue;
            }
            for (start, first, len) in [(start, 0, split), (start + split + 1, split, len - split)] {
                if len > 0 {
                    prompt[start..start + len].fill(IMAGES.placeholder);
                    let image = Arc::clone(image);
                    images.push(ImageSpan {
                        start,
                        len,
                        first,
                        image,
                    });
                }
            }
        }
        images
    }
}

/// Few: most requests want none.
fn bans(rng: &mut StdRng, model: &SimModel, max_tokens: usize) -> Bans {
    let mut words = Vec::new();
    while rng.random_bool(0.15) {
        let len = rng.random_range(1..=2);
        words.push(random_tokens(rng, model, len));
    }
    Bans {
        min_tokens: if rng.random_bool(0.1) {
            rng.random_range(0..=max_tokens)
        } else {
            0
        },
        allowed: rng.random_bool(0.05).then(|| random_tokens(rng, model, 2)),
        words: words.into(),
    }
}

fn random_tokens(rng: &mut StdRng, model: &SimModel, count: usize) -> Vec<TokenId> {
    (0..count)
        .map(|_| rng.random_range(0..model.vocab_size()) as TokenId)
        .collect()
}

fn sampling(rng: &mut StdRng) -> SamplingOptions {
    SamplingOptions {
        temperature: rng.random_bool(0.5).then_some(0.0),
        presence_penalty: rng.random_bool(0.2).then_some(1.0),
        logprobs: rng.random_bool(0.1).then_some(2),
        ..Default::default()
    }
}
