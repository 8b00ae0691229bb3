//! Runs a batch: some of its requests at a time, behind all others, until all have a result or it is cancelled or too late.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes, to_bytes};
use axum::extract::Request;
use axum::http::{StatusCode, header};
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::OwnedSemaphorePermit;
use tower::ServiceExt;

use super::Endpoints;
use super::input::{self, Lines};
use crate::context::Context;
use crate::error::ErrorCode;
use crate::file_store::{Batch, FileStore, Record, StoreError, Writer};
use crate::state::AppState;
use crate::time::unix_seconds;
use crate::wire::batch::{BatchError, BatchErrors, BatchObject, BatchStatus, RequestCounts};

/// Runs batch `id` in a task of its own.
pub(super) fn start(state: &AppState, endpoints: &Endpoints, store: &Arc<FileStore>, id: String) {
    let (state, endpoints, store) = (state.clone(), endpoints.clone(), Arc::clone(store));
    tokio::spawn(async move {
        let Some(record) = store.batch_record(&id) else {
            return;
        };
        let run = Run {
            state,
            endpoints,
            store,
            owner: record.owner.as_deref().map(Arc::from),
            record,
        };
        let end = match run.all().await {
            Ok(end) => end,
            Err(error) => End::Failed("store_failed", error.to_string()),
        };
        if let Err(error) = run.end(end) {
            tracing::error!(id, %error, "a batch cannot be stored");
        }
    });
}

/// How a batch ended.
#[derive(Debug)]
enum End {
    Completed,
    Expired,
    Cancelled,
    /// A code and a message.
    Failed(&'static str, String),
    /// The server ends: another process goes on with it, if its files are kept.
    Unfinished,
}

/// The result of one line.
struct Done {
    number: usize,
    is_good: bool,
    /// A line of the output or of the errors; `None` if the server ends before there is a result.
    text: Option<Vec<u8>>,
}

struct Run {
    state: AppState,
    endpoints: Endpoints,
    store: Arc<FileStore>,
    owner: Option<Arc<str>>,
    record: Record<Batch>,
}

impl Run {
    fn object(&self) -> &BatchObject {
        &self.record.object.object
    }

    fn change(&self, saved: bool, change: impl FnOnce(&mut BatchObject)) -> Result<(), StoreError> {
        self.store
            .change_batch(&self.object().id, saved, change)
            .map(|_| ())
    }

    /// Answers all lines, and completes the files of the results.
    async fn all(&self) -> Result<End, StoreError> {
        let most = self.state.options().max_body_bytes;
        let input = self.store.path(&self.object().input_file_id);
        let mut total = 0;
        match Lines::open(&input, 0).await {
            Ok(mut lines) => {
                while lines.next().await?.is_some() {
                    total += 1;
                }
            }
            Err(error) => {
                let message = format!("the input file cannot be read: {error}");
                return Ok(End::Failed("invalid_input_file", message));
            }
        }
        if total == 0 {
            return Ok(End::Failed(
                "empty_file",
                "the input file has no requests".to_owned(),
            ));
        }
        let (mut results, mut over) = Results::open(&self.store, &self.record.object, total).await?;
        self.change(true, |batch| {
            if batch.status == BatchStatus::Validating {
                batch.status = BatchStatus::InProgress;
                batch.in_progress_at = Some(unix_seconds());
            }
            batch.request_counts = results.counts;
        })?;
        let mut lines = Lines::open(&input, most).await?;
        let answered = self.answer_lines(&mut lines, &mut results, &mut over).await;
        let mut end = answered.unwrap_or_else(|error| End::Failed("store_failed", error.to_string()));
        if let End::Unfinished = end {
            results.keep().await?;
            return Ok(end);
        }
        self.change(true, |batch| {
            if batch.status == BatchStatus::InProgress {
                batch.status = BatchStatus::Finalizing;
                batch.finalizing_at = Some(unix_seconds());
            }
        })?;
        if let End::Expired = end
            && let Err(error) = self
                .give_up_rest(Lines::open(&input, most).await?, &mut results, &over)
                .await
        {
            end = End::Failed("store_failed", error.to_string());
        }
        self.keep_results(results).await?;
        Ok(end)
    }

