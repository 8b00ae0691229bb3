//! Tensor maps: descriptions of matrices for the copy engine (TMA) of GPUs of compute capability 9.0 and later.

use cudarc::driver::sys;

use super::{Gpu, GpuError, check};

/// Rows, and bytes of a row, that a copy takes: `kMapRows` of `kernels/include/tensor_map.cuh`.
const BOX: [u32; 3] = [128, 64, 1];

/// Matrices of one shape at equal distances in device memory.
#[derive(Clone, Copy, Debug)]
pub struct Matrices {
    /// Address of the first one, a multiple of 16.
    pub first: u64,
    /// Of each.
    pub rows: usize,
    /// Bytes of a row. Copies that go on behind them write zeros.
    pub row_bytes: usize,
    /// Bytes from one row to the next, a multiple of 16.
    pub pitch: usize,
    /// How many there are.
    pub count: usize,
    /// Bytes from one to the next, a multiple of 16.
    pub stride: usize,
}

/// A kernel's first argument, for copies of 64 rows of 128 bytes, swizzled as matrix products of warp groups want them.
#[derive(Clone, Debug)]
pub struct TensorMap(sys::CUtensorMap);

impl Gpu {
    /// Describes matrices. The map must not be used once their memory is given back.
    ///
    /// # Errors
    /// [`GpuError`] of the driver: what [`Matrices`] asks does not hold, or the GPU has no such engine.
    pub fn tensor_map(&self, of: &Matrices) -> Result<TensorMap, GpuError> {
        self.bind()?;
        let sizes = [of.row_bytes as u64, of.rows as u64, of.count as u64];
        // One matrix has no next one.
        let strides = [of.pitch as u64, of.stride.max(of.pitch) as u64];
        let mut map = sys::CUtensorMap { opaque: [0; 16] };
        // SAFETY: a place to write to, and arrays of as many elements as the rank says; the driver does not follow the address.
        check("cuTensorMapEncodeTiled", unsafe {
            sys::cuTensorMapEncodeTiled(
                &mut map,
                sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT8,
                sizes.len() as u32,
                of.first as *mut _,
                sizes.as_ptr(),
                strides.as_ptr(),
                BOX.as_ptr(),
                [1; 3].as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                // The next 128 bytes of a row are wanted soon.
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        })?;
        Ok(TensorMap(map))
    }
}

impl TensorMap {
    pub(super) fn as_ptr(&self) -> *const sys::CUtensorMap {
        &self.0
    }
}
