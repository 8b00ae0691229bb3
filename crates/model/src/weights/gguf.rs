//! Weights of a GGUF file under the names of Hugging Face checkpoints.

use std::borrow::Cow;
use std::collections::HashMap;

use plimsoll_kernels::WeightType;

use super::{RowOrder, Source, Tensor};
use crate::blocks::{Decoder, Inspector, Matrix, Stack};
use crate::gguf::{GgufFile, ROPE_DIVISORS, ROPE_FACTORS};
use crate::quantization::GgufTypes;
use crate::{Architecture, DecoderSpec, ModelError};

/// A GGUF file as a source of weights.
#[derive(Debug)]
pub(crate) struct GgufWeights<'a> {
    file: &'a GgufFile,
    /// Sizes of the heads whose rows the converter interleaved, for q and k.
    interleaved: Option<Heads>,
    /// What `post_attention_layernorm` is called: it names the norm before the MLP, or one behind attention.
    post_attention: &'static str,
    /// Experts of a layer that has any.
    experts: usize,
    /// The divisors of frequencies are a part of the configuration.
    has_divisors_in_config: bool,
}

#[derive(Clone, Copy, Debug)]
struct Heads {
    q: usize,
    k: usize,
}

impl<'a> GgufWeights<'a> {
    pub(crate) fn new(file: &'a GgufFile, architecture: Architecture, spec: &DecoderSpec) -> Self {
        // llama.cpp rotates neighbouring pairs for `llama` and what its converter derives from it, halves for the others,
        // and the converter orders the rows accordingly (`LlamaModel.permute` in convert_hf_to_gguf.py).
        let interleaved = match architecture {
            Architecture::Llama
            | Architecture::Mistral
            | Architecture::Mixtral
            | Architecture::Ministral3
            | Architecture::SmolLM3 => spec.attention().next().map(|attention| Heads {
                q: attention.heads,
                k: attention.kv_heads,
            }),
            _ => None,
        };
        let has_post_norms = spec.layers.iter().any(|layer| layer.post_norms);
        // So llama.cpp calls the norm before the MLP in these.
        let is_named_so = matches!(
            architecture,
            Architecture::GptOss | Architecture::Qwen3_5 | Architecture::Qwen3_5Moe | Architecture::Qwen3Next
        );
        Self {
            file,
            interleaved,
            post_attention: if has_post_norms || is_named_so {
                "post_attention_norm"
            } else {
                "ffn_norm"
            },
            experts: spec.mixtures().map(|moe| moe.experts).max().unwrap_or(0),
            has_divisors_in_config: architecture == Architecture::Gemma4,
        }
    }

    /// Block types of the decoder's matrices, by their modules.
    ///
    /// # Errors
    /// As [`Source::tensor`].
    pub(crate) fn types(&self, spec: &DecoderSpec) -> Result<GgufTypes, ModelError> {
        let mut types = Types {
            source: self,
            found: HashMap::new(),
        };
        Decoder::visit(spec, &mut types)?;
        Ok(GgufTypes::new(types.found))
    }

    fn interleaved_heads(&self, gguf_name: &str) -> Option<usize> {
        let heads = self.interleaved?;
        match gguf_name.rsplit('.').nth(1) {
            Some("attn_q") => Some(heads.q),
            Some("attn_k") => Some(heads.k),
            _ => None,
        }
    }
}

impl Source for GgufWeights<'_> {
    fn has(&self, name: &str) -> bool {
        self.file.tensor(&self.stored_name(name)).is_some()
    }

    fn tensor(&self, hf_name: &str, expected: &[usize]) -> Result<Option<Tensor<'_>>, ModelError> {
        let name = self.stored_name(hf_name);
        let Some((info, data)) = self.file.tensor(&name) else {
            return Ok(None);
        };
        let (data, shape) = match (expert_of(hf_name), &info.shape[..]) {
            // A tensor of all experts.
            (Some(expert), [experts, of_each @ ..]) if *experts == self.experts && !of_each.is_empty() => {
                let bytes = data.len() / experts;
                (&data[expert * bytes..][..bytes], of_each)
            }
            // A projection to one number is a vector.
            (_, [_]) if expected.len() == 2 && expected[0] == 1 => (data, expected),
            // Convolutions have one input for each channel.
            (_, [channels, taps]) if expected == [*channels, 1, *taps] => (data, expected),
            (_, shape) => (data, shape),
        };
        let rows = shape[0];
        let order = match self.interleaved_heads(&name) {
            None => RowOrder::Plain,
            Some(heads) if rows > 0 && rows.is_multiple_of(2 * heads) => RowOrder::Interleaved {
                head_dim: rows / heads,
            },
            Some(heads) => {
                let message = format!("{rows} rows of q or k are not {heads} heads of even size");
                return Err(ModelError::corrupt(self.file.path(), message));
            }
        };
        let data = match hf_name.ends_with(".A_log") && info.dtype == WeightType::F32 {
            true => Cow::Owned(logarithms(data).map_err(|rate| {
                let message = format!("`{name}` has an element {rate}, and all are to be negative");
                ModelError::corrupt(self.file.path(), message)
            })?),
            false => Cow::Borrowed(data),
        };
        Ok(Some(Tensor {
            order,
            ..Tensor::plain(&name, info.dtype, shape, data)
        }))
    }

    fn names(&self) -> Vec<String> {
        let in_config = |name: &&str| {
            ROPE_FACTORS.contains(name) || (self.has_divisors_in_config && *name == ROPE_DIVISORS)
        };
        let names = self.file.tensor_names().filter(|name| !in_config(name));
        names.map(str::to_owned).collect()
    }

    fn total_bytes(&self) -> u64 {
        self.file.tensor_bytes()
    }

    /// The converter adds the 1.
    fn has_whole_norms(&self) -> bool {
        true
    }

    fn stored_name(&self, name: &str) -> String {
        gguf_name(name, self.post_attention)
    }
}

