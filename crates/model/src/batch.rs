//! From a step plan to the rows of a batch.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use plimsoll_core::{
    ImageInput, KvConfig, PageId, Pooling, RequestId, Run, RunInput, SampleSpec, StateSlot, StepLimits,
    StepPlan, TokenId,
};
use plimsoll_kernels::{RunMeta, StateRun};

use crate::encoder::{Embeddings, EncodedImage};
use crate::tables::{self, PageTable};

/// What one step computes: rows of tokens, and which of them belong together.
#[derive(Debug)]
pub(crate) struct Batch<'a> {
    /// Ids, run after run.
    pub(crate) tokens: &'a [TokenId],
    /// The runs, once for each table of pages.
    pub(crate) tables: Vec<Vec<RunMeta<'a>>>,
    /// The runs and their states, in a model whose layers have such.
    pub(crate) states: Vec<StateRun>,
    /// Of each run its positions in three dimensions, where it is of a prompt with images.
    pub(crate) positions: Vec<Option<Vec<[u32; 3]>>>,
    /// Of each row the end of what it sees, where that is not itself.
    pub(crate) ends: Option<Vec<usize>>,
    /// Rows of the batch that are rows of an image.
    pub(crate) image: Option<BatchImage<'a>>,
}

/// Rows of the one image that a step may have.
#[derive(Debug)]
pub(crate) struct BatchImage<'a> {
    /// Rows of the batch, and which of the image's each is.
    pub(crate) rows: Vec<(usize, usize)>,
    /// Where the image's are.
    pub(crate) encoded: EncodedImage,
    pub(crate) embeddings: &'a Embeddings,
    /// Layers of the decoder to whose output rows of images are added.
    pub(crate) features: usize,
}

/// The bounds inside which a plan is legal.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    pub(crate) limits: StepLimits,
    pub(crate) kv: KvConfig,
    pub(crate) vocab_size: usize,
    /// What runs may ask of their rows; `None` where they are sampled from.
    pub(crate) pooling: Option<Pooling>,
    /// The images that runs may have.
    pub(crate) images: Option<ImageInput>,
}

impl Bounds {
    /// Says what is wrong with a plan. The kernels rely on all of this.
    pub(crate) fn check(&self, plan: &StepPlan, last: &HashMap<RequestId, TokenId>) -> Result<(), String> {
        let (limits, tokens) = (&self.limits, plan.num_tokens());
        if plan.runs.len() > limits.max_num_seqs {
            return Err(format!(
                "{} runs in a step of at most {}",
                plan.runs.len(),
                limits.max_num_seqs
            ));
        }
        if tokens > limits.max_num_batched_tokens {
            return Err(format!(
                "{tokens} tokens in a step of at most {}",
                limits.max_num_batched_tokens
            ));
        }
        self.check_images(plan)?;
        let mut requests = HashSet::new();
        let writes: HashMap<StateSlot, RequestId> = plan
            .runs
            .iter()
            .filter_map(|run| Some((run.state?.after, run.request)))
            .collect();
        for run in &plan.runs {
            let unique = requests
                .insert(run.request)
                .then_some(())
                .ok_or("it is in the plan twice".to_owned());
            unique
                .and_then(|()| self.check_input(run, last))
                .and_then(|()| self.check_blocks(run))
                .and_then(|()| self.check_state(run, &writes))
                .and_then(|()| self.check_score(run))
                .and_then(|()| self.check_output(run))
                .and_then(|()| {
                    run.sample
                        .as_ref()
                        .map_or(Ok(()), |sample| self.check_sample(sample))
                })
                .map_err(|message| format!("{}: {message}", run.request))?;
        }
        Ok(())
    }

    /// One image at most, so that the memory of one encode is enough.
    fn check_images(&self, plan: &StepPlan) -> Result<(), String> {
        let mut rows = plan.runs.iter().flat_map(Run::image_rows);
        let encode = plan.encode.as_ref().map(|encode| (&encode.image, 0));
        let first = rows.next();
        let first = first.map(|(span, _)| (&span.image, span.first + span.len));
        let Some((image, tokens)) = first.or(encode) else {
            return Ok(());
        };
        let Some(input) = &self.images else {
            return Err("the model is served without images".to_owned());
        };
        let cut = plan.runs.iter().find_map(|run| {
            let mut spans = run.image_rows().map(|(span, _)| span);
            spans.find(|span| span.is_cut_at(run.end()))
        });
        if let Some(span) = cut.filter(|_| input.mutual) {
            let (start, end) = (span.start, span.end());
            return Err(format!(
                "a run ends among tokens {start}..{end}, which see each other"
            ));
        }
        let mut others = rows
            .map(|(span, _)| &span.image)
            .chain(encode.map(|(image, _)| image));
        if others.any(|other| other.hash != image.hash) {
            return Err("two images in a step that has one".to_owned());
        }
        let patches = image.grid.patches();
        let fits = patches <= input.limits.max_patches
            && image.pixels.len() == patches * input.patch.bytes()
            && input.rows(image.grid) >= Some(tokens);
        match fits {
            true => Ok(()),
            false => Err(format!("an image of {:?} for {tokens} tokens", image.grid)),
        }
    }

    fn check_input(&self, run: &Run, last: &HashMap<RequestId, TokenId>) -> Result<(), String> {
        match &run.input {
            RunInput::Known(tokens) if tokens.is_empty() => Err("a run without tokens".to_owned()),
            RunInput::Known(tokens) => self.check_tokens(tokens),
            RunInput::LastSampled if last.contains_key(&run.request) => Ok(()),
            RunInput::LastSampled => Err("nothing was sampled for it in the step before".to_owned()),
        }
    }

