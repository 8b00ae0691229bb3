//! Everything that a plan depends on.
//!
//! A plan holds what was measured: the peak of the worst steps. How much memory there is beside that, and what part of it is
//! for KV, is taken anew at each start; so `--mem-fraction`, the neighbours and, on a CPU, the free memory are no part of the
//! key.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::num::NonZeroU64;
use std::path::Path;
use std::time::UNIX_EPOCH;

use plimsoll_device::cuda::Gpu;
use plimsoll_model::HfOverrides;
use serde::Serialize;
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::hardware;

/// What a stored file was measured for.
pub(crate) trait CacheKey: Serialize {
    /// Extension of such files.
    const EXTENSION: &'static str;

    fn to_json(&self) -> Value {
        serde_json::to_value(self).expect("a key is JSON")
    }

    /// Names the file; 128 bits are plenty among 64 files.
    fn hash(&self) -> String {
        let mut hash = hex(self.to_json().to_string().as_bytes());
        hash.truncate(32);
        hash
    }
}

/// What a plan is for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Key {
    pub(crate) model: ModelKey,
    pub(crate) build: BuildKey,
    pub(crate) device: DeviceKey,
    pub(crate) shape: ShapeKey,
}

impl Key {
    /// For this binary.
    pub(crate) fn new(model: ModelKey, device: DeviceKey, shape: ShapeKey) -> Self {
        Self {
            model,
            build: BuildKey::of_this_process(),
            device,
            shape,
        }
    }
}

impl CacheKey for Key {
    const EXTENSION: &'static str = "plan";
}

/// What stored choices of linear layers are valid for, whatever the limits and the granted memory. cuBLASLt's version is stored with the
/// choices, as it is known only once the library is open.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct LinearKey {
    pub(super) model: ModelKey,
    pub(super) build: BuildKey,
    pub(super) device: DeviceKey,
    pub(super) dtype: String,
    /// How linear layers are to be stored, if a flag says so.
    pub(super) quantization: Option<String>,
    pub(super) ranks: usize,
}

impl LinearKey {
    /// For this binary.
    pub(crate) fn new(
        model: ModelKey,
        device: DeviceKey,
        dtype: String,
        quantization: Option<String>,
        ranks: usize,
    ) -> Self {
        Self {
            model,
            build: BuildKey::of_this_process(),
            device: DeviceKey {
                granted: None,
                enforce_eager: false,
                ..device
            },
            dtype,
            quantization,
            ranks,
        }
    }
}

impl CacheKey for LinearKey {
    const EXTENSION: &'static str = "linear";
}

/// The model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct ModelKey {
    /// Where it lies.
    path: String,
    /// SHA-256 of config.json.
    config: Option<String>,
    /// `--hf-overrides`.
    hf_overrides: HfOverrides,
    /// Files of weights.
    weights: Vec<WeightFile>,
    /// `--seed`, of dummy weights.
    seed: Option<u64>,
}

/// A file of weights, told without reading all of it: that would take longer than the probe that a plan saves. Its head
/// holds the name, type and shape of each tensor, which is all that memory depends on; size and time tell of any other
/// change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct WeightFile {
    name: String,
    bytes: u64,
    /// Seconds since 1970.
    modified: String,
    /// SHA-256 of the head.
    head: String,
}

/// More than the metadata and the table of tensors of any GGUF file there is; most of it is the vocabulary.
const GGUF_HEAD: u64 = 16 << 20;

/// As the safetensors library limits it.
const MAX_SAFETENSORS_HEADER: u64 = 100_000_000;

impl ModelKey {
    /// The simulated model, whose layers have this window.
    pub(crate) fn simulated(window: Option<NonZeroU64>) -> Self {
        let window = window.map(|window| format!(":window={window}"));
        Self {
            path: crate::args::SIM_MODEL.to_owned() + &window.unwrap_or_default(),
            config: None,
            hf_overrides: HfOverrides::default(),
            weights: Vec::new(),
            seed: None,
        }
    }

    /// A directory or a GGUF file, with these fields of its configuration; `seed` where the weights are random ones.
    pub(crate) fn of_files(path: &Path, hf_overrides: HfOverrides, seed: Option<u64>) -> io::Result<Self> {
        let path = path.canonicalize()?;
        let mut weights = Vec::new();
        let mut config = None;
        if path.is_file() {
            weights.push(WeightFile::of(&path)?);
        } else {
            config = Some(hex(&std::fs::read(path.join("config.json"))?));
            // Random weights come from config.json alone.
            if seed.is_none() {
                for entry in std::fs::read_dir(&path)? {
                    let file = entry?.path();
                    if is_safetensors(&file) {
                        weights.push(WeightFile::of(&file)?);
                    }
                }
            }
        }
        weights.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        Ok(Self {
            path: path.to_string_lossy().into_owned(),
            config,
            hf_overrides,
            weights,
            seed,
        })
    }
}

impl WeightFile {
    fn of(path: &Path) -> io::Result<Self> {
        let mut file = File::open(path)?;
        let metadata = file.metadata()?;
        let mut length = GGUF_HEAD;
        let mut head = Vec::new();
        if is_safetensors(path) {
            let mut header = [0; 8];
            file.read_exact(&mut header)?;
            head.extend(header);
            length = u64::from_le_bytes(header).min(MAX_SAFETENSORS_HEADER);
        }
        file.take(length).read_to_end(&mut head)?;
        let name = path.file_name().unwrap_or_default();
        Ok(Self {
            name: name.to_string_lossy().into_owned(),
            bytes: metadata.len(),
            modified: modified(&metadata),
            head: hex(&head),
        })
    }
}

