//! What ends a server: signals, of which the first asks and the second does not, and for a child the end of its parent.

use std::pin::pin;

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;

use crate::exit;

/// One of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::Display)]
pub enum Signal {
    /// Ctrl-C.
    #[strum(to_string = "SIGINT")]
    Interrupt,
    /// What supervisors send.
    #[strum(to_string = "SIGTERM")]
    Terminate,
    /// The terminal is gone.
    #[strum(to_string = "SIGHUP")]
    Hangup,
    /// No signal: standard input was closed, which its parent has held open.
    #[strum(to_string = "the end of standard input")]
    InputClosed,
}

impl Signal {
    /// As a shell reports a process that the signal ended.
    pub fn exit_code(self) -> u8 {
        match self {
            Self::Interrupt => 128 + 2,
            // The parent asks, in another way.
            Self::Terminate | Self::InputClosed => 128 + 15,
            Self::Hangup => 128 + 1,
        }
    }
}

/// The first signal from now on. The second ends the process there and then. With `stdin`, the end of standard input counts as
/// one of them.
///
/// # Errors
/// Where the operating system takes no handlers.
pub(crate) fn first(stdin: bool) -> std::io::Result<oneshot::Receiver<Signal>> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let (sender, receiver) = oneshot::channel();
    tokio::spawn(async move {
        let mut sender = Some(sender);
        let mut input = pin!(end_of_input());
        let mut stdin = stdin;
        loop {
            let signal = tokio::select! {
                _ = interrupt.recv() => Signal::Interrupt,
                _ = terminate.recv() => Signal::Terminate,
                () = &mut input, if stdin => {
                    stdin = false;
                    Signal::InputClosed
                }
            };
            match sender.take() {
                // Nobody waits any more where the server ends by itself.
                Some(sender) => drop(sender.send(signal)),
                None => {
                    exit::at_the_latest();
                    std::process::exit(signal.exit_code().into());
                }
            }
        }
    });
    Ok(receiver)
}

/// Returns when standard input is closed, or cannot be read: then nobody can close it any more.
async fn end_of_input() {
    let _ = tokio::io::copy(&mut tokio::io::stdin(), &mut tokio::io::sink()).await;
}
