use std::fmt;

use plimsoll_core::{Component, Meters};

use crate::StepShape;

/// A step that ran out of device memory, and who held the memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutOfMemory {
    /// The step.
    pub shape: StepShape,
    /// Bytes of the allocation that failed.
    pub requested: u64,
    /// Component that the memory was for.
    pub component: Component,
    /// The device's meters at that moment.
    pub meters: Meters,
    /// Bytes that other processes held when the server was ready.
    pub peers_at_ready: u64,
}

impl OutOfMemory {
    /// Bytes by which other processes grew since the server was ready; below 0 if they shrank.
    pub fn peers_delta(&self) -> i128 {
        i128::from(self.meters.peers()) - i128::from(self.peers_at_ready)
    }
}

/// Keys and values for the log; bytes are plain numbers.
impl fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let meters = &self.meters;
        write!(
            f,
            "{} requested={} component={} reserved={} used={} free={} total={} peers={} peers_delta={:+}",
            self.shape,
            self.requested,
            self.component,
            meters.reserved,
            meters.used,
            meters.free,
            meters.total,
            meters.peers(),
            self.peers_delta()
        )
    }
}
