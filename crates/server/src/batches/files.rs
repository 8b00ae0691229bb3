//! `/v1/files`.

use axum::extract::multipart::{Field, MultipartError, MultipartRejection};
use axum::extract::rejection::QueryRejection;
use axum::extract::{DefaultBodyLimit, Multipart, Path, Query, State};
use axum::http::{HeaderMap, HeaderValue, header};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use tokio_util::io::ReaderStream;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::{ExpiresAfter, Page, refused, store, unknown};
use crate::context::Context;
use crate::error::ApiError;
use crate::file_store::Writer;
use crate::openapi::Errors;
use crate::paging::{limit, page};
use crate::state::AppState;
use crate::wire::batch::{DeletedFile, FileForm, FileObject, FilesQuery};
use crate::wire::error::ErrorBody;

/// The only purpose of uploads.
const PURPOSE: &str = "batch";
/// OpenAI's bounds of `expires_after.seconds`.
const LEAST_EXPIRY: u64 = 3600;
const MOST_EXPIRY: u64 = 30 * 24 * 3600;
/// Maximum bytes of a field of the form that is no file.
const MAX_FIELD: usize = 1 << 10;

pub(super) fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::default()
        .routes(routes!(create, list))
        .routes(routes!(retrieve, delete))
        .routes(routes!(content))
        // The store limits what it takes.
        .layer(DefaultBodyLimit::disable())
}

pub(super) fn fresh_file_id() -> String {
    format!("file-{:032x}", rand::random::<u128>())
}

/// Seconds after which a file is deleted, at most `most`.
pub(super) fn expiry(after: &ExpiresAfter, most: u64, field: &str) -> Result<u64, ApiError> {
    let bounds = LEAST_EXPIRY..=MOST_EXPIRY;
    if after.anchor != "created_at" {
        let message = format!("{field}: anchor must be created_at, not {}", after.anchor);
        return Err(ApiError::invalid(format!("{field}.anchor"), message));
    }
    if !bounds.contains(&after.seconds) {
        let message = format!(
            "{field}: seconds must be between {LEAST_EXPIRY} and {MOST_EXPIRY}, not {}",
            after.seconds
        );
        return Err(ApiError::invalid(format!("{field}.seconds"), message));
    }
    Ok(after.seconds.min(most))
}

/// Upload a file
///
/// For batches: a line of JSON for each request.
#[utoipa::path(
    post, path = "/v1/files", operation_id = "createFile", tag = "Batches",
    request_body(content = FileForm, content_type = "multipart/form-data"),
    responses((status = 200, description = "The file.", body = FileObject), Errors)
)]
async fn create(
    State(state): State<AppState>,
    Extension(context): Extension<Context>,
    headers: HeaderMap,
    form: Result<Multipart, MultipartRejection>,
) -> Result<Json<FileObject>, ApiError> {
    let store = store(&state)?;
    store.check_count().map_err(|error| refused(error, "file"))?;
    let mut form = form.map_err(|_| {
        let given = headers.get(header::CONTENT_TYPE).map(HeaderValue::as_bytes);
        ApiError::MediaType {
            given: String::from_utf8_lossy(given.unwrap_or(b"none")).into_owned(),
            wanted: "multipart/form-data with a boundary",
        }
    })?;
    let patience = state.options().body_timeout;
    let (mut file, mut purpose, mut anchor, mut seconds) = (None, None, None, None);
    loop {
        let field = tokio::time::timeout(patience, form.next_field());
        let field = field.await.map_err(|_| ApiError::BodyTimeout(patience))?;
        let Some(field) = field.map_err(broken)? else {
            break;
        };
        let part = field.name().unwrap_or_default().to_owned();
        match part.as_str() {
            "file" if file.is_some() => return Err(ApiError::invalid("file", "there must be one file")),
            "file" => {
                let name = field.file_name().unwrap_or("upload.jsonl").to_owned();
                let writer = store.write(&fresh_file_id(), false).await;
                let mut writer = writer.map_err(|error| refused(error, "file"))?;
                receive(field, &mut writer, &state).await?;
                file = Some((name, writer));
            }
            "purpose" => purpose = Some(text(field).await?),
            "expires_after[anchor]" => anchor = Some(text(field).await?),
            "expires_after[seconds]" => seconds = Some(text(field).await?),
            other => {
                let name = other.escape_default().to_string();
                let message = format!("unknown field `{name}` of the form");
                return Err(ApiError::invalid(name, message));
            }
        }
    }
    let Some((name, writer)) = file else {
        return Err(ApiError::invalid("file", "the form has no file"));
    };
    match purpose.as_deref() {
        Some(PURPOSE) => {}
        given => {
            let given = given.unwrap_or("nothing").escape_default();
            let message =
                format!("purpose must be `{PURPOSE}`, not {given}: this server has files for batches alone");
            return Err(ApiError::invalid("purpose", message));
        }
    }
    let most = store.expiry();
    let kept = match (anchor, seconds) {
        (None, None) => most,
        (anchor, seconds) => {
            let after = ExpiresAfter {
                anchor: anchor.unwrap_or_default(),
                seconds: seconds.and_then(|text| text.parse().ok()).unwrap_or_default(),
            };
            expiry(&after, most, "expires_after")?
        }
    };
    let stored = writer.finish(context.owner(), name, PURPOSE, kept).await;
    stored.map(Json).map_err(|error| refused(error, "file"))
}

