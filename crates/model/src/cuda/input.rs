use std::collections::HashMap;

use plimsoll_core::{
    BlockSize, CacheGroups, KvConfig, Pooling, RequestId, Run, RunInput, StepLimits, StepPlan,
};
use plimsoll_device::Pod;
use plimsoll_device::cuda::{DeviceError, Gpu, GpuError, GpuSlice};
use plimsoll_kernels::cuda::{
    DecodeHeader, DecodeItem, GpuRun, HostCopies, PrefillItem, PrefillPlan, SampleLists, SampleRow, TokenBias,
};

use super::parts::{ListRoom, SamplePart};
use super::planners::{AttentionPlanners, Planners};
use super::shape::{BatchShape, DecodeStep, ImageInputs, Sampling, padded_rows};
use super::staging::STEPS_IN_FLIGHT;
use super::staging::{Layout, Section, Staging};
use super::states::{StateCounts, StateInput, StateLists};
use crate::images::ends_of;
use crate::positions::positions;
use crate::tables::PageTable;

/// What the kernels of a step read, besides weights and KV: sections of the staging memory.
#[derive(Debug)]
pub(super) struct StepInput {
    /// Rows of the batch, padding included.
    pub(super) rows: usize,
    /// As in [`DecodeStep`].
    pub(super) is_long: bool,
    /// Rows that are given out: sampled from, padding included, or pooled.
    pub(super) samples: usize,
    pub(super) tokens: Section<i32>,
    /// How many rows are tokens: those behind them are padding.
    pub(super) real_rows: Section<i32>,
    /// One number for each row, or three where images are served and their rows have places.
    pub(super) positions: Section<i32>,
    /// For each table of pages, where rows are written.
    pub(super) slots: Vec<Section<i32>>,
    /// Of a model whose layers have states.
    pub(super) states: Option<StateInput>,
    /// The rows that are given out; `None` if all are, in order.
    pub(super) sample_at: Option<Section<i32>>,
    /// First row and number of rows, among those given out, of each pooled vector.
    pub(super) spans: Section<i32>,
    pub(super) sample_rows: Section<SampleRow>,
    /// Rows whose sampling waits for masks: those that are sent with the rest are skipped.
    pub(super) deferred: Option<Vec<SampleRow>>,
    /// Rows that are sampled behind a graph, which skips them all: some need lists, for which graphs have no room.
    pub(super) late_rows: Option<Section<SampleRow>>,
    pub(super) decode: Option<DecodeInput>,
    pub(super) prefill: Option<PrefillInput>,
    pub(super) blocks: Section<i32>,
    /// Rows that are an image's: of each, which of the batch, and which of those that are kept.
    pub(super) image_rows: Section<i32>,
    pub(super) history: Section<i32>,
    pub(super) biases: Section<TokenBias>,
    /// Rows that are sampled together. What those of the first part refer to is packed with the rest.
    pub(super) sample_parts: Vec<SamplePart>,
    /// Rows whose next token is a prompt's and scored.
    pub(super) scored: usize,
    /// Where it was packed.
    pub(super) slot: usize,
    /// Bytes in use.
    pub(super) bytes: usize,
}

/// Runs of one token, or longer ones, and the work of each kind of attention, in the order of [`Planners`].
#[derive(Debug)]
pub(super) struct DecodeInput {
    /// For each table of pages.
    pub(super) runs: Vec<Section<GpuRun>>,
    pub(super) work: Vec<(Section<DecodeHeader>, Section<DecodeItem>)>,
}

/// As [`DecodeInput`].
#[derive(Debug)]
pub(super) struct PrefillInput {
    /// For each table of pages.
    pub(super) runs: Vec<Section<GpuRun>>,
    pub(super) work: Vec<(PrefillPlan, Section<PrefillItem>)>,
    /// Of each row of the batch the end of what it sees, where rows of images see each other.
    pub(super) ends: Section<i32>,
}

impl StepInput {
    /// Takes from the plan what rows to sample from refer to, if it is not there yet: it may be more than the rest of the step has, so of a
    /// step that waits for masks it is left to whoever launched the rest.
    pub(super) fn add_lists(&mut self, plan: &StepPlan) {
        self.sample_parts.iter_mut().for_each(|part| part.add_lists(plan));
    }
}

