//! GGUF files: metadata and tensors, read in place.

mod header;

use std::collections::{BTreeMap, HashMap};
use std::io::Cursor;
use std::ops::Range;
use std::panic::catch_unwind;
use std::path::{Path, PathBuf};

use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::{Content, Value};
use memmap2::Mmap;
use plimsoll_core::{MetaValue, Metadata, untrusted};

use crate::{GgufTensors, HfOverrides, ModelConfig, ModelError};

const MAGIC: &[u8] = b"GGUF";

/// Tensors that hold a part of the configuration: LongRoPE's divisors, for short and for long contexts.
pub(crate) const ROPE_FACTORS: [&str; 2] = ["rope_factors_short.weight", "rope_factors_long.weight"];

/// An open GGUF file. The header is checked against the file's size, so every tensor lies inside it.
#[derive(Debug)]
pub struct GgufFile {
    path: PathBuf,
    bytes: Mmap,
    metadata: Metadata,
    tensors: BTreeMap<String, GgufTensor>,
}

/// Where one tensor lies.
#[derive(Clone, Debug)]
pub(crate) struct GgufTensor {
    pub(crate) dtype: GgmlDType,
    /// Outermost dimension first.
    pub(crate) shape: Vec<usize>,
    range: Range<usize>,
}

impl GgufFile {
    /// Maps the file and reads its header.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        let bytes = map_file(path)?;
        if bytes.len() >= MAGIC.len() && !bytes.starts_with(MAGIC) {
            let expected = "a model is a directory with config.json and safetensors, or a GGUF file";
            return Err(ModelError::NotAModel {
                path: path.to_owned(),
                expected,
            });
        }
        // candle checks lengths against the file's size but not every field: an alignment of 0 panics.
        let header = header::check(path, &bytes)?;
        let content = catch_unwind(|| Content::read(&mut Cursor::new(header)));
        let content = content
            .map_err(|_| ModelError::corrupt(path, "the header is not valid"))?
            .map_err(|error| header_error(path, &error))?;
        let tensors = locate(path, &content, bytes.len())?;
        Ok(Self {
            path: path.to_owned(),
            metadata: metadata(content.metadata),
            bytes,
            tensors,
        })
    }

    /// The file's path, for messages.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The key-value section: hyperparameters, tokenizer, chat template.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// The model's configuration.
    ///
    /// # Errors
    /// [`ModelError`], which names the field at fault.
    pub fn config(&self, overrides: &HfOverrides) -> Result<ModelConfig, ModelError> {
        let [short, long] = ROPE_FACTORS.map(|name| self.floats(name));
        let tensors = GgufTensors {
            tied_embeddings: !self.tensors.contains_key("output.weight"),
            rope_factors: short?.zip(long?),
        };
        ModelConfig::from_gguf(&self.path, &self.metadata, tensors, overrides)
    }

    fn floats(&self, name: &str) -> Result<Option<Vec<f32>>, ModelError> {
        let float = |bytes: &[u8; 4]| f32::from_le_bytes(*bytes);
        match self.tensor(name) {
            None => Ok(None),
            Some((info, data)) if info.dtype == GgmlDType::F32 => {
                Ok(Some(data.as_chunks().0.iter().map(float).collect()))
            }
            Some((info, _)) => Err(ModelError::TensorType {
                name: name.to_owned(),
                found: format!("{:?}", info.dtype),
                supported: "F32",
            }),
        }
    }

    /// Names of all tensors.
    pub fn tensor_names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Bytes of all tensors.
    pub(crate) fn tensor_bytes(&self) -> u64 {
        self.tensors
            .values()
            .map(|tensor| tensor.range.len() as u64)
            .sum()
    }

    pub(crate) fn tensor(&self, name: &str) -> Option<(&GgufTensor, &[u8])> {
        let tensor = self.tensors.get(name)?;
        Some((tensor, &self.bytes[tensor.range.clone()]))
    }
}

/// Maps a file read-only.
pub(crate) fn map_file(path: &Path) -> Result<Mmap, ModelError> {
    let file = untrusted::open_file(path).map_err(ModelError::io(path))?;
    // SAFETY: the map is only read. Somebody who truncates a model file while it is being loaded gets a SIGBUS, as with
    // every loader that maps; weights are copied out, so nothing reads the map once the model is loaded.
    let bytes = unsafe { Mmap::map(&file) }.map_err(ModelError::io(path))?;
    if bytes.starts_with(b"version https://git-lfs") {
        let message = "it is a Git LFS pointer, not the file itself (`git lfs pull` fetches that)";
        return Err(ModelError::corrupt(path, message));
    }
    Ok(bytes)
}

