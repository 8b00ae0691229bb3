use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use cudarc::driver::sys;

use super::runtime::{self, MemoryInfo, Runtime};
use super::{GpuError, check};
use crate::Budget;

/// CUDA version of the compiler that the kernels are built with: an older driver cannot load them.
const NEEDED_DRIVER: i32 = 13000;

/// One GPU: a context, one stream that everything runs on, and the account of its memory. Clones share it. A process may open
/// several, and use each from any thread.
#[derive(Clone, Debug)]
pub struct Gpu(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    device: sys::CUdevice,
    context: sys::CUcontext,
    stream: sys::CUstream,
    pool: sys::CUmemoryPool,
    granularity: usize,
    info: GpuInfo,
    budget: Budget,
    runtime: Runtime,
    /// Device allocations made so far, by whatever means.
    allocations: AtomicU64,
    /// See [`Gpu::has_peers`].
    has_peers: AtomicBool,
}

// SAFETY: the handles belong to the driver, whose functions may be called from any thread.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

/// What a GPU is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuInfo {
    /// Which of the visible GPUs.
    pub ordinal: usize,
    /// Name, from the driver.
    pub name: String,
    /// Bytes of device memory.
    pub total_bytes: u64,
    /// Major and minor.
    pub compute_capability: (u32, u32),
    /// Streaming multiprocessors.
    pub sm_count: usize,
    /// Bytes of shared memory one block may ask for.
    pub max_shared_bytes: usize,
    /// CUDA version of the driver: 1000 × major + 10 × minor.
    pub driver_version: i32,
}

/// How to open a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct GpuOptions {
    /// Most of the GPU that this process plans with and takes.
    pub limit: GpuLimit,
    /// Most bytes that can be allocated, whatever the meters promise: for tests that must run out of memory without filling the GPU.
    pub cap: Option<u64>,
}

/// Most of a GPU's memory that a process takes, context and libraries included.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum GpuLimit {
    /// What is there.
    #[default]
    All,
    /// So many bytes, if there are as many.
    Bytes(u64),
    /// This part of it, at most 1.
    Fraction(f64),
}

impl GpuLimit {
    fn of(self, total: u64) -> u64 {
        match self {
            Self::All => total,
            Self::Bytes(bytes) => bytes.min(total),
            Self::Fraction(fraction) => ((total as f64 * fraction) as u64).min(total),
        }
    }
}

impl Gpu {
    /// Opens a GPU.
    ///
    /// # Errors
    /// [`GpuError`] if there is no driver, a driver too old, no such GPU, or one that is too old.
    pub fn open(ordinal: usize) -> Result<Self, GpuError> {
        Self::open_with(ordinal, GpuOptions::default())
    }

