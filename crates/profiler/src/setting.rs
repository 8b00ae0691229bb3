use std::fmt;

use serde::{Serialize, Serializer};

/// A flag with the value that is advised for it; its `Display` is the flag as it is typed, `--max-model-len=4096`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Setting {
    /// `--device-memory`, in bytes.
    DeviceMemory(u64),
    /// `--mem-fraction`.
    MemFraction(f64),
    /// `--max-model-len`, in tokens.
    MaxModelLen(usize),
    /// `--max-num-batched-tokens`.
    MaxNumBatchedTokens(usize),
    /// `--max-num-seqs`.
    MaxNumSeqs(usize),
    /// `--max-total-token-num`.
    MaxTotalTokenNum(usize),
    /// `--kv-cache-memory-bytes`.
    KvCacheMemoryBytes(u64),
}

impl Setting {
    /// The flag without its dashes.
    pub fn name(self) -> &'static str {
        match self {
            Self::DeviceMemory(_) => "device-memory",
            Self::MemFraction(_) => "mem-fraction",
            Self::MaxModelLen(_) => "max-model-len",
            Self::MaxNumBatchedTokens(_) => "max-num-batched-tokens",
            Self::MaxNumSeqs(_) => "max-num-seqs",
            Self::MaxTotalTokenNum(_) => "max-total-token-num",
            Self::KvCacheMemoryBytes(_) => "kv-cache-memory-bytes",
        }
    }
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "--{}=", self.name())?;
        match *self {
            Self::DeviceMemory(bytes) | Self::KvCacheMemoryBytes(bytes) => write!(f, "{bytes}"),
            Self::MemFraction(fraction) => write!(f, "{fraction}"),
            Self::MaxModelLen(count)
            | Self::MaxNumBatchedTokens(count)
            | Self::MaxNumSeqs(count)
            | Self::MaxTotalTokenNum(count) => write!(f, "{count}"),
        }
    }
}

impl Serialize for Setting {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}
