use plimsoll_core::{Component, Oom};
use plimsoll_device::Charge;
use plimsoll_device::cuda::{Gpu, GpuError, Graph};

/// Decode steps recorded as CUDA graphs, one per batch size of a ladder: a step of fewer requests runs the next larger one,
/// with padding rows.
#[derive(Debug, Default)]
pub(super) struct Graphs {
    /// Ascending.
    ladder: Vec<(usize, Graph)>,
    /// What they take on the device, measured.
    _charge: Option<Charge>,
}

impl Graphs {
    /// Captures one graph per size, largest first, so that what the smaller ones need is there already; before each,
    /// `progress` gets how many are done, and of how many.
    ///
    /// # Errors
    /// As `capture`, or [`Oom`] if the account has no room for what they took.
    pub(super) fn capture<E: From<GpuError> + From<Oom>>(
        gpu: &Gpu,
        max_num_seqs: usize,
        progress: &mut dyn FnMut(usize, usize),
        mut capture: impl FnMut(usize) -> Result<Graph, E>,
    ) -> Result<Self, E> {
        gpu.synchronize()?;
        // The arena grows meanwhile, which is in the account already.
        let held = || gpu.budget().meters().reserved;
        let (before, held_before) = (gpu.memory_info()?.free, held());
        let mut graphs = Vec::new();
        let sizes = ladder(max_num_seqs);
        for &size in sizes.iter().rev() {
            progress(graphs.len(), sizes.len());
            graphs.push((size, capture(size)?));
        }
        graphs.reverse();
        gpu.synchronize()?;
        let gone = before.saturating_sub(gpu.memory_info()?.free);
        let taken = gone.saturating_sub(held().saturating_sub(held_before));
        Ok(Self {
            ladder: graphs,
            _charge: Some(gpu.budget().charge(Component::Graphs, taken)?),
        })
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

/// Batch sizes that get a graph: 1, 2, 4, then multiples of 8 up to 256, of 16 up to 512 and of 32 from there on, and `max`
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
            256..512 => 16,
            _ => 32,
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
