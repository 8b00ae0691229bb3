//! Matrix products by `cublasGemmEx`, which chooses its kernels otherwise than cuBLASLt does. Optional.

use std::ffi::c_void;

use cudarc::cublas::sys;
use plimsoll_device::cuda::{Gpu, GpuError, GpuSlab};

use super::cublas_lt::{Operands, Shape};

/// The library, opened for one GPU and its stream.
#[derive(Debug)]
pub(super) struct Cublas {
    gpu: Gpu,
    handle: sys::cublasHandle_t,
}

// SAFETY: a handle may be used from any thread, by one at a time.
unsafe impl Send for Cublas {}

impl Cublas {
    /// Opens the library; none if it is not on this machine. The workspace must live as long.
    pub(super) fn open(gpu: &Gpu, workspace: &GpuSlab) -> Result<Option<Self>, GpuError> {
        gpu.bind()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: functions are called once the library is known to be there; a place to write to.
        unsafe {
            if !sys::is_culib_present() {
                return Ok(None);
            }
            check("cublasCreate", sys::cublasCreate_v2(&mut handle))?;
        }
        let this = Self {
            gpu: gpu.clone(),
            handle,
        };
        let workspace = workspace.slice::<u8>();
        // SAFETY: the handle and the stream are alive, the workspace has that many bytes. It is set after the stream, which
        // would reset it.
        unsafe {
            check(
                "cublasSetStream",
                sys::cublasSetStream_v2(handle, gpu.stream().cast()),
            )?;
            check(
                "cublasSetWorkspace",
                sys::cublasSetWorkspace_v2(handle, pointer(workspace.ptr()), workspace.bytes()),
            )?;
        }
        Ok(Some(this))
    }

    /// Launches a product without a bias on the GPU's stream.
    ///
    /// # Safety
    /// As [`CublasLt::run`](super::cublas_lt::CublasLt::run).
    pub(super) unsafe fn run(&self, shape: &Shape, operands: &Operands) -> Result<(), GpuError> {
        assert!(!shape.bias, "cublasGemmEx adds no bias");
        self.gpu.bind()?;
        let (alpha, beta) = (1.0_f32, 0.0_f32);
        let (m, n, k) = (shape.m as i32, shape.n as i32, shape.k as i32);
        let half = sys::cudaDataType::CUDA_R_16BF;
        let out = if shape.wide {
            sys::cudaDataType::CUDA_R_32F
        } else {
            half
        };
        // SAFETY: the operands are the caller's promise; the scales are f32 as the compute type says.
        check("cublasGemmEx", unsafe {
            sys::cublasGemmEx(
                self.handle,
                sys::cublasOperation_t::CUBLAS_OP_T,
                sys::cublasOperation_t::CUBLAS_OP_N,
                n,
                m,
                k,
                (&raw const alpha).cast(),
                pointer(operands.weight),
                half,
                k,
                pointer(operands.x),
                half,
                k,
                (&raw const beta).cast(),
                pointer(operands.out),
                out,
                n,
                sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
                sys::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT,
            )
        })
    }
}

impl Drop for Cublas {
    fn drop(&mut self) {
        if self.gpu.synchronize().is_ok() {
            // SAFETY: nothing uses the handle any more. A failure means that the context is gone.
            let _ = unsafe { sys::cublasDestroy_v2(self.handle) };
        }
    }
}

fn pointer(address: u64) -> *mut c_void {
    address as usize as *mut c_void
}

fn check(call: &'static str, status: sys::cublasStatus_t) -> Result<(), GpuError> {
    match status {
        sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS => Ok(()),
        error => Err(GpuError::Call {
            call,
            code: format!("{error:?}"),
            message: "cuBLAS".to_owned(),
        }),
    }
}
