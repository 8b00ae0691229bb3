//! Names on the page of `/metrics`, for programs that read it.

/// Requests that run.
pub const RUNNING: &str = super::RUNNING.0;
/// Requests that wait.
pub const WAITING: &str = super::WAITING.0;
/// Requests that run, wait, or whose answer is on its way.
pub const IN_FLIGHT: &str = super::IN_FLIGHT.0;
/// KV blocks, labelled by `state`.
pub const KV_BLOCKS: &str = super::KV_BLOCKS.0;
/// Times a running request gave up its KV.
pub const PREEMPTIONS: &str = super::PREEMPTIONS.0;
/// Prompt tokens that were found in the prefix cache.
pub const PREFIX_HITS: &str = super::PREFIX_HITS.0;
/// Tokens generated.
pub const GENERATED_TOKENS: &str = super::GENERATED_TOKENS.0;
/// Tokens computed.
pub const COMPUTED_TOKENS: &str = super::COMPUTED_TOKENS.0;
/// Requests ended by their clients.
pub const CANCELLED: &str = super::CANCELLED.0;
/// Requests whose step failed.
pub const FAILED: &str = super::FAILED.0;
/// Steps that ended well.
pub const STEPS: &str = super::STEPS.0;
/// Steps that failed.
pub const FAILED_STEPS: &str = super::FAILED_STEPS.0;
/// Highest device memory held.
pub const MEMORY_HIGH: &str = super::MEMORY_HIGH.0;
/// Device allocations since the server is ready.
pub const ALLOCATIONS: &str = super::ALLOCATIONS.0;
/// Steps after which more memory was held than was proved.
pub const ABOVE_PROOF: &str = super::ABOVE_PROOF.0;
/// States built again since the server is ready.
pub const REBUILDS: &str = super::REBUILDS.0;
