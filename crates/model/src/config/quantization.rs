//! `quantization_config` of config.json: which of its formats are served, and what they say of each matrix.

mod int4;
mod modelopt;

use std::collections::BTreeMap;
use std::path::Path;

use plimsoll_core::untrusted::quotable;
use serde::Deserialize;
use serde::de::{DeserializeOwned, IgnoredAny};
use serde_json::{Map, Value, json};

use super::advice::{Part, Places, with_removal};
use crate::ModelError;
use crate::quantization::{FP8_BLOCK, Fp8Scales, MatrixFormat, ModuleNames, Quantization, QuantizationGroup};
pub(super) use modelopt::beside;

/// The names of the field; the second in checkpoints of older compressed-tensors.
pub(super) const FIELDS: [&str; 2] = ["quantization_config", "compression_config"];

const SUPPORTED: &str = "`fp8`, `compressed-tensors` with 8-bit floats or 4-bit integers, `modelopt` with 8-bit floats, 4-bit \
                         `gptq`, `awq` and `auto-round` and, for experts, `mxfp4` are: use the model in one of these, before quantisation, or as a GGUF file";

/// The field of MLX, beside which it writes a `quantization_config` without a method.
const MLX: &str = "quantization";

/// What a configuration says of its matrices.
///
/// # Errors
/// [`ModelError`], which names the method that is not served, or the field at fault.
pub(super) fn read(
    path: &Path,
    places: &Places,
    values: &Map<String, Value>,
) -> Result<Quantization, ModelError> {
    let given = |field: &&str| values.get(*field).is_some_and(|value| !value.is_null());
    if given(&MLX) {
        return Err(ModelError::unsupported(MLX, "MLX's", SUPPORTED));
    }
    let mut given = FIELDS.iter().copied().filter(given);
    let Some(field) = given.next() else {
        return Ok(Quantization::default());
    };
    if let Some(second) = given.next().filter(|second| values[*second] != values[field]) {
        return Err(ModelError::unsupported(
            second,
            format!("given beside `{field}`, and something else"),
            "one of the two is",
        ));
    }
    let reader = Reader {
        path: places.quantization.as_deref().unwrap_or(path),
        part: places.of(field),
        field,
        shown: match &places.quantization {
            Some(file) => format!(
                "{}: {}",
                file.file_name().unwrap_or_default().display(),
                modelopt::FIELD
            ),
            None => field.to_owned(),
        },
    };
    let value = &values[field];
    match value["quant_method"].as_str() {
        Some("modelopt") => reader.modelopt(reader.parse(value)?),
        Some("fp8") => reader.fp8(reader.parse(value)?),
        Some("mxfp4") => reader.mxfp4(reader.parse(value)?),
        Some("awq") => reader.awq(reader.parse(value)?),
        Some("gptq") => reader.gptq(reader.parse(value)?),
        Some("auto-round") => reader.auto_round(reader.parse(value)?),
        Some("compressed-tensors") => reader.compressed(reader.parse(value)?),
        Some(other) => Err(reader.unsupported("quant_method", format!("`{other}`"), SUPPORTED)),
        None => Err(reader.unsupported("quant_method", "missing", SUPPORTED)),
    }
}

/// What transformers and AutoFP8 write for `fp8`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawFp8 {
    #[serde(rename = "quant_method")]
    _quant_method: String,
    fmt: Option<String>,
    activation_scheme: Option<String>,
    weight_block_size: Option<Vec<usize>>,
    modules_to_not_convert: Option<Vec<String>>,
    ignored_layers: Option<Vec<String>>,
    modules_to_convert: Option<Vec<String>>,
    kv_cache_scheme: Option<Value>,
    /// How the scales came about; they are read as they are.
    #[serde(rename = "scale_fmt")]
    _scale_fmt: Option<IgnoredAny>,
    /// Asks transformers to load the model in floats; without effect here.
    #[serde(rename = "dequantize")]
    _dequantize: Option<IgnoredAny>,
    expert_dtype: Option<Value>,
}

/// What gpt-oss has.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawMxfp4 {
    #[serde(rename = "quant_method")]
    _quant_method: String,
    modules_to_not_convert: Option<Vec<String>>,
    /// Asks transformers to load the model in floats; without effect here.
    #[serde(rename = "dequantize")]
    _dequantize: Option<IgnoredAny>,
}

