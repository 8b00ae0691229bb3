//! Work that would block the async runtime's threads.

use std::panic::resume_unwind;

use crate::error::ApiError;

/// Runs long work on the blocking pool. A panic there is propagated.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    tokio::task::spawn_blocking(work)
        .await
        .unwrap_or_else(|error| match error.try_into_panic() {
            Ok(panic) => resume_unwind(panic),
            Err(cancelled) => Err(ApiError::Internal(cancelled.to_string())),
        })
}
