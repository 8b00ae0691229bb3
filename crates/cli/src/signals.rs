//! Signals that end a server: the first asks, the second does not.

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
}

impl Signal {
    /// As a shell reports a process that the signal ended.
    pub fn exit_code(self) -> u8 {
        match self {
            Self::Interrupt => 128 + 2,
            Self::Terminate => 128 + 15,
        }
    }
}

/// The first signal from now on. The second ends the process there and then.
///
/// # Errors
/// Where the operating system takes no handlers.
pub(crate) fn first() -> std::io::Result<oneshot::Receiver<Signal>> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let (sender, receiver) = oneshot::channel();
    tokio::spawn(async move {
        let mut sender = Some(sender);
        loop {
            let signal = tokio::select! {
                _ = interrupt.recv() => Signal::Interrupt,
                _ = terminate.recv() => Signal::Terminate,
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
