//! NCCL, which is opened at run time: sums over GPUs that cannot use each other's memory, and an oracle of tests.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::Arc;

use cudarc::driver::sys;
use libloading::Library;

use super::{Gpu, GpuError, GpuSlice};

const LIBRARY: &str = "libnccl.so.2";

type Comm = *mut c_void;
type InitAll = unsafe extern "C" fn(*mut Comm, c_int, *const c_int) -> c_int;
type Collective =
    unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, sys::CUstream) -> c_int;
type Gather = unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, Comm, sys::CUstream) -> c_int;
type OfComm = unsafe extern "C" fn(Comm) -> c_int;
type Describe = unsafe extern "C" fn(c_int) -> *const c_char;

/// `ncclFloat32`, `ncclBfloat16` and `ncclSum`.
const F32: c_int = 7;
const BF16: c_int = 9;
const SUM: c_int = 0;

/// The functions of the library, which stays open.
#[derive(Debug)]
struct Functions {
    init_all: InitAll,
    all_reduce: Collective,
    all_gather: Gather,
    destroy: OfComm,
    describe: Describe,
    _library: Library,
}

impl Functions {
    fn open() -> Result<Self, GpuError> {
        let missing = || GpuError::NoLibrary {
            library: LIBRARY.to_owned(),
        };
        // SAFETY: NVIDIA's library, which runs nothing of consequence when loaded; the functions have these types.
        unsafe {
            let library = Library::new(LIBRARY).map_err(|_| missing())?;
            macro_rules! function {
                ($name:literal) => {
                    *library.get($name).map_err(|_| missing())?
                };
            }
            Ok(Self {
                init_all: function!(b"ncclCommInitAll"),
                all_reduce: function!(b"ncclAllReduce"),
                all_gather: function!(b"ncclAllGather"),
                destroy: function!(b"ncclCommDestroy"),
                describe: function!(b"ncclGetErrorString"),
                _library: library,
            })
        }
    }

    fn check(&self, call: &'static str, result: c_int) -> Result<(), GpuError> {
        if result == 0 {
            return Ok(());
        }
        // SAFETY: the library returns static strings.
        let message = unsafe { CStr::from_ptr((self.describe)(result)) };
        Err(GpuError::Call {
            call,
            code: result.to_string(),
            message: message.to_string_lossy().into_owned(),
        })
    }
}

/// One rank of a group of GPUs.
#[derive(Debug)]
pub struct Nccl {
    gpu: Gpu,
    comm: Comm,
    functions: Arc<Functions>,
}

// SAFETY: NCCL's functions may be called from any thread, for one rank by one at a time.
unsafe impl Send for Nccl {}

impl Nccl {
    /// A group of different GPUs, one rank each, in order. Takes some hundred megabytes of each.
    ///
    /// # Errors
    /// [`GpuError::NoLibrary`] without NCCL; [`GpuError::Call`] of the library.
    pub fn group(gpus: &[Gpu]) -> Result<Vec<Self>, GpuError> {
        let functions = Arc::new(Functions::open()?);
        let ordinals: Vec<c_int> = gpus.iter().map(|gpu| gpu.info().ordinal as c_int).collect();
        let mut comms = vec![std::ptr::null_mut(); gpus.len()];
        // SAFETY: as many places and ordinals as the count says.
        let result =
            unsafe { (functions.init_all)(comms.as_mut_ptr(), ordinals.len() as c_int, ordinals.as_ptr()) };
        // The library has made other contexts current, and says so to nobody.
        Gpu::forget_current();
        functions.check("ncclCommInitAll", result)?;
        let ranks = gpus.iter().zip(comms).map(|(gpu, comm)| Self {
            gpu: gpu.clone(),
            comm,
            functions: Arc::clone(&functions),
        });
        Ok(ranks.collect())
    }

    /// Sums `x`, of `bf16`, over the ranks in place, on the GPU's stream.
    ///
    /// # Errors
    /// [`GpuError::Call`] of the library.
    pub fn sum_bf16(&self, x: GpuSlice<'_, u16>) -> Result<(), GpuError> {
        self.gpu.bind()?;
        let at = x.ptr() as usize as *mut c_void;
        let stream = self.gpu.stream();
        // SAFETY: the memory has so many elements; a slice cannot outlive it.
        let result = unsafe { (self.functions.all_reduce)(at, at, x.len(), BF16, SUM, self.comm, stream) };
        self.functions.check("ncclAllReduce", result)
    }

    /// `mine` of all ranks, one behind the other, into `out`.
    ///
    /// # Errors
    /// [`GpuError::Call`] of the library.
    pub fn gather_f32(&self, mine: GpuSlice<'_, f32>, out: GpuSlice<'_, f32>) -> Result<(), GpuError> {
        self.gpu.bind()?;
        let [from, to] = [mine, out].map(|slice| slice.ptr() as usize as *mut c_void);
        let stream = self.gpu.stream();
        // SAFETY: the memory has so many elements; a slice cannot outlive it.
        let result = unsafe { (self.functions.all_gather)(from, to, mine.len(), F32, self.comm, stream) };
        self.functions.check("ncclAllGather", result)
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        if self.gpu.synchronize().is_ok() {
            // SAFETY: nothing uses the handle any more.
            unsafe { (self.functions.destroy)(self.comm) };
            Gpu::forget_current();
        }
    }
}
