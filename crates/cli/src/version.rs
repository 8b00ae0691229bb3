//! What this binary was built from.

/// Short commit hash; `unknown` outside a git checkout.
pub(crate) const COMMIT: &str = env!("BUILD_COMMIT");

/// Version and commit, as `--version` shows them.
pub(crate) const LONG: &str = concat!(env!("CARGO_PKG_VERSION"), " (", env!("BUILD_COMMIT"), ")");
