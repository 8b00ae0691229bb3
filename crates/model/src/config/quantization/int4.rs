//! Configurations of integers of four bits: AWQ, GPTQ, AutoRound, and the schemes of compressed-tensors.

use std::collections::BTreeMap;

use plimsoll_core::untrusted::quotable;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Map, Value};

use super::{RawScheme, Reader};
use crate::ModelError;
use crate::quantization::{
    Int4Format, Int4Groups, Int4Packing, MatrixFormat, ModuleNames, Quantization, QuantizationGroup,
};

/// What these formats leave in floats without saying so: the head, and what chooses experts.
const NEVER: [&str; 2] = ["lm_head", r"re:.*\.(?:gate|router|shared_expert_gate)$"];

const SIZES: &str = "32, 64, 128 and -1 (all inputs) are";

/// What AutoAWQ, llm-compressor and transformers write for `awq`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawAwq {
    #[serde(rename = "quant_method")]
    _quant_method: String,
    #[serde(alias = "w_bit")]
    bits: Option<i64>,
    #[serde(alias = "q_group_size")]
    group_size: Option<i64>,
    zero_point: Option<bool>,
    #[serde(alias = "format")]
    version: Option<String>,
    modules_to_not_convert: Option<Vec<String>>,
    /// How others compute.
    #[serde(rename = "backend")]
    _backend: Option<IgnoredAny>,
    #[serde(rename = "do_fuse")]
    _do_fuse: Option<IgnoredAny>,
    #[serde(rename = "fuse_max_seq_len")]
    _fuse_max_seq_len: Option<IgnoredAny>,
    #[serde(rename = "modules_to_fuse")]
    _modules_to_fuse: Option<IgnoredAny>,
    #[serde(rename = "exllama_config")]
    _exllama_config: Option<IgnoredAny>,
}

/// What AutoGPTQ, GPTQModel and transformers write for `gptq`. Most says how the codes came about or how others compute.
#[derive(Deserialize)]
pub(super) struct RawGptq {
    bits: Option<i64>,
    group_size: Option<i64>,
    desc_act: Option<bool>,
    checkpoint_format: Option<String>,
    /// Its name in newer versions.
    format: Option<String>,
    is_marlin_format: Option<bool>,
    lm_head: Option<bool>,
    /// By expressions: what is left alone (`-:`), and what is quantised otherwise.
    dynamic: Option<Map<String, Value>>,
    modules_in_block_to_quantize: Option<Value>,
    modules_to_not_convert: Option<Vec<String>>,
    pack_dtype: Option<Value>,
    #[serde(flatten)]
    others: BTreeMap<String, IgnoredAny>,
}

/// Fields of `gptq` that change nothing of what is stored, as far as [`RawGptq`] does not have them.
const GPTQ_OTHERS: &[&str] = &[
    "act_group_aware",
    "adapter",
    "backend",
    "batch_size",
    "block_name_to_quantize",
    "cache_block_outputs",
    "damp_auto_increment",
    "damp_percent",
    "dataset",
    "disable_exllama",
    "exllama_config",
    "hyb_act",
    "max_input_length",
    "meta",
    "method",
    "model_file_base_name",
    "model_name_or_path",
    "model_seqlen",
    "module_name_preceding_first_block",
    "module_seqlen",
    "mse",
    "offload_to_disk",
    "offload_to_disk_path",
    "pad_token_id",
    "quant_method",
    "quantizer",
    "rotation",
    "static_groups",
    "sym",
    "tokenizer",
    "true_sequential",
    "use_cuda_fp16",
    "use_exllama",
    "version",
];

/// What AutoRound writes for `auto-round`.
#[derive(Deserialize)]
pub(super) struct RawAutoRound {
    bits: Option<i64>,
    group_size: Option<i64>,
    data_type: Option<String>,
    packing_format: Option<String>,
    act_bits: Option<i64>,
    lm_head: Option<bool>,
    /// By names or expressions: what is quantised otherwise, most of it with 16 bits, not at all.
    extra_config: Option<BTreeMap<String, RawLayer>>,
    modules_to_not_convert: Option<Vec<String>>,
    #[serde(flatten)]
    others: BTreeMap<String, IgnoredAny>,
}

#[derive(Deserialize)]
struct RawLayer {
    bits: Option<i64>,
    group_size: Option<i64>,
}

