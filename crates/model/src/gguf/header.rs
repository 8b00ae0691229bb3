//! Bounds of a GGUF header, checked before it is read into memory: each byte of an array may take 60 there. The format is that
//! of <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>.

use std::collections::HashSet;
use std::path::Path;

use crate::ModelError;

/// Bytes of all fields and descriptions of tensors; the largest vocabularies need a tenth.
const MAX_BYTES: usize = 128 << 20;
/// Elements of all arrays; 260,000 tokens have a million.
const MAX_ELEMENTS: u64 = 1 << 22;
/// Fields, and tensors.
const MAX_ENTRIES: u64 = 1 << 17;
/// Arrays within arrays.
const MAX_DEPTH: usize = 4;

const STRING: u32 = 8;
const ARRAY: u32 = 9;

/// Where reading stands.
struct Header<'a> {
    path: &'a Path,
    /// What is left.
    bytes: &'a [u8],
    /// Lengths have 4 bytes in version 1, and 8 since.
    length_bytes: usize,
    elements: u64,
}

/// The part of `bytes` that may be the header.
///
/// # Errors
/// [`ModelError::Corrupt`], which names the field that is too large, or there twice.
pub(super) fn check<'a>(path: &'a Path, bytes: &'a [u8]) -> Result<&'a [u8], ModelError> {
    let bytes = &bytes[..bytes.len().min(MAX_BYTES)];
    let mut header = Header {
        path,
        bytes,
        length_bytes: 8,
        elements: 0,
    };
    header.skip(super::MAGIC.len() as u64)?;
    if header.u32()? == 1 {
        header.length_bytes = 4;
    }
    let (tensors, fields) = (header.length()?, header.length()?);
    for (what, count) in [("tensors", tensors), ("fields", fields)] {
        if count > MAX_ENTRIES {
            let message =
                format!("the header has {count} {what}, more than the {MAX_ENTRIES} that it may have");
            return Err(ModelError::corrupt(path, message));
        }
    }
    let mut seen = HashSet::new();
    for _ in 0..fields {
        let key = header.name(&mut seen, "field")?;
        let kind = header.u32()?;
        header.value(&key, kind, 0)?;
    }
    seen.clear();
    for _ in 0..tensors {
        header.name(&mut seen, "tensor")?;
        let dimensions = header.u32()?;
        let size = header.length_bytes as u64;
        header.skip(u64::from(dimensions) * size + 12)?;
    }
    Ok(bytes)
}

impl<'a> Header<'a> {
    fn take(&mut self, count: u64) -> Result<&'a [u8], ModelError> {
        let count = usize::try_from(count).ok();
        match count.and_then(|count| self.bytes.split_at_checked(count)) {
            Some((taken, rest)) => {
                self.bytes = rest;
                Ok(taken)
            }
            None => Err(ModelError::corrupt(
                self.path,
                format!(
                    "the header does not end within the file's first {} MiB",
                    MAX_BYTES >> 20
                ),
            )),
        }
    }

    fn skip(&mut self, count: u64) -> Result<(), ModelError> {
        self.take(count).map(drop)
    }

    fn number(&mut self, bytes: usize) -> Result<u64, ModelError> {
        let mut number = [0; 8];
        number[..bytes].copy_from_slice(self.take(bytes as u64)?);
        Ok(u64::from_le_bytes(number))
    }

    fn u32(&mut self) -> Result<u32, ModelError> {
        self.number(4).map(|number| number as u32)
    }

    fn length(&mut self) -> Result<u64, ModelError> {
        self.number(self.length_bytes)
    }

    fn name(&mut self, seen: &mut HashSet<&'a [u8]>, what: &str) -> Result<String, ModelError> {
        let length = self.length()?;
        let bytes = self.take(length)?;
        let name = String::from_utf8_lossy(bytes).into_owned();
        match seen.insert(bytes) {
            true => Ok(name),
            false => Err(ModelError::corrupt(
                self.path,
                format!("the {what} `{name}` is there twice"),
            )),
        }
    }

    fn value(&mut self, key: &str, kind: u32, depth: usize) -> Result<(), ModelError> {
        let size = match kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            10..=12 => 8,
            STRING => self.length()?,
            ARRAY => return self.array(key, depth),
            _ => {
                let message = format!("`{key}` has the unknown type {kind}");
                return Err(ModelError::corrupt(self.path, message));
            }
        };
        self.skip(size)
    }

    fn array(&mut self, key: &str, depth: usize) -> Result<(), ModelError> {
        let kind = self.u32()?;
        let count = self.length()?;
        self.elements = self.elements.saturating_add(count);
        if self.elements > MAX_ELEMENTS {
            let message = format!("`{key}` has {count} elements; all arrays may have {MAX_ELEMENTS}");
            return Err(ModelError::corrupt(self.path, message));
        }
        if depth == MAX_DEPTH {
            let message = format!("`{key}` is an array of arrays of arrays, deeper than {MAX_DEPTH}");
            return Err(ModelError::corrupt(self.path, message));
        }
        (0..count).try_for_each(|_| self.value(key, kind, depth + 1))
    }
}