    /// As [`Self::open`], with options.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_with(ordinal: usize, options: GpuOptions) -> Result<Self, GpuError> {
        let driver_version = driver_version()?;
        let device = device(ordinal)?;
        let info = describe(ordinal, device, driver_version)?;
        let (major, minor) = info.compute_capability;
        if major < 8 {
            return Err(GpuError::OldDevice {
                name: info.name,
                major,
                minor,
            });
        }
        let mut context = std::ptr::null_mut();
        let mut stream = std::ptr::null_mut();
        // SAFETY: plain calls with places to write to.
        unsafe {
            check(
                "cuDevicePrimaryCtxRetain",
                sys::cuDevicePrimaryCtxRetain(&mut context, device),
            )?;
            make_current(context)?;
            let non_blocking = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
            check("cuStreamCreate", sys::cuStreamCreate(&mut stream, non_blocking))?;
        }
        let budget = Budget::new(options.limit.of(info.total_bytes));
        let runtime = Runtime::of_context(&budget, device)?;
        budget.set_cap(options.cap.map(|cap| cap + budget.meters().reserved));
        let pool = create_pool(device, options.cap)?;
        Ok(Self(Arc::new(Inner {
            device,
            context,
            stream,
            pool,
            granularity: granularity(device)?,
            info,
            runtime,
            budget,
            allocations: AtomicU64::new(0),
            has_peers: AtomicBool::new(false),
        })))
    }

    /// What it is.
    pub fn info(&self) -> &GpuInfo {
        &self.0.info
    }

    /// The account of what this process has allocated, rounded as the device rounds.
    pub fn budget(&self) -> &Budget {
        &self.0.budget
    }

    /// Counts an allocation made beside [`Self::alloc`].
    pub(super) fn count_allocation(&self) {
        self.0.allocations.fetch_add(1, Ordering::Relaxed);
    }

    /// Device allocations made so far, by whatever means.
    pub fn allocations(&self) -> u64 {
        self.0.allocations.load(Ordering::Relaxed)
    }

    /// Kernels of this GPU will wait for those of others: from now on each is loaded to the last byte when it is asked for. A driver
    /// that does so at the first launch may wait for what runs, and what runs may wait for a launch.
    pub fn expect_peers(&self) {
        self.0.has_peers.store(true, Ordering::Relaxed);
    }

    /// Whether [`Self::expect_peers`] was called.
    pub(super) fn has_peers(&self) -> bool {
        self.0.has_peers.load(Ordering::Relaxed)
    }

    /// Free and total bytes, as the driver sees them.
    ///
    /// # Errors
    /// [`GpuError`] of the driver.
    pub fn memory_info(&self) -> Result<MemoryInfo, GpuError> {
        self.bind()?;
        runtime::memory_info()
    }

    /// Waits until all launched work is done.
    ///
    /// # Errors
    /// [`GpuError`] of the driver, or of work that failed.
    pub fn synchronize(&self) -> Result<(), GpuError> {
        self.bind()?;
        // SAFETY: the stream is alive.
        check("cuStreamSynchronize", unsafe {
            sys::cuStreamSynchronize(self.0.stream)
        })
    }

    /// The stream, for libraries that launch on it.
    pub fn stream(&self) -> sys::CUstream {
        self.0.stream
    }

    /// The pool that allocations outside the mapped ones come from, for its meters.
    pub fn pool(&self) -> sys::CUmemoryPool {
        self.0.pool
    }

    /// The driver's handle.
    pub fn device(&self) -> sys::CUdevice {
        self.0.device
    }

    /// Memory that the driver took implicitly.
    pub(super) fn runtime(&self) -> &Runtime {
        &self.0.runtime
    }

    /// Bytes that mapped allocations are multiples of.
    pub(crate) fn granularity(&self) -> usize {
        self.0.granularity
    }

    /// Makes the context current on this thread, as every driver call needs.
    ///
    /// # Errors
    /// [`GpuError`] of the driver.
    pub fn bind(&self) -> Result<(), GpuError> {
        make_current(self.0.context)
    }

    /// To be called after a library that may have made another context current.
    pub(super) fn forget_current() {
        CURRENT.set(std::ptr::null_mut());
    }

    /// True if kernels of this GPU can read and write memory of `peer`, over NVLink or PCI Express.
    ///
    /// # Errors
    /// [`GpuError`] of the driver.
    pub fn reaches(&self, peer: &Self) -> Result<bool, GpuError> {
        if self.0.device == peer.0.device {
            return Ok(true);
        }
        let mut can = 0;
        // SAFETY: a place to write to.
        check("cuDeviceCanAccessPeer", unsafe {
            sys::cuDeviceCanAccessPeer(&mut can, self.0.device, peer.0.device)
        })?;
        Ok(can != 0)
    }

    /// Tells a profiler that runs this process with `--profile-from-start off` (Nsight Compute) to watch, or no longer.
    ///
    /// # Errors
    /// [`GpuError`] of the driver.
    pub fn watch(&self, on: bool) -> Result<(), GpuError> {
        self.synchronize()?;
        // SAFETY: the context is current.
        unsafe {
            match on {
                true => check("cuProfilerStart", sys::cuProfilerStart()),
                false => check("cuProfilerStop", sys::cuProfilerStop()),
            }
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: nothing can use the handles any more. A failure means that the driver is gone with everything in it.
        unsafe {
            if make_current(self.context).is_ok() {
                let _ = sys::cuStreamSynchronize(self.stream);
                let _ = sys::cuMemPoolDestroy(self.pool);
                let _ = sys::cuStreamDestroy_v2(self.stream);
            }
        }
    }
}

thread_local! {
    /// The context that this thread has made current last.
    static CURRENT: Cell<sys::CUcontext> = const { Cell::new(std::ptr::null_mut()) };
}

/// Makes a context, which is retained, current on this thread, unless it is.
fn make_current(context: sys::CUcontext) -> Result<(), GpuError> {
    CURRENT.with(|current| {
        if current.get() == context {
            return Ok(());
        }
        // SAFETY: primary contexts are never released.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(context) })?;
        current.set(context);
        Ok(())
    })
}

