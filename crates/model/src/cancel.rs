use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::ModelError;

/// Lets another thread end the loading of weights. Clones are the same switch.
#[derive(Clone, Debug, Default)]
pub struct Cancel(Arc<AtomicBool>);

impl Cancel {
    /// Loading fails with [`ModelError::Cancelled`] at the next tensor.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    pub(crate) fn check(&self) -> Result<(), ModelError> {
        match self.0.load(Ordering::Relaxed) {
            true => Err(ModelError::Cancelled),
            false => Ok(()),
        }
    }
}
