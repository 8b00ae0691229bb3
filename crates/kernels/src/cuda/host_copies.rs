//! Inputs and outputs of steps that graphs replay.

use std::ops::Range;

use plimsoll_device::cuda::{Function, Gpu, GpuError, GpuSlice, Launch, PinnedSlab};

const THREADS: usize = 256;
const MOST_BLOCKS: usize = 32;
/// Bytes of one access.
const VEC: usize = 16;
const WORD: usize = 4;

/// Copies of up to some megabytes between pinned memory and the device by a kernel. Around a CUDA graph the copy engine takes longer, as the
/// GPU goes from one engine to the other and back.
#[derive(Clone, Debug)]
pub struct HostCopies {
    gpu: Gpu,
    copy_words: Function,
}

impl HostCopies {
    /// By `copy_words` of `kernels/fused.cu`.
    pub(super) fn new(gpu: &Gpu, copy_words: Function) -> Self {
        Self {
            gpu: gpu.clone(),
            copy_words,
        }
    }

    /// Starts a copy of these bytes of `from` to the device.
    ///
    /// # Errors
    /// [`GpuError`] of the launch.
    ///
    /// # Panics
    /// If the lengths differ, a copy does not begin at a multiple of 16 bytes, or its bytes are not whole words of 4.
    ///
    /// # Safety
    /// `from` must live and not be written until the copy is done (an [`Event`](plimsoll_device::cuda::Event) recorded after it passed). A
    /// kernel that starts before the one ahead of it has ended must not be launched next: it might read what is not copied yet.
    pub unsafe fn upload(
        &self,
        from: &PinnedSlab,
        bytes: Range<usize>,
        to: GpuSlice<'_, u8>,
    ) -> Result<(), GpuError> {
        let len = from.as_slice::<u8>()[bytes.clone()].len();
        assert_eq!(len, to.len(), "bytes to copy");
        self.copy(from.ptr() + bytes.start as u64, to.ptr(), len)
    }

    /// Starts a copy from the device to the front of `to`.
    ///
    /// # Errors
    /// [`GpuError`] of the launch.
    ///
    /// # Panics
    /// If `to` has fewer bytes than `from`, or as [`Self::upload`].
    ///
    /// # Safety
    /// `to` must live and not be read until the copy is done.
    pub unsafe fn download(&self, from: GpuSlice<'_, u8>, to: &mut PinnedSlab) -> Result<(), GpuError> {
        let len = to.as_slice::<u8>()[..from.len()].len();
        self.copy(from.ptr(), to.ptr(), len)
    }

    fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<(), GpuError> {
        if bytes == 0 {
            return Ok(());
        }
        assert!(
            [from, to]
                .iter()
                .all(|address| address.is_multiple_of(VEC as u64))
                && bytes.is_multiple_of(WORD),
            "copies of words begin at a multiple of 16 bytes"
        );
        let blocks = bytes.div_ceil(VEC * THREADS).min(MOST_BLOCKS);
        let launch = Launch::new([blocks as u32, 1, 1], THREADS as u32);
        let args = [from.into(), to.into(), ((bytes / WORD) as i32).into()];
        // SAFETY: both are as long, and memory that is pinned has the same address on the device.
        unsafe { self.gpu.launch(&self.copy_words, launch, &args) }
    }
}
