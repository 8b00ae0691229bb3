//! The pool of worker processes, as their parent sees it.

use std::ffi::OsString;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::available_parallelism;
use std::time::Duration;

use super::ChatInput;
use super::protocol::{Reply, Request, receive, send};
use super::text::TemplateText;
use super::worker::limit_of;
use crate::TextError;
use crate::bounds::{MAX_TIME, RenderLimit};

/// Bytes of a worker's last words that are read.
const LAST_WORDS: u64 = 4096;

/// A program that calls [`crate::run_template_worker`].
#[derive(Clone, Debug)]
pub struct WorkerProgram {
    /// The file.
    pub path: PathBuf,
    /// Its arguments.
    pub args: Vec<OsString>,
}

/// Processes that render, started when they are needed.
#[derive(Debug)]
pub(super) struct Workers {
    program: WorkerProgram,
    time: Duration,
    /// The most there may be.
    most: usize,
    pool: Mutex<Pool>,
    /// A worker was put back, or ended.
    returned: Condvar,
}

#[derive(Debug, Default)]
struct Pool {
    idle: Vec<Worker>,
    busy: usize,
}

impl Workers {
    pub(super) fn new(program: WorkerProgram) -> Self {
        Self {
            program,
            time: MAX_TIME,
            most: available_parallelism().map_or(1, usize::from),
            pool: Mutex::default(),
            returned: Condvar::new(),
        }
    }

    pub(super) fn within(self, time: Duration) -> Self {
        Self { time, ..self }
    }

    /// Blocks while all workers are busy, and while one renders.
    pub(super) fn render(
        &self,
        text: &Arc<TemplateText>,
        input: &ChatInput<'_>,
    ) -> Result<String, TextError> {
        let mut turn = self.turn(text);
        let worker = match turn.worker.take() {
            Some(worker) => worker,
            None => Worker::start(&self.program, self.time).map_err(TextError::Worker)?,
        };
        let (outcome, worker) = worker.render(text, input)?;
        turn.worker = worker;
        outcome
    }

    /// Waits for a worker that is idle, or the right to start one.
    fn turn(&self, text: &Arc<TemplateText>) -> Turn<'_> {
        let mut pool = self.lock();
        loop {
            // One may have been killed meanwhile.
            pool.idle.retain_mut(Worker::is_alive);
            let knows = |worker: &Worker| worker.text.as_ref().is_some_and(|known| Arc::ptr_eq(known, text));
            let last = pool.idle.len().checked_sub(1);
            let chosen = pool.idle.iter().position(knows).or(last);
            if chosen.is_some() || pool.busy < self.most {
                pool.busy += 1;
                let worker = chosen.map(|index| pool.idle.swap_remove(index));
                return Turn {
                    workers: self,
                    worker,
                };
            }
            pool = self.returned.wait(pool).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Pool> {
        self.pool.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The right to one rendering; gives back the worker that it has.
struct Turn<'a> {
    workers: &'a Workers,
    worker: Option<Worker>,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut pool = self.workers.lock();
        pool.busy -= 1;
        pool.idle.extend(self.worker.take());
        drop(pool);
        self.workers.returned.notify_one();
    }
}

/// A process that renders; killed when dropped.
#[derive(Debug)]
struct Worker {
    child: Child,
    stream: UnixStream,
    /// What it compiled last.
    text: Option<Arc<TemplateText>>,
}

impl Worker {
    fn start(program: &WorkerProgram, time: Duration) -> io::Result<Self> {
        let (stream, theirs) = UnixStream::pair()?;
        stream.set_read_timeout(Some(time))?;
        stream.set_write_timeout(Some(time))?;
        let mut command = Command::new(&program.path);
        // Secrets in the environment are none of its business, and a Ctrl-C at the terminal is not for it: it ends with its parent.
        command
            .arg0("plimsoll")
            .args(&program.args)
            .env_clear()
            .process_group(0);
        let command = command
            .stdin(OwnedFd::from(theirs))
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        Ok(Self {
            child: command.spawn()?,
            stream,
            text: None,
        })
    }

    fn is_alive(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Gives itself back unless it ended.
    fn render(
        mut self,
        text: &Arc<TemplateText>,
        input: &ChatInput<'_>,
    ) -> Result<(Result<String, TextError>, Option<Self>), TextError> {
        let is_known = self.text.as_ref().is_some_and(|known| Arc::ptr_eq(known, text));
        let request = Request {
            text: (!is_known).then_some(text),
            input: *input,
        };
        let reply = send(&mut self.stream, &request).and_then(|()| receive::<Reply>(&mut self.stream));
        match reply {
            Ok(Reply { outcome, is_last }) => {
                self.text = Some(Arc::clone(text));
                Ok((outcome.into(), (!is_last).then_some(self)))
            }
            Err(error) => Err(self.cause_of(error)),
        }
    }

    /// Why there is no reply.
    fn cause_of(mut self, error: io::Error) -> TextError {
        if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) {
            return TextError::Limit(RenderLimit::Time);
        }
        // It has ended, unless what it wrote makes no sense.
        let _ = self.child.kill();
        let mut last_words = Vec::new();
        let stderr = self.child.stderr.take();
        let read = stderr.map(|stderr| stderr.take(LAST_WORDS).read_to_end(&mut last_words));
        let last_words = String::from_utf8_lossy(&last_words);
        match (limit_of(&last_words), read, self.child.wait()) {
            (Some(limit), ..) => TextError::Limit(limit),
            (None, Some(Err(error)), _) | (None, _, Err(error)) => TextError::Worker(error),
            (None, _, Ok(status)) => TextError::Worker(io::Error::other(format!(
                "it ended with {status}: {error}; {}",
                last_words.trim()
            ))),
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // Both fail where it has ended and was waited for.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
