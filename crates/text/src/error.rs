use std::path::{Path, PathBuf};

use plimsoll_core::untrusted::quotable;

use crate::bounds::RenderLimit;

/// Why text could not be turned into tokens, tokens into text, or messages into a prompt.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// A file could not be read.
    #[error("cannot read {path}: {source}", path = path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Error of the operating system.
        source: std::io::Error,
    },
    /// A file or a metadata field does not hold what it should.
    #[error("{place}: {problem}")]
    Invalid {
        /// File, or GGUF metadata key.
        place: String,
        /// What is wrong with it, and what would be right.
        problem: String,
    },
    /// An unsupported kind of tokenizer.
    #[error("{place}: {what} {found:?} is not supported; supported are {supported}")]
    Unsupported {
        /// File, or GGUF metadata key.
        place: String,
        /// What is unsupported.
        what: &'static str,
        /// Its name.
        found: String,
        /// Supported names.
        supported: String,
    },
    /// Tokenizing failed.
    #[error("cannot tokenize the text: {0}")]
    Encode(String),
    /// There is no chat template where one is needed.
    #[error("this model has no chat template; pass one with --chat-template, or use /v1/completions")]
    NoChatTemplate,
    /// The chat template does not compile.
    #[error("the chat template is not valid Jinja: {0}")]
    Template(String),
    /// The chat template itself refused these messages, with `raise_exception`.
    #[error("{0}")]
    Refused(String),
    /// The chat template failed on these messages.
    #[error("the chat template cannot render these messages: {0}")]
    Render(String),
    /// Rendering exceeded a bound.
    #[error("the chat template cannot render these messages: {0}")]
    Limit(RenderLimit),
    /// The process that renders chat templates could not be started, or was ended by somebody else.
    #[error("the process that renders chat templates failed: {0}")]
    Worker(std::io::Error),
    /// A stop string is empty.
    #[error("a stop string must not be empty")]
    EmptyStop,
}

impl TextError {
    pub(crate) fn invalid(place: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Invalid {
            place: place.into(),
            problem: quotable(&problem.into()),
        }
    }

    pub(crate) fn read(path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| Self::Read { path, source }
    }

    /// The same, of keys of this GGUF file.
    #[must_use]
    pub fn in_file(self, path: &Path) -> Self {
        let within = |place: String| format!("{}: {place}", path.display());
        match self {
            Self::Invalid { place, problem } => Self::Invalid {
                place: within(place),
                problem,
            },
            Self::Unsupported {
                place,
                what,
                found,
                supported,
            } => Self::Unsupported {
                place: within(place),
                what,
                found,
                supported,
            },
            error => error,
        }
    }

    /// True if the client's messages or text are at fault, not the model's files: a 4xx.
    pub fn is_client_error(&self) -> bool {
        matches!(
            self,
            Self::Encode(_)
                | Self::NoChatTemplate
                | Self::Refused(_)
                | Self::Render(_)
                | Self::Limit(_)
                | Self::EmptyStop
        )
    }
}
