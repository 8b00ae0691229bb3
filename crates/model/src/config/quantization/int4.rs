//! Configurations of integers of four bits: AWQ, GPTQ, AutoRound, and the schemes of compressed-tensors.

use std::collections::BTreeMap;

use plimsoll_core::untrusted::quotable;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{RawScheme, Reader};
use crate::ModelError;
use crate::quantization::{
    Int4Format, Int4Groups, Int4Packing, MatrixFormat, ModuleNames, Quantization, QuantizationGroup,
};

/// What these formats leave in floats without saying so: the head, and what chooses experts.
const NEVER: [&str; 2] = ["lm_head", r"re:.*\.(?:gate|router|shared_expert_gate)$"];

const SIZES: &str = "32, 64, 128 and -1 (all inputs) are";

/// What AutoAWQ, GPTQModel, AutoRound and transformers write for `awq`. Most says how the codes came about or how others
/// compute, also that zeros are all alike (`zero_point`): they are stored.
#[derive(Deserialize)]
pub(super) struct RawAwq {
    #[serde(alias = "w_bit")]
    bits: Option<i64>,
    #[serde(alias = "q_group_size")]
    group_size: Option<i64>,
    version: Option<String>,
    /// Its name in newer versions, which write both, or all three.
    format: Option<String>,
    checkpoint_format: Option<String>,
    backend: Option<String>,
    dynamic: Option<Map<String, Value>>,
    modules_to_not_convert: Option<Vec<String>>,
    #[serde(flatten)]
    others: Map<String, Value>,
}

/// What AutoGPTQ, GPTQModel, AutoRound and transformers write for `gptq`.
#[derive(Deserialize)]
pub(super) struct RawGptq {
    bits: Option<i64>,
    group_size: Option<i64>,
    desc_act: Option<bool>,
    checkpoint_format: Option<String>,
    /// Its name in newer versions.
    format: Option<String>,
    /// By expressions: what is left alone (`-:`), and what is quantised otherwise.
    dynamic: Option<Map<String, Value>>,
    modules_to_not_convert: Option<Vec<String>>,
    #[serde(flatten)]
    others: Map<String, Value>,
}

/// What AutoRound writes for `auto-round`.
#[derive(Deserialize)]
pub(super) struct RawAutoRound {
    bits: Option<i64>,
    group_size: Option<i64>,
    packing_format: Option<String>,
    /// By names or expressions: what is quantised otherwise, most of it with 16 bits, not at all.
    extra_config: Option<BTreeMap<String, RawLayer>>,
    modules_to_not_convert: Option<Vec<String>>,
    #[serde(flatten)]
    others: Map<String, Value>,
}

#[derive(Deserialize)]
struct RawLayer {
    bits: Option<i64>,
    group_size: Option<i64>,
    #[serde(flatten)]
    others: Map<String, Value>,
}

/// Fields with one supported value, as JSON, whichever tool writes them.
const ONLY: &[(&str, &str)] = &[
    ("data_type", "\"int\""),
    ("is_marlin_format", "false"),
    ("lm_head", "false"),
    ("modules_in_block_to_quantize", "null"),
    ("pack_dtype", "\"int32\""),
];

/// Fields that change nothing of what is stored, whichever tool writes them.
const OTHERS: &[&str] = &[
    "act_data_type",
    "act_dynamic",
    "act_group_aware",
    "act_group_size",
    "act_sym",
    "adapter",
    "amp",
    "autoround_version",
    "backend",
    "batch_size",
    "block_name_to_quantize",
    "cache_block_outputs",
    "damp_auto_increment",
    "damp_percent",
    "dataset",
    "disable_exllama",
    "do_fuse",
    "enable_minmax_tuning",
    "enable_norm_bias_tuning",
    "enable_quanted_input",
    "exllama_config",
    "fuse_max_seq_len",
    "gradient_accumulate_steps",
    "hyb_act",
    "iters",
    "low_cpu_mem_usage",
    "low_gpu_mem_usage",
    "lr",
    "max_input_length",
    "meta",
    "method",
    "minmax_lr",
    "model_file_base_name",
    "model_free",
    "model_name_or_path",
    "model_seqlen",
    "module_name_preceding_first_block",
    "module_seqlen",
    "modules_to_fuse",
    "mse",
    "nsamples",
    "offload_to_disk",
    "offload_to_disk_path",
    "pad_token_id",
    "provider",
    "quant_block_list",
    "quant_method",
    "quantizer",
    "rotation",
    "scale_dtype",
    "seqlen",
    "static_attention_granularity",
    "static_groups",
    "static_kv_granularity",
    "super_bits",
    "super_group_size",
    "sym",
    "to_quant_block_names",
    "tokenizer",
    "true_sequential",
    "use_cuda_fp16",
    "use_exllama",
    "version",
    "zero_point",
];