/// Fields of `auto-round` that change nothing of what is stored, as far as [`RawAutoRound`] does not have them.
const AUTO_ROUND_OTHERS: &[&str] = &[
    "act_data_type",
    "act_dynamic",
    "act_group_size",
    "act_sym",
    "amp",
    "autoround_version",
    "backend",
    "batch_size",
    "block_name_to_quantize",
    "damp_percent",
    "dataset",
    "desc_act",
    "enable_minmax_tuning",
    "enable_norm_bias_tuning",
    "enable_quanted_input",
    "gradient_accumulate_steps",
    "iters",
    "low_cpu_mem_usage",
    "low_gpu_mem_usage",
    "lr",
    "minmax_lr",
    "model_free",
    "nsamples",
    "quant_block_list",
    "quant_method",
    "scale_dtype",
    "seqlen",
    "super_bits",
    "super_group_size",
    "sym",
    "to_quant_block_names",
    "true_sequential",
];

impl Reader<'_> {
    pub(super) fn awq(&self, raw: RawAwq) -> Result<Quantization, ModelError> {
        match raw.version.as_deref().map(str::to_lowercase).as_deref() {
            None | Some("gemm") => {}
            Some(other) => {
                let value = format!("`{}`", quotable(other));
                return Err(self.unsupported("version", value, "`gemm` is, whose layout differs"));
            }
        }
        self.only("zero_point", raw.zero_point, true)?;
        let format = Int4Format {
            packing: Int4Packing::Awq,
            groups: self.groups("bits", raw.bits, "group_size", raw.group_size.or(Some(128)))?,
            ordered: false,
        };
        self.all_but(format, &[], raw.modules_to_not_convert.unwrap_or_default())
    }

    pub(super) fn gptq(&self, raw: RawGptq) -> Result<Quantization, ModelError> {
        self.known(&raw.others, GPTQ_OTHERS)?;
        let version = raw.checkpoint_format.or(raw.format);
        let zeros_less_one = match version.as_deref() {
            None | Some("gptq") => true,
            Some("gptq_v2") => false,
            Some(other) => {
                let value = format!("`{}`", quotable(other));
                let supported = "`gptq` and `gptq_v2` are, whose weights are not in the order of one kernel";
                return Err(self.unsupported("checkpoint_format", value, supported));
            }
        };
        self.only("is_marlin_format", raw.is_marlin_format, false)?;
        self.only("lm_head", raw.lm_head, false)?;
        self.only("pack_dtype", raw.pack_dtype, "int32")?;
        let in_blocks = raw.modules_in_block_to_quantize;
        self.only("modules_in_block_to_quantize", in_blocks, Value::Null)?;
        let mut left = Vec::new();
        for (rule, _) in raw.dynamic.unwrap_or_default() {
            let Some(expression) = rule.strip_prefix("-:") else {
                let supported = "rules that leave modules alone (`-:`) are";
                return Err(self.unsupported("dynamic", format!("`{}`", quotable(&rule)), supported));
            };
            left.push(format!("re:{expression}"));
        }
        let format = Int4Format {
            packing: Int4Packing::Gptq { zeros_less_one },
            groups: self.groups("bits", raw.bits, "group_size", raw.group_size)?,
            ordered: raw.desc_act == Some(true),
        };
        self.all_but(format, &left, raw.modules_to_not_convert.unwrap_or_default())
    }

    pub(super) fn auto_round(&self, raw: RawAutoRound) -> Result<Quantization, ModelError> {
        self.known(&raw.others, AUTO_ROUND_OTHERS)?;
        let packing = match raw.packing_format.as_deref() {
            Some("auto_round:auto_gptq") => Int4Packing::Gptq { zeros_less_one: true },
            Some("auto_round:auto_awq") => Int4Packing::Awq,
            other => {
                let value = other.map_or("missing".to_owned(), |other| format!("`{}`", quotable(other)));
                let supported = "`auto_round:auto_gptq` and `auto_round:auto_awq` are";
                return Err(self.unsupported("packing_format", value, supported));
            }
        };
        self.only("data_type", raw.data_type, "int")?;
        // Inputs in as many bits as they have.
        let act_bits = raw.act_bits.filter(|&bits| bits < 16);
        self.only("act_bits", act_bits, Value::Null)?;
        self.only("lm_head", raw.lm_head, false)?;
        let groups = self.groups("bits", raw.bits, "group_size", raw.group_size)?;
        let mut left = Vec::new();
        for (name, layer) in raw.extra_config.unwrap_or_default() {
            let is_same_size = layer.group_size.is_none_or(|size| Some(size) == raw.group_size);
            match layer.bits {
                Some(bits) if bits >= 16 => left.push(name),
                None | Some(4) if is_same_size => {}
                _ => {
                    let field = format!("extra_config.{}", quotable(&name));
                    let value = format!(
                        "{} bits, groups of {}",
                        shown(layer.bits),
                        shown(layer.group_size)
                    );
                    return Err(self.unsupported(
                        &field,
                        value,
                        "16 bits, or what the other layers have, are",
                    ));
                }
            }
        }
        // Some are names, others expressions.
        let left: Vec<String> = left
            .into_iter()
            .flat_map(|name| [format!("re:{name}$"), name])
            .collect();
        let format = Int4Format {
            packing,
            groups,
            ordered: false,
        };
        self.all_but(format, &left, raw.modules_to_not_convert.unwrap_or_default())
    }

    /// Integers of four bits of compressed-tensors.
    pub(super) fn int4_group(
        &self,
        field: &impl Fn(&str) -> String,
        weights: &RawScheme,
    ) -> Result<Int4Format, ModelError> {
        let kind = weights.kind.as_deref().unwrap_or("int");
        if kind != "int" {
            let value = format!("{}-bit {}", shown(weights.num_bits), quotable(kind));
            return Err(self.unsupported(&field("weights"), value, "integers are `pack-quantized` here"));
        }
        let size = match weights.strategy.as_deref() {
            Some("group") => weights.group_size,
            Some("channel") => Some(-1),
            other => {
                let value = other.map_or("missing".to_owned(), |other| format!("`{}`", quotable(other)));
                let supported = "`group` and `channel` are";
                return Err(self.unsupported(&field("weights.strategy"), value, supported));
            }
        };
        let ordered = match &weights.actorder {
            None | Some(Value::Null | Value::Bool(false)) => false,
            Some(Value::Bool(true)) => true,
            Some(Value::String(order)) => match &**order {
                "group" | "dynamic" => true,
                // Only the order in which weights were rounded.
                "weight" | "static" => false,
                other => {
                    let value = format!("`{}`", quotable(other));
                    return Err(self.unsupported(
                        &field("weights.actorder"),
                        value,
                        "`group` and `weight` are",
                    ));
                }
            },
            Some(other) => {
                return Err(self.unsupported(&field("weights.actorder"), other, "`group` and `weight` are"));
            }
        };
        let bits = weights.num_bits.map(|bits| bits as i64);
        Ok(Int4Format {
            packing: Int4Packing::Compressed {
                symmetric: weights.symmetric.unwrap_or(true),
            },
            groups: self.groups(
                &field("weights.num_bits"),
                bits,
                &field("weights.group_size"),
                size,
            )?,
            ordered,
        })
    }

    fn groups(
        &self,
        bits_field: &str,
        bits: Option<i64>,
        size_field: &str,
        size: Option<i64>,
    ) -> Result<Int4Groups, ModelError> {
        if bits != Some(4) {
            let value = format!("{} bits", shown(bits));
            let supported =
                "4 bits are; use the model in another format, before quantisation, or as a GGUF file";
            return Err(self.unsupported(bits_field, value, supported));
        }
        let groups = size.and_then(Int4Groups::of_size);
        groups.ok_or_else(|| self.unsupported(size_field, shown(size), SIZES))
    }

    /// Everything has this format but what never has it, what names and expressions say, and parts of names.
    fn all_but(
        &self,
        format: Int4Format,
        left: &[String],
        parts: Vec<String>,
    ) -> Result<Quantization, ModelError> {
        let plain = |field: &str, modules| -> Result<QuantizationGroup, ModelError> {
            Ok(QuantizationGroup {
                modules: self.names(field, modules)?,
                format: MatrixFormat::Plain,
            })
        };
        let never: Vec<String> = NEVER
            .map(str::to_owned)
            .into_iter()
            .chain(left.iter().cloned())
            .collect();
        Ok(Quantization {
            groups: vec![
                plain("dynamic", ModuleNames::named(&never))?,
                QuantizationGroup {
                    modules: ModuleNames::All,
                    format: MatrixFormat::Int4(format),
                },
            ],
            ignored: self.names("modules_to_not_convert", ModuleNames::containing(&parts))?,
            ..Quantization::default()
        })
    }

    fn known(&self, found: &BTreeMap<String, IgnoredAny>, known: &[&str]) -> Result<(), ModelError> {
        match found.keys().find(|field| !known.contains(&field.as_str())) {
            None => Ok(()),
            Some(unknown) => {
                let message = format!("`{}`: unknown field `{}`", self.field, quotable(unknown));
                Err(ModelError::config(self.path, message))
            }
        }
    }
}

fn shown(value: Option<impl ToString>) -> String {
    value.map_or("missing".to_owned(), |value| value.to_string())
}
