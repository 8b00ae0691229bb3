//! `GET /load`, as in vLLM: how many requests the server has.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::Json;
use axum::extract::State;
use axum::http::Method;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::state::AppState;
use crate::wire::about::LoadReport;

/// Number of requests in progress; clones share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Load(Arc<AtomicUsize>);

impl Load {
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

/// The route of `--enable-server-load-tracking`.
pub(crate) fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::default().routes(routes!(load))
}

/// Load
///
/// Requests for the model that have arrived and whose response has not ended.
#[utoipa::path(
    get, path = "/load", tag = "Operation", operation_id = "load",
    responses((status = 200, description = "How many there are.", body = LoadReport))
)]
async fn load(State(state): State<AppState>) -> Json<LoadReport> {
    Json(LoadReport {
        server_load: state.load().0.load(Ordering::Relaxed),
    })
}
