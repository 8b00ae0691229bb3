//! Host memory for what large requests say, from its arrival until it is tokens: parsed and rendered it takes many times its
//! bytes, so the size of each alone would not bound what all take.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use crate::error::ApiError;

/// Bytes that need no room: as many connections as there may be take no more than they do anyway, and small requests do not wait
/// for large ones.
pub(crate) const SMALL: usize = 64 << 10;

/// So many bytes of texts may be in at once.
#[derive(Debug)]
pub(crate) struct Room {
    free: Arc<Semaphore>,
    all: u32,
    patience: Duration,
}

/// A part of the room; it is free again with the drop.
pub(crate) type Place = OwnedSemaphorePermit;

impl Room {
    /// Of `bytes`. Who finds no place within `patience` is refused.
    pub(crate) fn new(bytes: usize, patience: Duration) -> Self {
        let all = u32::try_from(bytes).unwrap_or(u32::MAX);
        Self {
            free: Arc::new(Semaphore::new(all as usize)),
            all,
            patience,
        }
    }

    /// Takes `bytes`, or all that there are, once others have left.
    pub(crate) async fn take(&self, bytes: usize) -> Result<Place, ApiError> {
        let wanted = match bytes {
            ..=SMALL => 0,
            bytes => u32::try_from(bytes).unwrap_or(u32::MAX).min(self.all),
        };
        let place = Arc::clone(&self.free).acquire_many_owned(wanted);
        match timeout(self.patience, place).await {
            Ok(Ok(place)) => Ok(place),
            // Nobody closes it.
            Ok(Err(_)) | Err(_) => Err(ApiError::NoRoom(self.patience)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn large_ones_wait_and_small_ones_do_not() {
        let room = Room::new(1 << 20, Duration::from_millis(50));
        let first = room.take(1 << 20).await.unwrap();
        assert!(matches!(room.take(SMALL + 1).await, Err(ApiError::NoRoom(_))));
        drop(room.take(SMALL).await.unwrap());
        drop(first);
        // More than there is: alone, then.
        let huge = room.take(usize::MAX).await.unwrap();
        assert!(room.take(1 << 19).await.is_err());
        drop(huge);
        drop(room.take(1 << 19).await.unwrap());
    }
}