/// Of rates of decay, which the converter writes as `-exp(A_log)`.
///
/// # Errors
/// A rate that is not negative.
fn logarithms(rates: &[u8]) -> Result<Vec<u8>, f32> {
    let mut out = Vec::with_capacity(rates.len());
    for rate in rates.as_chunks().0 {
        let rate = f32::from_le_bytes(*rate);
        if !(rate < 0.0 && rate.is_finite()) {
            return Err(rate);
        }
        out.extend((-rate).ln().to_le_bytes());
    }
    Ok(out)
}

/// Finds the types of matrices. Those that are missing are left to whoever reads them.
struct Types<'a> {
    source: &'a GgufWeights<'a>,
    found: HashMap<String, WeightType>,
}

impl Types<'_> {
    fn add(&mut self, matrix: &Matrix) -> Result<(), ModelError> {
        let tensor = self.source.tensor(&matrix.name(), &matrix.shape())?;
        if let Some(tensor) = tensor.filter(|tensor| tensor.dtype.block_len() > 1) {
            self.found.insert(matrix.module.clone(), tensor.dtype);
        }
        Ok(())
    }
}

impl Inspector for Types<'_> {
    type Error = ModelError;

    fn linear(&mut self, stack: &Stack) -> Result<(), ModelError> {
        stack.parts.iter().try_for_each(|part| self.add(part))
    }

    fn embedding(&mut self, table: &Matrix) -> Result<(), ModelError> {
        self.add(table)
    }
}

