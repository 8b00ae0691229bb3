use std::thread::Builder;

use plimsoll_device::cuda::{Gpu, GpuError, Module};

// `static IMAGES: &[(&str, &[u8])]`: name and fatbin of each file of `kernels/`; empty without the feature `cuda`.
// `const HOPPER: bool`: whether they have code for `90a`.
include!(concat!(env!("OUT_DIR"), "/images.rs"));

/// Whether this binary carries GPU code: it was built with the feature `cuda`.
pub fn has_images() -> bool {
    !IMAGES.is_empty()
}

/// Whether the kernels that are made for Hopper alone (H100, H200: compute capability 9.0) run on `gpu`. The instructions they need are in
/// code for `90a`, and not in that for `compute_90`, which newer GPUs can run too.
pub fn has_hopper_kernels(gpu: &Gpu) -> bool {
    HOPPER && gpu.info().compute_capability == (9, 0)
}

/// Begins to open cuBLAS, which takes a while, beside the GPU; [`check`] waits for it.
pub fn open_libraries() {
    if has_images() {
        let open = Builder::new().name("open-cublas".to_owned());
        // Whoever needs it hears of a failure, and opens it where there is no thread for it.
        let _ = open.spawn(|| drop(super::linear::find_cublas()));
    }
}

/// Whether this binary can compute on `gpu`: it carries GPU code for it, and cuBLAS is on this machine.
///
/// # Errors
/// [`GpuError`] that says what is missing.
pub fn check(gpu: &Gpu) -> Result<(), GpuError> {
    let (_, image) = IMAGES.first().ok_or(GpuError::NoKernels)?;
    gpu.load_module(image)?;
    super::linear::find_cublas()
}

/// Loads the kernels of `kernels/NAME.cu`.
///
/// # Errors
/// [`GpuError`] if this binary carries no GPU code or none for this GPU.
pub fn load(gpu: &Gpu, name: &str) -> Result<Module, GpuError> {
    let image = IMAGES.iter().find(|(image, _)| *image == name);
    let (_, bytes) = image.ok_or(GpuError::NoKernels)?;
    gpu.load_module(bytes)
}
