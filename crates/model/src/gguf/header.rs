//! The header of a GGUF file (<https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>): metadata, and where tensors lie.
//!
//! Nothing in it is trusted. Every length is checked against the bytes that are left before anything is allocated for it.

use std::collections::BTreeSet;
use std::path::Path;

use plimsoll_core::{MetaValue, Metadata};
use plimsoll_kernels::WeightType;

use crate::ModelError;

pub(super) const MAGIC: &[u8] = b"GGUF";
/// Where tensors begin, in multiples of which their data is laid out, unless the metadata says otherwise.
const ALIGNMENT_KEY: &str = "general.alignment";
const DEFAULT_ALIGNMENT: u64 = 32;
/// What ggml computes with (`GGML_MAX_DIMS`).
const MAX_DIMENSIONS: u32 = 4;
/// Arrays within arrays; no file is known to nest them at all.
const MAX_DEPTH: u32 = 4;
/// Elements of all arrays, each of which may take 60 bytes in memory; 260,000 tokens have a million.
const MAX_ELEMENTS: u64 = 1 << 22;
/// Fields, and tensors.
const MAX_ENTRIES: u64 = 1 << 17;
/// Bytes of all fields and descriptions of tensors; the largest vocabularies need a tenth.
const MAX_BYTES: usize = 128 << 20;

/// What the header says.
#[derive(Debug)]
pub(super) struct Header {
    pub(super) metadata: Metadata,
    pub(super) tensors: Vec<TensorInfo>,
    /// Where the tensors' data begins in the file, in bytes.
    pub(super) data_offset: usize,
}

/// One tensor, as the header describes it.
#[derive(Debug)]
pub(super) struct TensorInfo {
    pub(super) name: String,
    pub(super) dtype: WeightType,
    /// Outermost dimension first; the file has it last.
    pub(super) shape: Vec<usize>,
    /// Bytes from [`Header::data_offset`].
    pub(super) offset: u64,
}

impl Header {
    /// Reads the header at the beginning of a file.
    ///
    /// # Errors
    /// [`ModelError::Corrupt`] and [`ModelError::TensorType`], which name the key or tensor at fault.
    pub(super) fn read(path: &Path, file: &[u8]) -> Result<Self, ModelError> {
        let mut reader = Reader {
            path,
            file: &file[..file.len().min(MAX_BYTES)],
            position: 0,
            elements: 0,
        };
        let magic = reader.take(MAGIC.len(), || "the magic".to_owned())?;
        debug_assert_eq!(magic, MAGIC, "the caller looks at it");
        let version = reader.u32(|| "the version".to_owned())?;
        if !(2..=3).contains(&version) {
            let message = format!("GGUF version {version} is not supported; versions 2 and 3 are");
            return Err(reader.corrupt(message));
        }
        let tensor_count = reader.u64(|| "the number of tensors".to_owned())?;
        let field_count = reader.u64(|| "the number of fields".to_owned())?;
        for (what, count) in [("tensors", tensor_count), ("fields", field_count)] {
            if count > MAX_ENTRIES {
                let message =
                    format!("the header has {count} {what}, more than the {MAX_ENTRIES} that it may have");
                return Err(reader.corrupt(message));
            }
        }
        let metadata = reader.metadata(field_count)?;
        let tensors = reader.tensors(tensor_count)?;
        let alignment = alignment(&metadata).map_err(|message| reader.corrupt(message))?;
        // No overflow: `position` lies in the file, and the alignment is small.
        let data_offset = reader.position.next_multiple_of(alignment);
        Ok(Self {
            metadata,
            tensors,
            data_offset,
        })
    }
}

fn alignment(metadata: &Metadata) -> Result<usize, String> {
    let value = metadata.get(ALIGNMENT_KEY);
    let alignment = value.map_or(Some(DEFAULT_ALIGNMENT), MetaValue::as_u64);
    alignment
        .filter(|alignment| alignment.is_power_of_two() && *alignment <= 1 << 20)
        .and_then(|alignment| usize::try_from(alignment).ok())
        .ok_or_else(|| format!("`{ALIGNMENT_KEY}` is not a power of two up to 1048576"))
}

/// Reads a file from its beginning. `what`, in its methods, names for errors what is being read.
struct Reader<'a> {
    path: &'a Path,
    file: &'a [u8],
    position: usize,
    /// Of all arrays so far.
    elements: u64,
}

impl<'a> Reader<'a> {
    fn corrupt(&self, message: impl std::fmt::Display) -> ModelError {
        ModelError::corrupt(self.path, message)
    }