/// Packs step plans.
#[derive(Debug)]
pub(super) struct StepInputs {
    staging: Staging,
    planners: Planners,
    kv: KvConfig,
    images: Option<ImageInputs>,
    room: ListRoom,
    tables: Vec<PageTable>,
    /// Runs of the step being packed, for each table.
    decode_runs: Vec<Vec<GpuRun>>,
    prefill_runs: Vec<Vec<GpuRun>>,
    states: StateLists,
}

impl StepInputs {
    /// Room for every step within `limits`.
    pub(super) fn new(
        gpu: &Gpu,
        limits: &StepLimits,
        kv: KvConfig,
        sampling: Sampling,
        images: Option<ImageInputs>,
        planners: Planners,
    ) -> Result<Self, DeviceError> {
        let room = ListRoom::new(limits, sampling);
        let bytes = Self::bytes(limits, kv.block_size, &kv.groups, sampling, images, &planners);
        let tables = PageTable::all(&kv.groups, kv.block_size);
        Ok(Self {
            staging: Staging::new(gpu, bytes, STEPS_IN_FLIGHT)?,
            planners,
            kv,
            images,
            room,
            decode_runs: vec![Vec::new(); tables.len()],
            prefill_runs: vec![Vec::new(); tables.len()],
            states: StateLists::default(),
            tables,
        })
    }

    /// A decode step of padding rows in slot 0.
    pub(super) fn padding(&mut self, step: DecodeStep) -> StepInput {
        let shape = BatchShape::Decode(step);
        self.pack(0, &StepPlan::default(), &HashMap::new(), &shape, &[])
    }

    /// Packs a checked plan into the memory of step slot `slot`, whose last copy is done. `image_rows` are its rows of an image: of
    /// each, which of the batch, and which of those that are kept.
    pub(super) fn pack(
        &mut self,
        slot: usize,
        plan: &StepPlan,
        last: &HashMap<RequestId, u32>,
        shape: &BatchShape,
        image_rows: &[[i32; 2]],
    ) -> StepInput {
        let pages = self.split_runs(plan, shape);
        if self.kv.groups.state_layers() > 0 {
            let padded = match *shape {
                BatchShape::Decode(step) => step.rows,
                BatchShape::Exact(_) | BatchShape::Pool(..) => 0,
            };
            self.states.fill(plan, padded);
        }
        let (mut sample_rows, sample_parts) = self.room.sample_rows(plan, shape);
        let is_graph = matches!(shape, BatchShape::Decode(_));
        let is_late = is_graph && !plan.awaits_masks() && plan_needs_lists(plan);
        let waiting = (is_late || plan.awaits_masks()).then(|| {
            let skipped = vec![SampleRow::padding(); sample_rows.len()];
            std::mem::replace(&mut sample_rows, skipped)
        });
        let lists = sample_parts[0].lists();
        let mut counts = self.counts(plan, shape, pages);
        // Later parts take the place of the first.
        counts.history = lists.history.len();
        counts.biases = lists.biases.len();
        counts.image_rows = image_rows.len();
        if !image_rows.is_empty() {
            counts.ends = ImageInputs::ends(self.images, counts.rows);
        }
        counts.late_rows = if is_late { counts.sample_rows } else { 0 };
        if sample_parts.len() > 1 {
            (counts.history, counts.biases) = (self.room.history, self.room.biases);
        }
        let mut input = layout(&counts, &self.planners);
        input.is_long = matches!(shape, BatchShape::Decode(step) if step.is_long);
        self.write_tokens(slot, plan, last, &input);
        self.write_attention(slot, plan, &mut input);
        if let Some(states) = input.states {
            self.states.write(&mut self.staging, slot, states);
        }
        self.write_blocks(slot, plan, &input);
        self.staging
            .host(slot, input.image_rows)
            .copy_from_slice(image_rows.as_flattened());
        if let (Some(at), Some(section)) = (shape.picked(), input.sample_at) {
            self.staging.host(slot, section).copy_from_slice(at);
        }
        self.staging
            .host(slot, input.spans)
            .copy_from_slice(shape.spans().as_flattened());
        self.staging
            .host(slot, input.sample_rows)
            .copy_from_slice(&sample_rows);
        self.write_lists(slot, lists, &input);
        (input.sample_parts, input.slot) = (sample_parts, slot);
        match (waiting, input.late_rows) {
            (Some(rows), Some(section)) => self.staging.host(slot, section).copy_from_slice(&rows),
            (waiting, _) => input.deferred = waiting,
        }
        if input.deferred.is_none() {
            input.add_lists(plan);
        }
        input
    }

