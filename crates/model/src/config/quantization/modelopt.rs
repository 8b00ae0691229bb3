//! What NVIDIA's [Model Optimizer](https://github.com/NVIDIA/Model-Optimizer) writes: `hf_quant_config.json`, and in newer exports the
//! same as `quantization_config`.

use std::path::{Path, PathBuf};

use plimsoll_core::untrusted::quotable;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Map, Value, json};

use super::{FIELDS, Reader};
use crate::ModelError;
use crate::embedding::read_json;
use crate::quantization::{Fp8Scales, MatrixFormat, ModuleNames, Quantization, QuantizationGroup};

/// The file beside config.json, which vLLM too reads where that says nothing.
const FILE: &str = "hf_quant_config.json";

/// The one of its fields that says how matrices are stored.
pub(super) const FIELD: &str = "quantization";

/// Of a KV cache of eight bits; newer exports have an object in its place.
const KV_FP8: &str = "FP8";

/// What is in floats in all exports, also where older ones do not list it.
const NEVER: [&str; 3] = ["*.gate", "*.router", "*.shared_expert_gate"];

/// Takes the quantisation of `values`, those of `config`, from the file beside it, where they say nothing of it. Returns that file.
///
/// # Errors
/// [`ModelError`] where the file cannot be read, or is something else.
pub(crate) fn beside(config: &Path, values: &mut Map<String, Value>) -> Result<Option<PathBuf>, ModelError> {
    let says = |fields: &Map<String, Value>| {
        let mut given = FIELDS.iter().filter_map(|field| fields.get(*field));
        given.any(|value| !value.is_null())
    };
    let text = values.get("text_config").and_then(Value::as_object);
    if says(values) || text.is_some_and(says) {
        return Ok(None);
    }
    let path = config.with_file_name(FILE);
    let Some(mut file) = read_json::<Map<String, Value>>(&path)? else {
        return Ok(None);
    };
    let Some(Value::Object(mut fields)) = file.remove(FIELD) else {
        return Err(ModelError::config(
            &path,
            format!("`{FIELD}` is missing or not an object"),
        ));
    };
    if let Some(other) = file.keys().find(|field| *field != "producer") {
        return Err(ModelError::config(
            &path,
            format!("unknown field `{}`", quotable(other)),
        ));
    }
    fields.insert("quant_method".to_owned(), "modelopt".into());
    values.insert(FIELDS[0].to_owned(), fields.into());
    Ok(Some(path))
}

/// Both ways in which it is written.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawModelOpt {
    #[serde(rename = "quant_method")]
    _quant_method: IgnoredAny,
    quant_algo: Option<String>,
    /// Names in which `*` stands for anything; the second in the file of its own.
    ignore: Option<Vec<String>>,
    exclude_modules: Option<Vec<String>>,
    /// The second in the file of its own.
    kv_cache_scheme: Option<Value>,
    kv_cache_quant_algo: Option<String>,
    has_zero_point: Option<bool>,
    pre_quant_scale: Option<bool>,
    quantized_layers: Option<Map<String, Value>>,
    /// Says no more than `quant_algo`, in the words of compressed-tensors.
    #[serde(rename = "config_groups")]
    _config_groups: Option<IgnoredAny>,
    /// Of formats in four bits.
    #[serde(rename = "group_size")]
    _group_size: Option<IgnoredAny>,
    #[serde(rename = "producer")]
    _producer: Option<IgnoredAny>,
}

impl Reader<'_> {
    pub(super) fn modelopt(&self, raw: RawModelOpt) -> Result<Quantization, ModelError> {
        let algorithm = raw.quant_algo.map(|name| name.to_ascii_uppercase());
        let stored = match algorithm.as_deref() {
            // The KV cache alone.
            None => None,
            Some("FP8") => Some((Fp8Scales::Tensor, true)),
            Some("FP8_PER_CHANNEL_PER_TOKEN") => Some((Fp8Scales::Channel, false)),
            Some("FP8_PB_WO") => Some((Fp8Scales::Block, false)),
            Some(other) => {
                let supported = "`FP8`, `FP8_PER_CHANNEL_PER_TOKEN` and `FP8_PB_WO` are: use the model in one of these, \
                                 before quantisation, or as a GGUF file";
                return Err(self.unsupported("quant_algo", format!("`{other}`"), supported));
            }
        };
        self.only("has_zero_point", raw.has_zero_point, false)?;
        self.only("pre_quant_scale", raw.pre_quant_scale, false)?;
        self.only("quantized_layers", raw.quantized_layers, Map::new())?;
        self.only("kv_cache_quant_algo", raw.kv_cache_quant_algo, KV_FP8)?;
        let kv_cache = raw.kv_cache_scheme.filter(|scheme| *scheme != json!(KV_FP8));
        self.only(
            "kv_cache_scheme",
            kv_cache,
            json!({"num_bits": 8, "type": "float", "dynamic": false}),
        )?;
        let Some((scales, input_scale)) = stored else {
            return Ok(Quantization::default());
        };
        let (field, listed) = match raw.exclude_modules {
            Some(listed) => ("exclude_modules", listed),
            None => ("ignore", raw.ignore.unwrap_or_default()),
        };
        let never = NEVER.map(str::to_owned);
        let ignored = ModuleNames::globs(listed.iter().chain(&never));
        Ok(Quantization {
            groups: vec![QuantizationGroup {
                modules: ModuleNames::All,
                format: MatrixFormat::Fp8 { scales, input_scale },
            }],
            ignored: self.names(field, ignored)?,
            ..Quantization::default()
        })
    }
}