    async fn answer_lines(
        &self,
        lines: &mut Lines,
        results: &mut Results,
        over: &mut HashSet<usize>,
    ) -> Result<End, StoreError> {
        let left = self.object().expires_at.saturating_sub(unix_seconds());
        let late = tokio::time::sleep(Duration::from_secs(left));
        let cancelled = self.store.cancelled(&self.object().id);
        let (mut late, mut cancelled) = (std::pin::pin!(late), std::pin::pin!(cancelled));
        let mut seen = HashSet::new();
        let mut running = FuturesUnordered::new();
        let mut exhausted = false;
        loop {
            if exhausted && running.is_empty() {
                return Ok(End::Completed);
            }
            tokio::select! {
                biased;
                // What runs is cancelled by being dropped.
                () = &mut cancelled => return Ok(End::Cancelled),
                () = &mut late => return Ok(End::Expired),
                Some(done) = running.next(), if !running.is_empty() => {
                    let Done { number, is_good, text } = done;
                    let Some(text) = text else { return Ok(End::Unfinished) };
                    results.add(is_good, &text).await?;
                    over.insert(number);
                    self.change(false, |batch| batch.request_counts = results.counts)?;
                }
                place = Arc::clone(self.state.background()).acquire_owned(), if !exhausted => {
                    match lines.next().await? {
                        None => exhausted = true,
                        Some((number, line)) => {
                            let parsed = input::parse(&line, &self.object().endpoint, self.state.options());
                            let parsed = parsed.and_then(|line| match seen.insert(line.custom_id.clone()) {
                                true => Ok(line),
                                false => {
                                    let message = format!("custom_id `{}` is not unique", line.custom_id);
                                    Err((Some(line.custom_id), message))
                                }
                            });
                            if !over.contains(&number) {
                                running.push(self.answer(number, parsed, place.ok()));
                            }
                        }
                    }
                }
            }
        }
    }

    /// The result of one line. `place` is held until then.
    async fn answer(
        &self,
        number: usize,
        line: Result<input::Line, (Option<String>, String)>,
        place: Option<OwnedSemaphorePermit>,
    ) -> Done {
        let _place = place;
        let id = result_id(&self.object().id, number);
        let line = match line {
            Ok(line) => line,
            Err((custom_id, message)) => {
                let text = failure(&id, custom_id, "invalid_request", &message);
                return Done {
                    number,
                    is_good: false,
                    text: Some(text),
                };
            }
        };
        let body = Bytes::from(json!(line.body).to_string());
        let answered = self.post(body).await;
        let Some((status, request_id, body)) = answered else {
            return Done {
                number,
                is_good: false,
                text: None,
            };
        };
        let body = serde_json::from_slice(&body).unwrap_or(Value::Null);
        let response = json!({ "status_code": status.as_u16(), "request_id": request_id, "body": body });
        let text = json!({ "id": id, "custom_id": line.custom_id, "response": response, "error": null });
        Done {
            number,
            is_good: status.is_success(),
            text: Some(with_newline(&text)),
        }
    }

    /// Sends `body` to the endpoint until the server has room for it. `None` if the server ends before.
    async fn post(&self, body: Bytes) -> Option<(StatusCode, String, Bytes)> {
        loop {
            let request = Request::post(&self.object().endpoint)
                .header(header::CONTENT_TYPE, "application/json")
                .body(Body::from(body.clone()));
            let mut request = request.ok()?;
            let context = Context::in_background(&self.state, &request, self.owner.clone());
            request.extensions_mut().insert(context.clone());
            let Ok(response) = self.endpoints.0.clone().oneshot(request).await;
            let status = response.status();
            let code = response.extensions().get::<ErrorCode>().and_then(|code| code.0);
            context.answered(status, code);
            if matches!(code, Some("shutting_down" | "engine_dead")) {
                return None;
            }
            let is_final = response.headers().contains_key("x-should-retry");
            let wait = matches!(
                status,
                StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE
            ) && !is_final;
            if wait {
                let after = response.headers().get(header::RETRY_AFTER);
                let after = after.and_then(|after| after.to_str().ok()?.parse().ok());
                let after = Duration::from_secs(after.unwrap_or(1)).clamp(LEAST_WAIT, MOST_WAIT);
                tokio::time::sleep(after).await;
                continue;
            }
            let whole = to_bytes(response.into_body(), usize::MAX)
                .await
                .unwrap_or_default();
            context.completed();
            return Some((status, context.id().to_owned(), whole));
        }
    }

    /// Tells that the lines without a result have none.
    async fn give_up_rest(
        &self,
        mut lines: Lines,
        results: &mut Results,
        over: &HashSet<usize>,
    ) -> Result<(), StoreError> {
        while let Some((number, line)) = lines.next().await? {
            if over.contains(&number) {
                continue;
            }
            let parsed: Result<Value, _> = serde_json::from_slice(&line);
            let custom_id = parsed
                .ok()
                .and_then(|line| Some(line.get("custom_id")?.as_str()?.to_owned()));
            let id = result_id(&self.object().id, number);
            let text = failure(
                &id,
                custom_id,
                "batch_expired",
                "the batch's completion window was over before this request was answered",
            );
            results.add(false, &text).await?;
        }
        Ok(())
    }

