//! One plan as a file: a line with format and checksum, then the key in clear and the plan as JSON.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::key::hex;
use crate::start::PhaseSeconds;

/// What every file begins with; the number changes with the format.
const MAGIC: &str = "plimsoll-profile 2 ";

/// Plans have a few kilobytes; what is larger is none.
const MAX_BYTES: u64 = 1 << 20;

/// The content of a file whose checksum is right.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Stored {
    /// What the plan was made for.
    pub(super) key: Value,
    /// Nothing is known about it yet.
    pub(super) plan: Value,
    /// What the phases of that start took; unknown in files of older builds.
    #[serde(default)]
    pub(super) seconds: PhaseSeconds,
}

impl Stored {
    /// # Errors
    /// `NotFound` where there is no file, `InvalidData` where it is no whole plan.
    pub(super) fn read(path: &Path) -> io::Result<Self> {
        let mut bytes = Vec::new();
        let file = File::open(path)?;
        if !file.metadata()?.is_file() {
            return Err(invalid("it is not a file"));
        }
        file.take(MAX_BYTES + 1).read_to_end(&mut bytes)?;
        Self::decode(&bytes)
    }

    pub(super) fn decode(bytes: &[u8]) -> io::Result<Self> {
        if bytes.len() as u64 > MAX_BYTES {
            return Err(invalid("it is too long"));
        }
        let text = std::str::from_utf8(bytes).map_err(|_| invalid("it is not text"))?;
        let rest = text
            .strip_prefix(MAGIC)
            .ok_or_else(|| invalid("it has another format"))?;
        let (checksum, content) = rest.split_once('\n').ok_or_else(|| invalid("it is cut off"))?;
        if checksum != hex(content.as_bytes()) {
            return Err(invalid("its checksum is wrong"));
        }
        serde_json::from_str(content).map_err(|error| invalid(&error.to_string()))
    }
}

pub(super) fn encode<P: Serialize>(key: &Value, plan: &P, seconds: &PhaseSeconds) -> io::Result<Vec<u8>> {
    let plan = serde_json::to_value(plan)?;
    let content =
        serde_json::to_string_pretty(&serde_json::json!({ "key": key, "plan": plan, "seconds": seconds }))?
            + "\n";
    let checksum = hex(content.as_bytes());
    Ok(format!("{MAGIC}{checksum}\n{content}").into_bytes())
}

fn invalid(problem: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, problem)
}