    /// Sends what a later part of the sampling refers to, in place of the part before, and waits for that first.
    pub(super) fn send_part(&mut self, gpu: &Gpu, input: &StepInput, part: usize) -> Result<(), GpuError> {
        gpu.synchronize()?;
        let lists = input.sample_parts[part].lists();
        self.write_lists(input.slot, lists, input);
        // One after the other: see `layout`.
        let sent = input.history.start()..input.biases.front(lists.biases.len()).end();
        // SAFETY: the next part waits for the copy, and so does whoever packs the slot again.
        unsafe { self.staging.send_range(input.slot, sent) }
    }

    fn write_lists(&mut self, slot: usize, lists: &SampleLists, input: &StepInput) {
        self.staging.host(slot, input.history)[..lists.history.len()].copy_from_slice(&lists.history);
        self.staging.host(slot, input.biases)[..lists.biases.len()].copy_from_slice(&lists.biases);
    }

    /// The device's side of a section.
    pub(super) fn device<T: Pod>(&self, section: Section<T>) -> GpuSlice<'_, T> {
        self.staging.device(section)
    }

    /// Starts to send what was packed.
    ///
    /// # Safety
    /// As [`Staging::send`]: slot `slot` must not be packed again until the copy is done.
    pub(super) unsafe fn send(
        &self,
        slot: usize,
        input: &StepInput,
        ahead_of_graph: Option<&HostCopies>,
    ) -> Result<(), GpuError> {
        // SAFETY: the caller's promise.
        unsafe { self.staging.send(slot, input.bytes, ahead_of_graph) }
    }

    /// Bytes of the largest step, which it takes of device memory.
    pub(super) fn bytes(
        limits: &StepLimits,
        block_size: BlockSize,
        groups: &CacheGroups,
        sampling: Sampling,
        images: Option<ImageInputs>,
        planners: &[AttentionPlanners],
    ) -> usize {
        let room = ListRoom::new(limits, sampling);
        let (sample_rows, spans) = match sampling {
            Sampling::From { .. } => (limits.max_num_seqs, 0),
            Sampling::Pooled(_) => (0, limits.max_num_seqs),
        };
        let tables = PageTable::all(groups, block_size);
        let most = |table: &PageTable| table.most_slices(limits);
        let rows = padded_rows(limits.max_num_batched_tokens.max(limits.max_num_seqs));
        let counts = Counts {
            tables: tables.len(),
            rows,
            states: StateCounts::most(groups, rows, limits.max_num_seqs),
            samples: limits.max_num_seqs,
            gather: sampling != Sampling::Pooled(Pooling::Mean),
            sample_rows,
            spans,
            decode_runs: limits.max_num_seqs,
            prefill_runs: limits.max_num_seqs,
            pages: tables.iter().map(most).sum(),
            numbers: ImageInputs::numbers(images),
            ends: ImageInputs::ends(images, rows),
            image_rows: images.map_or(0, |_| rows),
            late_rows: sample_rows,
            history: room.history,
            biases: room.biases,
        };
        layout(&counts, planners).bytes
    }

    pub(super) fn planners(&self) -> &[AttentionPlanners] {
        &self.planners
    }

    /// Runs of one token, padded as `shape` wants, and the others. Returns how many pages their tables have.
    fn split_runs(&mut self, plan: &StepPlan, shape: &BatchShape) -> usize {
        let mut pages = 0;
        let runs = self.decode_runs.iter_mut().zip(&mut self.prefill_runs);
        for (table, (decode, prefill)) in self.tables.iter().zip(runs) {
            decode.clear();
            prefill.clear();
            let mut first_row = 0;
            for run in &plan.runs {
                let slices = table.slices(run);
                let meta = GpuRun {
                    first_row: first_row as i32,
                    len: run.input.len() as i32,
                    context_end: run.end() as i32,
                    // That of the first slice of all, which need not be there.
                    block_offset: pages as i32 - slices.start as i32,
                };
                match meta.len {
                    1 => decode.push(meta),
                    _ => prefill.push(meta),
                }
                first_row += run.input.len();
                pages += slices.len();
            }
            if let BatchShape::Decode(step) = *shape {
                let padding = |row: usize| GpuRun {
                    first_row: row as i32,
                    ..Default::default()
                };
                decode.extend((decode.len()..step.rows).map(padding));
            }
        }
        pages
    }

    fn counts(&self, plan: &StepPlan, shape: &BatchShape, pages: usize) -> Counts {
        let tokens = plan.num_tokens();
        let rows = shape.rows(tokens);
        let (samples, gather) = match shape.picked() {
            Some(at) => (at.len(), true),
            None => (rows, false),
        };
        Counts {
            tables: self.tables.len(),
            rows,
            states: self.states.counts(),
            samples,
            gather,
            sample_rows: match shape {
                BatchShape::Pool(..) => 0,
                BatchShape::Decode(_) | BatchShape::Exact(_) => samples,
            },
            spans: shape.spans().len(),
            decode_runs: self.decode_runs[0].len(),
            prefill_runs: self.prefill_runs[0].len(),
            pages,
            numbers: ImageInputs::numbers(self.images),
            ends: 0,
            image_rows: 0,
            late_rows: 0,
            history: 0,
            biases: 0,
        }
    }

    fn write_tokens(
        &mut self,
        slot: usize,
        plan: &StepPlan,
        last: &HashMap<RequestId, u32>,
        input: &StepInput,
    ) {
        let tokens = self.staging.host(slot, input.tokens);
        let mut row = 0;
        for run in &plan.runs {
            match &run.input {
                RunInput::Known(known) => {
                    for (to, &token) in tokens[row..].iter_mut().zip(known) {
                        *to = token as i32;
                    }
                }
                // Row `i` of what the step before samples.
                RunInput::LastSampled => tokens[row] = -1 - last[&run.request] as i32,
            }
            row += run.input.len();
        }
        tokens[row..].fill(0);
        self.staging.host(slot, input.real_rows)[0] = row as i32;

        let written = self.staging.host(slot, input.positions);
        let mut at = 0;
        for run in &plan.runs {
            at += write_positions(self.images, run, &mut written[at..]);
        }
        written[at..].fill(0);

        for (table, &slots) in self.tables.iter().zip(&input.slots) {
            let slots = self.staging.host(slot, slots);
            let (mut row, tokens) = (0, table.slice_size());
            for run in &plan.runs {
                for position in run.start..run.end() {
                    let page = table.page(run, position / tokens);
                    slots[row] = (page.index() * tokens + position % tokens) as i32;
                    row += 1;
                }
            }
            slots[row..].fill(-1);
        }
    }

    fn write_attention(&mut self, slot: usize, plan: &StepPlan, input: &mut StepInput) {
        let Self {
            staging,
            planners,
            decode_runs,
            prefill_runs,
            ..
        } = self;
        if let Some(decode) = &input.decode {
            for (&section, runs) in decode.runs.iter().zip(&*decode_runs) {
                staging.host(slot, section).copy_from_slice(runs);
            }
            // Padding has no context, and no work.
            let contexts = decode_runs[0].iter().map(|run| run.context_end as usize);
            let contexts = contexts.enumerate().filter(|&(_, context)| context > 0);
            for (planners, &(header, items)) in planners.iter().zip(&decode.work) {
                let planned = planners.decode.plan(contexts.clone(), staging.host(slot, items));
                staging.host(slot, header)[0] = planned;
            }
        }
        if let Some(prefill) = &mut input.prefill {
            for (&section, runs) in prefill.runs.iter().zip(&*prefill_runs) {
                staging.host(slot, section).copy_from_slice(runs);
            }
            let ends: Option<Vec<i32>> = (prefill.ends.len() > 0).then(|| {
                let ends = plan.runs.iter().flat_map(ends_of);
                let padding = std::iter::repeat(0);
                ends.chain(padding)
                    .map(|end| end as i32)
                    .take(prefill.ends.len())
                    .collect()
            });
            if let Some(ends) = &ends {
                staging.host(slot, prefill.ends).copy_from_slice(ends);
            }
            for (planners, (plan, items)) in planners.iter().zip(&mut prefill.work) {
                let items = staging.host(slot, *items);
                *plan = planners.prefill.plan(&prefill_runs[0], ends.as_deref(), items);
            }
        }
    }

    fn write_blocks(&mut self, slot: usize, plan: &StepPlan, input: &StepInput) {
        let blocks = self.staging.host(slot, input.blocks);
        let mut at = 0;
        for table in &self.tables {
            for run in &plan.runs {
                for slice in table.slices(run) {
                    blocks[at] = table.page(run, slice).0 as i32;
                    at += 1;
                }
            }
        }
    }
}

