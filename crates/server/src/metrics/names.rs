//! Metric names, for programs that read `/metrics`.

/// Running requests.
pub const RUNNING: &str = super::catalog::RUNNING.0;
/// Queued requests.
pub const WAITING: &str = super::catalog::WAITING.0;
/// Requests that were accepted and have not ended.
pub const IN_FLIGHT: &str = super::catalog::IN_FLIGHT.0;
/// KV blocks, labelled by `state`.
pub const KV_BLOCKS: &str = super::catalog::KV_BLOCKS.0;
/// Preemptions, by cause.
pub const PREEMPTIONS: &str = super::catalog::PREEMPTIONS.0;
/// Prompt tokens found in the prefix cache.
pub const PREFIX_HITS: &str = super::catalog::PREFIX_HITS.0;
/// Tokens generated.
pub const GENERATED_TOKENS: &str = super::catalog::GENERATED_TOKENS.0;
/// Tokens computed.
pub const COMPUTED_TOKENS: &str = super::catalog::COMPUTED_TOKENS.0;
/// Requests cancelled by their clients.
pub const CANCELLED: &str = super::catalog::CANCELLED.0;
/// Failed requests.
pub const FAILED: &str = super::catalog::FAILED.0;
/// Successful steps.
pub const STEPS: &str = super::catalog::STEPS.0;
/// Failed steps.
pub const FAILED_STEPS: &str = super::catalog::FAILED_STEPS.0;
/// Peak device memory held.
pub const MEMORY_HIGH: &str = super::catalog::MEMORY_HIGH.0;
/// Device allocations since the server became ready.
pub const ALLOCATIONS: &str = super::catalog::ALLOCATIONS.0;
/// Steps that exceeded the validated peak.
pub const ABOVE_PROOF: &str = super::catalog::ABOVE_PROOF.0;
/// Rebuilds of the engine's state.
pub const REBUILDS: &str = super::catalog::REBUILDS.0;
