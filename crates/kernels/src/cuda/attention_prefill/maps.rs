//! What the copy engine must know of a cache.

use half::bf16;
use plimsoll_device::cuda::{GpuError, GpuSlice, MatrixEights, TensorMap};

use super::PrefillKernels;
use crate::cuda::GpuKv;

/// What the copy engine must know of the keys and values of a layer's cache: encoded once for as long as they stay where they are.
#[derive(Clone, Debug)]
pub struct PrefillMaps {
    keys: TensorMap,
    values: TensorMap,
    /// Addresses and lengths of what the maps describe.
    of: [(u64, usize); 2],
}

impl PrefillMaps {
    /// Of keys and of values.
    ///
    /// # Panics
    /// If they are of another cache.
    pub(super) fn of(&self, kv: &GpuKv<'_>) -> [&TensorMap; 2] {
        assert_eq!(self.of, Self::cache(kv), "maps of another cache");
        [&self.keys, &self.values]
    }

    fn cache(kv: &GpuKv<'_>) -> [(u64, usize); 2] {
        [kv.k, kv.v].map(|slice| (slice.ptr(), slice.len()))
    }
}

impl PrefillKernels {
    /// Describes a cache with heads of this size, which has at least one block, to the copy engine, if the kernel for it copies so. The maps
    /// must not be used once the cache is given back.
    ///
    /// # Errors
    /// [`GpuError`] of the driver.
    ///
    /// # Panics
    /// If the head size is none of [`HEAD_DIMS`](crate::cuda::HEAD_DIMS).
    pub fn maps(&self, head_dim: usize, kv: &GpuKv<'_>) -> Result<Option<PrefillMaps>, GpuError> {
        if !self.copies_by_maps(head_dim, kv.element) {
            return Ok(None);
        }
        Ok(Some(PrefillMaps {
            keys: self.map(kv.k, head_dim)?,
            values: self.map(kv.v, head_dim)?,
            of: PrefillMaps::cache(kv),
        }))
    }

    /// Of keys or values of 16 bits.
    fn map(&self, cache: GpuSlice<'_, u8>, head_dim: usize) -> Result<TensorMap, GpuError> {
        let row_bytes = head_dim * size_of::<bf16>();
        self.gpu.eights_map(&MatrixEights {
            first: cache.ptr(),
            rows: cache.len() / row_bytes,
            row_bytes,
        })
    }
}
