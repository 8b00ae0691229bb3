use std::fmt;

use serde::{Serialize, Serializer};

/// A flag with the value that is advised for it; its `Display` is the flag as it is typed, `--max-model-len=4096`.
#[derive(Clone, Copy, Debug, PartialEq, strum::IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
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
        self.into()
    }
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "--{}=", self.name())?;
        match *self {
            Self::DeviceMemory(bytes) | Self::KvCacheMemoryBytes(bytes) => f.write_str(&exact(bytes)),
            Self::MemFraction(fraction) => write!(f, "{fraction}"),
            Self::MaxModelLen(count)
            | Self::MaxNumBatchedTokens(count)
            | Self::MaxNumSeqs(count)
            | Self::MaxTotalTokenNum(count) => write!(f, "{count}"),
        }
    }
}

/// Bytes as a flag takes them: exactly, in the largest unit of which they are a multiple.
fn exact(bytes: u64) -> String {
    let units = [(30, "GiB"), (20, "MiB"), (10, "KiB")];
    let unit = units
        .iter()
        .find(|(shift, _)| bytes > 0 && bytes.trailing_zeros() >= *shift);
    unit.map_or_else(
        || bytes.to_string(),
        |(shift, name)| format!("{}{name}", bytes >> shift),
    )
}

/// At least `bytes`, by less than 1 %, in a number that people can read.
pub(crate) fn readable(bytes: u64) -> u64 {
    let unit = if bytes >= 100 << 20 { 1 << 20 } else { 1 << 10 };
    bytes.checked_next_multiple_of(unit).unwrap_or(bytes)
}

impl Serialize for Setting {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_exact_and_readable() {
        for (bytes, text) in [
            (3 << 30, "--device-memory=3GiB"),
            (353 << 20, "--device-memory=353MiB"),
            (23_040 << 10, "--device-memory=23040KiB"),
            (369_433_806, "--device-memory=369433806"),
        ] {
            assert_eq!(Setting::DeviceMemory(bytes).to_string(), text);
        }
        assert_eq!(
            Setting::DeviceMemory(readable(369_433_806)).to_string(),
            "--device-memory=353MiB"
        );
        assert_eq!(readable(1000), 1024);
        assert_eq!(readable(u64::MAX), u64::MAX);
    }
}
