use std::sync::{Mutex, PoisonError};

use plimsoll_core::BlockSize;
use plimsoll_device::cuda::{DeviceError, Gpu, Graph};

/// Decode steps recorded as CUDA graphs, one per batch size of a ladder: a step of fewer requests runs the next larger one,
/// with padding rows.
#[derive(Debug)]
pub(super) struct Graphs {
    gpu: Gpu,
    /// Ascending.
    ladder: Vec<(usize, Graph)>,
}

impl Graphs {
    /// No graph at all.
    pub(super) fn none(gpu: &Gpu) -> Self {
        Self {
            gpu: gpu.clone(),
            ladder: Vec::new(),
        }
    }

    /// Captures one graph for each of `sizes`, which ascend, the largest first; before each, `progress` gets how many are done,
    /// and of how many. Every size must have run once: what a first run loads is not the graphs'.
    ///
    /// # Errors
    /// As `capture`, or [`DeviceError::Oom`] if the account has no room for what they took.
    pub(super) fn capture(
        gpu: &Gpu,
        sizes: &[usize],
        progress: &mut dyn FnMut(usize, usize),
        mut capture: impl FnMut(usize) -> Result<Graph, DeviceError>,
    ) -> Result<Self, DeviceError> {
        let mut graphs = Self::none(gpu);
        gpu.capture_graphs(|| {
            for &size in sizes.iter().rev() {
                progress(graphs.ladder.len(), sizes.len());
                graphs.ladder.push((size, capture(size)?));
            }
            Ok(())
        })?;
        graphs.ladder.reverse();
        Ok(graphs)
    }

    /// The batch size whose graph serves a step of `runs` decoding requests.
    pub(super) fn size_for(&self, runs: usize) -> Option<usize> {
        let at = self.ladder.partition_point(|(size, _)| *size < runs);
        self.ladder.get(at).map(|(size, _)| *size)
    }

    /// The graph of that batch size.
    pub(super) fn get(&self, size: usize) -> Option<&Graph> {
        let at = self.ladder.binary_search_by_key(&size, |(size, _)| *size);
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
}
