use std::fmt;
use std::path::{Path, PathBuf};

use plimsoll_core::Oom;
use plimsoll_core::untrusted::{quotable, with_plain_types};
use plimsoll_device::cuda::{DeviceError, GpuError};

/// Why a model could not be loaded. Every message names the thing at fault.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A file could not be read.
    #[error("cannot read {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// The path holds no model we can load.
    #[error("{} is not a model: {expected}", path.display())]
    NotAModel {
        /// The path as given.
        path: PathBuf,
        /// What was looked for.
        expected: &'static str,
    },
    /// A file is truncated, corrupt or not what its name says.
    #[error("{} is corrupt or incomplete: {message}; download it again", path.display())]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        message: String,
    },
    /// A configuration does not parse, or two of its fields contradict each other.
    #[error("{}: {message}", path.display())]
    Config {
        /// config.json, generation_config.json or the GGUF file.
        path: PathBuf,
        /// What is wrong; names the field.
        message: String,
    },
    /// No family of ours has this name.
    #[error("architecture `{found}` is not supported; supported are {supported}")]
    UnknownArchitecture {
        /// As the model calls it.
        found: String,
        /// What would have been right.
        supported: String,
    },
    /// The configuration asks for something this decoder does not do.
    #[error("configuration field `{field}` is {value}, which is not supported; {supported}")]
    Unsupported {
        /// The field.
        field: String,
        /// Its value.
        value: String,
        /// What would have been right.
        supported: String,
    },
    /// A flag asks for something that this model cannot do.
    #[error("{flag}: {message}")]
    Flag {
        /// The flag.
        flag: &'static str,
        /// What is wrong, and what would be right.
        message: String,
    },
    /// The weights lack a tensor.
    #[error("tensor `{name}` is missing (expected shape {expected})")]
    MissingTensor {
        /// As the file would call it.
        name: String,
        /// Shape the configuration implies.
        expected: Shape,
    },
    /// A tensor does not fit the configuration.
    #[error("tensor `{name}` has shape {found}, the configuration implies {expected}")]
    MisshapenTensor {
        /// As the file calls it.
        name: String,
        /// Shape the configuration implies.
        expected: Shape,
        /// Shape in the file.
        found: Shape,
    },
    /// A tensor is stored in a way we cannot compute with.
    #[error("tensor `{name}` has type {found}; supported are {supported}")]
    TensorType {
        /// As the file calls it.
        name: String,
        /// Type in the file.
        found: String,
        /// What would have been right.
        supported: &'static str,
    },
    /// The kernels cannot use a tensor.
    #[error("tensor `{name}`: {message}")]
    Weights {
        /// As the file calls it.
        name: String,
        /// What the kernels said.
        message: String,
    },
    /// The weights hold decoder tensors that the configuration gives no place, so the output would be wrong.
    #[error("the weights hold tensors that this architecture does not use: {names}")]
    UnusedTensors {
        /// The first few names.
        names: String,
    },
    /// A rank is gone, or did not come in time.
    #[error("{0}")]
    RankLost(String),
    /// Another thread ended it, see [`crate::Cancel`].
    #[error("loading was cancelled")]
    Cancelled,
    /// The GPU or its driver refused.
    #[error(transparent)]
    Gpu(#[from] GpuError),
    /// The weights do not fit the device.
    #[error(transparent)]
    Oom(#[from] Oom),
}

impl From<DeviceError> for ModelError {
    fn from(error: DeviceError) -> Self {
        match error {
            DeviceError::Oom(oom) => Self::Oom(oom),
            DeviceError::Gpu(error) => Self::Gpu(error),
        }
    }
}

impl ModelError {
    pub(crate) fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_owned();
        |source| Self::Io { path, source }
    }

    pub(crate) fn corrupt(path: &Path, message: impl fmt::Display) -> Self {
        Self::Corrupt {
            path: path.to_owned(),
            message: plain(message),
        }
    }

    pub(crate) fn config(path: &Path, message: impl fmt::Display) -> Self {
        Self::Config {
            path: path.to_owned(),
            message: plain(message),
        }
    }

    pub(crate) fn unsupported(
        field: impl Into<String>,
        value: impl fmt::Display,
        supported: impl Into<String>,
    ) -> Self {
        Self::Unsupported {
            field: quotable(&field.into()),
            value: quotable(&value.to_string()),
            supported: supported.into(),
        }
    }

    pub(crate) fn flag(flag: &'static str, message: impl Into<String>) -> Self {
        Self::Flag {
            flag,
            message: quotable(&message.into()),
        }
    }

    /// Of a rank's part of a model, where the whole is supported.
    pub(crate) fn because_divided(self, ranks: usize) -> Self {
        match self {
            Self::Unsupported {
                field,
                value,
                supported,
            } => Self::Unsupported {
                field,
                value,
                supported: format!(
                    "{supported}; it is a part that each GPU has with --tensor-parallel-size {ranks}: undivided it is supported"
                ),
            },
            other => other,
        }
    }
}

/// Errors of serde name types of Rust, and values of any length.
fn plain(message: impl fmt::Display) -> String {
    quotable(&with_plain_types(&message.to_string()))
}

/// A tensor's shape, outermost dimension first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape(pub Vec<usize>);

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&quotable(&format!("{:?}", self.0)))
    }
}
