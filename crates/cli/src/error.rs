//! What can go wrong, and with which exit code the process then ends.

use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::time::Duration;

use plimsoll_core::Oom;
use plimsoll_device::CapacityError;
use plimsoll_device::cuda::{GpuError, Holder};
use plimsoll_images::ProcessorError;
use plimsoll_kv_events::BindError;
use plimsoll_model::ModelError;
use plimsoll_profiler::{Diagnostic, ProfileError};
use plimsoll_server::ServeError;
use plimsoll_text::TextError;
use tokio::task::JoinError;

use crate::hub::HubError;
use crate::signals::Signal;

/// Everything that ends `plimsoll`.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The command line; clap prints it, `--help` and `--version` included.
    #[error(transparent)]
    Clap(clap::Error),
    /// A layer below the command line, or values that do not go together.
    #[error("{origin}: {message}")]
    Configuration {
        /// The file, the variable or the flag.
        origin: String,
        /// What is wrong and what would be right.
        message: String,
    },
    /// MODEL is neither a path nor the name of a repository.
    #[error("there is no {model}: give a directory, a .gguf file, a Hub id such as owner/name, or sim")]
    NoSuchModel {
        /// MODEL as given.
        model: String,
    },
    /// There is something at MODEL that may not be read.
    #[error("cannot read {}: {source}", path.display())]
    Unreadable {
        /// MODEL as given, or a file in it.
        path: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// A file of the model that says how images become its input.
    #[error("{}/{error}; --limit-mm-per-prompt '{{\"image\": 0}}' serves text alone", directory.display())]
    Images {
        /// The model's.
        directory: PathBuf,
        /// Names the file and what is wrong with it.
        error: ProcessorError,
    },
    /// The tokenizer lacks what prompts with images need.
    #[error("{0}; --limit-mm-per-prompt '{{\"image\": 0}}' serves text alone")]
    ImageTokens(String),
    /// Longer than the model was made for.
    #[error("--max-model-len: the model's context is at most {trained_for} tokens, not {asked}")]
    ContextTooLong {
        /// As asked for.
        asked: usize,
        /// What its configuration says.
        trained_for: usize,
    },
    /// The files at MODEL are not what `--load-format` asks for.
    #[error("{}: expected {expected}", path.display())]
    WrongFormat {
        /// Directory or file.
        path: PathBuf,
        /// What was looked for.
        expected: &'static str,
    },
    /// A repository whose weights alone would tell what it is.
    #[error(
        "{model} has no config.json on the Hub, so nothing can be predicted without its weights: give the path of a \
         .gguf file, or use `plimsoll profile`, which downloads and measures it"
    )]
    OnlyWeights {
        /// MODEL as given.
        model: String,
    },
    /// The Hub.
    #[error(transparent)]
    Hub(#[from] HubError),
    /// The model.
    #[error(transparent)]
    Model(ModelError),
    /// The weights alone are too large.
    #[error(
        "the weights do not fit: {0}; choose a smaller or quantised model, or more memory (--device-memory, --device)"
    )]
    WeightsDoNotFit(Oom),
    /// The same, or too little to measure anything; and the device on which everything is predicted to fit.
    #[error("{error}")]
    NeedsLargerDevice {
        /// Without that number.
        error: Box<Error>,
        /// Its bytes.
        bytes: u64,
    },
    /// The GPU.
    #[error(transparent)]
    Gpu(#[from] GpuError),
    /// There is a GPU, whose memory others hold.
    #[error(
        "cuda:{ordinal} is full: {error}\n  {}\nfree some of its memory (end a process, or start it with a smaller --mem-fraction \
         or --device-memory), or choose another device: --device cuda:N, or --device cpu",
        held_by(holders)
    )]
    GpuFull {
        /// Which one.
        ordinal: usize,
        /// What the driver said.
        error: GpuError,
        /// Processes that hold its memory, as far as that is known.
        holders: Vec<Holder>,
    },
    /// Another start holds the device's lock.
    #[error(
        "{holder} is still measuring {device} after {:.0} s: wait until it is ready, raise \
         --device-lock-timeout, or end it (lock file: {})",
        timeout.as_secs_f64(), path.display()
    )]
    DeviceBusy {
        /// The device, as its lock file is called.
        device: String,
        /// What the holder says about itself.
        holder: String,
        /// How long it was waited for.
        timeout: Duration,
        /// The lock file.
        path: PathBuf,
    },
    /// The tokenizer or the chat template.
    #[error(transparent)]
    Text(#[from] TextError),
    /// The machine does not say how much memory it has.
    #[error(transparent)]
    Capacity(#[from] CapacityError),
    /// The auto-profile.
    #[error(transparent)]
    Profile(#[from] ProfileError),
    /// What a start would end with, by its prediction.
    #[error("predicted, nothing was measured: {0}")]
    Predicted(Box<Self>),
    /// The address cannot be listened on.
    #[error("cannot listen on {address}: {source}; choose another with {flags}")]
    Bind {
        /// As given.
        address: String,
        /// What sets it.
        flags: &'static str,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// Likewise, of KV events.
    #[error(transparent)]
    BindEvents(#[from] BindError),
    /// The server stopped by itself.
    #[error(transparent)]
    Serve(#[from] ServeError),
    /// A signal came before there was anything to serve.
    #[error("stopped by {signal} after {:.1} s of the start, in phase {phase}", after.as_secs_f64())]
    Interrupted {
        /// Which.
        signal: Signal,
        /// What the start did then.
        phase: &'static str,
        /// How long it had taken.
        after: Duration,
    },
    /// Requests were cut off at shutdown.
    #[error("requests cut off by the drain timeout of {} s: {requests}; raise --drain-timeout", timeout.as_secs_f64())]
    CutOff {
        /// How many.
        requests: usize,
        /// How long the drain lasted.
        timeout: Duration,
    },
    /// A benchmark.
    #[error("{0}")]
    Bench(String),
    /// A request of a chat.
    #[error("{0}")]
    Chat(String),
    /// There is no server to talk to.
    #[error("{0}")]
    NoServer(String),
    /// The server that a chat started has ended.
    #[error("the server of this chat ended: {said}")]
    OwnServer {
        /// With this, unless a signal ended it.
        code: Option<u8>,
        /// Its last words.
        said: String,
    },
    /// A signal ended a command.
    #[error("stopped by {0}")]
    Stopped(Signal),
    /// The selftest found something; the verdict says what.
    #[error("the selftest failed: {0}")]
    SelftestFailed(String),
    /// There is nothing to test.
    #[error("{0}")]
    NothingToTest(String),
    /// The selftest found nothing, but did not reach every limit.
    #[error("the selftest is inconclusive: {0}")]
    Inconclusive(String),
    /// A file that was asked for cannot be written.
    #[error("cannot write {}: {source}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// A defect of this program.
    #[error("internal error: {0}; this is a bug in plimsoll, please report it with the log above")]
    Internal(String),
    /// Threads, signals, sockets.
    #[error("the operating system reported an error: {0}")]
    System(#[from] std::io::Error),
}

/// A line for each process.
fn held_by(holders: &[Holder]) -> String {
    let lines: Vec<_> = holders.iter().map(Holder::to_string).collect();
    match lines.is_empty() {
        true => {
            "the driver does not list the processes that hold it; run `nvidia-smi` on the host".to_owned()
        }
        false => lines.join("\n  "),
    }
}

impl Error {
    /// What `origin`, a file, a variable or a flag, says wrongly, and what would be right.
    pub(crate) fn configuration(origin: impl Display, message: impl Into<String>) -> Self {
        Self::Configuration {
            origin: origin.to_string(),
            message: message.into(),
        }
    }

    /// The file at `path`, which `flag` names, cannot be read.
    pub(crate) fn unreadable(flag: &str, path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        move |source| Self::configuration(flag, format!("cannot read {}: {source}", path.display()))
    }

    /// Whether work was ended because other work of the same start failed.
    pub(crate) fn is_cancelled(&self) -> bool {
        matches!(self, Self::Model(ModelError::Cancelled))
    }

    /// As `plimsoll --help` lists them.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Clap(error) => u8::try_from(error.exit_code()).unwrap_or(2),
            Self::Predicted(error) => error.exit_code(),
            Self::Configuration { .. } => 2,
            Self::NeedsLargerDevice { error, .. } => error.exit_code(),
            Self::WeightsDoNotFit(_) | Self::Profile(ProfileError::DoesNotFit(_)) | Self::GpuFull { .. } => 4,
            Self::NoSuchModel { .. } | Self::Unreadable { .. } => 3,
            Self::Images { .. } | Self::ImageTokens(_) => 3,
            Self::WrongFormat { .. } | Self::OnlyWeights { .. } => 3,
            Self::Hub(_) | Self::Model(_) | Self::Text(_) => 3,
            Self::Bind { .. } | Self::BindEvents(_) => 5,
            Self::CutOff { .. } => 6,
            Self::ContextTooLong { .. } | Self::Profile(ProfileError::NotFinite { .. }) => 3,
            Self::Gpu(_) | Self::Profile(ProfileError::Device { .. }) => 7,
            Self::DeviceBusy { .. } => 8,
            Self::NothingToTest(_) | Self::NoServer(_) => 9,
            Self::Inconclusive(_) => 10,
            Self::Serve(ServeError::Stalled(_)) => 11,
            Self::Interrupted { signal, .. } | Self::Stopped(signal) => signal.exit_code(),
            Self::OwnServer { code, .. } => code.filter(|&code| code > 0).unwrap_or(1),
            Self::Capacity(_) | Self::Profile(_) | Self::Serve(_) => 1,
            Self::Bench(_) | Self::Chat(_) | Self::SelftestFailed(_) | Self::Internal(_) => 1,
            Self::Write { .. } | Self::System(_) => 1,
        }
    }

    /// Whether threads may still be at work on the device, perhaps for ever.
    pub fn leaves_work_behind(&self) -> bool {
        matches!(
            self,
            Self::Serve(ServeError::Stalled(_)) | Self::Interrupted { .. } | Self::CutOff { .. }
        )
    }

    /// Why it does not fit, and what would.
    pub fn diagnostic(&self) -> Option<&Diagnostic> {
        match self {
            Self::Profile(ProfileError::DoesNotFit(diagnostic)) => Some(diagnostic),
            Self::Predicted(error) => error.diagnostic(),
            _ => None,
        }
    }
}

impl From<JoinError> for Error {
    /// A task ends without a result where it panicked; the log says where.
    fn from(error: JoinError) -> Self {
        let panic = match error.try_into_panic() {
            Ok(panic) => panic,
            Err(cancelled) => return Self::Internal(cancelled.to_string()),
        };
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        Self::Internal(text.unwrap_or("a task panicked").to_owned())
    }
}

impl From<ModelError> for Error {
    fn from(error: ModelError) -> Self {
        match error {
            ModelError::Oom(oom) => Self::WeightsDoNotFit(oom),
            ModelError::Gpu(error) => Self::Gpu(error),
            ModelError::Flag { flag, message } => Self::configuration(flag, message),
            error => Self::Model(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_panic_is_a_defect_and_not_the_operating_systems() {
        for message in ["constant", &format!("computed {}", 1)] {
            let message = message.to_owned();
            let work = move || match message.as_str() {
                "constant" => panic!("constant"),
                computed => panic!("{computed}"),
            };
            let error = Error::from(tokio::task::spawn_blocking(work).await.unwrap_err());
            assert_eq!(error.exit_code(), 1);
            let text = error.to_string();
            assert!(
                text.starts_with("internal error: co") && text.contains("bug"),
                "{text}"
            );
        }
    }
}
