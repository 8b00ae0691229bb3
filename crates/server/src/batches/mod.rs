//! `/v1/files` and `/v1/batches`: OpenAI's Batch API over this server's own engine.

mod files;
mod input;
mod run;

use std::sync::Arc;

use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use axum::{Extension, Json, Router};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::body::Body;
use crate::context::Context;
use crate::error::ApiError;
use crate::file_store::{Batch, FileStore, StoreError};
use crate::openapi::Errors;
use crate::paging::{limit, page};
use crate::respond::fresh_id;
use crate::state::AppState;
use crate::time::unix_seconds;
use crate::wire::batch::{
    BatchFields, BatchObject, BatchRequest, BatchStatus, BatchesQuery, ExpiresAfter, Page, RequestCounts,
};
use crate::wire::error::ErrorBody;

/// The endpoints whose requests a batch may have, without middleware.
#[derive(Clone, Debug)]
pub(crate) struct Endpoints(pub(crate) Router);

/// Their paths.
const ENDPOINTS: [&str; 4] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
];
/// Longest completion window, in hours.
const MAX_HOURS: u64 = 30 * 24;

/// The routes, where there is a file store.
pub(crate) fn routes() -> OpenApiRouter<AppState> {
    files::routes()
        .routes(routes!(create, list))
        .routes(routes!(retrieve))
        .routes(routes!(cancel))
}

/// Goes on with the batches that an earlier process left.
pub(crate) fn resume(state: &AppState, endpoints: &Endpoints) {
    let Some(store) = &state.options().files else {
        return;
    };
    for id in store.live_batches() {
        tracing::info!(id, "resuming a batch");
        run::start(state, endpoints, store, id);
    }
}

/// The store; without one there are no such routes.
fn store(state: &AppState) -> Result<&Arc<FileStore>, ApiError> {
    let store = state.options().files.as_ref();
    store.ok_or_else(|| ApiError::Internal("there is no file store".into()))
}

/// An error of the store about a request whose `field` is to be stored.
fn refused(error: StoreError, field: &str) -> ApiError {
    match error {
        StoreError::Io(_) => ApiError::Internal(error.to_string()),
        StoreError::Full(_) | StoreError::TooMany(_) => ApiError::invalid(field, error.to_string()),
    }
}

fn unknown(what: &str, id: &str, param: Option<&'static str>) -> ApiError {
    ApiError::NotStored {
        message: format!("there is no {what} `{id}`, or no longer"),
        param,
    }
}

/// Create a batch
///
/// Answers the requests of a file in the background, behind all other requests.
#[utoipa::path(
    post, path = "/v1/batches", operation_id = "createBatch", tag = "Batches",
    request_body(content = BatchRequest, example = json!({
        "input_file_id": "file-..", "endpoint": "/v1/chat/completions", "completion_window": "24h",
    })),
    responses((status = 200, description = "The batch, which has begun.", body = BatchObject), Errors)
)]
async fn create(
    State(state): State<AppState>,
    Extension(context): Extension<Context>,
    Extension(endpoints): Extension<Endpoints>,
    Body(BatchRequest(fields)): Body<BatchRequest>,
) -> Result<Json<BatchObject>, ApiError> {
    let store = store(&state)?;
    let BatchFields {
        input_file_id,
        endpoint,
        completion_window,
        metadata,
        output_expires_after,
    } = fields;
    if !ENDPOINTS.contains(&endpoint.as_str()) {
        let message = format!("endpoint must be one of {}, not {endpoint}", ENDPOINTS.join(", "));
        return Err(ApiError::invalid("endpoint", message));
    }
    let hours = completion_window
        .strip_suffix('h')
        .and_then(|hours| hours.parse::<u64>().ok());
    let Some(hours @ 1..=MAX_HOURS) = hours else {
        let message =
            format!("completion_window must be 1h to {MAX_HOURS}h, such as 24h, not {completion_window}");
        return Err(ApiError::invalid("completion_window", message));
    };
    let output_expiry =
        output_expires_after.map(|after| files::expiry(&after, store.expiry(), "output_expires_after"));
    let output_expiry = output_expiry.transpose()?;
    let owner = context.owner();
    if store.file(&owner, &input_file_id).is_none() {
        return Err(unknown("file", &input_file_id, Some("input_file_id")));
    }
    let created_at = unix_seconds();
    let object = BatchObject {
        id: fresh_id("batch"),
        object: "batch".to_owned(),
        endpoint,
        errors: None,
        input_file_id,
        completion_window,
        status: BatchStatus::Validating,
        output_file_id: None,
        error_file_id: None,
        created_at,
        in_progress_at: None,
        expires_at: created_at + hours * 3600,
        finalizing_at: None,
        completed_at: None,
        failed_at: None,
        expired_at: None,
        cancelling_at: None,
        cancelled_at: None,
        request_counts: RequestCounts::default(),
        metadata,
    };
    let batch = Batch {
        object: object.clone(),
        parts: std::array::from_fn(|_| files::fresh_file_id()),
        output_expiry,
    };
    store
        .add_batch(owner, batch)
        .map_err(|error| refused(error, "input_file_id"))?;
    run::start(&state, &endpoints, store, object.id.clone());
    Ok(Json(object))
}

