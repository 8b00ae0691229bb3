//! Sums over the GPUs of one process: `kernels/all_reduce.cu`, or NCCL where that is faster or where GPUs cannot use each other's
//! memory.

mod beside;
mod group;
mod layout;

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use half::bf16;
use plimsoll_device::cuda::{
    Arg, Function, Gpu, GpuError, GpuSlab, GpuSlice, Launch, Module, Nccl, PinnedSlab, SideStream,
};

use super::fused::{MAX_NORM, MAX_THREADS, VEC, WARP, address, fp8_args, int};
use super::{FusedKernels, GpuNorm, GpuRows};

use beside::Beside;
pub use beside::{SentHalf, SentRoom};
pub use layout::{communication_bytes, sent_bytes};

/// Most rows that are summed and normalised in one kernel, one block of threads each.
const MAX_FUSED_ROWS: usize = 128;

/// Which way sums go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum AllReducePath {
    /// Through peers' memory where that works, else by NCCL.
    #[default]
    Peers,
    /// Through peers' memory where that works, and by NCCL, if it is on this machine, for the sizes for which it is faster. NCCL takes
    /// some hundred megabytes of each GPU.
    Fastest,
    /// By NCCL.
    Nccl,
}

/// One rank's end of a group of GPUs.
///
/// All ranks must make the same calls with the same lengths in the same order, each on its own stream; graphs may hold them, but for halves
/// of sums ([`Self::send`]). A rank
/// whose peer does not come waits for 20 s and goes on with wrong sums, which [`Self::check`] reports: the group is broken then.
#[derive(Debug)]
pub struct AllReduce {
    gpu: Gpu,
    rank: usize,
    ranks: usize,
    peers: Option<Peers>,
    /// The library takes one call for a rank at a time.
    nccl: Option<Mutex<Nccl>>,
    ways: Ways,
    times: Vec<[Option<f32>; 3]>,
}

/// What computes sums of so many bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// Everyone sends everything to everyone.
    Few,
    /// Each rank sums a share.
    Many,
    Nccl,
}

/// Sizes, in bytes, from which the next way is faster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Ways {
    /// Up to here, [`Way::Few`]; of more than there is room for, one part after the other.
    few: usize,
    /// From here on, [`Way::Nccl`].
    nccl: usize,
}

/// Kernels, and what they reach.
#[derive(Debug)]
struct Peers {
    buffers: Arc<Buffers>,
    /// Of threads that have one vector, and four of them.
    few: [Function; 2],
    many: Function,
    gather: Function,
    /// Of rows of which a thread keeps one vector or two, without and with outputs that are quantised.
    add_rms_norm: [[Function; 2]; 2],
    sandwich_norm: [[Function; 2]; 2],
    /// Of two ranks.
    beside: Option<Beside>,
    _module: Module,
}

/// Memory of all ranks. It is given back when nobody uses it any more.
#[derive(Debug)]
struct Buffers {
    gpus: Vec<Gpu>,
    slabs: Vec<GpuSlab>,
    /// Of each rank, in pinned memory: [`layout::NO_FAULT`], or why its waits have ended.
    faults: Vec<PinnedSlab>,
    /// Of two ranks, each one's stream for copies to the other.
    sides: Vec<SideStream>,
    /// Addresses of the ranks' [`SentRoom`]s, 0 for none, and bytes of a half in any of them.
    rooms: Vec<AtomicU64>,
    area: AtomicU64,
}

impl Buffers {
    /// Waits for what any rank has launched.
    fn settle(&self) {
        // They fail only if a GPU's context is gone, and all memory with it.
        for gpu in &self.gpus {
            let _ = gpu.synchronize();
        }
        for side in &self.sides {
            let _ = side.synchronize();
        }
    }

    fn abandon(&self) {
        for fault in &self.faults {
            let word = &fault.as_atomics()[0];
            let _ = word.compare_exchange(
                layout::NO_FAULT,
                layout::ABANDONED,
                Ordering::Relaxed,
                Ordering::Relaxed,
            );
        }
    }

    /// As new, of a rank for which no kernel of any rank works.
    fn clear(&self, rank: usize) -> Result<(), GpuError> {
        let (gpu, slab) = (&self.gpus[rank], &self.slabs[rank]);
        gpu.fill(slab.slice().range(0..layout::STATE), 0)?;
        gpu.fill(slab.slice().range(layout::FEW_RANGE), 0xff)?;
        gpu.synchronize()?;
        self.faults[rank].as_atomics()[0].store(layout::NO_FAULT, Ordering::Relaxed);
        Ok(())
    }
}