    fn take(&mut self, len: usize, what: impl Fn() -> String) -> Result<&'a [u8], ModelError> {
        let end = self.position.checked_add(len);
        let bytes = end.and_then(|end| self.file.get(self.position..end));
        let bytes = bytes.ok_or_else(|| match self.file.len() {
            MAX_BYTES => self.corrupt(format!(
                "the header does not end within the file's first {} MiB",
                MAX_BYTES >> 20
            )),
            _ => self.corrupt(format!("the file ends within {}", what())),
        })?;
        self.position += len;
        Ok(bytes)
    }

    fn array<const N: usize>(&mut self, what: impl Fn() -> String) -> Result<[u8; N], ModelError> {
        let bytes = self.take(N, what)?;
        Ok(*bytes.as_array().expect("as many as asked for"))
    }

    fn u32(&mut self, what: impl Fn() -> String) -> Result<u32, ModelError> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    fn u64(&mut self, what: impl Fn() -> String) -> Result<u64, ModelError> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    fn text(&mut self, what: impl Fn() -> String) -> Result<String, ModelError> {
        // What does not fit `usize` does not fit the file.
        let len = usize::try_from(self.u64(&what)?).unwrap_or(usize::MAX);
        let bytes = self.take(len, &what)?;
        match std::str::from_utf8(bytes) {
            Ok(text) => Ok(text.to_owned()),
            Err(_) => Err(self.corrupt(format!("{} is not UTF-8", what()))),
        }
    }

    fn metadata(&mut self, count: u64) -> Result<Metadata, ModelError> {
        let mut metadata = Metadata::new();
        for index in 0..count {
            let key = self.text(|| format!("the name of field {index}"))?;
            let kind = self.u32(|| format!("the type of `{key}`"))?;
            let value = self.value(&key, kind, 0)?;
            if metadata.contains_key(&key) {
                return Err(self.corrupt(format!("the field `{key}` is there twice")));
            }
            metadata.insert(key, value);
        }
        Ok(metadata)
    }

    fn value(&mut self, key: &str, kind: u32, depth: u32) -> Result<MetaValue, ModelError> {
        let what = || format!("the field `{key}`");
        Ok(match kind {
            0 => MetaValue::UInt(u8::from_le_bytes(self.array(what)?).into()),
            1 => MetaValue::Int(i8::from_le_bytes(self.array(what)?).into()),
            2 => MetaValue::UInt(u16::from_le_bytes(self.array(what)?).into()),
            3 => MetaValue::Int(i16::from_le_bytes(self.array(what)?).into()),
            4 => MetaValue::UInt(self.u32(what)?.into()),
            5 => MetaValue::Int(i32::from_le_bytes(self.array(what)?).into()),
            6 => MetaValue::Float(f32::from_le_bytes(self.array(what)?).into()),
            7 => match self.array::<1>(what)? {
                [0] => MetaValue::Bool(false),
                [1] => MetaValue::Bool(true),
                [other] => return Err(self.corrupt(format!("`{key}` is a flag of value {other}"))),
            },
            8 => MetaValue::Str(self.text(what)?),
            9 => self.list(key, depth)?,
            10 => MetaValue::UInt(self.u64(what)?),
            11 => MetaValue::Int(i64::from_le_bytes(self.array(what)?)),
            12 => MetaValue::Float(f64::from_le_bytes(self.array(what)?)),
            other => return Err(self.corrupt(format!("`{key}` has the unknown type {other}"))),
        })
    }

    fn list(&mut self, key: &str, depth: u32) -> Result<MetaValue, ModelError> {
        let what = || format!("the field `{key}`");
        let kind = self.u32(what)?;
        let len = self.u64(what)?;
        self.elements = self.elements.saturating_add(len);
        if self.elements > MAX_ELEMENTS {
            let message = format!("`{key}` has {len} elements; all arrays may have {MAX_ELEMENTS}");
            return Err(self.corrupt(message));
        }
        if depth >= MAX_DEPTH {
            return Err(self.corrupt(format!(
                "`{key}` is an array of arrays of arrays, deeper than {MAX_DEPTH}"
            )));
        }
        // Not reserved in advance: the file may be shorter.
        let values = (0..len).map(|_| self.value(key, kind, depth + 1));
        Ok(MetaValue::List(values.collect::<Result<_, _>>()?))
    }

    fn tensors(&mut self, count: u64) -> Result<Vec<TensorInfo>, ModelError> {
        let mut tensors = Vec::new();
        let mut names = BTreeSet::new();
        for index in 0..count {
            let name = self.text(|| format!("the name of tensor {index}"))?;
            let tensor = self.tensor(name)?;
            if !names.insert(tensor.name.clone()) {
                return Err(self.corrupt(format!("the tensor `{}` is there twice", tensor.name)));
            }
            tensors.push(tensor);
        }
        Ok(tensors)
    }

    fn tensor(&mut self, name: String) -> Result<TensorInfo, ModelError> {
        let what = || format!("the description of tensor `{name}`");
        let dimensions = self.u32(what)?;
        if !(1..=MAX_DIMENSIONS).contains(&dimensions) {
            let message =
                format!("tensor `{name}` has {dimensions} dimensions; 1 to {MAX_DIMENSIONS} are possible");
            return Err(self.corrupt(message));
        }
        let mut shape = Vec::new();
        for _ in 0..dimensions {
            let size = usize::try_from(self.u64(what)?);
            let too_large = |_| self.corrupt(format!("tensor `{name}` is too large"));
            shape.push(size.map_err(too_large)?);
        }
        shape.reverse();
        let code = self.u32(what)?;
        let offset = self.u64(what)?;
        let Some(dtype) = WeightType::from_ggml(code) else {
            return Err(ModelError::TensorType {
                name,
                found: format!("ggml type {code} (in {})", self.path.display()),
                supported: "F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q8_1, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K and Q8_K",
            });
        };
        Ok(TensorInfo {
            name,
            dtype,
            shape,
            offset,
        })
    }
}