/// The binary. Kernels are a part of it, so its size and time tell them too, and one build of uncommitted code from another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct BuildKey {
    pub(super) version: String,
    pub(super) bytes: Option<u64>,
    pub(super) modified: Option<String>,
}

impl BuildKey {
    fn of_this_process() -> Self {
        let metadata = std::env::current_exe().and_then(std::fs::metadata).ok();
        Self {
            version: crate::version::long().to_owned(),
            bytes: metadata.as_ref().map(std::fs::Metadata::len),
            modified: metadata.as_ref().map(modified),
        }
    }
}

/// The device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct DeviceKey {
    /// As the driver or the operating system calls it.
    pub(crate) name: String,
    /// Cores of a CPU, multiprocessors of a GPU.
    pub(crate) cores: usize,
    /// Bytes it has, where they are not measured anew at each start.
    pub(crate) total: Option<u64>,
    /// Bytes that flags grant of it.
    pub(crate) granted: Option<u64>,
    /// A GPU's driver, as it says itself.
    pub(crate) driver: Option<String>,
    /// Newest CUDA version the driver knows: 1000 × major + 10 × minor.
    pub(crate) cuda: Option<i32>,
    /// Major and minor.
    pub(crate) compute_capability: Option<(u32, u32)>,
    /// Whether a GPU does without graphs, which take memory.
    pub(crate) enforce_eager: bool,
    /// Threads of a CPU: each has scratch memory of its own.
    pub(crate) threads: Option<usize>,
}

impl DeviceKey {
    /// This machine's CPU. Its memory is that of everybody, so only what a flag grants of it is the same at each start.
    pub(crate) fn cpu(granted: Option<u64>, threads: usize) -> Self {
        Self {
            name: hardware::cpu().unwrap_or_else(|| std::env::consts::ARCH.to_owned()),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            granted,
            threads: Some(threads),
            ..Self::default()
        }
    }

    pub(crate) fn simulated(granted: Option<u64>) -> Self {
        Self {
            name: "simulated".to_owned(),
            granted,
            ..Self::default()
        }
    }

    /// Any GPU of the same kind: a plan may move to the one beside it.
    pub(crate) fn gpu(gpu: &Gpu, enforce_eager: bool) -> Self {
        let info = gpu.info();
        Self {
            name: info.name.clone(),
            cores: info.sm_count,
            total: Some(info.total_bytes),
            granted: Some(gpu.budget().meters().total),
            driver: hardware::field("/proc/driver/nvidia/version", "NVRM version"),
            cuda: Some(info.driver_version),
            compute_capability: Some(info.compute_capability),
            enforce_eager,
            threads: None,
        }
    }
}

/// What decides the size of a step and of a token's KV.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct ShapeKey {
    pub(crate) max_num_batched_tokens: usize,
    pub(crate) max_num_seqs: usize,
    pub(crate) max_model_len: usize,
    pub(crate) block_size: usize,
    pub(crate) kv_bytes_per_token: u64,
    /// Of the states of one request.
    pub(crate) state_bytes: u64,
    /// States that there is room for, snapshots included.
    pub(crate) state_slots: usize,
    pub(crate) kv_cache_dtype: String,
    pub(crate) dtype: String,
    /// How linear layers are stored on the device, if not as `dtype` says.
    pub(crate) quantization: Option<String>,
    /// How rows are pooled, where there are no logits.
    pub(crate) pooling: Option<&'static str>,
    /// Of the largest image, where any are served.
    pub(crate) max_patches: Option<usize>,
    /// Devices that share the model.
    pub(crate) ranks: usize,
}

/// Whether two keys are of the same model on the same device, as people call them.
pub(super) fn same_subject(a: &Value, b: &Value) -> bool {
    ["/model/path", "/device/name"]
        .iter()
        .all(|part| a.pointer(part).is_some() && a.pointer(part) == b.pointer(part))
}

/// The parts in which keys differ, by name, with both values where they are short.
pub(super) fn differences(then: &Value, now: &Value) -> Vec<String> {
    let (then, now) = (leaves(then), leaves(now));
    let names: std::collections::BTreeSet<_> = then.keys().chain(now.keys()).collect();
    let changed = names.into_iter().filter(|name| then.get(*name) != now.get(*name));
    changed
        .map(|name| match (then.get(name), now.get(name)) {
            (Some(then), Some(now)) if is_short(then) && is_short(now) => {
                format!("{name} (then {then}, now {now})")
            }
            _ => name.clone(),
        })
        .collect()
}

fn is_short(value: &Value) -> bool {
    value.is_number() || value.is_boolean() || value.as_str().is_some_and(|text| text.len() < 64)
}

/// Everything in a key that is no object, by its path.
fn leaves(key: &Value) -> BTreeMap<String, &Value> {
    fn walk<'a>(path: &str, value: &'a Value, found: &mut BTreeMap<String, &'a Value>) {
        let Value::Object(fields) = value else {
            found.insert(path.to_owned(), value);
            return;
        };
        for (name, field) in fields {
            let path = if path.is_empty() {
                name.clone()
            } else {
                format!("{path}.{name}")
            };
            walk(&path, field, found);
        }
    }
    let mut found = BTreeMap::new();
    walk("", key, &mut found);
    found
}

fn is_safetensors(path: &Path) -> bool {
    path.extension() == Some("safetensors".as_ref())
}

fn modified(metadata: &std::fs::Metadata) -> String {
    let modified = metadata.modified().ok();
    let since = modified.and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    since.map_or_else(
        || "unknown".to_owned(),
        |since| format!("{}.{:09}", since.as_secs(), since.subsec_nanos()),
    )
}

/// SHA-256 in hexadecimal digits.
pub(super) fn hex(bytes: &[u8]) -> String {
    Sha256::digest(bytes)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}
