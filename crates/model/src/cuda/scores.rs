//! Log-probabilities of prompt tokens: what a step needs for them besides logits. On the device it is part of the step's arena.

use plimsoll_core::{Logprobs, PromptLogprob, ScoreSpec, StepPlan};
use plimsoll_device::Pod;
use plimsoll_device::cuda::{Gpu, GpuError, GpuSlice, PinnedSlab};
use plimsoll_kernels::SampleError;
use plimsoll_kernels::cuda::{RowLogprobs, SampleRow, TokenRank};

use super::input::StepInput;
use super::shape::padded_rows;
use super::staging::STEPS_IN_FLIGHT;
use super::staging::{Layout, Section};

/// Rows whose logits exist at one time to be scored: those of a long prompt would be the largest memory of all.
pub(super) const SCORE_ROWS: usize = 256;

/// Where everything lies in a step of so many rows, as if all were scored: a step's memory depends on its rows alone, not on
/// how many of them are scored.
#[derive(Clone, Copy, Debug)]
pub(super) struct ScoreLayout {
    at: Section<i32>,
    targets: Section<i32>,
    sample_rows: Section<SampleRow>,
    /// Bytes up to here come from the host.
    sent: usize,
    best: Section<i32>,
    likeliest: Section<RowLogprobs>,
    ranks: Section<TokenRank>,
    /// Bytes of all.
    pub(super) bytes: usize,
}

/// The elements of a section that are in use.
fn front<'a, T: Pod>(len: usize, section: Section<T>, memory: GpuSlice<'a, u8>) -> GpuSlice<'a, T> {
    section.within(memory).range(0..len)
}

impl ScoreLayout {
    /// Of a step of so many tokens or, which is the same, of as many rows as these are padded to.
    pub(super) fn new(tokens: usize) -> Self {
        let rows = padded_rows(tokens);
        let mut layout = Layout::default();
        let (at, targets) = (layout.section(rows), layout.section(rows));
        let sample_rows = layout.section(rows.min(SCORE_ROWS));
        let sent = layout.bytes();
        Self {
            at,
            targets,
            sample_rows,
            sent,
            best: layout.section(rows),
            likeliest: layout.section(rows),
            ranks: layout.section(rows),
            bytes: layout.bytes(),
        }
    }
}

/// A step's scored rows on the device.
#[derive(Clone, Copy, Debug)]
pub(super) struct ScoreSlices<'a> {
    /// Rows of the batch.
    pub(super) at: GpuSlice<'a, i32>,
    /// The tokens whose log-probabilities are wanted, one per row.
    pub(super) targets: GpuSlice<'a, i32>,
    /// Of the rows that are scored at one time.
    pub(super) sample_rows: GpuSlice<'a, SampleRow>,
    /// Out: the likeliest token of each row, or -1.
    pub(super) best: GpuSlice<'a, i32>,
    /// Out: the likeliest tokens.
    pub(super) likeliest: GpuSlice<'a, RowLogprobs>,
    /// Out: about the targets.
    pub(super) ranks: GpuSlice<'a, TokenRank>,
}

/// The host's side of each step in flight.
#[derive(Debug)]
pub(super) struct Scores {
    gpu: Gpu,
    slots: Vec<Slot>,
}

#[derive(Debug)]
struct Slot {
    input: PinnedSlab,
    best: PinnedSlab,
    likeliest: PinnedSlab,
    ranks: PinnedSlab,
}

impl Scores {
    /// Room for steps of at most `rows` rows.
    pub(super) fn new(gpu: &Gpu, rows: usize) -> Result<Self, GpuError> {
        let layout = ScoreLayout::new(rows);
        let slot = |_| {
            Ok(Slot {
                input: PinnedSlab::new(gpu, layout.sent)?,
                best: PinnedSlab::new(gpu, layout.best.bytes())?,
                likeliest: PinnedSlab::new(gpu, layout.likeliest.bytes())?,
                ranks: PinnedSlab::new(gpu, layout.ranks.bytes())?,
            })
        };
        Ok(Self {
            gpu: gpu.clone(),
            slots: (0..STEPS_IN_FLIGHT).map(slot).collect::<Result<_, GpuError>>()?,
        })
    }

