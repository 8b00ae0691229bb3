//! The device's meters, asked of a driver that may not answer.

use std::panic::resume_unwind;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use plimsoll_core::Meters;
use tokio::sync::Mutex;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use crate::memory::Memory;

/// How long the driver may take. Below every scraper's own patience: the other metrics are wanted most while a device hangs.
const PATIENCE: Duration = Duration::from_secs(2);

/// Asks for the meters, and keeps the answer for when there is none.
#[derive(Debug)]
pub(crate) struct MeterReader {
    /// Whose turn it is to ask: a driver that hangs holds one thread, however often it is asked.
    turn: Arc<Mutex<()>>,
    last: Arc<std::sync::Mutex<Meters>>,
}

impl MeterReader {
    /// Asks once, so that there is an answer from the start.
    pub(crate) fn new(memory: &dyn Memory) -> Self {
        Self {
            turn: Arc::default(),
            last: Arc::new(memory.meters().into()),
        }
    }

    /// The meters now; as they were last read where the device does not answer.
    pub(crate) async fn read(&self, memory: &Arc<dyn Memory>) -> Meters {
        let asked = async {
            let turn = Arc::clone(&self.turn).lock_owned().await;
            let (memory, last) = (Arc::clone(memory), Arc::clone(&self.last));
            let read = move || {
                let meters = memory.meters();
                *last.lock().unwrap_or_else(PoisonError::into_inner) = meters;
                drop(turn);
            };
            spawn_blocking(read).await
        };
        match timeout(PATIENCE, asked).await {
            Ok(Ok(())) => {}
            // A panic goes on here; else the runtime ends.
            Ok(Err(error)) => {
                if let Ok(panic) = error.try_into_panic() {
                    resume_unwind(panic);
                }
            }
            Err(_) => tracing::warn!("the device does not say what memory is free: its numbers are old"),
        }
        *self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