/// The `QuantizationConfig` of [compressed-tensors](https://github.com/vllm-project/compressed-tensors).
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawCompressed {
    #[serde(rename = "quant_method")]
    _quant_method: String,
    format: Option<String>,
    config_groups: BTreeMap<String, RawGroup>,
    ignore: Option<Vec<String>>,
    kv_cache_scheme: Option<RawScheme>,
    quantization_status: Option<String>,
    sparsity_config: Option<Map<String, Value>>,
    moe_sparsity_config: Option<Value>,
    transform_config: Option<Map<String, Value>>,
    #[serde(rename = "global_compression_ratio")]
    _global_compression_ratio: Option<IgnoredAny>,
    /// AutoRound's name.
    #[serde(rename = "provider")]
    _provider: Option<IgnoredAny>,
    #[serde(rename = "version")]
    _version: Option<IgnoredAny>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawGroup {
    targets: Vec<String>,
    weights: Option<RawScheme>,
    input_activations: Option<RawScheme>,
    output_activations: Option<Value>,
    format: Option<String>,
}

/// `QuantizationArgs`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawScheme {
    num_bits: Option<u64>,
    #[serde(rename = "type")]
    kind: Option<String>,
    symmetric: Option<bool>,
    strategy: Option<String>,
    group_size: Option<i64>,
    block_structure: Option<Value>,
    dynamic: Option<Value>,
    actorder: Option<Value>,
    /// Of calibration, which is over.
    #[serde(rename = "observer")]
    _observer: Option<IgnoredAny>,
    #[serde(rename = "observer_kwargs")]
    _observer_kwargs: Option<IgnoredAny>,
    /// As the tensors say.
    #[serde(rename = "scale_dtype")]
    _scale_dtype: Option<IgnoredAny>,
    #[serde(rename = "zp_dtype")]
    _zp_dtype: Option<IgnoredAny>,
}

/// `value` without null fields at any depth, except for GPTQModel's rules (`-:`), whose name says everything.
fn without_nulls(value: &Value) -> Value {
    match value {
        Value::Object(fields) => {
            let given = fields
                .iter()
                .filter(|(field, value)| !value.is_null() || field.starts_with("-:"));
            let given = given.map(|(field, value)| (field.clone(), without_nulls(value)));
            Value::Object(given.collect())
        }
        value => value.clone(),
    }
}

struct Reader<'a> {
    path: &'a Path,
    part: Part,
    field: &'static str,
    /// The field in messages: where it really stands.
    shown: String,
}

