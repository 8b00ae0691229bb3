//! A process that renders chat templates for another. A template is a program that comes with a model, and the engine that runs
//! it bounds neither its memory nor its stack: what it does to this process, it does to nothing else.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::SystemTime;
use std::{fs, panic, process, thread};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::engine::Engine;
use super::protocol::{Outcome, Received, Reply, receive, send};
use crate::TextError;
use crate::bounds::{MAX_MEMORY_BYTES, RenderLimit, STACK_BYTES};

/// A worker that has grown by more, by leaks or fragments, is replaced: it could fail where a new one does not.
const MAX_GROWTH_BYTES: u64 = MAX_MEMORY_BYTES / 4;

/// Renders what arrives on stdin, a Unix socket, and answers there, until the socket is closed. It is run by
/// [`crate::Renderer::workers`], in a program of its own.
///
/// # Errors
/// Where stdin is no socket, or limits cannot be set.
pub fn run_template_worker() -> io::Result<()> {
    let socket = io::stdin().as_fd().try_clone_to_owned()?;
    let watched = socket.try_clone()?;
    // stderr is for the last words of a process that dies.
    panic::set_hook(Box::new(|_| {}));
    limit(Resource::Core, 0)?;
    thread::Builder::new().spawn(move || end_with_parent(&watched))?;
    let worker = thread::Builder::new().stack_size(STACK_BYTES);
    let worker = worker.spawn(move || serve(UnixStream::from(socket)))?;
    worker
        .join()
        .unwrap_or_else(|_| Err(io::Error::other("the worker panicked")))
}

/// Ends the process when the other end of the socket is closed, even in the middle of a rendering.
fn end_with_parent(socket: &OwnedFd) {
    loop {
        let mut watched = [PollFd::new(socket, PollFlags::empty())];
        match poll(&mut watched, None) {
            Err(rustix::io::Errno::INTR) => {}
            _ => process::exit(0),
        }
    }
}

fn serve(mut stream: UnixStream) -> io::Result<()> {
    let begin = address_space();
    if let Some(bytes) = begin {
        limit(Resource::As, bytes + MAX_MEMORY_BYTES)?;
    }
    let mut engine = Err(TextError::Template("there is no template".to_owned()));
    loop {
        let Received { text, input } = match receive(&mut stream) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            received => received?,
        };
        if let Some(text) = text {
            engine = Engine::compile(Arc::new(text), SystemTime::now);
        }
        let rendered = match &engine {
            Ok(engine) => engine.render(&input.as_input()),
            Err(TextError::Template(problem)) => Err(TextError::Template(problem.clone())),
            Err(error) => Err(TextError::Template(error.to_string())),
        };
        drop(input);
        let grown = address_space()
            .zip(begin)
            .map(|(now, begin)| now.saturating_sub(begin));
        let is_last = grown.is_some_and(|bytes| bytes > MAX_GROWTH_BYTES);
        let outcome = Outcome::from(rendered);
        send(&mut stream, &Reply { outcome, is_last })?;
        if is_last {
            return Ok(());
        }
    }
}

/// Lowers a limit of this process.
fn limit(resource: Resource, value: u64) -> io::Result<()> {
    let Rlimit { maximum, .. } = getrlimit(resource);
    let current = Some(maximum.map_or(value, |maximum| maximum.min(value)));
    Ok(setrlimit(resource, Rlimit { current, maximum })?)
}

/// Bytes of this process's address space; `None` where the system does not tell, and limits none.
fn address_space() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let kib = status.lines().find_map(|line| line.strip_prefix("VmSize:"))?;
    let kib: u64 = kib.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib << 10)
}

/// What the last words of a worker that died say about the cause, if it is one of the bounds.
pub(super) fn limit_of(last_words: &str) -> Option<RenderLimit> {
    if last_words.contains("has overflowed its stack") {
        return Some(RenderLimit::Stack);
    }
    last_words
        .contains("memory allocation of")
        .then_some(RenderLimit::Memory)
}
