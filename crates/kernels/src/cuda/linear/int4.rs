//! What products of weights in four bits need besides (`kernels/int4.cu`).

use half::bf16;
use plimsoll_device::cuda::{Function, Gpu, GpuError, GpuSlice, Launch};

use super::matrix::{Int4Group, int4_pitch};

/// Of `kernels/int4.cu`.
const THREADS: usize = 256;
/// Codes of a word, and inputs that a thread moves.
const WORD: usize = 8;
/// Bytes of codes that a thread widens.
const PIECE: usize = 16;

/// The kernels.
#[derive(Debug)]
pub struct Int4Kernels {
    gpu: Gpu,
    dequantise: Function,
    reorder: Function,
    fill: Function,
}

impl Int4Kernels {
    /// Loads `kernels/int4.cu`.
    ///
    /// # Errors
    /// [`GpuError`] if this binary carries no code for this GPU.
    pub fn load(gpu: &Gpu) -> Result<Self, GpuError> {
        let module = crate::cuda::load(gpu, "int4")?;
        Ok(Self {
            gpu: gpu.clone(),
            dequantise: module.function("int4_dequantise")?,
            reorder: module.function("int4_reorder")?,
            fill: module.function("int4_fill")?,
        })
    }

    /// The codes of `n` rows at `codes`, with their groups at `groups`, to `[n, k]` of `bf16` at `out`, rounded once. Device addresses.
    ///
    /// # Safety
    /// There are as many as [`super::GpuMatrix::Int4`] says, and room for `n * k`, until the kernel is done.
    pub(super) unsafe fn dequantise(
        &self,
        [codes, groups, out]: [u64; 3],
        [n, k]: [usize; 2],
        group: Int4Group,
    ) -> Result<(), GpuError> {
        let threads = n * int4_pitch(k) / PIECE;
        let args = [
            codes.into(),
            groups.into(),
            out.into(),
            (n as i32).into(),
            (k as i32).into(),
            (group.inputs() as i32).into(),
        ];
        // SAFETY: the caller's promise; the arguments are those of `int4_dequantise`.
        unsafe { self.gpu.launch(&self.dequantise, launch(threads), &args) }
    }

    /// Inputs `[m, k]` in the order of a matrix: of each row of `out`, input `i` is input `order[i]` of `x`.
    pub(super) fn reorder(
        &self,
        x: GpuSlice<'_, bf16>,
        order: GpuSlice<'_, u32>,
        out: GpuSlice<'_, bf16>,
    ) -> Result<(), GpuError> {
        let k = order.len();
        assert_eq!(x.len(), out.len(), "x and out differ");
        assert!(
            k.is_multiple_of(WORD) && x.len().is_multiple_of(k),
            "rows of {k} inputs"
        );
        let m = x.len() / k;
        let args = [
            x.into(),
            order.into(),
            out.into(),
            (m as i32).into(),
            (k as i32).into(),
        ];
        // SAFETY: the lengths were checked; what an order holds was when it was made.
        unsafe { self.gpu.launch(&self.reorder, launch(x.len() / WORD), &args) }
    }

    /// Fills codes with random ones.
    ///
    /// # Errors
    /// [`GpuError`] of the launch.
    ///
    /// # Panics
    /// If they are no whole rows.
    pub fn fill(&self, codes: GpuSlice<'_, u8>, seed: u64) -> Result<(), GpuError> {
        let pieces = codes.len() / PIECE;
        assert_eq!(pieces * PIECE, codes.len(), "whole rows");
        let args = [codes.into(), (pieces as u64).into(), seed.into()];
        let blocks = pieces.div_ceil(THREADS).clamp(1, 1 << 16);
        let launch = Launch::new([blocks as u32, 1, 1], THREADS as u32).pdl(true);
        // SAFETY: the arguments are those of `int4_fill`, which writes as much as there is.
        unsafe { self.gpu.launch(&self.fill, launch, &args) }
    }
}

fn launch(threads: usize) -> Launch {
    Launch::new([threads.div_ceil(THREADS) as u32, 1, 1], THREADS as u32).pdl(true)
}
