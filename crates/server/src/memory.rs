//! Where the server learns what the device's memory holds.

use plimsoll_core::Meters;
use serde_json::Value;

/// Where `/memory` and the memory metrics come from.
pub trait Memory: Send + Sync + 'static {
    /// The profile's report.
    fn report(&self) -> Value;

    /// The device's meters, now. Asks the device or the operating system, which may hang.
    fn meters(&self) -> Meters;

    /// Allocations that were made since the server is ready, those for building its state again left out.
    fn allocations_after_ready(&self) -> u64;

    /// Highest bytes that were held while the worst steps ran, without the canary, by the process's own account.
    fn proved_peak(&self) -> u64;

    /// How the start went, and the proof of the state in use.
    fn start(&self) -> StartNumbers;
}

/// Numbers of a start.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StartNumbers {
    /// Seconds of each stage, in their order; names are constants.
    pub stages: Vec<(&'static str, f64)>,
    /// Sizes of the KV cache that were tried for the state in use. The last was proved.
    pub tried: usize,
}
