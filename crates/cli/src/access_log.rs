//! The access log: one JSON object per line and request.

use std::fs::OpenOptions;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, UNIX_EPOCH};

use parking_lot::Mutex;
use plimsoll_server::{RequestRecord, RequestSink};
use serde_json::{Map, Value, json};

use crate::error::Error;

/// Lines that wait for a slow disk; more are lost, and counted.
const QUEUE: usize = 4096;

/// Writes on a thread of its own.
#[derive(Debug)]
pub(crate) struct AccessLog(Mutex<State>);

#[derive(Debug)]
struct State {
    /// `None` once it is finished.
    writer: Option<Writer>,
    /// Lines lost since one was not.
    lost: u64,
}

#[derive(Debug)]
struct Writer {
    lines: SyncSender<String>,
    thread: JoinHandle<()>,
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
            Box::new(file.map_err(|error| {
                let message = format!("{} cannot be written: {error}", path.display());
                Error::configuration("--access-log", message)
            })?)
        };
        let (lines, queue) = sync_channel(QUEUE);
        let path = path.to_owned();
        let thread = std::thread::Builder::new().name("plimsoll-access-log".into());
        let thread = thread.spawn(move || write(&queue, BufWriter::new(out), &path))?;
        Ok(Self::new(Writer { lines, thread }))
    }

    fn new(writer: Writer) -> Self {
        Self(Mutex::new(State {
            writer: Some(writer),
            lost: 0,
        }))
    }

    /// Writes what is left. Requests that end later are not logged. Blocks for as long as the disk takes.
    pub(crate) fn finish(&self) {
        let mut state = self.0.lock();
        let (writer, lost) = (state.writer.take(), state.lost);
        drop(state);
        if lost > 0 {
            tracing::warn!(lost, "the access log lost lines at the end");
        }
        let Some(Writer { lines, thread }) = writer else {
            return;
        };
        drop(lines);
        if thread.join().is_err() {
            tracing::error!("the access log thread panicked: its last lines are lost");
        }
    }
}

impl RequestSink for AccessLog {
    fn ended(&self, record: &RequestRecord) {
        let line = line(record);
        let mut state = self.0.lock();
        let Some(writer) = &state.writer else { return };
        // Told when it begins and when it is over.
        match writer.lines.try_send(line) {
            Ok(()) => match std::mem::take(&mut state.lost) {
                0 => {}
                lost => tracing::warn!(lost, "the access log continues; lines were lost"),
            },
            Err(TrySendError::Full(_)) => {
                state.lost += 1;
                if state.lost == 1 {
                    tracing::warn!("lines of the access log are lost: the disk is too slow");
                }
            }
            Err(TrySendError::Disconnected(_)) => {}
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
        (0..1000).for_each(|_| log.ended(&record()));
        log.finish();
        let lines = || std::fs::read_to_string(&path).unwrap().lines().count();
        assert_eq!(lines(), 1001, "the last of them too");
        // Too late, and no reason to fail.
        log.ended(&record());
        log.finish();
        assert_eq!(lines(), 1001);
        assert!(AccessLog::open(Path::new("/no/such/directory/log")).is_err());
    }

    #[test]
    fn lost_lines_are_counted_until_the_log_goes_on() {
        let (lines, queue) = sync_channel(2);
        let thread = std::thread::spawn(|| {});
        let log = AccessLog::new(Writer { lines, thread });
        (0..5).for_each(|_| log.ended(&record()));
        assert_eq!(log.0.lock().lost, 3);
        queue.recv().unwrap();
        log.ended(&record());
        assert_eq!(log.0.lock().lost, 0);
    }
}