impl Drop for Buffers {
    fn drop(&mut self) {
        // Kernels of other ranks may still write here.
        self.abandon();
        self.settle();
    }
}

impl Peers {
    fn load(gpu: &Gpu, buffers: &Arc<Buffers>) -> Result<Self, GpuError> {
        let ranks = buffers.slabs.len();
        let module = super::load(gpu, "all_reduce")?;
        let function = |name: &str| module.function(&format!("{name}_ranks_{ranks}"));
        let norms = |name: &str| -> Result<[[Function; 2]; 2], GpuError> {
            let of = |name: &str| -> Result<_, GpuError> {
                Ok([function(&format!("{name}_1"))?, function(&format!("{name}_2"))?])
            };
            Ok([of(name)?, of(&format!("{name}_fp8"))?])
        };
        Ok(Self {
            buffers: Arc::clone(buffers),
            few: [function("sum_few_1")?, function("sum_few_4")?],
            many: function("sum_many")?,
            gather: function("gather_columns")?,
            add_rms_norm: norms("add_rms_norm")?,
            sandwich_norm: norms("sandwich_norm")?,
            beside: (ranks == 2).then(|| Beside::load(gpu, &module)).transpose()?,
            _module: module,
        })
    }

    /// `PEER_PARAMS` of the kernels.
    fn args(&self, rank: usize) -> [Arg; layout::MAX_RANKS + 3] {
        let bases = self.buffers.slabs.iter().map(|slab| slab.slice::<u8>().ptr());
        let mut args = [Arg::from(0u64); layout::MAX_RANKS + 3];
        args.iter_mut()
            .zip(bases.clone())
            .for_each(|(arg, base)| *arg = base.into());
        let mine = bases.clone().nth(rank).expect("a buffer of each rank");
        args[layout::MAX_RANKS] = mine.into();
        args[layout::MAX_RANKS + 1] = int(rank);
        args[layout::MAX_RANKS + 2] = self.buffers.faults[rank].ptr().into();
        args
    }
}

/// What is normalised before it is added to the residual stream.
#[derive(Clone, Copy, Debug)]
pub struct GpuAdded<'a> {
    /// `[tokens, n]`.
    pub delta: GpuSlice<'a, bf16>,
    /// `[n]`, of its norm.
    pub weight: GpuSlice<'a, f32>,
    /// What the sum is multiplied by, one number.
    pub scalar: Option<GpuSlice<'a, f32>>,
}

impl AllReduce {
    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The sum of `x` over the ranks, in place; rows of a multiple of eight elements that begin at multiples of 16 bytes. Sums
    /// through peers' memory are `f32` in the order of ranks and rounded once, so all ranks have the same bits, however many rows
    /// there are.
    ///
    /// # Errors
    /// [`GpuError`] of the launch.
    pub fn sum(&self, x: GpuSlice<'_, bf16>) -> Result<(), GpuError> {
        let way = self.ways.of(x.bytes());
        self.sum_by(way, x)
    }

    fn sum_by(&self, way: Way, x: GpuSlice<'_, bf16>) -> Result<(), GpuError> {
        assert!(
            x.len().is_multiple_of(VEC) && x.ptr().is_multiple_of(16),
            "rows of a multiple of {VEC} elements are summed, not {}",
            x.len()
        );
        match (way, &self.peers, &self.nccl) {
            _ if x.is_empty() => Ok(()),
            // Small blocks, so that what is small leaves by many multiprocessors.
            (Way::Few, Some(peers), _) => {
                self.sum_in_parts(x, layout::most_few(self.ranks), |vecs| match vecs {
                    ..=65536 => (&peers.few[0], vecs.div_ceil(256), 256),
                    _ => (&peers.few[1], vecs.div_ceil(4 * 512), 512),
                })
            }
            (Way::Many, Some(peers), _) => self.sum_in_parts(x, layout::MOST_MANY, |vecs| {
                (&peers.many, vecs.div_ceil(self.ranks).div_ceil(256), 256)
            }),
            (_, _, Some(nccl)) => lock(nccl).sum_bf16(x.cast()),
            _ => unreachable!("ways are those that there are"),
        }
    }