    fn check_tokens(&self, tokens: &[TokenId]) -> Result<(), String> {
        match tokens.iter().find(|&&token| token as usize >= self.vocab_size) {
            Some(token) => Err(format!("token {token} of a vocabulary of {}", self.vocab_size)),
            None => Ok(()),
        }
    }

    fn check_blocks(&self, run: &Run) -> Result<(), String> {
        let limit = self.limits.max_model_len;
        let end = run.start.checked_add(run.input.len()).filter(|&end| end <= limit);
        if end.is_none() {
            return Err(format!(
                "{} tokens from {} on exceed the longest context, {limit}",
                run.input.len(),
                run.start
            ));
        }
        tables::check(run, &self.kv.groups, self.kv.block_size, self.kv.num_pages)
    }

    /// Where layers have states, each run writes a slot of its own, and reads none that another writes.
    fn check_state(&self, run: &Run, writers: &HashMap<StateSlot, RequestId>) -> Result<(), String> {
        if self.kv.groups.state_layers() == 0 {
            return Ok(());
        }
        let state = run.state.ok_or("it has no slot for its state")?;
        if state.before.is_some() != (run.start > 0) {
            return Err(format!(
                "it begins at {} with the state in {:?}",
                run.start, state.before
            ));
        }
        let slots = self.kv.state_slots;
        for slot in state.before.into_iter().chain([state.after]) {
            if slot.index() >= slots {
                return Err(format!("state slot {} of {slots}", slot.0));
            }
            if writers.get(&slot).is_some_and(|&writer| writer != run.request) {
                return Err(format!("another run writes state slot {}", slot.0));
            }
        }
        Ok(())
    }

    /// Every scored token follows a token of the run. The row that is sampled from is not scored too.
    fn check_score(&self, run: &Run) -> Result<(), String> {
        let Some(score) = &run.score else { return Ok(()) };
        let rows = run.input.len() - usize::from(run.sample.is_some());
        let end = score.first.checked_add(score.targets.len());
        if score.targets.is_empty() || end.is_none_or(|end| end > rows) {
            return Err(format!(
                "{} tokens from row {} on are to be scored by {rows} rows",
                score.targets.len(),
                score.first
            ));
        }
        self.check_tokens(&score.targets)
    }

    fn check_output(&self, run: &Run) -> Result<(), String> {
        match (self.pooling, run.pool) {
            (Some(_), _) if run.sample.is_some() || run.score.is_some() => {
                Err("its logits are to be read, and the model is served for embeddings".to_owned())
            }
            (pooling, Some(asked)) if pooling != Some(asked) => Err(format!(
                "its rows are to be pooled ({}), for which the model is not served",
                asked.name()
            )),
            _ => Ok(()),
        }
    }

    fn check_sample(&self, sample: &SampleSpec) -> Result<(), String> {
        if sample.params.needs_history() && sample.prompt_len > sample.history.len() {
            return Err(format!(
                "a prompt of {} tokens in a history of {}",
                sample.prompt_len,
                sample.history.len()
            ));
        }
        self.check_tokens(&sample.history)
    }
}

/// The tables of a step's runs.
#[derive(Debug)]
pub(crate) struct StepPages {
    /// Table after table.
    pages: Vec<PageId>,
    /// For each table, and in it for each run: the first slice, and where in `pages` its pages are.
    places: Vec<Vec<(usize, Range<usize>)>>,
}

impl StepPages {
    /// Of a checked plan.
    pub(crate) fn new(plan: &StepPlan, kv: KvConfig) -> Self {
        let (mut pages, mut places) = (Vec::new(), Vec::new());
        for table in PageTable::all(&kv.groups, kv.block_size) {
            let place = |run: &Run| {
                let (slices, start) = (table.slices(run), pages.len());
                pages.extend(slices.clone().map(|slice| table.page(run, slice)));
                (slices.start, start..pages.len())
            };
            places.push(plan.runs.iter().map(place).collect());
        }
        Self { pages, places }
    }
}

impl<'a> Batch<'a> {
    /// Packs a checked plan: token ids go to `tokens`, which has room for exactly the plan's.
    pub(crate) fn pack(
        plan: &StepPlan,
        last: &HashMap<RequestId, TokenId>,
        pages: &'a StepPages,
        tokens: &'a mut [TokenId],
    ) -> Self {
        let mut first_row = 0;
        for run in &plan.runs {
            let len = run.input.len();
            let rows = &mut tokens[first_row..first_row + len];
            match &run.input {
                RunInput::Known(known) => rows.copy_from_slice(known),
                RunInput::LastSampled => rows[0] = last[&run.request],
            }
            first_row += len;
        }
        let table = |places: &'a Vec<(usize, Range<usize>)>| {
            let mut first_row = 0;
            let run = |(run, (first_block, range)): (&Run, &(usize, Range<usize>))| {
                first_row += run.input.len();
                RunMeta {
                    first_row: first_row - run.input.len(),
                    len: run.input.len(),
                    start: run.start,
                    first_block: *first_block,
                    blocks: &pages.pages[range.clone()],
                }
            };
            plan.runs.iter().zip(places).map(run).collect()
        };
        let mut first_row = 0;
        let states = plan.runs.iter().filter_map(|run| {
            first_row += run.input.len();
            Some(StateRun {
                first_row: first_row - run.input.len(),
                len: run.input.len(),
                before: run.state?.before.map(StateSlot::index),
                after: run.state?.after.index(),
            })
        });
        Self {
            positions: Vec::new(),
            ends: None,
            image: None,
            states: states.collect(),
            tables: pages.places.iter().map(table).collect(),
            tokens,
        }
    }

    /// The runs, whichever their pages.
    pub(crate) fn runs(&self) -> &[RunMeta<'a>] {
        self.tables.first().map_or(&[], Vec::as_slice)
    }
}