impl Reader<'_> {
    /// A field that is null counts as absent, even an unknown one: so `--hf-overrides` can remove it.
    fn parse<T: DeserializeOwned>(&self, value: &Value) -> Result<T, ModelError> {
        serde_path_to_error::deserialize(without_nulls(value)).map_err(|error| {
            let message = error.inner().to_string();
            if !message.starts_with("unknown field ") {
                return ModelError::config(self.path, format!("`{}`: {message}", self.shown));
            }
            let path: Vec<String> = error.path().iter().map(ToString::to_string).collect();
            self.unknown(&path.iter().map(String::as_str).collect::<Vec<_>>())
        })
    }

    /// An error about an unknown field at the end of `path`.
    fn unknown(&self, path: &[&str]) -> ModelError {
        let field = path.last().copied().unwrap_or_default();
        let nulls = path.iter().rev().fold(Value::Null, |value, name| {
            Value::Object(Map::from_iter([((*name).to_owned(), value)]))
        });
        let message = format!("`{}`: unknown field `{}`", self.shown, quotable(field));
        let message = with_removal(message, path, &self.part.overrides(json!({ self.field: nulls })));
        ModelError::config(self.path, message)
    }

    fn unsupported(&self, field: &str, value: impl std::fmt::Display, supported: &str) -> ModelError {
        ModelError::unsupported(format!("{}.{field}", self.shown), value, supported)
    }

    /// A field with one supported value; an absent one has it.
    fn only(
        &self,
        field: &str,
        found: Option<impl Into<Value>>,
        supported: impl Into<Value>,
    ) -> Result<(), ModelError> {
        let supported = supported.into();
        match found.map(Into::into) {
            None | Some(Value::Null) => Ok(()),
            Some(found) if found == supported => Ok(()),
            Some(found) => Err(self.unsupported(field, found, &format!("only {supported} is"))),
        }
    }

    fn names(&self, field: &str, names: Result<ModuleNames, String>) -> Result<ModuleNames, ModelError> {
        names.map_err(|error| ModelError::config(self.path, format!("`{}.{field}`: {error}", self.shown)))
    }

    fn fp8(&self, raw: RawFp8) -> Result<Quantization, ModelError> {
        self.only("fmt", raw.fmt, "e4m3")?;
        self.only("kv_cache_scheme", raw.kv_cache_scheme, Value::Null)?;
        self.only("expert_dtype", raw.expert_dtype, "fp8")?;
        if let Some(also) = raw.modules_to_convert.filter(|names| !names.is_empty()) {
            let value = quotable(&format!("{also:?}"));
            return Err(self.unsupported("modules_to_convert", value, "linear layers alone are"));
        }
        let input_scale = match raw.activation_scheme.as_deref() {
            None | Some("dynamic") => false,
            Some("static") => true,
            Some(other) => {
                let value = format!("`{other}`");
                return Err(self.unsupported("activation_scheme", value, "`dynamic` and `static` are"));
            }
        };
        let scales = match raw.weight_block_size.as_deref() {
            None => Fp8Scales::Tensor,
            Some([FP8_BLOCK, FP8_BLOCK]) => Fp8Scales::Block,
            Some(other) => {
                let supported = format!("null and [{FP8_BLOCK}, {FP8_BLOCK}] are");
                return Err(self.unsupported("weight_block_size", format!("{other:?}"), &supported));
            }
        };
        // Whoever reads this format leaves the head alone.
        let mut ignored = vec!["lm_head".to_owned()];
        ignored.extend(raw.modules_to_not_convert.into_iter().flatten());
        ignored.extend(raw.ignored_layers.into_iter().flatten());
        Ok(Quantization {
            groups: vec![QuantizationGroup {
                modules: ModuleNames::All,
                format: MatrixFormat::Fp8 { scales, input_scale },
            }],
            ignored: self.names("modules_to_not_convert", ModuleNames::parts(&ignored))?,
            ..Quantization::default()
        })
    }

    /// Experts alone are stored so.
    fn mxfp4(&self, raw: RawMxfp4) -> Result<Quantization, ModelError> {
        let ignored = raw.modules_to_not_convert.unwrap_or_default();
        let experts = ModuleNames::named(&[r"re:.*\.experts\.\d+\.".to_owned()]);
        Ok(Quantization {
            groups: vec![QuantizationGroup {
                modules: self.names("quant_method", experts)?,
                format: MatrixFormat::Mxfp4,
            }],
            ignored: self.names("modules_to_not_convert", ModuleNames::parts(&ignored))?,
            ..Quantization::default()
        })
    }

    fn compressed(&self, raw: RawCompressed) -> Result<Quantization, ModelError> {
        match raw.quantization_status.as_deref() {
            None | Some("compressed" | "frozen") => {}
            Some(other) => {
                let supported = "a model whose quantisation is done (`compressed`) is";
                return Err(self.unsupported("quantization_status", format!("`{other}`"), supported));
            }
        }
        let sparsity = raw.sparsity_config.unwrap_or_default();
        self.only("sparsity_config.format", sparsity.get("format").cloned(), "dense")?;
        self.only("moe_sparsity_config", raw.moe_sparsity_config, Value::Null)?;
        let transforms = raw.transform_config.unwrap_or_default();
        let groups = transforms.get("config_groups").cloned();
        self.only("transform_config.config_groups", groups, Map::new())?;
        let kv_scales = match &raw.kv_cache_scheme {
            None => false,
            Some(scheme) => {
                self.float8("kv_cache_scheme", scheme)?;
                self.only("kv_cache_scheme.strategy", scheme.strategy.clone(), "tensor")?;
                scheme.dynamic != Some(true.into())
            }
        };
        let mut groups = Vec::new();
        for (name, group) in raw.config_groups {
            groups.push(self.group(&format!("config_groups.{name}"), group, raw.format.as_deref())?);
        }
        Ok(Quantization {
            groups,
            ignored: self.names("ignore", ModuleNames::named(&raw.ignore.unwrap_or_default()))?,
            kv_scales,
            ..Quantization::default()
        })
    }

    /// `format` is that of groups that have none of their own.
    fn group(
        &self,
        name: &str,
        raw: RawGroup,
        format: Option<&str>,
    ) -> Result<QuantizationGroup, ModelError> {
        let field = |field: &str| format!("{name}.{field}");
        self.only(&field("output_activations"), raw.output_activations, Value::Null)?;
        let Some(weights) = raw.weights else {
            return Err(self.unsupported(&field("weights"), "null", SUPPORTED));
        };
        self.only(&field("weights.dynamic"), weights.dynamic.clone(), false)?;
        let modules = match raw.targets.iter().any(|target| target == "Linear") {
            true => ModuleNames::All,
            false => self.names(&field("targets"), ModuleNames::named(&raw.targets))?,
        };
        let format = match (raw.format.as_deref(), format) {
            (Some(own), _) => Some((field("format"), own)),
            (None, of_all) => of_all.map(|of_all| ("format".to_owned(), of_all)),
        };
        let format = match format {
            // What is naive and of eight bits is stored alike.
            None | Some((_, "float-quantized" | "naive-quantized")) => {
                self.float8_group(&field, &weights, raw.input_activations.as_ref())?
            }
            Some((_, "pack-quantized")) => {
                let inputs = raw.input_activations.map(|_| "given");
                self.only(&field("input_activations"), inputs, Value::Null)?;
                MatrixFormat::Int4(self.int4_group(&field, &weights)?)
            }
            Some((at, other)) => return Err(self.unsupported(&at, format!("`{other}`"), SUPPORTED)),
        };
        Ok(QuantizationGroup { modules, format })
    }

    fn float8_group(
        &self,
        field: &impl Fn(&str) -> String,
        weights: &RawScheme,
        inputs: Option<&RawScheme>,
    ) -> Result<MatrixFormat, ModelError> {
        self.float8(&field("weights"), weights)?;
        let block = Value::from(vec![FP8_BLOCK; 2]);
        let scales = match weights.strategy.as_deref() {
            None | Some("tensor") => Fp8Scales::Tensor,
            Some("channel") => Fp8Scales::Channel,
            // Older versions write the block as text.
            Some("block") if weights.block_structure == Some(format!("{FP8_BLOCK}x{FP8_BLOCK}").into()) => {
                Fp8Scales::Block
            }
            Some("block") => {
                let found = weights.block_structure.clone().unwrap_or_default();
                match found == block {
                    true => Fp8Scales::Block,
                    false => {
                        let supported = format!("only {block} is");
                        return Err(self.unsupported(&field("weights.block_structure"), found, &supported));
                    }
                }
            }
            Some(other) => {
                let supported = "`tensor`, `channel` and `block` are";
                return Err(self.unsupported(&field("weights.strategy"), format!("`{other}`"), supported));
            }
        };
        let input_scale = match inputs {
            None => false,
            Some(inputs) => {
                self.float8(&field("input_activations"), inputs)?;
                let is_dynamic = inputs.dynamic == Some(true.into());
                if !is_dynamic {
                    self.only(
                        &field("input_activations.strategy"),
                        inputs.strategy.clone(),
                        "tensor",
                    )?;
                }
                !is_dynamic
            }
        };
        Ok(MatrixFormat::Fp8 { scales, input_scale })
    }

    /// Checks that a scheme is of symmetric 8-bit floats. The size of groups says nothing beside the strategy.
    fn float8(&self, name: &str, scheme: &RawScheme) -> Result<(), ModelError> {
        let RawScheme {
            num_bits,
            kind,
            symmetric,
            actorder,
            ..
        } = scheme;
        let kind = kind.as_deref().unwrap_or("int");
        if (num_bits.unwrap_or(8), kind) != (8, "float") {
            let value = format!("{}-bit {kind}", num_bits.unwrap_or(8));
            return Err(self.unsupported(name, value, SUPPORTED));
        }
        self.only(&format!("{name}.symmetric"), *symmetric, true)?;
        match actorder {
            None | Some(Value::Null | Value::Bool(false)) => {}
            Some(other) => return Err(self.unsupported(&format!("{name}.actorder"), other, "null is")),
        }
        // Inputs in groups of a block's inputs are of block-wise weights.
        let size = scheme.group_size.filter(|&size| size != FP8_BLOCK as i64);
        self.only(&format!("{name}.group_size"), size, Value::Null)
    }
}