/// Writes a file as it arrives.
async fn receive(mut field: Field<'_>, writer: &mut Writer, state: &AppState) -> Result<(), ApiError> {
    let patience = state.options().body_timeout;
    loop {
        let piece = tokio::time::timeout(patience, field.chunk()).await;
        let piece = piece.map_err(|_| ApiError::BodyTimeout(patience))?;
        let Some(piece) = piece.map_err(broken)? else {
            return Ok(());
        };
        let written = writer.append(&piece).await;
        written.map_err(|error| refused(error, "file"))?;
    }
}

/// A short field of the form.
async fn text(mut field: Field<'_>) -> Result<String, ApiError> {
    let name = field.name().unwrap_or_default().to_owned();
    let mut bytes = Vec::new();
    while let Some(piece) = field.chunk().await.map_err(broken)? {
        bytes.extend_from_slice(&piece);
        if bytes.len() > MAX_FIELD {
            return Err(ApiError::invalid(
                name.clone(),
                format!("{name} is longer than {MAX_FIELD} bytes"),
            ));
        }
    }
    String::from_utf8(bytes).map_err(|_| ApiError::invalid(name.clone(), format!("{name} is not UTF-8")))
}

fn broken(error: MultipartError) -> ApiError {
    ApiError::bad_request(format!("the form could not be read: {}", error.body_text()))
}

/// List files
///
/// The newest first, unless `order` says otherwise.
#[utoipa::path(
    get, path = "/v1/files", operation_id = "listFiles", tag = "Batches", params(FilesQuery),
    responses(
        (status = 200, description = "A page of them.", body = Page<FileObject>),
        (status = 400, description = "A parameter is wrong.", body = ErrorBody),
    )
)]
async fn list(
    State(state): State<AppState>,
    Extension(context): Extension<Context>,
    query: Result<Query<FilesQuery>, QueryRejection>,
) -> Result<Json<Page<FileObject>>, ApiError> {
    let Query(FilesQuery {
        after,
        limit: asked,
        order,
        purpose,
    }) = query?;
    let limit = limit(asked, 10_000, 10_000)?;
    let mut files = store(&state)?.files(&context.owner());
    match order.as_deref() {
        None | Some("desc") => files.reverse(),
        Some("asc") => {}
        Some(_) => return Err(ApiError::invalid("order", "order must be asc or desc")),
    }
    files.retain(|file| purpose.as_ref().is_none_or(|purpose| file.purpose == *purpose));
    page(files, after.as_deref(), limit, |file| &file.id).map(Json)
}

/// Get a file
#[utoipa::path(
    get, path = "/v1/files/{id}", operation_id = "getFile", tag = "Batches",
    params(("id" = String, Path, description = "The file's.")),
    responses(
        (status = 200, description = "The file, without its content.", body = FileObject),
        (status = 404, description = "There is none.", body = ErrorBody),
    )
)]
async fn retrieve(
    State(state): State<AppState>,
    Extension(context): Extension<Context>,
    Path(id): Path<String>,
) -> Result<Json<FileObject>, ApiError> {
    let found = store(&state)?.file(&context.owner(), &id);
    found.map(Json).ok_or_else(|| unknown("file", &id, None))
}

/// Delete a file
#[utoipa::path(
    delete, path = "/v1/files/{id}", operation_id = "deleteFile", tag = "Batches",
    params(("id" = String, Path, description = "The file's.")),
    responses(
        (status = 200, description = "It is deleted.", body = DeletedFile),
        (status = 404, description = "There is none.", body = ErrorBody),
    )
)]
async fn delete(
    State(state): State<AppState>,
    Extension(context): Extension<Context>,
    Path(id): Path<String>,
) -> Result<Json<DeletedFile>, ApiError> {
    let deleted = store(&state)?.delete(&context.owner(), &id);
    match deleted.map_err(|error| refused(error.into(), "id"))? {
        true => Ok(Json(DeletedFile {
            id,
            object: "file",
            deleted: true,
        })),
        false => Err(unknown("file", &id, None)),
    }
}

/// The content of a file
#[utoipa::path(
    get, path = "/v1/files/{id}/content", operation_id = "getFileContent", tag = "Batches",
    params(("id" = String, Path, description = "The file's.")),
    responses(
        (status = 200, description = "The content.", body = String, content_type = "application/octet-stream"),
        (status = 404, description = "There is none.", body = ErrorBody),
    )
)]
async fn content(
    State(state): State<AppState>,
    Extension(context): Extension<Context>,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    let store = store(&state)?;
    let file = store
        .file(&context.owner(), &id)
        .ok_or_else(|| unknown("file", &id, None))?;
    let opened = tokio::fs::File::open(store.path(&id)).await;
    let opened = opened.map_err(|error| refused(error.into(), "id"))?;
    let headers = [
        (header::CONTENT_TYPE, "application/octet-stream".to_owned()),
        (header::CONTENT_LENGTH, file.bytes.to_string()),
    ];
    Ok((headers, axum::body::Body::from_stream(ReaderStream::new(opened))).into_response())
}
