//! Limits host memory for what requests bring: for the text of large ones until it is tokenized, as parsed and rendered text takes
//! many times its bytes, and for their images. A limit per request would not bound the total.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use crate::error::ApiError;

/// Requests up to this size, in bytes, need no reservation: the connection limit bounds them, and they do not wait for large ones.
pub(crate) const SMALL: usize = 64 << 10;

/// Bytes of a permit: with these the 32 bits of a semaphore count up to 4 TiB.
const UNIT: usize = 1 << 10;

/// A budget of bytes.
#[derive(Debug)]
pub(crate) struct RequestMemory {
    /// What it is for.
    of: &'static str,
    free: Arc<Semaphore>,
    /// The whole budget, in permits.
    all: u32,
    /// What needs no reservation, in bytes.
    small: usize,
    patience: Duration,
}

/// A reservation; dropping it releases it.
pub(crate) type Reservation = OwnedSemaphorePermit;

/// Gives back what a reservation has beyond `bytes`.
pub(crate) fn shrink(reservation: &mut Reservation, bytes: usize) {
    let rest = reservation.num_permits().saturating_sub(bytes.div_ceil(UNIT));
    drop(reservation.split(rest));
}

impl RequestMemory {
    /// A budget of `bytes`; a reservation that waits longer than `patience` fails. Up to `small` bytes need none.
    pub(crate) fn new(of: &'static str, bytes: usize, small: usize, patience: Duration) -> Self {
        let all = u32::try_from(bytes / UNIT).unwrap_or(u32::MAX);
        Self {
            of,
            free: Arc::new(Semaphore::new(all as usize)),
            all,
            small,
            patience,
        }
    }

    /// Reserves `bytes`, at most the whole budget, once they are free.
    pub(crate) async fn reserve(&self, bytes: usize) -> Result<Reservation, ApiError> {
        let wanted = match bytes <= self.small {
            true => 0,
            false => u32::try_from(bytes.div_ceil(UNIT)).map_or(self.all, |permits| permits.min(self.all)),
        };
        let reservation = Arc::clone(&self.free).acquire_many_owned(wanted);
        match timeout(self.patience, reservation).await {
            Ok(Ok(reservation)) => Ok(reservation),
            // The semaphore is never closed.
            Ok(Err(_)) | Err(_) => Err(ApiError::NoRequestMemory {
                of: self.of,
                waited: self.patience,
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn large_requests_wait_and_small_ones_do_not() {
        let memory = RequestMemory::new("tests", 1 << 20, SMALL, Duration::from_millis(50));
        let first = memory.reserve(1 << 20).await.unwrap();
        assert!(matches!(
            memory.reserve(SMALL + 1).await,
            Err(ApiError::NoRequestMemory { .. })
        ));
        drop(memory.reserve(SMALL).await.unwrap());
        drop(first);
        // Larger than the budget: reserves all of it.
        let huge = memory.reserve(usize::MAX).await.unwrap();
        assert!(memory.reserve(1 << 19).await.is_err());
        drop(huge);
        drop(memory.reserve(1 << 19).await.unwrap());
    }

    #[tokio::test]
    async fn what_is_not_needed_any_more_is_for_others() {
        let memory = RequestMemory::new("tests", 1 << 20, SMALL, Duration::from_millis(50));
        let mut first = memory.reserve(1 << 20).await.unwrap();
        shrink(&mut first, 1 << 18);
        let second = memory.reserve(3 << 18).await.unwrap();
        assert!(memory.reserve(SMALL + 1).await.is_err());
        drop(second);
        // There is nothing more to give back.
        shrink(&mut first, 1 << 20);
        assert!(memory.reserve((3 << 18) + SMALL).await.is_err());
    }
}
