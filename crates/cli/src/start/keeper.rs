//! What the engine gets along with its state.

use std::sync::Arc;

use plimsoll_engine::StateSource;
use plimsoll_server::Memory;

use crate::standing::Standing;

/// Knows how the state in use stands.
pub(super) struct Keeper {
    pub(super) standing: Arc<Standing>,
}

impl<S> StateSource<S> for Keeper {
    fn high_water(&self) -> u64 {
        self.standing.high_water()
    }

    fn proved_peak(&self) -> u64 {
        self.standing.proved_peak()
    }
}
