//! Why there is no room in the cache.

/// Too few pages are free; nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{needed} KV pages are needed, {available} are available: preempt a request or wait for one to end")]
pub struct OutOfPages {
    /// Pages asked for, headroom included.
    pub needed: usize,
    /// Unreferenced pages, cached ones included.
    pub available: usize,
}

/// Why a table cannot be opened; nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoRoom {
    /// For its blocks.
    #[error(transparent)]
    Pages(#[from] OutOfPages),
    /// For its state.
    #[error("all {0} state slots are in use: wait for a request to end")]
    Slots(usize),
}
