//! How many requests for the model the server has, as vLLM counts them.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::http::Method;

/// Number of requests in progress; clones share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Load(Arc<AtomicUsize>);

impl Load {
    /// How many there are.
    pub(crate) fn now(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }

    /// Counts a request until the result is dropped, if it is one for the model.
    pub(crate) fn count(&self, method: &Method, path: &str) -> Option<Counted> {
        let is_for_model = *method == Method::POST && OTHER.iter().all(|other| !path.starts_with(other));
        is_for_model.then(|| {
            self.0.fetch_add(1, Ordering::Relaxed);
            Counted(self.clone())
        })
    }
}

/// Paths of requests that the model has nothing to do with.
const OTHER: &[&str] = &[
    "/tokenize",
    "/detokenize",
    "/sleep",
    "/wake_up",
    "/admin/",
    "/reset_prefix_cache",
    "/ping",
    "/v1/files",
    "/v1/batches",
];

/// A request that is counted.
#[derive(Debug)]
pub(crate) struct Counted(Load);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::Relaxed);
    }
}