/// Elements of a step's sections.
struct Counts {
    /// Tables of pages.
    tables: usize,
    rows: usize,
    states: StateCounts,
    samples: usize,
    gather: bool,
    sample_rows: usize,
    spans: usize,
    decode_runs: usize,
    prefill_runs: usize,
    pages: usize,
    /// Of a position.
    numbers: usize,
    /// Of what rows see.
    ends: usize,
    image_rows: usize,
    late_rows: usize,
    history: usize,
    biases: usize,
}

/// Writes the positions of a run's rows. Returns how many numbers they are.
fn write_positions(images: Option<ImageInputs>, run: &Run, to: &mut [i32]) -> usize {
    let rows = run.start..run.end();
    let Some(merge) = images.and_then(|images| images.merge) else {
        to.iter_mut().zip(rows).for_each(|(to, row)| *to = row as i32);
        return run.input.len();
    };
    let spans = run.images.as_deref().unwrap_or_default();
    let numbers = positions(spans, merge, rows);
    let numbers = numbers.as_flattened();
    to.iter_mut()
        .zip(numbers)
        .for_each(|(to, &number)| *to = number as i32);
    numbers.len()
}

/// Whether a token's sampling depends on those before it, or on biases.
fn plan_needs_lists(plan: &StepPlan) -> bool {
    let mut specs = plan.runs.iter().filter_map(|run| run.sample.as_ref());
    specs.any(|spec| spec.params.needs_history() || !spec.params.logit_bias().is_empty())
}

