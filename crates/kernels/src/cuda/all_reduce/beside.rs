//! Sums of two ranks in halves: a copy engine sends one half of the rows while kernels compute the other, and what takes up the sum
//! waits for the rows that it needs. No multiprocessor is kept from products.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use half::bf16;
use plimsoll_core::Component;
use plimsoll_device::cuda::{
    Arg, DeviceError, Event, Function, Gpu, GpuError, GpuSlab, GpuSlice, Launch, Module,
};

use super::layout::{SENT_PARTS, area_bytes, sent_bytes, split};
use super::{AllReduce, Buffers, GpuAdded, VEC, address, fp8_args, int};
use crate::cuda::{FusedKernels, GpuNorm, GpuRows};

/// Kernels and events of one rank of two.
#[derive(Debug)]
pub(super) struct Beside {
    /// Without and with outputs that are quantised.
    add_rms_norm: [Function; 2],
    sandwich_norm: [Function; 2],
    sum: Function,
    /// Each half has been computed, and copied.
    computed: [Event; 2],
    copied: [Event; 2],
    /// Halves sent so far.
    sent: AtomicU32,
}

/// Where the other rank leaves its halves, of this sum and of the one before: it may send the next before these are read.
#[derive(Debug)]
pub struct SentRoom {
    _slab: GpuSlab,
    rank: usize,
    buffers: Arc<Buffers>,
}

/// One half of the rows of a sum, which both ranks have sent each other.
#[derive(Clone, Copy, Debug)]
pub struct SentHalf {
    half: usize,
    /// The other rank's rows, here, and their elements.
    at: u64,
    len: usize,
    number: u32,
}

impl Beside {
    pub(super) fn load(gpu: &Gpu, module: &Module) -> Result<Self, GpuError> {
        let norms = |name: &str| -> Result<_, GpuError> {
            let quantised = module.function(&format!("{name}_arrived_fp8"))?;
            Ok([module.function(&format!("{name}_arrived"))?, quantised])
        };
        Ok(Self {
            add_rms_norm: norms("add_rms_norm")?,
            sandwich_norm: norms("sandwich_norm")?,
            sum: module.function("sum_arrived")?,
            computed: [gpu.event()?, gpu.event()?],
            copied: [gpu.event()?, gpu.event()?],
            sent: AtomicU32::new(0),
        })
    }

    /// Nothing has been sent, nor will it be before all ranks say so.
    pub(super) fn reset(&self) {
        self.sent.store(0, Ordering::Relaxed);
    }
}

impl AllReduce {
    /// Memory for sums in halves of up to `rows` rows of `width` elements; none where sums are not made so. It is of use once all
    /// ranks have theirs.
    ///
    /// # Errors
    /// [`DeviceError::Oom`].
    pub fn make_room(&self, rows: usize, width: usize) -> Result<Option<SentRoom>, DeviceError> {
        let Some(peers) = self.peers.as_ref().filter(|peers| peers.beside.is_some()) else {
            return Ok(None);
        };
        let bytes = sent_bytes(self.ranks, rows, width);
        if bytes == 0 {
            return Ok(None);
        }
        let buffers = Arc::clone(&peers.buffers);
        let slab = self
            .gpu
            .alloc_for(Component::Communication, bytes, &buffers.gpus)?;
        buffers.rooms[self.rank].store(slab.slice::<u8>().ptr(), Ordering::Relaxed);
        buffers
            .area
            .store(area_bytes(rows, width) as u64, Ordering::Relaxed);
        Ok(Some(SentRoom {
            _slab: slab,
            rank: self.rank,
            buffers,
        }))
    }

    /// The rows of each half of such a sum, if it is faster so.
    pub fn halves(&self, rows: usize, width: usize) -> Option<[usize; 2]> {
        let peers = self.peers.as_ref().filter(|peers| peers.beside.is_some())?;
        let halves = split(rows)?;
        let bytes = halves[0] * width * size_of::<bf16>();
        let [room, area] =
            [&peers.buffers.rooms[self.rank], &peers.buffers.area].map(|at| at.load(Ordering::Relaxed));
        (room != 0 && bytes as u64 <= area).then_some(halves)
    }

    /// Starts to send the first (0) or second (1) half of this rank's part of a sum, once what was launched has computed it. It must
    /// not be written to before it has been taken up. Both halves are sent, the first one first, by all ranks.
    ///
    /// # Errors
    /// [`GpuError`] of the driver.
    pub fn send(&self, half: usize, rows: GpuSlice<'_, bf16>) -> Result<SentHalf, GpuError> {
        let (buffers, beside) = self.beside();
        let number = beside.sent.fetch_add(1, Ordering::Relaxed) + 1;
        let area = buffers.area.load(Ordering::Relaxed);
        assert!(rows.bytes() as u64 <= area, "there is room for {area} bytes");
        // Two areas for each half, which take turns.
        let place = (u64::from(number - 1) / 2 % 2 * 2 + half as u64) * area;
        let [own, other] = [self.rank, 1 - self.rank].map(|rank| buffers.rooms[rank].load(Ordering::Relaxed));
        assert!(own != 0 && other != 0, "all ranks have made room");
        let side = &buffers.sides[self.rank];
        beside.computed[half].record()?;
        side.wait_for(&beside.computed[half])?;
        let word = buffers.slabs[1 - self.rank].slice::<u8>().ptr() + SENT_PARTS as u64;
        // SAFETY: there is room at both places, which live as long as any rank's state; the kernel that takes this up waits for the copy.
        unsafe {
            side.copy(rows.cast(), other + place)?;
            side.write(word, number)?;
        }
        side.record(&beside.copied[half])?;
        let at = own + place;
        let len = rows.len();
        Ok(SentHalf {
            half,
            at,
            len,
            number,
        })
    }

