//! The access log: one JSON object per line and request.

use std::fs::OpenOptions;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::time::{Duration, UNIX_EPOCH};

use plimsoll_server::{RequestRecord, RequestSink};
use serde_json::{Map, Value, json};

use crate::error::Error;

/// Lines that wait for a slow disk; more are lost, and counted.
const QUEUE: usize = 4096;

/// Writes on a thread of its own.
#[derive(Debug)]
pub(crate) struct AccessLog {
    lines: SyncSender<String>,
}

impl AccessLog {
    /// Appends to the file `path`; `-` is stderr.
    ///
    /// # Errors
    /// Where the file cannot be opened.
    pub(crate) fn open(path: &Path) -> Result<Self, Error> {
        let out: Box<dyn Write + Send> = if path == Path::new("-") {
            Box::new(std::io::stderr())
        } else {
            let file = OpenOptions::new().create(true).append(true).open(path);
            Box::new(file.map_err(|error| Error::Configuration {
                origin: "--access-log".into(),
                message: format!("{} cannot be written: {error}", path.display()),
            })?)
        };
        let (lines, queue) = sync_channel(QUEUE);
        let path = path.to_owned();
        std::thread::Builder::new()
            .name("plimsoll-access-log".into())
            .spawn(move || write(&queue, BufWriter::new(out), &path))?;
        Ok(Self { lines })
    }
}

impl RequestSink for AccessLog {
    fn ended(&self, record: &RequestRecord) {
        if let Err(TrySendError::Full(_)) = self.lines.try_send(line(record)) {
            tracing::warn!(
                request_id = record.request_id,
                "a line of the access log is lost: the disk is too slow"
            );
        }
    }
}

/// Until nobody can send any more; what has come is flushed whenever there is nothing else to do.
fn write(queue: &Receiver<String>, mut out: impl Write, path: &Path) {
    let mut failed = false;
    while let Ok(first) = queue.recv() {
        let mut result = out.write_all(first.as_bytes());
        while let Ok(line) = queue.try_recv() {
            result = result.and_then(|()| out.write_all(line.as_bytes()));
        }
        match result.and_then(|()| out.flush()) {
            Ok(()) => failed = false,
            // Once for each time that it begins.
            Err(error) if !failed => {
                failed = true;
                tracing::error!("the access log {} cannot be written: {error}", path.display());
            }
            Err(_) => {}
        }
    }
}

/// A record as a line. What there is not is left out.
fn line(record: &RequestRecord) -> String {
    let seconds = |time: Duration| json!((time.as_secs_f64() * 1e6).round() / 1e6);
    let began = record.began.duration_since(UNIX_EPOCH).unwrap_or_default();
    let mut fields = Map::new();
    let mut put = |name: &str, value: Value| {
        if !value.is_null() {
            fields.insert(name.to_owned(), value);
        }
    };
    put("time", seconds(began));
    put("request_id", json!(record.request_id));
    put("key", json!(record.key));
    put("method", json!(record.method.as_str()));
    put("path", json!(record.path));
    put("status", json!(record.status.as_u16()));
    put("error", json!(record.error));
    put("complete", json!(record.complete));
    put("duration", seconds(record.duration));
    if let Some(generation) = &record.generation {
        put("model", json!(generation.model));
        put("prompt_tokens", json!(generation.prompt_tokens));
        put("cached_tokens", json!(generation.cached_tokens));
        put("output_tokens", json!(generation.output_tokens));
        put("queued", generation.queued.map_or(Value::Null, seconds));
        put("first_token", generation.first_token.map_or(Value::Null, seconds));
        put("finish_reasons", json!(generation.finish_reasons));
    }
    let mut line = Value::Object(fields).to_string();
    line.push('\n');
    line
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use plimsoll_server::Generation;

    use super::*;

    fn record() -> RequestRecord {
        RequestRecord {
            began: UNIX_EPOCH + Duration::from_millis(1_500),
            duration: Duration::from_millis(250),
            request_id: "id-1".into(),
            key: Some("alice".into()),
            method: "POST".parse().unwrap(),
            path: "/v1/\"x\"\n".into(),
            status: 200u16.try_into().unwrap(),
            error: None,
            complete: true,
            traceparent: None,
            tracestate: None,
            generation: Some(Generation {
                model: "m".into(),
                prompt_tokens: 3,
                output_tokens: 2,
                finish_reasons: vec!["stop"],
                ..Default::default()
            }),
        }
    }

    #[test]
    fn a_record_is_one_line_of_json() {
        let line = line(&record());
        assert_eq!(line.matches('\n').count(), 1, "{line}");
        let value: Value = serde_json::from_str(&line).unwrap();
        assert_eq!((&value["time"], &value["duration"]), (&json!(1.5), &json!(0.25)));
        assert_eq!(
            (&value["path"], &value["key"]),
            (&json!("/v1/\"x\"\n"), &json!("alice"))
        );
        assert_eq!(
            (&value["prompt_tokens"], &value["finish_reasons"]),
            (&json!(3), &json!(["stop"]))
        );
        assert!(value.get("error").is_none() && value.get("queued").is_none());
    }

    #[test]
    fn lines_reach_the_file_and_a_file_that_cannot_be_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("access.log");
        std::fs::write(&path, "before\n").unwrap();
        let log = AccessLog::open(&path).unwrap();
        log.ended(&record());
        let begin = Instant::now();
        let lines = || std::fs::read_to_string(&path).unwrap().lines().count();
        while lines() < 2 {
            assert!(begin.elapsed() < Duration::from_secs(60), "no line");
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(AccessLog::open(Path::new("/no/such/directory/log")).is_err());
    }
}