    /// Packs what a checked plan asks for into the memory of step slot `slot`, whose last copy is done. Returns the rows.
    pub(super) fn pack(&mut self, slot: usize, plan: &StepPlan) -> usize {
        let scored = plan.num_scored();
        if scored == 0 {
            return 0;
        }
        let layout = ScoreLayout::new(plan.num_tokens());
        let input = &mut self.slots[slot].input;
        let (mut first_row, mut rows, mut targets, mut top) = (0, Vec::new(), Vec::new(), 0);
        for run in &plan.runs {
            if let Some(score) = &run.score {
                rows.extend(score.rows().map(|row| (first_row + row) as i32));
                targets.extend(score.targets.iter().map(|&token| token as i32));
                top = top.max(score.top);
            }
            first_row += run.input.len();
        }
        layout.at.host(input)[..scored].copy_from_slice(&rows);
        layout.targets.host(input)[..scored].copy_from_slice(&targets);
        // All as many as any of them wants.
        layout.sample_rows.host(input).fill(SampleRow::likeliest(top));
        scored
    }

    /// Starts to send what was packed to the step's memory for it; `None` where nothing is scored.
    ///
    /// # Safety
    /// The step's slot must not be packed again until the copy is done.
    pub(super) unsafe fn send<'a>(
        &self,
        input: &StepInput,
        memory: GpuSlice<'a, u8>,
    ) -> Result<Option<ScoreSlices<'a>>, GpuError> {
        if input.scored == 0 {
            return Ok(None);
        }
        let layout = ScoreLayout::new(input.rows);
        let from = &self.slots[input.slot].input;
        // SAFETY: the caller's promise; whoever drops this waits for the stream.
        unsafe { self.gpu.upload_async(from, 0, memory.range(0..layout.sent))? };
        let at_once = 0..input.scored.min(SCORE_ROWS);
        Ok(Some(ScoreSlices {
            at: front(input.scored, layout.at, memory),
            targets: front(input.scored, layout.targets, memory),
            sample_rows: layout.sample_rows.within(memory).range(at_once),
            best: front(input.scored, layout.best, memory),
            likeliest: front(input.scored, layout.likeliest, memory),
            ranks: front(input.scored, layout.ranks, memory),
        }))
    }

    /// Starts to copy what was found for step slot `slot`, which nobody reads until the step has ended.
    pub(super) fn fetch(&mut self, slot: usize, found: &ScoreSlices<'_>) -> Result<(), GpuError> {
        let Slot {
            best,
            likeliest,
            ranks,
            ..
        } = &mut self.slots[slot];
        // SAFETY: the slot's last step has ended and was read; whoever drops this waits for the stream.
        unsafe {
            self.gpu.download_async(found.best.cast(), best)?;
            self.gpu.download_async(found.likeliest.cast(), likeliest)?;
            self.gpu.download_async(found.ranks.cast(), ranks)
        }
    }

    /// What the ended step in slot `slot` found for `spec`, whose rows are its scored ones from `first` on.
    pub(super) fn scored(
        &self,
        slot: usize,
        first: usize,
        spec: &ScoreSpec,
    ) -> Result<Vec<PromptLogprob>, SampleError> {
        let Slot {
            best,
            likeliest,
            ranks,
            ..
        } = &self.slots[slot];
        let one = |(row, &token)| {
            if best.as_slice::<i32>()[row] < 0 {
                return Err(SampleError::NotFinite);
            }
            let TokenRank { logprob, rank } = ranks.as_slice::<TokenRank>()[row];
            let mut top = Logprobs::from(&likeliest.as_slice::<RowLogprobs>()[row]).top;
            top.truncate(spec.top);
            Ok(PromptLogprob {
                token,
                logprob,
                rank,
                top,
            })
        };
        (first..).zip(&spec.targets).map(one).collect()
    }
}