/// Opens the driver library and asks for its version.
pub(super) fn driver_version() -> Result<i32, GpuError> {
    let mut found = 0;
    // SAFETY: the functions are only called once the library is known to be there.
    unsafe {
        if !sys::is_culib_present() {
            return Err(GpuError::NoDriver);
        }
        // Without a GPU, the version of the driver is no matter.
        match sys::cuInit(0) {
            sys::CUresult::CUDA_ERROR_NO_DEVICE => Err(GpuError::NoDevice { ordinal: 0, count: 0 }),
            // To link with, where there is no driver.
            sys::CUresult::CUDA_ERROR_STUB_LIBRARY => Err(GpuError::NoDriver),
            result => check("cuInit", result),
        }?;
        check("cuDriverGetVersion", sys::cuDriverGetVersion(&mut found))?;
    }
    if found < NEEDED_DRIVER {
        return Err(GpuError::OldDriver {
            found,
            needed: NEEDED_DRIVER,
        });
    }
    Ok(found)
}

pub(super) fn device(ordinal: usize) -> Result<sys::CUdevice, GpuError> {
    let (mut count, mut device) = (0, 0);
    // SAFETY: places to write to.
    unsafe {
        check("cuDeviceGetCount", sys::cuDeviceGetCount(&mut count))?;
        let count = count as usize;
        if ordinal >= count {
            return Err(GpuError::NoDevice { ordinal, count });
        }
        check("cuDeviceGet", sys::cuDeviceGet(&mut device, ordinal as i32))?;
    }
    Ok(device)
}

fn describe(ordinal: usize, device: sys::CUdevice, driver_version: i32) -> Result<GpuInfo, GpuError> {
    use sys::CUdevice_attribute as A;
    let attribute = |attribute: A| {
        let mut value = 0;
        // SAFETY: a place to write to.
        check("cuDeviceGetAttribute", unsafe {
            sys::cuDeviceGetAttribute(&mut value, attribute, device)
        })
        .map(|()| value as usize)
    };
    let mut name = [0u8; 256];
    let mut total = 0;
    // SAFETY: places to write to, with their length.
    unsafe {
        check(
            "cuDeviceGetName",
            sys::cuDeviceGetName(name.as_mut_ptr().cast(), name.len() as i32, device),
        )?;
        check("cuDeviceTotalMem", sys::cuDeviceTotalMem_v2(&mut total, device))?;
    }
    let end = name.iter().position(|&byte| byte == 0).unwrap_or(name.len());
    Ok(GpuInfo {
        ordinal,
        name: String::from_utf8_lossy(&name[..end]).into_owned(),
        total_bytes: total as u64,
        compute_capability: (
            attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)? as u32,
            attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)? as u32,
        ),
        sm_count: attribute(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        max_shared_bytes: attribute(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        driver_version,
    })
}

/// A pool that keeps what is freed until it is trimmed, so that its meters say what this process really holds.
fn create_pool(device: sys::CUdevice, cap: Option<u64>) -> Result<sys::CUmemoryPool, GpuError> {
    let mut pool = std::ptr::null_mut();
    // SAFETY: all-zero is valid for this struct of integers and pointers; places to write to.
    unsafe {
        let mut props: sys::CUmemPoolProps = std::mem::zeroed();
        props.allocType = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        props.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        props.location.id = device;
        props.maxSize = cap.unwrap_or(0) as usize;
        check("cuMemPoolCreate", sys::cuMemPoolCreate(&mut pool, &props))?;
        let mut threshold = u64::MAX;
        check(
            "cuMemPoolSetAttribute",
            sys::cuMemPoolSetAttribute(
                pool,
                sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD,
                (&raw mut threshold).cast(),
            ),
        )?;
    }
    Ok(pool)
}

/// Where mapped memory lies: on the device, in units of the granularity.
pub(crate) fn allocation_prop(device: sys::CUdevice) -> sys::CUmemAllocationProp {
    // SAFETY: all-zero is valid for this struct of integers and pointers.
    let mut prop: sys::CUmemAllocationProp = unsafe { std::mem::zeroed() };
    prop.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    prop.location.id = device;
    prop
}

fn granularity(device: sys::CUdevice) -> Result<usize, GpuError> {
    let mut granularity = 0;
    // SAFETY: a place to write to.
    check("cuMemGetAllocationGranularity", unsafe {
        sys::cuMemGetAllocationGranularity(
            &mut granularity,
            &allocation_prop(device),
            sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED,
        )
    })?;
    Ok(granularity)
}