/// Where the sections lie. Those of a graph come first and depend on its size alone; the rest may be of any length.
fn layout(counts: &Counts, planners: &[AttentionPlanners]) -> StepInput {
    fn sections<T: Pod>(layout: &mut Layout, count: usize, len: usize) -> Vec<Section<T>> {
        (0..count).map(|_| layout.section(len)).collect()
    }
    let mut layout = Layout::default();
    let mut input = StepInput {
        rows: counts.rows,
        is_long: false,
        samples: counts.samples,
        tokens: layout.section(counts.rows),
        real_rows: layout.section(1),
        positions: layout.section(counts.rows * counts.numbers),
        slots: sections(&mut layout, counts.tables, counts.rows),
        states: counts.states.layout(&mut layout),
        sample_at: counts.gather.then(|| layout.section(counts.samples)),
        spans: layout.section(2 * counts.spans),
        sample_rows: layout.section(counts.sample_rows),
        deferred: None,
        late_rows: None,
        decode: (counts.decode_runs > 0).then(|| DecodeInput {
            runs: sections(&mut layout, counts.tables, counts.decode_runs),
            work: planners
                .iter()
                .map(|planners| {
                    let items = layout.section(planners.decode.max_items());
                    (layout.section(1), items)
                })
                .collect(),
        }),
        prefill: (counts.prefill_runs > 0).then(|| PrefillInput {
            runs: sections(&mut layout, counts.tables, counts.prefill_runs),
            work: planners
                .iter()
                .map(|planners| {
                    let entries = planners.prefill.max_entries(counts.rows, counts.prefill_runs);
                    (PrefillPlan::default(), layout.section(entries))
                })
                .collect(),
            ends: layout.section(counts.ends),
        }),
        blocks: layout.section(counts.pages),
        image_rows: layout.section(2 * counts.image_rows),
        history: layout.section(counts.history),
        biases: layout.section(counts.biases),
        sample_parts: Vec::new(),
        scored: 0,
        slot: 0,
        bytes: 0,
    };
    input.late_rows = (counts.late_rows > 0).then(|| layout.section(counts.late_rows));
    input.bytes = layout.bytes();
    input
}
