use std::ffi::CStr;

use cudarc::driver::sys;
use plimsoll_core::{BuildError, Oom, StepError};

/// Why a GPU cannot be used, or what it refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GpuError {
    /// The driver library is not on this machine.
    #[error(
        "no NVIDIA driver: libcuda.so.1 was not found; install the driver, or run on the CPU with --device cpu"
    )]
    NoDriver,
    /// The driver is older than the kernels of this binary.
    #[error(
        "the NVIDIA driver supports CUDA {}.{}, but this binary needs CUDA {}.{}: update the driver, \
         or run on the CPU with --device cpu",
        found / 1000, found % 1000 / 10, needed / 1000, needed % 1000 / 10
    )]
    OldDriver {
        /// CUDA version of the driver, as 1000 × major + 10 × minor.
        found: i32,
        /// The least that will do.
        needed: i32,
    },
    /// There is no such GPU.
    #[error("there is no GPU {ordinal}: the driver has {count}; check --device and CUDA_VISIBLE_DEVICES")]
    NoDevice {
        /// What was asked for.
        ordinal: usize,
        /// GPUs there are.
        count: usize,
    },
    /// The GPU is too old for the kernels.
    #[error(
        "{name} has compute capability {major}.{minor}, but 8.0 (Ampere) or newer is needed; \
         run on the CPU with --device cpu"
    )]
    OldDevice {
        /// The GPU.
        name: String,
        /// Compute capability.
        major: u32,
        /// Compute capability.
        minor: u32,
    },
    /// The binary was built without device code.
    #[error(
        "this binary was built without CUDA kernels: build it with `make cuda`, or run with --device cpu"
    )]
    NoKernels,
    /// The binary's device code is for other GPUs.
    #[error(
        "this binary has no CUDA kernels for {name} (compute capability {major}.{minor}): build it with CUDA_ARCHS={major}{minor}, \
         or run on the CPU with --device cpu"
    )]
    NoKernelsFor {
        /// The GPU.
        name: String,
        /// Compute capability.
        major: u32,
        /// Compute capability.
        minor: u32,
    },
    /// A library that ships with CUDA is not on this machine.
    #[error(
        "{library} was not found: install it (it is part of the CUDA toolkit) or add its directory to \
         LD_LIBRARY_PATH, or run on the CPU with --device cpu"
    )]
    NoLibrary {
        /// Its file name.
        library: String,
    },
    /// Two GPUs cannot exchange data.
    #[error(
        "GPU {gpu} cannot use the memory of GPU {peer}, and libnccl.so.2 was not found: install NCCL or add its directory to \
         LD_LIBRARY_PATH, or choose GPUs that are connected (nvidia-smi topo -p2p rw)"
    )]
    Unconnected {
        /// One of them.
        gpu: usize,
        /// The other.
        peer: usize,
    },
    /// What GPUs exchange arrives changed.
    #[error(
        "GPU {gpu} reads wrong data from other GPUs: check the IOMMU and the driver (a virtual machine may need the NVLink \
         fabric manager), or install NCCL"
    )]
    WrongPeerData {
        /// The GPU that saw it.
        gpu: usize,
    },
    /// GPUs that compute a model together differ.
    #[error(
        "the GPUs can compute a product of the model in no common way: choose GPUs of one kind with --device (nvidia-smi -L)"
    )]
    NoCommonWay,
    /// A rank waited for another in vain.
    #[error("rank {rank} waited {seconds} s for rank {missing} and gave up")]
    RankLost {
        /// The rank that waited.
        rank: usize,
        /// The rank that did not come.
        missing: usize,
        /// How long it waited.
        seconds: u32,
    },
    /// The host has told a rank to wait no more.
    #[error("rank {rank} was told to wait for no other rank")]
    Abandoned {
        /// The rank.
        rank: usize,
    },
    /// A call failed.
    #[error("{call} failed: {code} ({message})")]
    Call {
        /// The function of the driver or of a library.
        call: &'static str,
        /// Name of the error.
        code: String,
        /// What the library says about it.
        message: String,
    },
}

impl GpuError {
    /// True if there was no device memory for the call. Memory of the host is none: no smaller KV cache frees any.
    pub fn is_out_of_memory(&self) -> bool {
        let codes = ["CUDA_ERROR_OUT_OF_MEMORY", "CUBLAS_STATUS_ALLOC_FAILED"];
        matches!(self, Self::Call { call, code, .. } if codes.contains(&code.as_str()) && *call != "cuMemHostAlloc")
    }
}

/// Why work on an open GPU failed. [`Gpu::failed`](super::Gpu::failed) tells the one from the other.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// It ran out of memory: with less to hold, it may succeed.
    #[error(transparent)]
    Oom(#[from] Oom),
    /// The driver or a kernel failed.
    #[error(transparent)]
    Gpu(#[from] GpuError),
}

impl From<DeviceError> for BuildError {
    fn from(error: DeviceError) -> Self {
        match error {
            DeviceError::Oom(oom) => Self::Oom(oom),
            DeviceError::Gpu(error) => Self::Device(error.to_string()),
        }
    }
}

impl From<DeviceError> for StepError {
    fn from(error: DeviceError) -> Self {
        match error {
            DeviceError::Oom(oom) => Self::Oom(oom),
            DeviceError::Gpu(error) => Self::Device(error.to_string()),
        }
    }
}

/// Turns a driver call's code into an error that names the call.
pub(crate) fn check(call: &'static str, result: sys::CUresult) -> Result<(), GpuError> {
    match result {
        sys::CUresult::CUDA_SUCCESS => Ok(()),
        error => Err(GpuError::Call {
            call,
            code: text(error, sys::cuGetErrorName),
            message: text(error, sys::cuGetErrorString),
        }),
    }
}

fn text(
    error: sys::CUresult,
    describe: unsafe fn(sys::CUresult, *mut *const std::ffi::c_char) -> sys::CUresult,
) -> String {
    let mut text = std::ptr::null();
    // SAFETY: the driver stores the address of a static string, or leaves null for a code it does not know.
    unsafe {
        if describe(error, &mut text) == sys::CUresult::CUDA_SUCCESS && !text.is_null() {
            return CStr::from_ptr(text).to_string_lossy().into_owned();
        }
    }
    format!("{error:?}")
}
