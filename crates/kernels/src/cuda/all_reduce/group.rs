//! Making a group: buffers, a check that peers' memory holds what was written to it, and which way is fastest for which size.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};
use std::thread;

use half::bf16;
use plimsoll_core::Component;
use plimsoll_device::cuda::{DeviceError, Gpu, GpuError, GpuSlice, Nccl, PinnedSlab, SideStream};

use super::layout::{LEAST_HALVED, communication_bytes};
use super::{AllReduce, AllReducePath, Buffers, Peers, VEC, Way, Ways};

/// Bytes that ways are measured with: 1, 16, 64, 512, 2048 and 8192 rows of 4096 elements.
const SIZES: [usize; 6] = [8 << 10, 128 << 10, 512 << 10, 4 << 20, 16 << 20, 64 << 20];
/// Microseconds by each way (few, many, NCCL) that there is, for each of [`SIZES`].
type Times = Vec<[Option<f32>; 3]>;

/// Calls in one measurement.
const CALLS: usize = 10;

impl AllReduce {
    /// A group of two, four or eight GPUs, one rank each, in order. Allocates [`communication_bytes`] of each, checks that what
    /// peers write arrives, and measures which way is fastest for which size. Each rank may move to a thread of its own.
    ///
    /// # Errors
    /// [`DeviceError::Oom`] if there is no room; [`DeviceError::Gpu`] if neither peers' memory nor NCCL serves.
    ///
    /// # Panics
    /// If there are not two, four or eight GPUs.
    pub fn group(gpus: &[Gpu], path: AllReducePath) -> Result<Vec<Self>, DeviceError> {
        assert!(matches!(gpus.len(), 2 | 4 | 8), "groups are of 2, 4 or 8 ranks");
        gpus.iter().for_each(Gpu::expect_peers);
        let through_peers = match path {
            AllReducePath::Nccl => None,
            AllReducePath::Peers | AllReducePath::Fastest => match Self::through_peers(gpus) {
                Ok(ranks) => Some(ranks),
                Err(DeviceError::Gpu(
                    error @ (GpuError::Unconnected { .. } | GpuError::WrongPeerData { .. }),
                )) => {
                    // The first reason is the one to tell, if NCCL is not there.
                    return Self::by_nccl(gpus).map_err(|other| match other {
                        GpuError::NoLibrary { .. } => error.into(),
                        other => other.into(),
                    });
                }
                Err(error) => return Err(error),
            },
        };
        let Some(mut ranks) = through_peers else {
            return Ok(Self::by_nccl(gpus)?);
        };
        if path == AllReducePath::Fastest {
            match Nccl::group(gpus) {
                Ok(nccl) => ranks
                    .iter_mut()
                    .zip(nccl)
                    .for_each(|(rank, nccl)| rank.nccl = Some(Mutex::new(nccl))),
                Err(GpuError::NoLibrary { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
        let times = measure(&mut ranks)?;
        let ways = crossovers(&times);
        for rank in &mut ranks {
            rank.ways = ways;
            rank.times.clone_from(&times);
            if ways.nccl == usize::MAX {
                rank.nccl = None;
            }
            rank.gpu.trim()?;
        }
        Ok(ranks)
    }

    fn by_nccl(gpus: &[Gpu]) -> Result<Vec<Self>, GpuError> {
        let ranks = Nccl::group(gpus)?.into_iter().zip(gpus).enumerate();
        let ranks = ranks.map(|(rank, (nccl, gpu))| Self {
            gpu: gpu.clone(),
            rank,
            ranks: gpus.len(),
            peers: None,
            nccl: Some(Mutex::new(nccl)),
            ways: Ways { few: 0, nccl: 0 },
            times: Vec::new(),
        });
        Ok(ranks.collect())
    }

    /// Whose peers' memory holds what was written to it.
    fn through_peers(gpus: &[Gpu]) -> Result<Vec<Self>, DeviceError> {
        for (gpu, peer) in gpus
            .iter()
            .flat_map(|gpu| gpus.iter().map(move |peer| (gpu, peer)))
        {
            if !gpu.reaches(peer)? {
                return Err(GpuError::Unconnected {
                    gpu: gpu.info().ordinal,
                    peer: peer.info().ordinal,
                }
                .into());
            }
        }
        let buffers = Arc::new(Buffers::new(gpus)?);
        let ranks = gpus.iter().enumerate().map(|(rank, gpu)| {
            Ok(Self {
                gpu: gpu.clone(),
                rank,
                ranks: gpus.len(),
                peers: Some(Peers::load(gpu, &buffers)?),
                nccl: None,
                ways: Ways {
                    few: usize::MAX,
                    nccl: usize::MAX,
                },
                times: Vec::new(),
            })
        });
        let mut ranks = ranks.collect::<Result<Vec<_>, GpuError>>()?;
        on_all(&mut ranks, Self::compare)?;
        let rooms = ranks.iter().map(|rank| rank.make_room(LEAST_HALVED, VEC));
        let rooms = rooms.collect::<Result<Option<Vec<_>>, _>>()?;
        if rooms.is_some() {
            on_all(&mut ranks, Self::compare_halves)?;
        }
        drop(rooms);
        Ok(ranks)
    }

    /// Sums and columns of a known pattern, by each kernel.
    fn compare(&self) -> Result<(), DeviceError> {
        // A vector of each thread, and several.
        for (way, len) in [(Way::Few, 100_000), (Way::Few, 600_000), (Way::Many, 4_500_008)] {
            self.compare_by(len, |x| self.sum_by(way, x))?;
        }
        self.compare_columns()
    }

    /// The same of columns that are gathered: more than one turn of the rings.
    fn compare_columns(&self) -> Result<(), DeviceError> {
        const ROWS: usize = 2;
        const WIDTH: usize = 600_000;
        let value = |rank: usize, i: usize| (rank * ROWS * WIDTH + i) as f32;
        let values: Vec<f32> = (0..ROWS * WIDTH).map(|i| value(self.rank, i)).collect();
        let all = self.ranks * values.len();
        let alloc = |len: usize| self.gpu.alloc(Component::Communication, len * size_of::<f32>());
        let (mine, out) = (alloc(values.len())?, alloc(all)?);
        let (mine, out) = (mine.slice().range(0..values.len()), out.slice().range(0..all));
        self.gpu.upload(&values, mine)?;
        self.gather(mine, ROWS, out)?;
        let found: Vec<f32> = self.gpu.download(out)?;
        self.check()?;
        let columns = found.chunks_exact(WIDTH).enumerate();
        let is_right = columns.into_iter().all(|(at, columns)| {
            let (row, rank) = (at / self.ranks, at % self.ranks);
            let mut columns = columns.iter().enumerate();
            columns.all(|(i, &found)| found == value(rank, row * WIDTH + i))
        });
        self.found(is_right)
    }

    /// Whether peers' memory held what was written to it.
    fn found(&self, is_right: bool) -> Result<(), DeviceError> {
        let gpu = self.gpu.info().ordinal;
        is_right
            .then_some(())
            .ok_or(GpuError::WrongPeerData { gpu }.into())
    }

    /// The same of sums in halves, by the copy engines.
    fn compare_halves(&self) -> Result<(), DeviceError> {
        let [first, second] = self
            .halves(LEAST_HALVED, VEC)
            .expect("there is room for so many rows");
        let (cut, len) = (first * VEC, (first + second) * VEC);
        self.compare_by(len, |x| {
            let halves = [x.range(0..cut), x.range(cut..len)];
            let sent = [self.send(0, halves[0])?, self.send(1, halves[1])?];
            self.sum_sent(sent[0], halves[0])?;
            self.sum_sent(sent[1], halves[1])
        })
    }

    /// Sums of a known pattern of so many elements.
    fn compare_by(
        &self,
        len: usize,
        sum: impl Fn(GpuSlice<'_, bf16>) -> Result<(), GpuError>,
    ) -> Result<(), DeviceError> {
        // Small integers, whose sums are exact.
        let pattern = |rank: usize, i: usize| ((i * 7 + i / 4096 + rank * 13) % 31) as f32;
        let values: Vec<bf16> = (0..len).map(|i| bf16::from_f32(pattern(self.rank, i))).collect();
        let slab = self
            .gpu
            .alloc(Component::Communication, size_of_val(values.as_slice()))?;
        let x = slab.slice::<bf16>().range(0..len);
        self.gpu.upload(&values, x)?;
        sum(x)?;
        let sums = self.gpu.download(x)?;
        self.check()?;
        let expected = |i| (0..self.ranks).map(|rank| pattern(rank, i)).sum::<f32>();
        let is_right = sums
            .iter()
            .enumerate()
            .all(|(i, sum)| sum.to_f32() == expected(i));
        self.found(is_right)
    }

    /// Microseconds of a sum of so many bytes, by each way that there is.
    fn time(&self, way: Way, bytes: usize) -> Result<f32, DeviceError> {
        let slab = self.gpu.alloc(Component::Communication, bytes)?;
        let x = slab.slice::<bf16>();
        self.gpu.fill(x.cast(), 0)?;
        self.sum_by(way, x)?;
        self.gpu.synchronize()?;
        let graph = self
            .gpu
            .capture(|| (0..CALLS).try_for_each(|_| self.sum_by(way, x)))?;
        let (start, end) = (self.gpu.event()?, self.gpu.event()?);
        // After the first, all ranks are at the same place.
        graph.launch()?;
        start.record()?;
        graph.launch()?;
        end.record()?;
        end.synchronize()?;
        self.check()?;
        Ok(start.elapsed_ms(&end)? * 1e3 / CALLS as f32)
    }

    fn times(&self) -> Result<Times, DeviceError> {
        let time = |way, bytes| self.time(way, bytes).map(Some);
        // Nothing more once one has failed: the other ranks would wait for what does not come.
        let times = SIZES.into_iter().map(|bytes| {
            let bytes = bytes.next_multiple_of(VEC * size_of::<bf16>());
            Ok([
                time(Way::Few, bytes)?,
                time(Way::Many, bytes)?,
                if self.nccl.is_some() {
                    time(Way::Nccl, bytes)?
                } else {
                    None
                },
            ])
        });
        times.collect()
    }

    /// What was measured when the group was made, one line for each size, and what follows from it: for logs.
    pub fn report(&self) -> String {
        let mut text = String::new();
        for (bytes, times) in SIZES.iter().zip(&self.times) {
            let of = |way: &str, time: Option<f32>| {
                time.map_or_else(String::new, |us| format!(" {way} {us:.1} us"))
            };
            let [few, many, nccl] = *times;
            text += &format!(
                "{} KiB:{}{}{}\n",
                bytes >> 10,
                of("one shot", few),
                of("two", many),
                of("NCCL", nccl)
            );
        }
        text + &self.ways.to_string()
    }
}

impl Buffers {
    fn new(gpus: &[Gpu]) -> Result<Self, DeviceError> {
        let (mut slabs, mut faults, mut sides) = (Vec::new(), Vec::new(), Vec::new());
        for gpu in gpus {
            let slab = gpu.alloc_for(Component::Communication, communication_bytes(gpus.len()), gpus)?;
            slabs.push(slab);
            faults.push(PinnedSlab::new(gpu, size_of::<u32>())?);
            if gpus.len() == 2 {
                sides.push(SideStream::new(gpu)?);
            }
        }
        let buffers = Self {
            gpus: gpus.to_vec(),
            slabs,
            faults,
            sides,
            rooms: gpus.iter().map(|_| AtomicU64::new(0)).collect(),
            area: AtomicU64::new(0),
        };
        (0..gpus.len()).try_for_each(|rank| buffers.clear(rank))?;
        Ok(buffers)
    }
}

/// What all ranks say, each on a thread of its own.
fn on_all<R: Send>(
    ranks: &mut [AllReduce],
    work: impl Fn(&AllReduce) -> Result<R, DeviceError> + Sync,
) -> Result<Vec<R>, DeviceError> {
    thread::scope(|scope| {
        let work = &work;
        let threads = ranks.iter_mut().map(|rank| {
            scope.spawn(move || {
                let rank = &*rank;
                // Nobody waits for one who has failed.
                work(rank).inspect_err(|_| rank.abandon())
            })
        });
        let threads: Vec<_> = threads.collect();
        let mut results = Vec::new();
        for thread in threads {
            results.push(
                thread
                    .join()
                    .unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
            );
        }
        // That others were told to stop is the least of the reasons.
        let is_reason = |result: &Result<R, DeviceError>| {
            !matches!(result, Err(DeviceError::Gpu(GpuError::Abandoned { .. })))
        };
        match results
            .iter()
            .position(|result| result.is_err() && is_reason(result))
        {
            Some(at) => Err(results.swap_remove(at).map(drop).unwrap_err()),
            None => results.into_iter().collect(),
        }
    })
}

/// From which sizes on which way is faster, by the slowest rank's times.
fn measure(ranks: &mut [AllReduce]) -> Result<Times, DeviceError> {
    let times = on_all(ranks, AllReduce::times)?;
    let slowest = |size: usize, way: usize| {
        let mut times = times.iter().map(|rank| rank[size][way]);
        times.try_fold(0.0_f32, |slowest, time| Some(slowest.max(time?)))
    };
    Ok((0..SIZES.len())
        .map(|size| [0, 1, 2].map(|way| slowest(size, way)))
        .collect())
}

/// From microseconds by size, in the order of [`SIZES`], and way (few, many, NCCL).
fn crossovers(times: &[[Option<f32>; 3]]) -> Ways {
    let beats = |a: Option<f32>, b: Option<f32>| a.is_some_and(|a| b.is_none_or(|b| a < b));
    // The last size at which few is no slower than many, and that at which NCCL is no faster than the better of both.
    let few = times.iter().rposition(|&[few, many, _]| !beats(many, few));
    let ours = times
        .iter()
        .rposition(|&[few, many, nccl]| !beats(nccl, few) || !beats(nccl, many));
    let up_to = |at: usize, bytes| if at + 1 == times.len() { usize::MAX } else { bytes };
    Ways {
        few: few.map_or(0, |at| up_to(at, SIZES[at])),
        nccl: ours.map_or(0, |at| up_to(at, SIZES[at] + 1)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fastest_way_is_taken_at_each_size() {
        let times = |few: &[f32], many: &[f32], nccl: &[f32]| -> Vec<[Option<f32>; 3]> {
            let at = |times: &[f32], i: usize| times.get(i).copied();
            (0..SIZES.len())
                .map(|i| [at(few, i), at(many, i), at(nccl, i)])
                .collect()
        };
        let many = [9.0, 9.0, 10.0, 20.0, 50.0, 200.0];
        // Few is always faster, and NCCL never.
        let ways = crossovers(&times(
            &[4.0, 4.0, 6.0, 15.0, 45.0, 180.0],
            &many,
            &[12.0, 13.0, 15.0, 33.0, 75.0, 250.0],
        ));
        assert_eq!(
            ways,
            Ways {
                few: usize::MAX,
                nccl: usize::MAX
            }
        );
        // Many from 512 KiB on, NCCL for the largest.
        let ways = crossovers(&times(
            &[4.0, 4.0, 12.0, 25.0, 90.0, 400.0],
            &many,
            &[12.0, 13.0, 15.0, 33.0, 75.0, 190.0],
        ));
        assert_eq!(
            ways,
            Ways {
                few: SIZES[1],
                nccl: SIZES[4] + 1
            }
        );
        assert_eq!(
            [1, SIZES[1], SIZES[1] + 1, SIZES[4], SIZES[5]].map(|bytes| ways.of(bytes)),
            [Way::Few, Way::Few, Way::Many, Way::Many, Way::Nccl]
        );
        // Without NCCL.
        let ways = crossovers(&times(&[10.0, 10.0, 12.0, 25.0, 90.0, 400.0], &many, &[]));
        assert_eq!(
            ways,
            Ways {
                few: 0,
                nccl: usize::MAX
            }
        );
    }
}