fn header_error(path: &Path, error: &candle_core::Error) -> ModelError {
    let message = error.to_string();
    match message.strip_prefix("unknown dtype for tensor ") {
        Some(code) => ModelError::TensorType {
            name: path.display().to_string(),
            found: format!("ggml type {}", code.lines().next().unwrap_or(code)),
            supported: "F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q8_1, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K and Q8_K",
        },
        None => ModelError::corrupt(path, message.lines().next().unwrap_or_default()),
    }
}

fn locate(
    path: &Path,
    content: &Content,
    file_len: usize,
) -> Result<BTreeMap<String, GgufTensor>, ModelError> {
    let locate_one = |(name, info): (&String, &candle_core::quantized::gguf_file::TensorInfo)| {
        let (dtype, shape) = (info.ggml_dtype, info.shape.dims().to_vec());
        let elements = shape
            .iter()
            .try_fold(1_usize, |product, &size| product.checked_mul(size));
        let row = shape.last().copied().unwrap_or(1);
        let len = elements
            .filter(|_| row.is_multiple_of(dtype.block_size()))
            .and_then(|elements| (elements / dtype.block_size()).checked_mul(dtype.type_size()))
            .ok_or_else(|| {
                ModelError::corrupt(
                    path,
                    format!("tensor `{name}` cannot have shape {shape:?} as {dtype:?}"),
                )
            })?;
        let start = content.tensor_data_offset.checked_add(info.offset);
        let range = start
            .and_then(|start| usize::try_from(start).ok())
            .and_then(|start| Some(start..start.checked_add(len)?))
            .filter(|range| range.end <= file_len)
            .ok_or_else(|| {
                ModelError::corrupt(path, format!("tensor `{name}` lies beyond the end of the file"))
            })?;
        Ok((name.clone(), GgufTensor { dtype, shape, range }))
    };
    let tensors = content.tensor_infos.iter().map(locate_one);
    let tensors: BTreeMap<_, _> = tensors.collect::<Result<_, ModelError>>()?;
    check_apart(path, &tensors)?;
    Ok(tensors)
}

/// Refuses tensors that share bytes: all but one would be wrong.
fn check_apart(path: &Path, tensors: &BTreeMap<String, GgufTensor>) -> Result<(), ModelError> {
    let mut ranges: Vec<_> = tensors
        .iter()
        .map(|(name, tensor)| (&tensor.range, name))
        .collect();
    ranges.retain(|(range, _)| !range.is_empty());
    ranges.sort_unstable_by_key(|(range, _)| range.start);
    let overlap = ranges.windows(2).find(|pair| pair[1].0.start < pair[0].0.end);
    match overlap {
        None => Ok(()),
        Some(pair) => {
            let message = format!("the tensors `{}` and `{}` overlap", pair[0].1, pair[1].1);
            Err(ModelError::corrupt(path, message))
        }
    }
}

fn metadata(values: HashMap<String, Value>) -> Metadata {
    values
        .into_iter()
        .map(|(key, value)| (key, meta_value(value)))
        .collect()
}

fn meta_value(value: Value) -> MetaValue {
    match value {
        Value::U8(v) => MetaValue::UInt(v.into()),
        Value::U16(v) => MetaValue::UInt(v.into()),
        Value::U32(v) => MetaValue::UInt(v.into()),
        Value::U64(v) => MetaValue::UInt(v),
        Value::I8(v) => MetaValue::Int(v.into()),
        Value::I16(v) => MetaValue::Int(v.into()),
        Value::I32(v) => MetaValue::Int(v.into()),
        Value::I64(v) => MetaValue::Int(v),
        Value::F32(v) => MetaValue::Float(v.into()),
        Value::F64(v) => MetaValue::Float(v),
        Value::Bool(v) => MetaValue::Bool(v),
        Value::String(v) => MetaValue::Str(v),
        Value::Array(v) => MetaValue::List(v.into_iter().map(meta_value).collect()),
    }
}
