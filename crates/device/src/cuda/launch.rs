use std::ffi::{CString, c_void};
use std::sync::Arc;

use bytemuck::Pod;
use cudarc::driver::sys;

use super::{Gpu, GpuError, GpuSlice, TensorMap, check};

/// Loaded device code, which its functions keep loaded.
#[derive(Debug)]
pub struct Module(Arc<Loaded>);

/// Unloads the code when dropped.
#[derive(Debug)]
struct Loaded {
    gpu: Gpu,
    handle: sys::CUmodule,
}

// SAFETY: the handle belongs to the driver, whose functions may be called from any thread.
unsafe impl Send for Loaded {}
// SAFETY: as above.
unsafe impl Sync for Loaded {}

impl Drop for Loaded {
    fn drop(&mut self) {
        // What was launched may still run.
        let unload = self.gpu.synchronize().and_then(|()| {
            // SAFETY: no function of it is left, so nothing is launched any more.
            check("cuModuleUnload", unsafe { sys::cuModuleUnload(self.handle) })
        });
        if let Err(error) = unload {
            tracing::error!(%error, "kernels could not be unloaded");
        }
    }
}

impl Gpu {
    /// Loads a cubin, fatbin or PTX image.
    ///
    /// # Errors
    /// [`GpuError::NoKernelsFor`] if the image has nothing for this GPU.
    pub fn load_module(&self, image: &[u8]) -> Result<Module, GpuError> {
        self.bind()?;
        Module::load(self, image)
    }

    /// Launches `function` on the stream.
    ///
    /// # Errors
    /// [`GpuError`] of the driver.
    ///
    /// # Safety
    /// `args` must be what the kernel declares, in order, and point to memory that it may access until it ends.
    pub unsafe fn launch(&self, function: &Function, launch: Launch, args: &[Arg]) -> Result<(), GpuError> {
        self.bind()?;
        // SAFETY: the caller's promise.
        unsafe { launch.run(function, self.stream(), args.iter().map(Arg::as_ptr)) }
    }

    /// As [`Self::launch`], of a kernel whose only argument is a struct.
    ///
    /// # Errors
    /// As [`Self::launch`].
    ///
    /// # Safety
    /// As [`Self::launch`]; the struct is the kernel's.
    pub unsafe fn launch_with_struct<T: Pod>(
        &self,
        function: &Function,
        launch: Launch,
        argument: &T,
    ) -> Result<(), GpuError> {
        self.bind()?;
        let argument = std::ptr::from_ref(argument).cast_mut().cast();
        // SAFETY: the caller's promise.
        unsafe { launch.run(function, self.stream(), [argument].into_iter()) }
    }

    /// As [`Self::launch`], of a kernel whose first arguments are tensor maps.
    ///
    /// # Errors
    /// As [`Self::launch`].
    ///
    /// # Safety
    /// As [`Self::launch`]; the maps' memory may be read until the kernel ends.
    pub unsafe fn launch_with_maps(
        &self,
        function: &Function,
        launch: Launch,
        maps: &[&TensorMap],
        args: &[Arg],
    ) -> Result<(), GpuError> {
        self.bind()?;
        // SAFETY: the caller's promise.
        unsafe {
            let maps = maps.iter().map(|map| map.as_ptr().cast_mut().cast());
            launch.run(function, self.stream(), maps.chain(args.iter().map(Arg::as_ptr)))
        }
    }
}

