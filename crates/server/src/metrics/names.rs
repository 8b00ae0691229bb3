//! Names on the page of `/metrics`, for programs that read it.

/// Requests that run.
pub const RUNNING: &str = super::catalog::RUNNING.0;
/// Requests that wait.
pub const WAITING: &str = super::catalog::WAITING.0;
/// Requests that run, wait, or whose answer is on its way.
pub const IN_FLIGHT: &str = super::catalog::IN_FLIGHT.0;
/// KV blocks, labelled by `state`.
pub const KV_BLOCKS: &str = super::catalog::KV_BLOCKS.0;
/// Times a running request lost its KV, by cause.
pub const PREEMPTIONS: &str = super::catalog::PREEMPTIONS.0;
/// Prompt tokens that were found in the prefix cache.
pub const PREFIX_HITS: &str = super::catalog::PREFIX_HITS.0;
/// Tokens generated.
pub const GENERATED_TOKENS: &str = super::catalog::GENERATED_TOKENS.0;
/// Tokens computed.
pub const COMPUTED_TOKENS: &str = super::catalog::COMPUTED_TOKENS.0;
/// Requests ended by their clients.
pub const CANCELLED: &str = super::catalog::CANCELLED.0;
/// Requests whose step failed.
pub const FAILED: &str = super::catalog::FAILED.0;
/// Steps that ended well.
pub const STEPS: &str = super::catalog::STEPS.0;
/// Steps that failed.
pub const FAILED_STEPS: &str = super::catalog::FAILED_STEPS.0;
/// Highest device memory held.
pub const MEMORY_HIGH: &str = super::catalog::MEMORY_HIGH.0;
/// Device allocations since the server is ready.
pub const ALLOCATIONS: &str = super::catalog::ALLOCATIONS.0;
/// Steps after which more memory was held than was proved.
pub const ABOVE_PROOF: &str = super::catalog::ABOVE_PROOF.0;
/// States built again since the server is ready.
pub const REBUILDS: &str = super::catalog::REBUILDS.0;
