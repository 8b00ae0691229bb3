//! Hugging Face checkpoints: one safetensors file, or several with an index.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use plimsoll_core::untrusted;
use plimsoll_kernels::WeightType;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, Metadata};
use serde::Deserialize;

use super::{Source, Tensor};
use crate::gguf::map_file;
use crate::{ModelError, names};

const SINGLE: &str = "model.safetensors";
/// Most bytes of an index: a line for each tensor.
const MAX_INDEX_BYTES: u64 = 64 << 20;
const INDEX: &str = "model.safetensors.index.json";

/// All tensors of a model directory.
#[derive(Debug)]
pub(crate) struct Checkpoint {
    files: Vec<TensorFile>,
    /// Tensor to index in `files`.
    places: HashMap<String, usize>,
    prefixes: names::Prefixes,
}

/// A tensor that every network has.
const EMBEDDING: &str = "model.embed_tokens.weight";

#[derive(Debug)]
struct TensorFile {
    path: PathBuf,
    bytes: Mmap,
    header: Metadata,
    /// Where the data begin: after the header's length and the header.
    data_start: usize,
}

impl Checkpoint {
    pub(crate) fn open(directory: &Path) -> Result<Self, ModelError> {
        let single = directory.join(SINGLE);
        if single.exists() {
            let file = TensorFile::open(&single)?;
            let places = file.header.tensors().into_keys().map(|name| (name, 0)).collect();
            return Ok(Self::new(vec![file], places));
        }
        let index = directory.join(INDEX);
        if index.exists() {
            return Self::open_sharded(directory, &index);
        }
        let expected = "no model.safetensors and no model.safetensors.index.json in it";
        Err(ModelError::NotAModel {
            path: directory.to_owned(),
            expected,
        })
    }

    fn open_sharded(directory: &Path, index: &Path) -> Result<Self, ModelError> {
        #[derive(Deserialize)]
        struct Index {
            weight_map: BTreeMap<String, String>,
        }
        let text = untrusted::read_text(index, MAX_INDEX_BYTES).map_err(ModelError::io(index))?;
        let Index { weight_map } =
            serde_json::from_str(&text).map_err(|error| ModelError::config(index, error))?;
        let mut files = Vec::new();
        let mut opened = BTreeMap::new();
        let mut places = HashMap::new();
        for (tensor, file_name) in weight_map {
            let place = match opened.get(&file_name) {
                Some(&place) => place,
                None => {
                    files.push(TensorFile::open(&directory.join(plain_name(index, &file_name)?))?);
                    opened.insert(file_name, files.len() - 1);
                    files.len() - 1
                }
            };
            places.insert(tensor, place);
        }
        Ok(Self::new(files, places))
    }

    fn new(files: Vec<TensorFile>, places: HashMap<String, usize>) -> Self {
        let found = names::OTHERS
            .into_iter()
            .find(|&prefixes| places.contains_key(&names::stored(EMBEDDING, prefixes)));
        Self {
            files,
            places,
            prefixes: found.unwrap_or(names::OWN),
        }
    }
}

/// An index must not lead out of its directory.
fn plain_name<'a>(index: &Path, name: &'a str) -> Result<&'a str, ModelError> {
    match Path::new(name).file_name() {
        Some(plain) if plain == name => Ok(name),
        _ => Err(ModelError::config(
            index,
            format!("`{name}` in weight_map is not a file name"),
        )),
    }
}

impl TensorFile {
    fn open(path: &Path) -> Result<Self, ModelError> {
        let bytes = map_file(path)?;
        // Also checks that the tensors cover the file exactly.
        let (header_len, header) =
            SafeTensors::read_metadata(&bytes).map_err(|error| ModelError::corrupt(path, error))?;
        Ok(Self {
            path: path.to_owned(),
            bytes,
            header,
            data_start: 8 + header_len,
        })
    }
}

impl Source for Checkpoint {
    fn stored_name(&self, name: &str) -> String {
        let stored = names::stored(name, self.prefixes);
        let newer = names::newer(&stored).filter(|newer| self.places.contains_key(newer));
        match newer {
            Some(newer) if !self.places.contains_key(&stored) => newer,
            _ => stored,
        }
    }

    fn has(&self, name: &str) -> bool {
        self.places.contains_key(&self.stored_name(name))
    }

    fn tensor(&self, name: &str, _expected: &[usize]) -> Result<Option<Tensor<'_>>, ModelError> {
        let name = &self.stored_name(name);
        let Some(&place) = self.places.get(name) else {
            return Ok(None);
        };
        let file = &self.files[place];
        let missing = || ModelError::corrupt(&file.path, format!("tensor `{name}` of the index is missing"));
        let info = file.header.info(name).ok_or_else(missing)?;
        let dtype = match info.dtype {
            Dtype::F32 => WeightType::F32,
            Dtype::F16 => WeightType::F16,
            Dtype::BF16 => WeightType::Bf16,
            Dtype::F8_E4M3 => WeightType::F8E4M3,
            Dtype::U8 => WeightType::U8,
            Dtype::I32 => WeightType::I32,
            Dtype::I64 => WeightType::I64,
            other => {
                return Err(ModelError::TensorType {
                    name: name.to_owned(),
                    found: format!("{other:?}"),
                    supported: "F32, F16 and BF16, and F8_E4M3, U8 and I32 as `quantization_config` says",
                });
            }
        };
        let (start, end) = info.data_offsets;
        let data = &file.bytes[file.data_start + start..file.data_start + end];
        Ok(Some(Tensor::plain(name, dtype, &info.shape, data)))
    }

    fn names(&self) -> Vec<String> {
        self.places.keys().cloned().collect()
    }

    fn total_bytes(&self) -> u64 {
        self.files
            .iter()
            .map(|file| (file.bytes.len() - file.data_start) as u64)
            .sum()
    }
}