impl Module {
    fn load(gpu: &Gpu, image: &[u8]) -> Result<Self, GpuError> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: the image says itself how long it is; it was made by the compiler.
        match unsafe { sys::cuModuleLoadData(&mut handle, image.as_ptr().cast()) } {
            sys::CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU => {
                let info = gpu.info();
                let (major, minor) = info.compute_capability;
                Err(GpuError::NoKernelsFor {
                    name: info.name.clone(),
                    major,
                    minor,
                })
            }
            result => check("cuModuleLoadData", result),
        }?;
        let gpu = gpu.clone();
        Ok(Self(Arc::new(Loaded { gpu, handle })))
    }

    /// The kernel of that (unmangled) name.
    ///
    /// # Errors
    /// [`GpuError`] if there is none.
    pub fn function(&self, name: &str) -> Result<Function, GpuError> {
        self.0.gpu.bind()?;
        let symbol = CString::new(name).map_err(|_| GpuError::Call {
            call: "cuModuleGetFunction",
            code: "CUDA_ERROR_INVALID_VALUE".to_owned(),
            message: format!("{name:?} holds a zero byte"),
        })?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the module is loaded, the name ends with a zero.
        check("cuModuleGetFunction", unsafe {
            sys::cuModuleGetFunction(&mut handle, self.0.handle, symbol.as_ptr())
        })
        .map_err(|error| match error {
            GpuError::Call { call, code, message } => GpuError::Call {
                call,
                code,
                message: format!("{name}: {message}"),
            },
            other => other,
        })?;
        if self.0.gpu.has_peers() {
            // SAFETY: the function was found.
            check("cuFuncLoad", unsafe { sys::cuFuncLoad(handle) })?;
        }
        Ok(Function {
            handle,
            module: Arc::clone(&self.0),
        })
    }
}

/// One kernel.
#[derive(Clone, Debug)]
pub struct Function {
    handle: sys::CUfunction,
    module: Arc<Loaded>,
}

// SAFETY: as for `Loaded`.
unsafe impl Send for Function {}
// SAFETY: as for `Loaded`.
unsafe impl Sync for Function {}

impl Function {
    /// Lets the kernel be launched with up to `bytes` of dynamic shared memory; 48 KiB are allowed without.
    ///
    /// # Errors
    /// [`GpuError`] if the GPU has less.
    pub fn allow_shared(&self, bytes: usize) -> Result<(), GpuError> {
        self.module.gpu.bind()?;
        // SAFETY: the function is loaded.
        check("cuFuncSetAttribute", unsafe {
            sys::cuFuncSetAttribute(
                self.handle,
                sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                bytes as i32,
            )
        })
    }

    /// Blocks of `threads` threads and `shared` bytes of dynamic shared memory that run on one multiprocessor at once.
    ///
    /// # Errors
    /// [`GpuError`] of the driver.
    pub fn blocks_per_sm(&self, threads: usize, shared: usize) -> Result<usize, GpuError> {
        self.module.gpu.bind()?;
        let mut blocks = 0;
        // SAFETY: the function is loaded; a place to write to.
        check("cuOccupancyMaxActiveBlocksPerMultiprocessor", unsafe {
            sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(&mut blocks, self.handle, threads as i32, shared)
        })?;
        Ok(blocks as usize)
    }

    /// Clusters of `cluster` blocks of `threads` threads and `shared` bytes of dynamic shared memory that the GPU runs at
    /// once. A cluster lies within one part of the chip, so this is less than multiprocessors suggest.
    ///
    /// # Errors
    /// [`GpuError`] of the driver; GPUs before compute capability 9.0 have no clusters.
    pub fn clusters_at_once(&self, cluster: usize, threads: usize, shared: usize) -> Result<usize, GpuError> {
        self.module.gpu.bind()?;
        // SAFETY: all-zero is valid for these structs.
        let (mut attribute, mut config) = unsafe {
            (
                std::mem::zeroed::<sys::CUlaunchAttribute>(),
                std::mem::zeroed::<sys::CUlaunchConfig>(),
            )
        };
        attribute.id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
        attribute.value.clusterDim.x = cluster as u32;
        attribute.value.clusterDim.y = 1;
        attribute.value.clusterDim.z = 1;
        config.gridDimX = cluster as u32;
        config.gridDimY = 1;
        config.gridDimZ = 1;
        config.blockDimX = threads as u32;
        config.blockDimY = 1;
        config.blockDimZ = 1;
        config.sharedMemBytes = shared as u32;
        config.attrs = &mut attribute;
        config.numAttrs = 1;
        let mut clusters = 0;
        // SAFETY: the function is loaded; a place to write to; the attribute outlives the call.
        check("cuOccupancyMaxActiveClusters", unsafe {
            sys::cuOccupancyMaxActiveClusters(&mut clusters, self.handle, &config)
        })?;
        Ok(clusters as usize)
    }
}