/// GGUF's name of a tensor, where `post_attention_layernorm` is called so; a name without a counterpart stays as it is.
fn gguf_name(name: &str, post_attention: &str) -> String {
    const PARTS: [(&str, &str); 45] = [
        ("input_layernorm", "attn_norm"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.qkv_proj", "attn_qkv"),
        ("self_attn.q_norm", "attn_q_norm"),
        ("self_attn.k_norm", "attn_k_norm"),
        ("self_attn.o_proj", "attn_output"),
        ("linear_attn.in_proj_qkv", "attn_qkv"),
        ("linear_attn.in_proj_z", "attn_gate"),
        ("linear_attn.in_proj_b", "ssm_beta"),
        ("linear_attn.in_proj_a", "ssm_alpha"),
        ("linear_attn.in_proj_ba", "ssm_ba"),
        ("linear_attn.conv1d", "ssm_conv1d"),
        ("linear_attn.norm", "ssm_norm"),
        ("linear_attn.out_proj", "ssm_out"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.gate_up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
        ("mlp.gate", "ffn_gate_inp"),
        ("mlp.router", "ffn_gate_inp"),
        ("mlp.experts.gate_proj", "ffn_gate_exps"),
        ("mlp.experts.up_proj", "ffn_up_exps"),
        ("mlp.experts.down_proj", "ffn_down_exps"),
        ("mlp.shared_expert.gate_proj", "ffn_gate_shexp"),
        ("mlp.shared_expert.up_proj", "ffn_up_shexp"),
        ("mlp.shared_expert.down_proj", "ffn_down_shexp"),
        ("mlp.shared_expert_gate", "ffn_gate_inp_shexp"),
        ("block_sparse_moe.gate", "ffn_gate_inp"),
        ("block_sparse_moe.experts.w1", "ffn_gate_exps"),
        ("block_sparse_moe.experts.w3", "ffn_up_exps"),
        ("block_sparse_moe.experts.w2", "ffn_down_exps"),
        ("pre_feedforward_layernorm", "ffn_norm"),
        ("post_feedforward_layernorm", "post_ffw_norm"),
        ("pre_feedforward_layernorm_2", "pre_ffw_norm_2"),
        ("post_feedforward_layernorm_1", "post_ffw_norm_1"),
        ("post_feedforward_layernorm_2", "post_ffw_norm_2"),
        ("router.proj", "ffn_gate_inp"),
        ("experts.gate_proj", "ffn_gate_exps"),
        ("experts.up_proj", "ffn_up_exps"),
        ("experts.down_proj", "ffn_down_exps"),
        ("per_layer_input_gate", "inp_gate"),
        ("per_layer_projection", "proj"),
        ("post_per_layer_input_norm", "post_norm"),
    ];
    let in_layer = || {
        let (layer, rest) = name.strip_prefix("model.layers.")?.split_once('.')?;
        if rest == "layer_scalar" {
            return Some(format!("blk.{layer}.layer_output_scale.weight"));
        }
        let (part, kind) = rest.rsplit_once('.')?;
        // One tensor has the matrices of all experts.
        let expert = expert_of(name).map(|expert| format!("experts.{expert}."));
        let of_all = expert.map(|expert| part.replace(&expert, "experts."));
        let part = of_all.as_deref().unwrap_or(part);
        let gguf = match (part, kind) {
            ("post_attention_layernorm", _) => post_attention,
            ("self_attn", "sinks") => return Some(format!("blk.{layer}.attn_sinks.weight")),
            ("router", "scale") => return Some(format!("blk.{layer}.ffn_gate_inp.scale")),
            ("router", "per_expert_scale") => return Some(format!("blk.{layer}.ffn_down_exps.scale")),
            ("experts", "gate_up_proj") => return Some(format!("blk.{layer}.ffn_gate_up_exps.weight")),
            ("linear_attn", "A_log") => return Some(format!("blk.{layer}.ssm_a")),
            ("linear_attn", "dt_bias") => return Some(format!("blk.{layer}.ssm_dt.bias")),
            _ => PARTS.iter().find(|(hf, _)| *hf == part)?.1,
        };
        Some(format!("blk.{layer}.{gguf}.{kind}"))
    };
    match name {
        "model.embed_tokens.weight" => "token_embd.weight".to_owned(),
        "model.norm.weight" => "output_norm.weight".to_owned(),
        "lm_head.weight" => "output.weight".to_owned(),
        "model.embed_tokens_per_layer.weight" => "per_layer_token_embd.weight".to_owned(),
        "model.per_layer_model_projection.weight" => "per_layer_model_proj.weight".to_owned(),
        "model.per_layer_projection_norm.weight" => "per_layer_proj_norm.weight".to_owned(),
        _ => in_layer().unwrap_or_else(|| name.to_owned()),
    }
}

/// Which expert a tensor belongs to.
fn expert_of(name: &str) -> Option<usize> {
    let (_, rest) = name.split_once(".experts.")?;
    rest.split_once('.')?.0.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_follow_llama_cpp() {
        let cases = [
            ("model.layers.12.self_attn.q_proj.bias", "blk.12.attn_q.bias"),
            (
                "model.layers.0.post_attention_layernorm.weight",
                "blk.0.ffn_norm.weight",
            ),
            (
                "model.layers.1.mlp.experts.17.up_proj.weight",
                "blk.1.ffn_up_exps.weight",
            ),
            (
                "model.layers.1.mlp.experts.17.up_proj.bias",
                "blk.1.ffn_up_exps.bias",
            ),
            (
                "model.layers.1.block_sparse_moe.experts.7.w3.weight",
                "blk.1.ffn_up_exps.weight",
            ),
            ("model.layers.3.mlp.gate.weight", "blk.3.ffn_gate_inp.weight"),
            ("model.layers.3.mlp.router.bias", "blk.3.ffn_gate_inp.bias"),
            ("model.layers.4.self_attn.sinks", "blk.4.attn_sinks.weight"),
            ("model.layers.5.linear_attn.A_log", "blk.5.ssm_a"),
            ("model.layers.5.linear_attn.dt_bias", "blk.5.ssm_dt.bias"),
            (
                "model.layers.5.linear_attn.in_proj_z.weight",
                "blk.5.attn_gate.weight",
            ),
            ("model.layers.6.layer_scalar", "blk.6.layer_output_scale.weight"),
            ("model.layers.6.router.proj.weight", "blk.6.ffn_gate_inp.weight"),
            ("model.layers.6.router.scale", "blk.6.ffn_gate_inp.scale"),
            (
                "model.layers.6.router.per_expert_scale",
                "blk.6.ffn_down_exps.scale",
            ),
            (
                "model.layers.6.experts.gate_up_proj",
                "blk.6.ffn_gate_up_exps.weight",
            ),
            (
                "model.layers.6.experts.9.down_proj.weight",
                "blk.6.ffn_down_exps.weight",
            ),
            (
                "model.layers.7.per_layer_input_gate.weight",
                "blk.7.inp_gate.weight",
            ),
            (
                "model.per_layer_model_projection.weight",
                "per_layer_model_proj.weight",
            ),
            ("lm_head.weight", "output.weight"),
            ("rope_freqs.weight", "rope_freqs.weight"),
        ];
        for (name, expected) in cases {
            assert_eq!(gguf_name(name, "ffn_norm"), expected);
        }
        assert_eq!(
            gguf_name(
                "model.layers.0.post_attention_layernorm.weight",
                "post_attention_norm"
            ),
            "blk.0.post_attention_norm.weight"
        );
    }
}