impl Reader<'_> {
    pub(super) fn awq(&self, raw: RawAwq) -> Result<Quantization, ModelError> {
        for (field, found) in [
            ("version", raw.version),
            ("format", raw.format),
            ("checkpoint_format", raw.checkpoint_format),
        ] {
            match found.as_deref().map(str::to_lowercase).as_deref() {
                None | Some("gemm") => {}
                Some(other) => {
                    let value = format!("`{}`", quotable(other));
                    return Err(self.unsupported(field, value, "`gemm` is, whose layout differs"));
                }
            }
        }
        // The only one of the names of kernels that says how weights are stored.
        if raw.backend.as_deref() == Some("llm-awq") {
            return Err(self.unsupported("backend", "`llm-awq`", "weights as AutoAWQ stores them are"));
        }
        self.of_others(&raw.others, &["desc_act"])?;
        self.only("desc_act", raw.others.get("desc_act").cloned(), false)?;
        let format = Int4Format {
            packing: Int4Packing::Awq,
            groups: self.groups("bits", raw.bits, "group_size", raw.group_size.or(Some(128)))?,
            ordered: false,
        };
        let base = json!({"bits": raw.bits, "group_size": raw.group_size});
        let rules = self.rules(raw.dynamic, &base, format)?;
        self.all_but(format, rules, raw.modules_to_not_convert.unwrap_or_default())
    }

    pub(super) fn gptq(&self, raw: RawGptq) -> Result<Quantization, ModelError> {
        self.of_others(&raw.others, &[])?;
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
        let format = Int4Format {
            packing: Int4Packing::Gptq { zeros_less_one },
            groups: self.groups("bits", raw.bits, "group_size", raw.group_size)?,
            ordered: raw.desc_act == Some(true),
        };
        let base = json!({"bits": raw.bits, "group_size": raw.group_size, "desc_act": format.ordered});
        let rules = self.rules(raw.dynamic, &base, format)?;
        self.all_but(format, rules, raw.modules_to_not_convert.unwrap_or_default())
    }

    /// What `dynamic` makes of modules, of which the first rule that matches decides: not quantised (`-:`), or as all are.
    fn rules(
        &self,
        dynamic: Option<Map<String, Value>>,
        base: &Value,
        format: Int4Format,
    ) -> Result<Vec<(String, MatrixFormat)>, ModelError> {
        let rule = |(rule, others): (String, Value)| {
            if let Some(expression) = rule.strip_prefix("-:") {
                return Ok((format!("re:{expression}"), MatrixFormat::Plain));
            }
            let changes = |(field, value): (&String, &Value)| {
                base[field.as_str()] != *value && !OTHERS.contains(&field.as_str())
            };
            if others.as_object().is_none_or(|others| others.iter().any(changes)) {
                let supported = "rules that leave modules alone (`-:`) or change nothing are";
                return Err(self.unsupported("dynamic", format!("`{}`", quotable(&rule)), supported));
            }
            let expression = rule.strip_prefix("+:").unwrap_or(&rule);
            Ok((format!("re:{expression}"), MatrixFormat::Int4(format)))
        };
        dynamic.unwrap_or_default().into_iter().map(rule).collect()
    }

    pub(super) fn auto_round(&self, raw: RawAutoRound) -> Result<Quantization, ModelError> {
        self.of_others(&raw.others, &["act_bits", "desc_act"])?;
        self.only("desc_act", raw.others.get("desc_act").cloned(), false)?;
        let packing = match raw.packing_format.as_deref() {
            Some("auto_round:auto_gptq") => Int4Packing::Gptq { zeros_less_one: true },
            Some("auto_round:auto_awq") => Int4Packing::Awq,
            other => {
                let value = other.map_or("missing".to_owned(), |other| format!("`{}`", quotable(other)));
                let supported = "`auto_round:auto_gptq` and `auto_round:auto_awq` are";
                return Err(self.unsupported("packing_format", value, supported));
            }
        };
        self.inputs_as_they_are("act_bits", &raw.others)?;
        let groups = self.groups("bits", raw.bits, "group_size", raw.group_size)?;
        let mut left = Vec::new();
        for (name, layer) in raw.extra_config.unwrap_or_default() {
            let field = format!("extra_config.{}", quotable(&name));
            let is_same_size = layer.group_size.is_none_or(|size| Some(size) == raw.group_size);
            match layer.bits {
                Some(bits) if bits >= 16 => left.push(name),
                None | Some(4) if is_same_size => {
                    self.only(
                        &format!("{field}.data_type"),
                        layer.others.get("data_type").cloned(),
                        "int",
                    )?;
                    self.inputs_as_they_are(&format!("{field}.act_bits"), &layer.others)?;
                }
                _ => {
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
        let left = left.into_iter().flat_map(|name| [format!("re:{name}$"), name]);
        let left = left.map(|name| (name, MatrixFormat::Plain)).collect();
        let format = Int4Format {
            packing,
            groups,
            ordered: false,
        };
        self.all_but(format, left, raw.modules_to_not_convert.unwrap_or_default())
    }

    /// Inputs in as many bits as they have.
    fn inputs_as_they_are(&self, field: &str, others: &Map<String, Value>) -> Result<(), ModelError> {
        let bits = others.get("act_bits");
        let fewer = bits.filter(|bits| bits.as_u64().is_none_or(|bits| bits < 16));
        self.only(field, fewer.cloned(), Value::Null)
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
        let size = match (weights.strategy.as_deref(), weights.group_size) {
            (Some("group"), size) => size,
            (Some("channel"), _) => Some(-1),
            // As compressed-tensors takes one that is missing.
            (None, Some(size)) => Some(size),
            (other, _) => {
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
        rules: Vec<(String, MatrixFormat)>,
        parts: Vec<String>,
    ) -> Result<Quantization, ModelError> {
        let never = NEVER.map(|name| (name.to_owned(), MatrixFormat::Plain));
        // There may be thousands of names: those of one format are one group.
        let mut lists: Vec<(MatrixFormat, Vec<String>)> = Vec::new();
        for (name, format) in never.into_iter().chain(rules) {
            match lists.last_mut() {
                Some((last, names)) if *last == format => names.push(name),
                _ => lists.push((format, vec![name])),
            }
        }
        let group = |(format, names): (_, Vec<String>)| -> Result<QuantizationGroup, ModelError> {
            Ok(QuantizationGroup {
                modules: self.names("dynamic", ModuleNames::named(&names))?,
                format,
            })
        };
        let mut groups: Vec<_> = lists.into_iter().map(group).collect::<Result<_, _>>()?;
        groups.push(QuantizationGroup {
            modules: ModuleNames::All,
            format: MatrixFormat::Int4(format),
        });
        Ok(Quantization {
            groups,
            ignored: self.names("modules_to_not_convert", ModuleNames::containing(&parts))?,
            ..Quantization::default()
        })
    }

    /// Refuses fields that are not known, but for `own` ones, and values that are not supported.
    fn of_others(&self, found: &Map<String, Value>, own: &[&str]) -> Result<(), ModelError> {
        for (field, value) in found {
            if let Some((_, supported)) = ONLY.iter().find(|(only, _)| only == field) {
                let supported: Value = supported.parse().expect("JSON");
                self.only(field, Some(value.clone()), supported)?;
            } else if !OTHERS.contains(&field.as_str()) && !own.contains(&field.as_str()) {
                return Err(self.unknown(&[field]));
            }
        }
        Ok(())
    }
}

fn shown(value: Option<impl ToString>) -> String {
    value.map_or("missing".to_owned(), |value| value.to_string())
}