/// Shape of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Blocks in x, y, z.
    pub grid: [u32; 3],
    /// Threads per block.
    pub block: u32,
    /// Bytes of dynamic shared memory per block.
    pub shared: u32,
    /// May start before the kernel ahead of it has ended (programmatic dependent launch): it waits itself, by `pdl_wait`.
    pub pdl: bool,
    /// Blocks in x that form a cluster; 1 for none.
    pub cluster: u32,
}

impl Launch {
    /// A grid of blocks of `block` threads.
    pub fn new(grid: [u32; 3], block: u32) -> Self {
        Self {
            grid,
            block,
            shared: 0,
            pdl: false,
            cluster: 1,
        }
    }

    /// With that much dynamic shared memory.
    pub fn shared(self, bytes: usize) -> Self {
        Self {
            shared: bytes as u32,
            ..self
        }
    }

    /// With programmatic dependent launch or without.
    pub fn pdl(self, pdl: bool) -> Self {
        Self { pdl, ..self }
    }

    /// In clusters of `blocks` blocks.
    pub fn cluster(self, blocks: u32) -> Self {
        Self {
            cluster: blocks,
            ..self
        }
    }

    /// # Safety
    /// As [`Gpu::launch`].
    unsafe fn run(
        self,
        function: &Function,
        stream: sys::CUstream,
        args: impl Iterator<Item = *mut c_void>,
    ) -> Result<(), GpuError> {
        let mut attributes = [const { std::mem::MaybeUninit::<sys::CUlaunchAttribute>::zeroed() }; 2];
        let mut count = 0;
        if self.pdl {
            // SAFETY: all-zero is valid for this struct.
            let attribute = unsafe { attributes[count].assume_init_mut() };
            attribute.id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
            attribute.value.programmaticStreamSerializationAllowed = 1;
            count += 1;
        }
        if self.cluster > 1 {
            // SAFETY: all-zero is valid for this struct.
            let attribute = unsafe { attributes[count].assume_init_mut() };
            attribute.id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
            attribute.value.clusterDim.x = self.cluster;
            attribute.value.clusterDim.y = 1;
            attribute.value.clusterDim.z = 1;
            count += 1;
        }
        let config = sys::CUlaunchConfig {
            gridDimX: self.grid[0],
            gridDimY: self.grid[1],
            gridDimZ: self.grid[2],
            blockDimX: self.block,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: self.shared,
            hStream: stream,
            attrs: attributes.as_mut_ptr().cast(),
            numAttrs: count as u32,
        };
        const MAX_ARGS: usize = 64;
        let mut params = [std::ptr::null_mut::<c_void>(); MAX_ARGS];
        for (at, arg) in args.enumerate() {
            assert!(at < MAX_ARGS, "more than {MAX_ARGS} kernel arguments");
            params[at] = arg;
        }
        // SAFETY: the caller's promise; the driver copies the arguments before it returns.
        check("cuLaunchKernelEx", unsafe {
            sys::cuLaunchKernelEx(
                &config,
                function.handle,
                params.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        })
    }
}

/// One kernel argument of up to eight bytes: the driver reads as many of them as the kernel declares.
#[derive(Clone, Copy, Debug)]
pub struct Arg(u64);

impl Arg {
    fn as_ptr(&self) -> *mut c_void {
        (&raw const self.0).cast_mut().cast()
    }
}

impl From<u32> for Arg {
    fn from(value: u32) -> Self {
        Self(u64::from(value))
    }
}

impl From<i32> for Arg {
    fn from(value: i32) -> Self {
        Self(u64::from(value.cast_unsigned()))
    }
}

impl From<f32> for Arg {
    fn from(value: f32) -> Self {
        Self(u64::from(value.to_bits()))
    }
}

impl From<u64> for Arg {
    fn from(value: u64) -> Self {
        Self(value)
    }
}

impl<T: Pod> From<GpuSlice<'_, T>> for Arg {
    fn from(slice: GpuSlice<'_, T>) -> Self {
        Self(slice.ptr())
    }
}
