//! GGUF files: metadata and tensors, read in place.

mod header;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use plimsoll_core::{Metadata, untrusted};
use plimsoll_kernels::WeightType;

use self::header::{Header, MAGIC, TensorInfo};
use crate::{GgufTensors, HfOverrides, ModelConfig, ModelError};

/// Tensors that hold a part of the configuration: LongRoPE's divisors, for short and for long contexts.
pub(crate) const ROPE_FACTORS: [&str; 2] = ["rope_factors_short.weight", "rope_factors_long.weight"];

/// What frequencies are divided by.
pub(crate) const ROPE_DIVISORS: &str = "rope_freqs.weight";

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
    pub(crate) dtype: WeightType,
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
        let Header {
            metadata,
            tensors,
            data_offset,
        } = Header::read(path, &bytes)?;
        let locate = |info| locate(path, info, data_offset, bytes.len());
        let tensors = tensors.into_iter().map(locate).collect::<Result<_, _>>()?;
        check_apart(path, &tensors)?;
        Ok(Self {
            path: path.to_owned(),
            metadata,
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
            rope_divisors: self.floats(ROPE_DIVISORS)?,
            without_values: self.without_values(),
        };
        ModelConfig::from_gguf(&self.path, &self.metadata, tensors, overrides)
    }

    /// Layers that have a projection to keys and none to values.
    fn without_values(&self) -> BTreeSet<usize> {
        let layers = self.tensors.keys().filter_map(|name| {
            let layer = name.strip_prefix("blk.")?.strip_suffix(".attn_k.weight")?;
            let has_values = self.tensors.contains_key(&format!("blk.{layer}.attn_v.weight"));
            layer.parse().ok().filter(|_| !has_values)
        });
        layers.collect()
    }

    fn floats(&self, name: &str) -> Result<Option<Vec<f32>>, ModelError> {
        let float = |bytes: &[u8; 4]| f32::from_le_bytes(*bytes);
        match self.tensor(name) {
            None => Ok(None),
            Some((info, data)) if info.dtype == WeightType::F32 => {
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

/// A tensor's name and its place in a file of `file_len` bytes.
fn locate(
    path: &Path,
    info: TensorInfo,
    data_offset: usize,
    file_len: usize,
) -> Result<(String, GgufTensor), ModelError> {
    let TensorInfo {
        name,
        dtype,
        shape,
        offset,
    } = info;
    let row = shape.last().copied().unwrap_or(1);
    let rows = &shape[..shape.len().saturating_sub(1)];
    let rows = rows
        .iter()
        .try_fold(1_usize, |product, &size| product.checked_mul(size));
    let len = dtype
        .row_bytes(row)
        .zip(rows)
        .and_then(|(bytes, rows)| bytes.checked_mul(rows))
        .ok_or_else(|| {
            let message = format!("tensor `{name}` cannot have shape {shape:?} as {dtype:?}");
            ModelError::corrupt(path, message)
        })?;
    let range = usize::try_from(offset)
        .ok()
        .and_then(|offset| data_offset.checked_add(offset))
        .and_then(|start| Some(start..start.checked_add(len)?))
        .filter(|range| range.end <= file_len)
        .ok_or_else(|| {
            ModelError::corrupt(path, format!("tensor `{name}` lies beyond the end of the file"))
        })?;
    Ok((name, GgufTensor { dtype, shape, range }))
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
