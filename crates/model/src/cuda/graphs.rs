use std::sync::{Mutex, PoisonError};

use plimsoll_core::BlockSize;
use plimsoll_device::cuda::{DeviceError, Gpu, Graph};

use super::shape::DecodeStep;

/// Decode steps recorded as CUDA graphs, those of [`steps`]: a step of fewer requests runs the next larger one, with padding rows.
#[derive(Debug)]
pub(super) struct Graphs {
    gpu: Gpu,
    /// Ascending.
    ladder: Vec<(DecodeStep, Graph)>,
    /// Tokens of context up to which the graph of one row has whole layers in one launch; longer ones have a graph of their own.
    pub(super) longest_whole: Option<usize>,
}

impl Graphs {
    /// No graph at all.
    pub(super) fn none(gpu: &Gpu) -> Self {
        Self {
            gpu: gpu.clone(),
            ladder: Vec::new(),
            longest_whole: None,
        }
    }

    /// Captures one graph for each of `steps`, which ascend, the largest first; before each, `progress` gets how many are done,
    /// and of how many. Every step must have run once: what a first run loads is not the graphs'.
    ///
    /// # Errors
    /// As `capture`, or [`DeviceError::Oom`] if the account has no room for what they took.
    pub(super) fn capture(
        gpu: &Gpu,
        steps: &[DecodeStep],
        progress: &mut dyn FnMut(usize, usize),
        mut capture: impl FnMut(DecodeStep) -> Result<Graph, DeviceError>,
    ) -> Result<Self, DeviceError> {
        let mut graphs = Self::none(gpu);
        gpu.capture_graphs(|| {
            for &step in steps.iter().rev() {
                progress(graphs.ladder.len(), steps.len());
                graphs.ladder.push((step, capture(step)?));
            }
            Ok(())
        })?;
        graphs.ladder.reverse();
        Ok(graphs)
    }

    /// The step whose graph serves so many decoding requests, of one long context as `is_long` says.
    pub(super) fn step_for(&self, runs: usize, is_long: bool) -> Option<DecodeStep> {
        let wanted = DecodeStep { rows: runs, is_long };
        let at = self.ladder.partition_point(|(step, _)| *step < wanted);
        self.ladder.get(at).map(|(step, _)| *step)
    }

    /// The graph of that step.
    pub(super) fn get(&self, step: DecodeStep) -> Option<&Graph> {
        let at = self.ladder.binary_search_by_key(&step, |(step, _)| *step);
        at.ok().map(|at| &self.ladder[at].1)
    }
}

impl Drop for Graphs {
    fn drop(&mut self) {
        if let Err(error) = self.gpu.destroy_graphs(|| self.ladder.clear()) {
            tracing::error!(%error, "the memory of graphs could not be measured");
        }
    }
}

/// Whose decode steps have all run: what a first run loads is there, so that the next state of the same block size and most rows can
/// capture its graphs at once.
#[derive(Debug, Default)]
pub(super) struct WarmedUp(Mutex<Option<(BlockSize, usize)>>);

impl WarmedUp {
    pub(super) fn is_for(&self, shape: (BlockSize, usize)) -> bool {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) == Some(shape)
    }

    pub(super) fn set(&self, shape: (BlockSize, usize)) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(shape);
    }
}

/// Batch sizes that get a graph: 1, 2, 4, then multiples of 8 up to 256, of 32 up to 512 and of 64 from there on, and `max`
/// itself. So at most an eighth of a step's rows is padding from 64 requests on.
pub(super) fn ladder(max: usize) -> Vec<usize> {
    let mut sizes = Vec::new();
    let mut size = 1;
    while size < max {
        sizes.push(size);
        size += match size {
            1 => 1,
            2 => 2,
            3..8 => 4,
            8..256 => 8,
            256..512 => 32,
            _ => 64,
        };
    }
    sizes.push(max);
    sizes
}

/// The decode steps that get a graph: of the batch sizes of [`ladder`], and of one row with a long context, if that is a step of its own.
pub(super) fn steps(max: usize, has_long_row: bool) -> Vec<DecodeStep> {
    let mut steps: Vec<_> = ladder(max)
        .into_iter()
        .map(|rows| DecodeStep { rows, is_long: false })
        .collect();
    if has_long_row {
        steps.insert(
            1,
            DecodeStep {
                rows: 1,
                is_long: true,
            },
        );
    }
    steps
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ladder_ends_at_its_maximum_and_pads_little() {
        for max in 1..1200 {
            let sizes = ladder(max);
            assert!(sizes.is_sorted_by(|a, b| a < b), "{sizes:?}");
            assert_eq!((sizes[0], *sizes.last().unwrap()), (1, max));
            for runs in 1..=max {
                let size = sizes[sizes.partition_point(|&size| size < runs)];
                let padding = size - runs;
                assert!(
                    padding < 8 || runs >= 64 && padding * 8 <= runs,
                    "{runs} in {size}"
                );
            }
        }
        assert_eq!(ladder(1), [1]);
        assert_eq!(ladder(24), [1, 2, 4, 8, 16, 24]);
        assert_eq!(ladder(256).len(), 35);
    }

    #[test]
    fn one_row_with_a_long_context_is_a_step_of_its_own_where_layers_are_whole() {
        let decode = |(rows, is_long)| DecodeStep { rows, is_long };
        let expected = [(1, false), (1, true), (2, false), (4, false), (8, false)];
        assert_eq!(steps(8, true), expected.map(decode));
        assert_eq!(steps(1, true), [(1, false), (1, true)].map(decode));
        assert_eq!(steps(2, false), [(1, false), (2, false)].map(decode));
        for max in 1..1200 {
            assert!(steps(max, true).is_sorted_by(|a, b| a < b), "{max}");
        }
    }
}
