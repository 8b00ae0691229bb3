use plimsoll_core::FillMasks;
use plimsoll_device::cuda::{DeviceError, Gpu, GpuError, GpuSlice};
use plimsoll_kernels::cuda::SampleRow;

use super::staging::STEPS_IN_FLIGHT;
use super::staging::{Layout, Section, Staging};
use crate::state::mask_words;

/// What the sampling of a step needs that waited for masks: its rows, and the tokens that each may choose. It is sent apart from
/// the rest, behind which it comes.
#[derive(Debug)]
pub(super) struct Masks {
    staging: Staging,
    sections: Sections,
}

#[derive(Clone, Copy, Debug)]
struct Sections {
    rows: Section<SampleRow>,
    /// `[rows, words]`; only those of masked rows are written, and read.
    masks: Section<u32>,
    words: usize,
    bytes: usize,
}

impl Sections {
    fn new(most_rows: usize, vocab_size: usize) -> Self {
        let (mut layout, words) = (Layout::default(), mask_words(vocab_size));
        Self {
            rows: layout.section(most_rows),
            masks: layout.section(most_rows * words),
            words,
            bytes: layout.bytes(),
        }
    }
}

impl Masks {
    /// Room for steps that sample from at most `rows` rows.
    pub(super) fn new(gpu: &Gpu, rows: usize, vocab_size: usize) -> Result<Self, DeviceError> {
        let sections = Sections::new(rows, vocab_size);
        Ok(Self {
            staging: Staging::new(gpu, sections.bytes, STEPS_IN_FLIGHT)?,
            sections,
        })
    }

    /// Bytes of device memory that it takes.
    pub(super) fn bytes(rows: usize, vocab_size: usize) -> usize {
        Sections::new(rows, vocab_size).bytes
    }

    /// Writes the rows of the step in slot `slot`, whose last copy is done, and has `fill` write the masks of those that are
    /// masked.
    pub(super) fn write(&mut self, slot: usize, rows: &[SampleRow], fill: &mut FillMasks<'_>) {
        let Sections {
            rows: section,
            masks,
            words,
            ..
        } = self.sections;
        self.staging.host(slot, section)[..rows.len()].copy_from_slice(rows);
        let masks = self.staging.host(slot, masks).chunks_exact_mut(words);
        let masked = masks.zip(rows).filter(|(_, row)| row.is_masked());
        fill(&mut masked.map(|(mask, _)| mask).collect::<Vec<_>>());
    }

    /// Starts to send the first `rows` rows of slot `slot`, and their masks.
    ///
    /// # Safety
    /// The slot must not be written again until the copy is done.
    pub(super) unsafe fn send(&self, slot: usize, rows: usize) -> Result<(), GpuError> {
        let Sections { masks, words, .. } = self.sections;
        // SAFETY: the caller's promise.
        unsafe { self.staging.send(slot, masks.front(rows * words).end(), None) }
    }

    /// The device's side of the first `rows` rows, and of their masks.
    pub(super) fn device(&self, rows: usize) -> (GpuSlice<'_, SampleRow>, GpuSlice<'_, u32>) {
        let Sections {
            rows: section,
            masks,
            words,
            ..
        } = self.sections;
        (
            self.staging.device(section.front(rows)),
            self.staging.device(masks.front(rows * words)),
        )
    }

    /// Words of a mask.
    pub(super) fn words(&self) -> usize {
        self.sections.words
    }
}
