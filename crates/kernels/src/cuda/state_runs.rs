use bytemuck::{Pod, Zeroable};

use crate::StateRun;

/// Constants of `kernels/include/delta_conv.cuh` and `delta_chunk.cuh`.
const TILE_ROWS: usize = 32;
pub(super) const CHUNK: usize = 64;

/// A [`StateRun`] in device memory, or padding: `after` below 0, for which no state is read or written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C, align(16))]
pub struct GpuStateRun {
    /// First row of the step's matrices.
    pub first_row: i32,
    /// Rows.
    pub len: i32,
    /// The slot of the state before the first row; -1 where that is zero.
    pub before: i32,
    /// The slot of the state after the last row; -1 is padding.
    pub after: i32,
    /// Tokens of the request before the first row.
    pub start: i32,
    in_chunks: i32,
    _unused: [i32; 2],
}

impl GpuStateRun {
    /// No rows of nobody.
    pub const PADDING: Self = Self {
        first_row: 0,
        len: 0,
        before: -1,
        after: -1,
        start: 0,
        in_chunks: 0,
        _unused: [0; 2],
    };

    /// A run behind `start` tokens of its request, computed in chunks or token by token.
    pub fn new(run: StateRun, start: usize, in_chunks: bool) -> Self {
        Self {
            first_row: run.first_row as i32,
            len: run.len as i32,
            before: run.before.map_or(-1, |slot| slot as i32),
            after: run.after as i32,
            start: start as i32,
            in_chunks: in_chunks.into(),
            _unused: [0; 2],
        }
    }

    /// Whether it is computed in chunks, where there are kernels for them.
    pub fn in_chunks(&self) -> bool {
        self.in_chunks != 0
    }

    /// Whether it is one token that is not in chunks, or padding.
    pub fn is_of_one_token(&self) -> bool {
        !self.in_chunks() && self.len <= 1
    }
}

/// Rows of a run that a block goes through: which run, and its first row within the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C, align(8))]
pub struct GpuStateTile {
    /// Index of the run.
    pub run: i32,
    /// Rows of the run before it.
    pub first: i32,
}

impl GpuStateTile {
    /// Tiles of 32 rows of a step's runs; padding has one each.
    pub fn all(runs: &[GpuStateRun]) -> impl Iterator<Item = Self> {
        (0..).zip(runs).flat_map(|(run, of)| {
            let firsts = (0..of.len.max(1)).step_by(TILE_ROWS);
            firsts.map(move |first| Self { run, first })
        })
    }

    /// Most of them of any step of so many rows and runs.
    pub fn most(rows: usize, runs: usize) -> usize {
        rows / TILE_ROWS + runs
    }

    /// Chunks of the runs that are computed so: each ends at a multiple of 64 tokens of its request, or with the run.
    pub fn chunks(runs: &[GpuStateRun]) -> impl Iterator<Item = Self> {
        let in_chunks = (0..).zip(runs).filter(|(_, run)| run.in_chunks());
        in_chunks.flat_map(|(run, of)| {
            let behind = of.start % CHUNK as i32;
            let firsts = (-behind..of.len).step_by(CHUNK);
            firsts.map(move |first| Self {
                run,
                first: first.max(0),
            })
        })
    }

    /// Most of those of any step of so many rows and runs.
    pub fn most_chunks(rows: usize, runs: usize) -> usize {
        rows / CHUNK + 2 * runs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_and_chunks_cover_every_run() {
        let run = |first_row, len, start, in_chunks| {
            let run = StateRun {
                first_row,
                len,
                before: None,
                after: 0,
            };
            GpuStateRun::new(run, start, in_chunks)
        };
        let runs = [
            run(0, 70, 0, true),
            run(70, 32, 64, true),
            run(102, 33, 40, true),
            run(135, 1, 64, true),
            run(136, 1, 95, false),
            run(137, 40, 7, false),
            GpuStateRun::PADDING,
        ];
        let firsts = |tiles: &mut dyn Iterator<Item = GpuStateTile>| {
            let firsts = tiles.map(|tile| (tile.run, tile.first));
            firsts.collect::<Vec<_>>()
        };
        let tiles = firsts(&mut GpuStateTile::all(&runs));
        let long = [(0, 0), (0, 32), (0, 64), (1, 0), (2, 0), (2, 32)];
        assert_eq!(
            tiles,
            [&long[..], &[(3, 0), (4, 0), (5, 0), (5, 32), (6, 0)]].concat()
        );
        assert!(tiles.len() <= GpuStateTile::most(177, runs.len()));
        let chunks = firsts(&mut GpuStateTile::chunks(&runs));
        assert_eq!(chunks, [(0, 0), (0, 64), (1, 0), (2, 0), (2, 24), (3, 0)]);
        assert!(chunks.len() <= GpuStateTile::most_chunks(177, runs.len()));
    }
}
