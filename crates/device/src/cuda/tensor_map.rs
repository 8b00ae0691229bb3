//! Tensor maps: descriptions of matrices for the copy engine (TMA) of GPUs of compute capability 9.0 and later.

use cudarc::driver::sys;

use super::{Gpu, GpuError, check};

/// Bytes of a row, and rows, that a copy takes: `kMapRows` of `kernels/include/tensor_map.cuh`.
const BOX: [u32; 3] = [128, 64, 1];
/// The same of one matrix, and of a pair.
const ROWS_BOX: [u32; 4] = [128, 64, 1, 1];
const PAIR_BOX: [u32; 4] = [128, EIGHT as u32, 2, 4];
/// Rows of either of a pair that are taken in turn.
const EIGHT: usize = 8;

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

/// A matrix, or a pair of one shape that follow each other, of which copies have eight rows in turn.
#[derive(Clone, Copy, Debug)]
pub struct MatrixRows {
    /// Address, a multiple of 16.
    pub first: u64,
    /// Of the matrix; of each of a pair, a multiple of 8.
    pub rows: usize,
    /// Bytes of a row, a multiple of 16. Copies that go on behind them, and behind the last row, write zeros.
    pub row_bytes: usize,
    /// Whether there are two.
    pub pair: bool,
}

/// A matrix whose rows follow each other, for copies of any number of them.
#[derive(Clone, Copy, Debug)]
pub struct MatrixTiles {
    /// Address, a multiple of 16.
    pub first: u64,
    /// Of the matrix.
    pub rows: usize,
    /// Bytes of a row, a multiple of 16. Copies that go on behind them, and behind the last row, write zeros.
    pub row_bytes: usize,
    /// Rows that a copy takes, at most 256.
    pub copied: usize,
}

/// A matrix whose rows follow each other, for copies of eight whole rows, which come as panels of 128 bytes of each, or of 64 bytes if 128
/// do not divide a row.
#[derive(Clone, Copy, Debug)]
pub struct MatrixEights {
    /// Address, a multiple of 16.
    pub first: u64,
    /// Of the matrix.
    pub rows: usize,
    /// Bytes of a row, a multiple of 64, at most 256 panels.
    pub row_bytes: usize,
}

/// A kernel argument for copies of boxes of rows of 128 bytes, 64 rows or as many as [`MatrixTiles`] or [`MatrixEights`] says, swizzled as
/// matrix products of warp groups want them.
#[derive(Clone, Debug)]
pub struct TensorMap(sys::CUtensorMap);

impl Gpu {
    /// Describes matrices. The map must not be used once their memory is given back.
    ///
    /// # Errors
    /// [`GpuError`] of the driver: what [`Matrices`] asks does not hold, or the GPU has no such engine.
    pub fn tensor_map(&self, of: &Matrices) -> Result<TensorMap, GpuError> {
        let sizes = [of.row_bytes as u64, of.rows as u64, of.count as u64];
        // One matrix has no next one.
        let strides = [of.pitch as u64, of.stride.max(of.pitch) as u64];
        self.encode(of.first, sizes, &strides, BOX)
    }

    /// Describes rows of a matrix or of a pair, for copies from (byte, row, 0, 0) on, or of a pair from (byte, 0, 0, row / 8) on. The map must
    /// not be used once their memory is given back.
    ///
    /// # Errors
    /// [`GpuError`] of the driver: what [`MatrixRows`] asks does not hold, or the GPU has no such engine.
    pub fn rows_map(&self, of: &MatrixRows) -> Result<TensorMap, GpuError> {
        let (rows, pitch) = (of.rows as u64, of.row_bytes as u64);
        let eight = EIGHT as u64;
        match of.pair {
            false => self.encode(of.first, [pitch, rows, 1, 1], &[pitch; 3], ROWS_BOX),
            true => {
                let strides = [pitch, rows * pitch, eight * pitch];
                self.encode(of.first, [pitch, eight, 2, rows / eight], &strides, PAIR_BOX)
            }
        }
    }

    /// Describes a matrix, for copies from (byte, row) on. The map must not be used once its memory is given back.
    ///
    /// # Errors
    /// [`GpuError`] of the driver: what [`MatrixTiles`] asks does not hold, or the GPU has no such engine.
    pub fn tiles_map(&self, of: &MatrixTiles) -> Result<TensorMap, GpuError> {
        let (rows, pitch) = (of.rows as u64, of.row_bytes as u64);
        self.encode(of.first, [pitch, rows], &[pitch], [BOX[0], of.copied as u32])
    }

    /// Describes a matrix, for copies from (0, row, 0) on. The map must not be used once its memory is given back.
    ///
    /// # Errors
    /// [`GpuError`] of the driver: what [`MatrixEights`] asks does not hold, or the GPU has no such engine.
    pub fn eights_map(&self, of: &MatrixEights) -> Result<TensorMap, GpuError> {
        let panel = if of.row_bytes.is_multiple_of(128) { 128 } else { 64 };
        let panels = of.row_bytes / panel;
        let sizes = [panel as u64, of.rows as u64, panels as u64];
        let strides = [of.row_bytes as u64, panel as u64];
        self.encode(
            of.first,
            sizes,
            &strides,
            [panel as u32, EIGHT as u32, panels as u32],
        )
    }

    /// `strides` are those of all dimensions but the first.
    fn encode<const RANK: usize>(
        &self,
        first: u64,
        sizes: [u64; RANK],
        strides: &[u64],
        copied: [u32; RANK],
    ) -> Result<TensorMap, GpuError> {
        assert_eq!(strides.len() + 1, RANK, "a stride for each further dimension");
        // Over as many bytes as a row of the box has.
        let swizzle = match copied[0] {
            64 => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_64B,
            _ => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
        };
        self.bind()?;
        let mut map = sys::CUtensorMap { opaque: [0; 16] };
        // SAFETY: a place to write to, and arrays of as many elements as the rank says; the driver does not follow the address.
        check("cuTensorMapEncodeTiled", unsafe {
            sys::cuTensorMapEncodeTiled(
                &mut map,
                sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT8,
                RANK as u32,
                first as *mut _,
                sizes.as_ptr(),
                strides.as_ptr(),
                copied.as_ptr(),
                [1; RANK].as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                swizzle,
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
