//! Reads the device's memory meters with a timeout: the driver may hang.

use std::panic::resume_unwind;
use std::sync::Arc;
use std::time::Duration;

use plimsoll_core::Meters;
use tokio::sync::Mutex;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use crate::memory::Memory;

/// Timeout of the driver. Shorter than scrape timeouts: the other metrics matter most while a device hangs.
const PATIENCE: Duration = Duration::from_secs(2);

/// Reads the meters and keeps the last values.
#[derive(Debug)]
pub(crate) struct MeterReader {
    /// One reader at a time: a driver that hangs blocks only one thread.
    turn: Arc<Mutex<()>>,
    last: Arc<parking_lot::Mutex<Vec<Meters>>>,
}

impl MeterReader {
    /// Reads once, so that there are values from the start.
    pub(crate) fn new(memory: &dyn Memory) -> Self {
        Self {
            turn: Arc::default(),
            last: Arc::new(memory.meters().into()),
        }
    }

    /// The meters of each rank; the last known ones where the device does not answer in time.
    pub(crate) async fn read(&self, memory: &Arc<dyn Memory>) -> Vec<Meters> {
        let asked = async {
            let turn = Arc::clone(&self.turn).lock_owned().await;
            let (memory, last) = (Arc::clone(memory), Arc::clone(&self.last));
            let read = move || {
                let meters = memory.meters();
                *last.lock() = meters;
                drop(turn);
            };
            spawn_blocking(read).await
        };
        match timeout(PATIENCE, asked).await {
            Ok(Ok(())) => {}
            // Propagate a panic; otherwise the runtime is shutting down.
            Ok(Err(error)) => {
                if let Ok(panic) = error.try_into_panic() {
                    resume_unwind(panic);
                }
            }
            Err(_) => {
                tracing::warn!("the device does not report its memory in time: showing the last known values")
            }
        }
        self.last.lock().clone()
    }
}