/// List batches
///
/// The newest first.
#[utoipa::path(
    get, path = "/v1/batches", operation_id = "listBatches", tag = "Batches", params(BatchesQuery),
    responses(
        (status = 200, description = "A page of them.", body = Page<BatchObject>),
        (status = 400, description = "A parameter is wrong.", body = ErrorBody),
    )
)]
async fn list(
    State(state): State<AppState>,
    Extension(context): Extension<Context>,
    query: Result<Query<BatchesQuery>, QueryRejection>,
) -> Result<Json<Page<BatchObject>>, ApiError> {
    let Query(BatchesQuery { after, limit: asked }) = query?;
    let limit = limit(asked, 20, 100)?;
    let mut batches = store(&state)?.batches(&context.owner());
    batches.reverse();
    page(batches, after.as_deref(), limit, |batch| &batch.id).map(Json)
}

/// Get a batch
#[utoipa::path(
    get, path = "/v1/batches/{id}", operation_id = "getBatch", tag = "Batches",
    params(("id" = String, Path, description = "The batch's.")),
    responses(
        (status = 200, description = "The batch.", body = BatchObject),
        (status = 404, description = "There is none.", body = ErrorBody),
    )
)]
async fn retrieve(
    State(state): State<AppState>,
    Extension(context): Extension<Context>,
    Path(id): Path<String>,
) -> Result<Json<BatchObject>, ApiError> {
    let found = store(&state)?.batch(&context.owner(), &id);
    found.map(Json).ok_or_else(|| unknown("batch", &id, None))
}

/// Cancel a batch
///
/// What is answered by then stays in its files.
#[utoipa::path(
    post, path = "/v1/batches/{id}/cancel", operation_id = "cancelBatch", tag = "Batches",
    params(("id" = String, Path, description = "The batch's.")),
    responses(
        (status = 200, description = "The batch, which is being cancelled.", body = BatchObject),
        (status = 400, description = "It is over.", body = ErrorBody),
        (status = 404, description = "There is none.", body = ErrorBody),
    )
)]
async fn cancel(
    State(state): State<AppState>,
    Extension(context): Extension<Context>,
    Path(id): Path<String>,
) -> Result<Json<BatchObject>, ApiError> {
    let store = store(&state)?;
    let batch = store
        .batch(&context.owner(), &id)
        .ok_or_else(|| unknown("batch", &id, None))?;
    if matches!(batch.status, BatchStatus::Cancelling | BatchStatus::Cancelled) {
        return Ok(Json(batch));
    }
    let changed = store.change_batch(&id, true, |batch| {
        // It may have ended meanwhile.
        if batch.status.is_live() {
            batch.status = BatchStatus::Cancelling;
            batch.cancelling_at = Some(unix_seconds());
        }
    });
    match changed.map_err(|error| refused(error, "id"))? {
        Some(batch) if batch.status == BatchStatus::Cancelling => Ok(Json(batch)),
        Some(_) => Err(ApiError::bad_request(format!("batch `{id}` is over"))),
        None => Err(unknown("batch", &id, None)),
    }
}
