//! States of fixed size, and where those of a step's runs are.

use std::cmp::Reverse;
use std::ops::Range;

use plimsoll_core::{CacheGroups, Component, StateSlot, StepPlan};
use plimsoll_device::cuda::{DeviceError, Gpu, GpuSlab, GpuSlice};
use plimsoll_kernels::StateRun;
use plimsoll_kernels::cuda::{GpuStateRun, GpuStateTile};

use super::staging::{Layout, Section, Staging};
use crate::DecoderSpec;
use crate::state::StateCache;

/// The states of fixed size of all slots, as [`StateCache`] has them on a CPU.
#[derive(Debug)]
pub(super) struct States {
    /// None where no layer has a state.
    slab: Option<GpuSlab>,
    /// Of each layer that has states: those of the convolution and those of the recurrence, in elements.
    layers: Vec<[Range<usize>; 2]>,
}

impl States {
    /// Zeroed.
    pub(super) fn new(gpu: &Gpu, spec: &DecoderSpec, slots: usize) -> Result<Self, DeviceError> {
        let bytes = Self::bytes(spec, slots);
        let bytes = usize::try_from(bytes)
            .ok()
            .filter(|&bytes| bytes < usize::MAX)
            .ok_or_else(|| gpu.budget().oom(Component::States, bytes))?;
        let slab = match spec.delta_nets().next() {
            None => None,
            Some(_) => {
                let slab = gpu.alloc(Component::States, bytes)?;
                gpu.fill(slab.slice(), 0)?;
                Some(slab)
            }
        };
        let mut end = 0;
        let layers = spec.delta_nets().map(|delta_net| {
            let layout = &delta_net.layout;
            [layout.conv_state(), layout.head_states()].map(|elements| {
                let start = end;
                end += slots * elements;
                start..end
            })
        });
        Ok(Self {
            layers: layers.collect(),
            slab,
        })
    }

    /// Bytes of all slots; `u64::MAX` if they fit no memory.
    pub(super) fn bytes(spec: &DecoderSpec, slots: usize) -> u64 {
        StateCache::slot_bytes(spec).saturating_mul(slots as u64)
    }

    /// Those of a layer, by its index among the layers that have any: of the convolution, and of the recurrence.
    ///
    /// # Panics
    /// If there are none.
    pub(super) fn of(&self, layer: usize) -> [GpuSlice<'_, f32>; 2] {
        let slab = self.slab.as_ref().expect("a layer with a recurrence has states");
        let [conv, heads] = self.layers[layer].clone();
        let all = slab.slice::<f32>();
        [all.range(conv), all.range(heads)]
    }
}

/// All runs of a step, and how they are cut into tiles and chunks.
#[derive(Clone, Copy, Debug)]
pub(super) struct StateInput {
    pub(super) runs: Section<GpuStateRun>,
    pub(super) tiles: Section<GpuStateTile>,
    pub(super) chunks: Section<GpuStateTile>,
    /// Runs in chunks, which come first.
    pub(super) in_chunks: usize,
    /// Of one token and not in chunks, or padding, which come last.
    pub(super) of_one_token: usize,
}

/// Elements of the sections of a [`StateInput`]; zero where no layer has a state.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct StateCounts {
    runs: usize,
    tiles: usize,
    chunks: usize,
    in_chunks: usize,
    of_one_token: usize,
}

impl StateCounts {
    /// Of the largest step.
    pub(super) fn most(groups: &CacheGroups, rows: usize, runs: usize) -> Self {
        match groups.state_layers() {
            0 => Self::default(),
            _ => Self {
                runs,
                tiles: GpuStateTile::most(rows, runs),
                chunks: GpuStateTile::most_chunks(rows, runs),
                in_chunks: runs,
                of_one_token: 0,
            },
        }
    }

    pub(super) fn layout(self, layout: &mut Layout) -> Option<StateInput> {
        (self.runs > 0).then(|| StateInput {
            runs: layout.section(self.runs),
            tiles: layout.section(self.tiles),
            chunks: layout.section(self.chunks),
            in_chunks: self.in_chunks,
            of_one_token: self.of_one_token,
        })
    }
}

/// What of a [`StateInput`] is being packed; nothing where no layer has a state.
#[derive(Debug, Default)]
pub(super) struct StateLists {
    runs: Vec<GpuStateRun>,
    tiles: Vec<GpuStateTile>,
    chunks: Vec<GpuStateTile>,
}

impl StateLists {
    /// Of a checked plan: those in chunks first, and of each kind the longest first, padded to at least so many.
    pub(super) fn fill(&mut self, plan: &StepPlan, padded: usize) {
        let mut first_row = 0;
        self.runs.clear();
        for run in &plan.runs {
            let len = run.input.len();
            self.runs.extend(run.state.map(|state| {
                let rows = StateRun {
                    first_row,
                    len,
                    before: state.before.map(StateSlot::index),
                    after: state.after.index(),
                };
                GpuStateRun::new(rows, run.start, state.in_chunks)
            }));
            first_row += len;
        }
        self.arrange(padded);
    }

    fn arrange(&mut self, padded: usize) {
        self.runs.sort_by_key(|run| Reverse((run.in_chunks(), run.len)));
        let len = self.runs.len().max(padded);
        self.runs.resize(len, GpuStateRun::PADDING);
        self.tiles.clear();
        self.tiles.extend(GpuStateTile::all(&self.runs));
        self.chunks.clear();
        self.chunks.extend(GpuStateTile::chunks(&self.runs));
    }

    pub(super) fn counts(&self) -> StateCounts {
        StateCounts {
            runs: self.runs.len(),
            tiles: self.tiles.len(),
            chunks: self.chunks.len(),
            in_chunks: self.runs.partition_point(GpuStateRun::in_chunks),
            of_one_token: self.runs.len() - self.runs.partition_point(|run| !run.is_of_one_token()),
        }
    }

    /// Writes them where they were laid out.
    pub(super) fn write(&self, staging: &mut Staging, slot: usize, input: StateInput) {
        staging.host(slot, input.runs).copy_from_slice(&self.runs);
        staging.host(slot, input.tiles).copy_from_slice(&self.tiles);
        staging.host(slot, input.chunks).copy_from_slice(&self.chunks);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_come_first_and_single_tokens_last() {
        let run = |slot, len, in_chunks| {
            let rows = StateRun {
                first_row: 0,
                len,
                before: None,
                after: slot,
            };
            GpuStateRun::new(rows, 0, in_chunks)
        };
        let mut lists = StateLists {
            runs: vec![
                run(0, 1, false),
                run(1, 9, false),
                run(2, 1, true),
                run(3, 1, false),
                run(4, 70, true),
            ],
            ..StateLists::default()
        };
        lists.arrange(6);
        let slots: Vec<i32> = lists.runs.iter().map(|run| run.after).collect();
        assert_eq!(slots, [4, 2, 1, 0, 3, -1]);
        let counts = lists.counts();
        assert_eq!((counts.in_chunks, counts.of_one_token), (2, 3));
        // As in a graph.
        let mut lists = StateLists {
            runs: vec![run(0, 1, false), run(1, 1, false)],
            ..StateLists::default()
        };
        lists.arrange(4);
        let counts = lists.counts();
        assert_eq!((counts.in_chunks, counts.of_one_token), (0, 4));
    }
}
