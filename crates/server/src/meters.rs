//! The device's meters, asked of a driver that may not answer.

use std::panic::resume_unwind;
use std::sync::Arc;
use std::time::Duration;

use plimsoll_core::Meters;
use tokio::sync::Mutex;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use crate::state::Memory;

/// How long the driver may take. Below every scraper's own patience: the other metrics are wanted most while a device hangs.
const PATIENCE: Duration = Duration::from_secs(2);

/// Whose turn it is to ask: a driver that hangs holds one thread, however often it is asked.
#[derive(Debug, Default)]
pub(crate) struct MeterReader(Arc<Mutex<()>>);

impl MeterReader {
    /// The meters now; as they were last read where the device does not answer.
    pub(crate) async fn read(&self, memory: &Arc<dyn Memory>) -> Meters {
        let asked = async {
            let turn = Arc::clone(&self.0).lock_owned().await;
            let memory = Arc::clone(memory);
            let read = move || {
                let meters = memory.meters();
                drop(turn);
                meters
            };
            spawn_blocking(read).await
        };
        match timeout(PATIENCE, asked).await {
            Ok(Ok(meters)) => meters,
            // The runtime ends, or a panic, which goes on here.
            Ok(Err(error)) => match error.try_into_panic() {
                Ok(panic) => resume_unwind(panic),
                Err(_) => memory.account(),
            },
            Err(_) => {
                tracing::warn!("the device does not say what memory is free: its numbers are old");
                memory.account()
            }
        }
    }
}
