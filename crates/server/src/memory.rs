//! What the server asks about the device's memory.

use plimsoll_core::Meters;
use serde_json::Value;

/// The source of `/memory` and the memory metrics.
pub trait Memory: Send + Sync + 'static {
    /// The report of the profile.
    fn report(&self) -> Value;

    /// Reads the device's meters. Calls the driver or the operating system, which may hang.
    fn meters(&self) -> Meters;

    /// Device allocations since the server became ready, without those of rebuilding the engine's state.
    fn allocations_after_ready(&self) -> u64;

    /// Peak bytes held while the worst-case steps ran, as counted by the process, without the canary.
    fn proved_peak(&self) -> u64;

    /// Numbers of the start and of the profile of the state in use.
    fn start(&self) -> StartNumbers;
}

/// Numbers of a start.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StartNumbers {
    /// Name and seconds of each stage, in order.
    pub stages: Vec<(&'static str, f64)>,
    /// KV cache sizes tried for the state in use; the last one was validated.
    pub tried: usize,
}
