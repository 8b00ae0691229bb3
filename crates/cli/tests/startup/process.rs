//! The binary as a process whose log is read as it is written, and processes that only hold memory.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// A debug build on a busy machine does anything here within this time.
const PATIENCE: Duration = Duration::from_secs(120);

/// A `plimsoll` that runs; it ends with this value.
pub(crate) struct Process {
    child: Child,
    lines: Receiver<String>,
    /// What it has logged and said so far.
    pub(crate) log: Vec<String>,
}

impl Process {
    /// Runs `command MODEL` with random weights, on the CPU unless `flags` say otherwise. `locks`: where its lock files go.
    pub(crate) fn start(command: &str, model: &Path, locks: &Path, flags: &[&str]) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_plimsoll"))
            .arg(command)
            .arg(model)
            .args(["--load-format", "dummy", "--device", "cpu", "--no-profile-cache"])
            .arg("--device-lock-dir")
            .arg(locks)
            .args(flags)
            .env_remove("RUST_LOG")
            .env("PLIMSOLL_LOG_FORMAT", "text")
            .env("PLIMSOLL_VERBOSE", "true")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let (sender, lines) = channel();
        let streams: [Box<dyn Read + Send>; 2] = [
            Box::new(child.stdout.take().unwrap()),
            Box::new(child.stderr.take().unwrap()),
        ];
        for stream in streams {
            let sender = sender.clone();
            std::thread::spawn(move || {
                let lines = BufReader::new(stream).lines();
                // Nobody listens any more once the test is over.
                lines.map_while(Result::ok).try_for_each(|line| sender.send(line))
            });
        }
        Self {
            child,
            lines,
            log: Vec::new(),
        }
    }

    /// Waits for a line with all of `parts`; panics if none comes.
    pub(crate) fn expect(&mut self, parts: &[&str]) -> String {
        let has = |line: &String| parts.iter().all(|part| line.contains(part));
        if let Some(line) = self.log.iter().find(|line| has(line)) {
            return line.clone();
        }
        let end = Instant::now() + PATIENCE;
        loop {
            match self
                .lines
                .recv_timeout(end.saturating_duration_since(Instant::now()))
            {
                Ok(line) => {
                    self.log.push(line.clone());
                    if has(&line) {
                        return line;
                    }
                }
                Err(error) => {
                    let why = match error {
                        RecvTimeoutError::Timeout => "no line in time",
                        RecvTimeoutError::Disconnected => "it ended",
                    };
                    panic!("{why}: expected {parts:?} in\n{}", self.log.join("\n"));
                }
            }
        }
    }

    /// Waits for the end; the exit code.
    pub(crate) fn finish(&mut self) -> Option<i32> {
        let end = Instant::now() + PATIENCE;
        loop {
            self.log.extend(self.lines.try_iter());
            if let Some(status) = self.child.try_wait().unwrap() {
                // The rest of what it wrote: both readers end with it.
                self.log.extend(self.lines.iter());
                return status.code();
            }
            assert!(Instant::now() < end, "it still runs:\n{}", self.log.join("\n"));
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A neighbour: a process that holds memory which really exists, and nothing else. It is `dd`, which keeps what it has read
/// of a block that is not yet full.
pub(crate) struct Ballast {
    child: Child,
    into: ChildStdin,
}

/// Most that one ballast holds.
const BLOCK: &str = "bs=1G";

impl Ballast {
    pub(crate) fn of(mebibytes: usize) -> Self {
        let mut child = Command::new("dd")
            .args(["of=/dev/null", "iflag=fullblock", "count=1", BLOCK])
            .stdin(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let into = child.stdin.take().unwrap();
        let mut ballast = Self { child, into };
        ballast.grow(mebibytes);
        ballast
    }

    /// Takes more; what the pipe has buffered comes on top.
    pub(crate) fn grow(&mut self, mebibytes: usize) {
        let chunk = vec![1; 1 << 20];
        for _ in 0..mebibytes {
            self.into.write_all(&chunk).unwrap();
        }
    }
}

impl Drop for Ballast {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
