//! A server that belongs to this chat: a child process that listens on a private socket and ends with it.

use std::fs::File;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use tempfile::TempDir;
use tokio::process::{Child, ChildStdin, Command};
use tokio::time::timeout;

use crate::command_line::quoted;
use crate::error::Error;

/// How long it may take to end before it is killed.
const PATIENCE: Duration = Duration::from_secs(10);
/// Lines of its log that are shown where it says no error.
const SHOWN: usize = 20;

/// The running child. Dropping it kills it.
#[derive(Debug)]
pub(super) struct OwnServer {
    child: Child,
    /// Held open for as long as the child is to run. Not by `child`, which closes it as soon as it is waited for.
    input: Option<ChildStdin>,
    /// How its command line begins, as it gives advice.
    command: String,
    /// How the same begins for who typed that of the chat.
    advice: String,
    /// Holds its socket and its log.
    dir: TempDir,
}

impl OwnServer {
    /// Starts `plimsoll serve MODEL FLAGS`.
    ///
    /// # Errors
    /// Where there is no place for its socket, or the program cannot be started again.
    pub(super) fn start(model: &str, flags: &[String]) -> Result<Self, Error> {
        let dir = tempfile::Builder::new().prefix("plimsoll-chat-").tempdir()?;
        let log = File::create(dir.path().join("log"))?;
        let socket = dir.path().join("socket").display().to_string();
        let name = std::env::args().next().unwrap_or_else(|| "plimsoll".to_owned());
        // Its standard input closes with this process, however that ends.
        let fixed = [
            "serve",
            model,
            "--log-format=text",
            "--exit-on-stdin-close",
            "--uds",
            &socket,
        ];
        let words: Vec<_> = [&*name].iter().chain(&fixed).map(|word| quoted(word)).collect();
        let mut child = Command::new("/proc/self/exe")
            .arg0(&name)
            .args(fixed)
            .arg("--max-num-seqs=1")
            .args(flags)
            // Keys and certificates are for servers that others can reach.
            .env_remove("PLIMSOLL_API_KEY")
            .env_remove("PLIMSOLL_API_KEY_FILE")
            .env_remove("PLIMSOLL_SSL_CERTFILE")
            .env_remove("PLIMSOLL_SSL_KEYFILE")
            .stdin(Stdio::piped())
            .stdout(log.try_clone()?)
            .stderr(log)
            // Ctrl-C is for the chat.
            .process_group(0)
            .kill_on_drop(true)
            .spawn()?;
        Ok(Self {
            input: child.stdin.take(),
            child,
            command: words.join(" "),
            advice: format!("{} chat {} --own-server --", quoted(&name), quoted(model)),
            dir,
        })
    }

    /// Where it listens.
    pub(super) fn socket(&self) -> PathBuf {
        self.dir.path().join("socket")
    }

    /// Waits until it ends by itself, which it should not.
    pub(super) async fn ended(&mut self) -> Error {
        match self.child.wait().await {
            Ok(status) => self.explain(status),
            Err(error) => Error::System(error),
        }
    }

    /// # Errors
    /// If it has ended.
    pub(super) fn check(&mut self) -> Result<(), Error> {
        match self.child.try_wait()? {
            None => Ok(()),
            Some(status) => Err(self.explain(status)),
        }
    }

    /// Ends it.
    ///
    /// # Errors
    /// Where it cannot even be killed.
    pub(super) async fn stop(mut self) -> Result<(), Error> {
        drop(self.input.take());
        if timeout(PATIENCE, self.child.wait()).await.is_err() {
            self.child.kill().await?;
        }
        Ok(())
    }

    fn explain(&self, status: ExitStatus) -> Error {
        let log = std::fs::read(self.dir.path().join("log")).unwrap_or_default();
        let said = last_words(&String::from_utf8_lossy(&log), status);
        Error::OwnServer {
            code: status.code().and_then(|code| u8::try_from(code).ok()),
            said: said.replace(&self.command, &self.advice),
        }
    }
}

/// Its error if it said one, else how it ended and the end of its log.
fn last_words(log: &str, status: ExitStatus) -> String {
    let error = log.lines().rev().position(|line| line.starts_with("error: "));
    let from_end = error.map_or(SHOWN, |line| line + 1);
    let lines: Vec<_> = log.lines().collect();
    let shown = lines[lines.len().saturating_sub(from_end)..].join("\n");
    match error {
        Some(_) => shown.trim_start_matches("error: ").to_owned(),
        None => format!("{status}\n{shown}").trim_end().to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    #[test]
    fn the_error_is_what_matters_of_the_log() {
        let status = ExitStatus::from_raw(3 << 8);
        let log = "12:00 INFO x\nerror: it does not fit\nany of these fits:\n  a";
        assert_eq!(
            last_words(log, status),
            "it does not fit\nany of these fits:\n  a"
        );
        let silent: String = (0..30).map(|line| format!("line {line}\n")).collect();
        let said = last_words(&silent, ExitStatus::from_raw(9));
        assert!(said.starts_with("signal: 9"), "{said}");
        assert_eq!(said.lines().count(), 1 + SHOWN);
    }
}
