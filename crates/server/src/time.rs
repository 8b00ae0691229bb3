//! The wall clock.

use std::time::{SystemTime, UNIX_EPOCH};

/// Now, in seconds since 1970.
pub(crate) fn unix_seconds() -> u64 {
    // A clock before 1970 shows as 0.
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .as_secs()
}
