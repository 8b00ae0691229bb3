//! `/v1/files` and `/v1/batches`.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::{IntoParams, ToSchema};

use super::error::FieldError;
use super::fields::Unsupported;
use super::request::{RequestBody, take};
use super::schema::body;

/// A file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct FileObject {
    pub(crate) id: String,
    /// `file`.
    pub(crate) object: String,
    /// Its size.
    pub(crate) bytes: u64,
    /// In seconds since 1970.
    pub(crate) created_at: u64,
    /// When it is deleted, in seconds since 1970.
    pub(crate) expires_at: u64,
    /// Its name, as uploaded.
    pub(crate) filename: String,
    /// `batch` or `batch_output`.
    pub(crate) purpose: String,
    /// `processed`.
    pub(crate) status: String,
}

/// An upload, as multipart/form-data. `purpose` comes before or after the file.
#[derive(Debug, ToSchema)]
#[expect(dead_code, reason = "describes the form, which is read part by part")]
pub(crate) struct FileForm {
    /// The file: for batches JSON lines.
    #[schema(value_type = String, format = Binary)]
    pub(crate) file: Vec<u8>,
    /// Only `batch`.
    pub(crate) purpose: String,
    /// Only `created_at`, with `expires_after[seconds]`.
    #[schema(rename = "expires_after[anchor]")]
    pub(crate) anchor: Option<String>,
    /// When the file is deleted, in seconds after its upload: an hour to 30 days, or what the server allows.
    #[schema(rename = "expires_after[seconds]")]
    pub(crate) seconds: Option<u64>,
}

/// A page of a list.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Page<T> {
    /// `list`.
    pub(crate) object: &'static str,
    pub(crate) data: Vec<T>,
    pub(crate) first_id: Option<String>,
    pub(crate) last_id: Option<String>,
    /// There are more behind the last one.
    pub(crate) has_more: bool,
}

/// The query of `GET /v1/files`.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(crate) struct FilesQuery {
    /// Start after this file.
    pub(crate) after: Option<String>,
    /// Maximum number of files, 1 to 10000. Default: 10000.
    #[param(minimum = 1, maximum = 10_000)]
    pub(crate) limit: Option<usize>,
    /// `asc` or `desc` by time. Default: `desc`.
    pub(crate) order: Option<String>,
    /// Only files for this purpose.
    pub(crate) purpose: Option<String>,
}

/// The query of `GET /v1/batches`.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(crate) struct BatchesQuery {
    /// Start after this batch.
    pub(crate) after: Option<String>,
    /// Maximum number of batches, 1 to 100. Default: 20.
    #[param(minimum = 1, maximum = 100)]
    pub(crate) limit: Option<usize>,
}

/// A file that was deleted.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct DeletedFile {
    pub(crate) id: String,
    pub(crate) object: &'static str,
    pub(crate) deleted: bool,
}

/// `POST /v1/batches`.
#[derive(Debug)]
pub(crate) struct BatchRequest(pub(crate) BatchFields);

/// The fields of the endpoint.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct BatchFields {
    /// An uploaded file with a request in each line.
    pub(crate) input_file_id: String,
    /// `/v1/chat/completions`, `/v1/completions`, `/v1/embeddings` or `/v1/responses`.
    pub(crate) endpoint: String,
    /// How long it may take, in hours, such as `24h`. Requests that are not answered by then are not any more.
    pub(crate) completion_window: String,
    /// Returned with the batch.
    pub(crate) metadata: Option<Map<String, Value>>,
    /// When its results are deleted.
    pub(crate) output_expires_after: Option<ExpiresAfter>,
}

/// A time after the creation of a file.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ExpiresAfter {
    /// Only `created_at`.
    pub(crate) anchor: String,
    /// Seconds after it.
    pub(crate) seconds: u64,
}

impl RequestBody for BatchRequest {
    const UNSUPPORTED: &[&[Unsupported]] = &[];

    fn take_from(object: &mut Map<String, Value>) -> Result<Self, FieldError> {
        take(object).map(Self)
    }
}

body!(BatchRequest, "Requests to answer in the background.", BatchFields);

/// A batch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub(crate) struct BatchObject {
    pub(crate) id: String,
    /// `batch`.
    pub(crate) object: String,
    pub(crate) endpoint: String,
    /// Why it failed as a whole.
    pub(crate) errors: Option<BatchErrors>,
    pub(crate) input_file_id: String,
    pub(crate) completion_window: String,
    pub(crate) status: BatchStatus,
    /// Answers, in the order in which they were ready.
    pub(crate) output_file_id: Option<String>,
    /// Requests that failed.
    pub(crate) error_file_id: Option<String>,
    pub(crate) created_at: u64,
    pub(crate) in_progress_at: Option<u64>,
    pub(crate) expires_at: u64,
    pub(crate) finalizing_at: Option<u64>,
    pub(crate) completed_at: Option<u64>,
    pub(crate) failed_at: Option<u64>,
    pub(crate) expired_at: Option<u64>,
    pub(crate) cancelling_at: Option<u64>,
    pub(crate) cancelled_at: Option<u64>,
    pub(crate) request_counts: RequestCounts,
    #[schema(value_type = Option<Object>)]
    pub(crate) metadata: Option<Map<String, Value>>,
}

/// Where a batch is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum BatchStatus {
    /// Its input is being read.
    Validating,
    /// It could not begin.
    Failed,
    /// Requests are being answered.
    InProgress,
    /// Its results are being stored.
    Finalizing,
    /// Every request has a result.
    Completed,
    /// The completion window is over; the error file has the other requests.
    Expired,
    /// Requests in progress are being given up.
    Cancelling,
    /// It was cancelled; what was ready by then is in its files.
    Cancelled,
}

impl BatchStatus {
    /// Whether it may still change.
    pub(crate) fn is_live(self) -> bool {
        matches!(
            self,
            Self::Validating | Self::InProgress | Self::Finalizing | Self::Cancelling
        )
    }
}

/// Why a batch failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct BatchErrors {
    /// `list`.
    pub(crate) object: String,
    pub(crate) data: Vec<BatchError>,
}

/// One reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct BatchError {
    pub(crate) code: String,
    pub(crate) message: String,
    pub(crate) param: Option<String>,
    pub(crate) line: Option<usize>,
}

/// How far a batch is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct RequestCounts {
    /// Lines of the input.
    pub(crate) total: usize,
    /// Requests that were answered.
    pub(crate) completed: usize,
    /// Requests that failed, bad lines among them.
    pub(crate) failed: usize,
}