    /// Sums of at most so many bytes at a time, by the kernel, the blocks and the threads of each that `kernel` says for so many vectors.
    fn sum_in_parts<'k>(
        &self,
        x: GpuSlice<'_, bf16>,
        most: usize,
        kernel: impl Fn(usize) -> (&'k Function, usize, u32),
    ) -> Result<(), GpuError> {
        let most = most / size_of::<bf16>();
        (0..x.len()).step_by(most).try_for_each(|start| {
            let x = x.range(start..x.len().min(start + most));
            let vecs = x.len() / VEC;
            let (kernel, blocks, threads) = kernel(vecs);
            let launch = Launch::new([blocks as u32, 1, 1], threads).pdl(true);
            self.launch(kernel, launch, &[x.into(), int(vecs)])
        })
    }

    /// `hidden +=` the sum of `delta` over the ranks, then its norm into `out`; all `[tokens, n]`: bit for bit [`Self::sum`] and
    /// [`FusedKernels::add_rms_norm`], which `fused` is for; one kernel for few rows. What `delta` holds afterwards is not defined.
    ///
    /// # Errors
    /// [`GpuError`] of the launch.
    pub fn add_rms_norm<'a>(
        &self,
        fused: &FusedKernels,
        hidden: GpuSlice<'_, bf16>,
        delta: GpuSlice<'_, bf16>,
        norm: GpuNorm<'_>,
        out: impl Into<GpuRows<'a>>,
    ) -> Result<(), GpuError> {
        let out = out.into();
        match self.fused(norm, &out) {
            Some(peers) => self.norm(
                &peers.add_rms_norm,
                [hidden.into(), delta.into(), 0u64.into()],
                address(None),
                norm,
                out,
            ),
            None => {
                self.sum(delta)?;
                fused.add_rms_norm(hidden, delta, norm, out)
            }
        }
    }

    /// As [`Self::add_rms_norm`], for [`FusedKernels::sandwich_norm`].
    ///
    /// # Errors
    /// [`GpuError`] of the launch.
    pub fn sandwich_norm<'a>(
        &self,
        fused: &FusedKernels,
        hidden: GpuSlice<'_, bf16>,
        added: GpuAdded<'_>,
        norm: GpuNorm<'_>,
        out: impl Into<GpuRows<'a>>,
    ) -> Result<(), GpuError> {
        let out = out.into();
        let GpuAdded {
            delta,
            weight: delta_weight,
            scalar,
        } = added;
        assert_eq!(delta_weight.len(), norm.weight.len(), "norms of different widths");
        match self.fused(norm, &out) {
            Some(peers) => self.norm(
                &peers.sandwich_norm,
                [hidden.into(), delta.into(), delta_weight.into()],
                address(scalar),
                norm,
                out,
            ),
            None => {
                self.sum(delta)?;
                fused.sandwich_norm(hidden, delta, delta_weight, scalar, norm, out)
            }
        }
    }

    /// The kernels, if one computes sum and norm.
    fn fused(&self, norm: GpuNorm<'_>, out: &GpuRows<'_>) -> Option<&Peers> {
        let n = norm.weight.len();
        let bytes = out.len() * size_of::<bf16>();
        let fits = n > 0 && n.is_multiple_of(VEC) && n <= MAX_NORM && out.len() <= n * MAX_FUSED_ROWS;
        self.peers
            .as_ref()
            .filter(|_| fits && self.ways.of(bytes) == Way::Few)
    }

    fn norm(
        &self,
        kernels: &[[Function; 2]; 2],
        [hidden, delta, delta_weight]: [Arg; 3],
        scalar: Arg,
        norm: GpuNorm<'_>,
        out: GpuRows<'_>,
    ) -> Result<(), GpuError> {
        let n = norm.weight.len();
        assert!(out.len().is_multiple_of(n), "out is not [rows, n]");
        let rows = out.len() / n;
        // As the kernels of FusedKernels do for so few rows, for the same bits.
        let vecs = if n / VEC > MAX_THREADS { 2 } else { 1 };
        let threads = (n / VEC).div_ceil(vecs).next_multiple_of(WARP);
        let launch = Launch::new([rows as u32, 1, 1], threads as u32).pdl(true);
        let sources = [hidden, delta, delta_weight, norm.weight.into()];
        let shape = [scalar, int(n), norm.eps.into()];
        match out {
            GpuRows::Bf16(out) => {
                let args = [&sources[..], &[out.into()], &shape].concat();
                self.launch(&kernels[0][vecs - 1], launch, &args)
            }
            GpuRows::Fp8(out) => {
                let args = [&sources[..], &fp8_args(&out, rows, n), &shape].concat();
                self.launch(&kernels[1][vecs - 1], launch, &args)
            }
        }
    }

    /// Columns of all ranks side by side: `mine` is `[rows, n / ranks]`, `out` `[rows, n]`, the same on all ranks; `n / ranks` is a
    /// multiple of four.
    ///
    /// # Errors
    /// [`GpuError`] of the launch.
    pub fn gather(
        &self,
        mine: GpuSlice<'_, f32>,
        rows: usize,
        out: GpuSlice<'_, f32>,
    ) -> Result<(), GpuError> {
        let width = mine.len().checked_div(rows).unwrap_or(0);
        assert_eq!(
            (mine.len(), out.len()),
            (rows * width, self.ranks * rows * width),
            "columns of {rows} rows"
        );
        assert!(
            width.is_multiple_of(4) && mine.ptr().is_multiple_of(16) && out.ptr().is_multiple_of(16),
            "columns come in fours, not {width}"
        );
        match (&self.peers, &self.nccl) {
            _ if mine.is_empty() => Ok(()),
            (Some(peers), _) => {
                let launch = Launch::new([layout::RING_BLOCKS as u32, 1, 1], 512).pdl(true);
                let vecs = (mine.len() / 4) as u64;
                let args = [mine.into(), out.into(), vecs.into(), int(width / 4)];
                self.launch(&peers.gather, launch, &args)
            }
            (None, Some(nccl)) => (0..rows).try_for_each(|row| {
                let all = self.ranks * width;
                lock(nccl).gather_f32(
                    mine.range(row * width..(row + 1) * width),
                    out.range(row * all..(row + 1) * all),
                )
            }),
            (None, None) => unreachable!("a group has one or the other"),
        }
    }

    fn launch(&self, kernel: &Function, launch: Launch, args: &[Arg]) -> Result<(), GpuError> {
        if launch.grid[0] == 0 {
            return Ok(());
        }
        let peers = self.peers.as_ref().expect("kernels are these");
        let args = [args, &peers.args(self.rank)].concat();
        // SAFETY: the methods pass what the kernels declare and check the lengths; all ranks keep all buffers.
        unsafe { self.gpu.launch(kernel, launch, &args) }
    }

    /// Whether this rank has ever waited for another in vain. To be asked when the work of a step is done; takes next to nothing.
    ///
    /// # Errors
    /// [`GpuError::RankLost`] names the rank that did not come, [`GpuError::Abandoned`] is for [`Self::abandon`].
    pub fn check(&self) -> Result<(), GpuError> {
        let Some(peers) = &self.peers else {
            return Ok(());
        };
        match peers.buffers.faults[self.rank].as_atomics()[0].load(Ordering::Relaxed) {
            layout::NO_FAULT => Ok(()),
            layout::ABANDONED => Err(GpuError::Abandoned { rank: self.rank }),
            missing => Err(GpuError::RankLost {
                rank: self.rank,
                missing: missing as usize - 1,
                seconds: layout::PATIENCE_SECONDS,
            }),
        }
    }

    /// Makes a group of use again whose ranks have lost each other, or were abandoned: this rank's part of it. To be called on every
    /// rank once the work of all of them is done, and before any has new work; graphs that were captured before remain valid. NCCL
    /// has nothing that could be renewed.
    ///
    /// # Errors
    /// [`GpuError`] of the device.
    pub fn renew(&self) -> Result<(), GpuError> {
        match &self.peers {
            None => Ok(()),
            Some(peers) => {
                peers.beside.iter().for_each(Beside::reset);
                peers.buffers.clear(self.rank)
            }
        }
    }

    /// Makes kernels of all ranks that wait for another go on at once, with wrong sums, for good: for a rank that cannot go on. Any
    /// thread may call it, at any time. Waits of NCCL do not end by it.
    pub fn abandon(&self) {
        if let Some(peers) = &self.peers {
            peers.buffers.abandon();
        }
    }
}

fn lock(nccl: &Mutex<Nccl>) -> MutexGuard<'_, Nccl> {
    // A call that panicked has changed nothing here.
    nccl.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Ways {
    fn of(self, bytes: usize) -> Way {
        match bytes {
            _ if bytes >= self.nccl => Way::Nccl,
            _ if bytes <= self.few => Way::Few,
            _ => Way::Many,
        }
    }
}

impl fmt::Display for Ways {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kib = |bytes: usize| bytes >> 10;
        match (self.few, self.nccl) {
            (_, 0) => return f.write_str("NCCL"),
            (usize::MAX, _) => f.write_str("one shot")?,
            (few, _) => write!(f, "one shot up to {} KiB, then two", kib(few))?,
        }
        match self.nccl {
            usize::MAX => Ok(()),
            nccl => write!(f, ", NCCL from {} KiB", kib(nccl)),
        }
    }
}
