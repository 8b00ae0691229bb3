//! What one rendering of a chat template may take.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Instructions of the template engine: some 3,000 for each of the messages that a request may have.
pub(crate) const MAX_STEPS: u64 = 50_000_000;
/// Bytes of a rendered prompt: twice the default of --max-body-size.
pub(crate) const MAX_OUTPUT_BYTES: usize = 64 << 20;
/// Address space, beside that of the program.
pub(crate) const MAX_MEMORY_BYTES: u64 = 512 << 20;
/// Stack; minijinja's calls end at a depth that needs a fraction of it.
pub(crate) const STACK_BYTES: usize = 32 << 20;
/// The steps that are allowed need a tenth of it on a slow machine.
pub(crate) const MAX_TIME: Duration = Duration::from_secs(20);

/// A bound of a rendering that was exceeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum RenderLimit {
    /// Instructions of the template engine.
    #[error("rendering took more than {} steps", MAX_STEPS)]
    Steps,
    /// Length of the prompt.
    #[error("rendering wrote more than {} MiB", MAX_OUTPUT_BYTES >> 20)]
    Output,
    /// Memory of the process that renders.
    #[error("rendering needed more than {} MiB of memory", MAX_MEMORY_BYTES >> 20)]
    Memory,
    /// Its stack.
    #[error("rendering recursed without end and overflowed the stack")]
    Stack,
    /// Time of the process that renders.
    #[error("rendering took more than {} s", MAX_TIME.as_secs())]
    Time,
}
