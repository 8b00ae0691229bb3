//! What this binary was built from.

/// Short commit hash; `unknown` outside a git checkout.
pub(crate) const COMMIT: &str = env!("BUILD_COMMIT");

/// Version, commit and whether there are CUDA kernels, as `--version` shows them.
pub(crate) fn long() -> &'static str {
    const CPU: &str = concat!(env!("CARGO_PKG_VERSION"), " (", env!("BUILD_COMMIT"), ")");
    const CUDA: &str = concat!(env!("CARGO_PKG_VERSION"), " (", env!("BUILD_COMMIT"), ", CUDA)");
    if plimsoll_kernels::cuda::has_images() {
        CUDA
    } else {
        CPU
    }
}