    /// `x` becomes the sum that `sent` is half of.
    ///
    /// # Errors
    /// [`GpuError`] of the launch.
    pub fn sum_sent(&self, sent: SentHalf, x: GpuSlice<'_, bf16>) -> Result<(), GpuError> {
        assert_eq!(x.len(), sent.len, "rows that were sent");
        let vecs = x.len() / VEC;
        let blocks = vecs.div_ceil(512).min(4 * self.gpu.info().sm_count);
        let launch = Launch::new([blocks as u32, 1, 1], 512).pdl(true);
        let (_, beside) = self.beside();
        self.take_up(&beside.sum, launch, sent, &[x.into(), (vecs as u64).into()])
    }

    /// As [`Self::add_rms_norm`], of a half of the rows.
    ///
    /// # Errors
    /// [`GpuError`] of the launch.
    pub fn add_rms_norm_sent<'a>(
        &self,
        sent: SentHalf,
        hidden: GpuSlice<'_, bf16>,
        delta: GpuSlice<'_, bf16>,
        norm: GpuNorm<'_>,
        out: impl Into<GpuRows<'a>>,
    ) -> Result<(), GpuError> {
        let sources = [hidden.into(), delta.into(), 0u64.into()];
        let (_, beside) = self.beside();
        self.norm_sent(
            &beside.add_rms_norm,
            sent,
            sources,
            address(None),
            norm,
            out.into(),
        )
    }

    /// As [`Self::sandwich_norm`], of a half of the rows.
    ///
    /// # Errors
    /// [`GpuError`] of the launch.
    pub fn sandwich_norm_sent<'a>(
        &self,
        sent: SentHalf,
        hidden: GpuSlice<'_, bf16>,
        added: GpuAdded<'_>,
        norm: GpuNorm<'_>,
        out: impl Into<GpuRows<'a>>,
    ) -> Result<(), GpuError> {
        assert_eq!(added.weight.len(), norm.weight.len(), "norms of different widths");
        let sources = [hidden.into(), added.delta.into(), added.weight.into()];
        let (_, beside) = self.beside();
        let scalar = address(added.scalar);
        self.norm_sent(&beside.sandwich_norm, sent, sources, scalar, norm, out.into())
    }

    fn norm_sent(
        &self,
        kernels: &[Function; 2],
        sent: SentHalf,
        sources: [Arg; 3],
        scalar: Arg,
        norm: GpuNorm<'_>,
        out: GpuRows<'_>,
    ) -> Result<(), GpuError> {
        let n = norm.weight.len();
        assert_eq!(out.len(), sent.len, "rows that were sent");
        let (vecs, launch) = FusedKernels::rows_of_norms(&self.gpu, out.len(), n);
        assert_eq!(vecs, 2, "a half has more rows than {}", sent.len / n);
        let launch = launch.pdl(true);
        let shape = [scalar, int(n), norm.eps.into()];
        let args = |out: &[Arg]| [&sources[..], &[norm.weight.into()], out, &shape].concat();
        match out {
            GpuRows::Bf16(out) => self.take_up(&kernels[0], launch, sent, &args(&[out.into()])),
            GpuRows::Fp8(out) => {
                let quantised = fp8_args(&out, out.values.len() / n, n);
                self.take_up(&kernels[1], launch, sent, &args(&quantised))
            }
        }
    }

    fn take_up(
        &self,
        kernel: &Function,
        launch: Launch,
        sent: SentHalf,
        args: &[Arg],
    ) -> Result<(), GpuError> {
        let (_, beside) = self.beside();
        // What was sent may be written to behind this kernel.
        self.gpu.wait_for(&beside.copied[sent.half])?;
        let args = [args, &[sent.at.into(), sent.number.into()]].concat();
        self.launch(kernel, launch, &args)
    }

    fn beside(&self) -> (&Buffers, &Beside) {
        let peers = self.peers.as_ref();
        let found = peers.and_then(|peers| Some((&*peers.buffers, peers.beside.as_ref()?)));
        found.expect("two ranks that reach each other")
    }
}

impl Drop for SentRoom {
    fn drop(&mut self) {
        self.buffers.rooms[self.rank].store(0, Ordering::Relaxed);
        // What may still use it: kernels of this rank, and copies of the other, whose kernels may wait for this rank and are not waited for.
        let Buffers { gpus, sides, .. } = &*self.buffers;
        // They fail only if a GPU's context is gone, and all memory with it.
        let _ = gpus[self.rank].synchronize();
        let _ = sides[1 - self.rank].synchronize();
    }
}