    /// Completes the files that are not empty.
    async fn keep_results(&self, results: Results) -> Result<(), StoreError> {
        let expiry = self
            .record
            .object
            .output_expiry
            .unwrap_or_else(|| self.store.expiry());
        let mut ids = [None, None];
        let names = ["output", "error"];
        for ((writer, id), name) in results.writers.into_iter().zip(&mut ids).zip(names) {
            if writer.is_empty() {
                writer.give_up();
                continue;
            }
            let name = format!("{}_{name}.jsonl", self.object().id);
            let file = writer
                .finish(self.record.owner.clone(), name, "batch_output", expiry)
                .await?;
            *id = Some(file.id);
        }
        self.change(true, |batch| {
            let [output, errors] = ids;
            batch.output_file_id = output;
            batch.error_file_id = errors;
            batch.request_counts = results.counts;
        })
    }

    /// Records how the batch ended.
    fn end(&self, end: End) -> Result<(), StoreError> {
        let now = Some(unix_seconds());
        let id = &self.object().id;
        tracing::info!(id, ?end, "a batch has ended");
        self.change(true, |batch| match end {
            End::Completed => {
                batch.status = BatchStatus::Completed;
                batch.completed_at = now;
            }
            End::Expired => {
                batch.status = BatchStatus::Expired;
                batch.expired_at = now;
            }
            End::Cancelled => {
                batch.status = BatchStatus::Cancelled;
                batch.cancelled_at = now;
            }
            End::Failed(code, message) => {
                batch.status = BatchStatus::Failed;
                batch.failed_at = now;
                batch.errors = Some(BatchErrors {
                    object: "list".to_owned(),
                    data: vec![BatchError {
                        code: code.to_owned(),
                        message,
                        param: None,
                        line: None,
                    }],
                });
            }
            End::Unfinished => {}
        })
    }
}

/// Shortest and longest time before a request is sent again.
const LEAST_WAIT: Duration = Duration::from_millis(200);
const MOST_WAIT: Duration = Duration::from_secs(30);

/// The id of a result, which has the number of its line.
fn result_id(batch: &str, number: usize) -> String {
    format!("batch_req_{}_{number}", batch.trim_start_matches("batch_"))
}

/// A result of a line that was not answered.
fn failure(id: &str, custom_id: Option<String>, code: &str, message: &str) -> Vec<u8> {
    let error = json!({ "code": code, "message": message });
    with_newline(&json!({ "id": id, "custom_id": custom_id, "response": null, "error": error }))
}

fn with_newline(value: &Value) -> Vec<u8> {
    let mut text = value.to_string().into_bytes();
    text.push(b'\n');
    text
}

/// The files of answers and of errors.
struct Results {
    writers: [Writer; 2],
    counts: RequestCounts,
}

impl Results {
    /// New files, or those that an earlier process began, for `total` lines, with the numbers of those that have a result.
    async fn open(
        store: &Arc<FileStore>,
        batch: &Batch,
        total: usize,
    ) -> Result<(Self, HashSet<usize>), StoreError> {
        let mut over = HashSet::new();
        let mut counts = [0; 2];
        for (part, count) in batch.parts.iter().zip(&mut counts) {
            let found = numbers(store, part).await?;
            *count = found.len();
            over.extend(found);
        }
        let [output, errors] = &batch.parts;
        let [completed, failed] = counts;
        let results = Self {
            writers: [store.write(output, true).await?, store.write(errors, true).await?],
            counts: RequestCounts {
                total,
                completed,
                failed,
            },
        };
        Ok((results, over))
    }

    async fn add(&mut self, is_good: bool, text: &[u8]) -> Result<(), StoreError> {
        let [output, errors] = &mut self.writers;
        match is_good {
            true => {
                output.append(text).await?;
                self.counts.completed += 1;
            }
            false => {
                errors.append(text).await?;
                self.counts.failed += 1;
            }
        }
        Ok(())
    }

    /// Leaves the files to another process.
    async fn keep(mut self) -> Result<(), StoreError> {
        for writer in &mut self.writers {
            writer.flush().await?;
        }
        Ok(())
    }
}

/// The lines that have a result in a file that an earlier process began. A result that it could not write to its end is dropped.
async fn numbers(store: &FileStore, part: &str) -> Result<Vec<usize>, StoreError> {
    #[derive(Deserialize)]
    struct Written {
        id: String,
    }
    let path = store.path(part);
    let mut found = Vec::new();
    let mut whole = 0;
    let bytes = match tokio::fs::read(&path).await {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(found),
        read => read?,
    };
    for line in bytes.split_inclusive(|&byte| byte == b'\n') {
        let written = serde_json::from_slice::<Written>(line)
            .ok()
            .filter(|_| line.ends_with(b"\n"));
        let number = written.and_then(|written| written.id.rsplit('_').next()?.parse().ok());
        let Some(number) = number else { break };
        found.push(number);
        whole += line.len() as u64;
    }
    if whole < bytes.len() as u64 {
        let file = tokio::fs::OpenOptions::new().write(true).open(&path).await?;
        file.set_len(whole).await?;
        store.shrank(bytes.len() as u64 - whole);
    }
    Ok(found)
}
