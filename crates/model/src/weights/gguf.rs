//! Weights of a GGUF file under the names of Hugging Face checkpoints.

use std::borrow::Cow;
use std::path::Path;

use plimsoll_kernels::WeightType;

use super::{Source, Tensor};
use crate::gguf::GgufFile;
use crate::{Architecture, DecoderSpec, ModelError, Shape};

/// A GGUF file as a source of weights.
#[derive(Debug)]
pub(crate) struct GgufWeights<'a> {
    file: &'a GgufFile,
    /// Sizes of the heads whose rows the converter interleaved, for q and k.
    interleaved: Option<Heads>,
}

#[derive(Clone, Copy, Debug)]
struct Heads {
    q: usize,
    k: usize,
}

impl<'a> GgufWeights<'a> {
    pub(crate) fn new(file: &'a GgufFile, architecture: Architecture, spec: &DecoderSpec) -> Self {
        // llama.cpp rotates neighbouring pairs for `llama` and halves for the others, and its converter orders the
        // rows accordingly (`LlamaModel.permute` in convert_hf_to_gguf.py).
        let interleaved = match architecture {
            Architecture::Llama | Architecture::Mistral => Some(Heads {
                q: spec.num_heads,
                k: spec.num_kv_heads,
            }),
            Architecture::Qwen2 | Architecture::Qwen3 => None,
        };
        Self { file, interleaved }
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
    fn tensor(&self, name: &str, _expected: &[usize]) -> Result<Option<Tensor<'_>>, ModelError> {
        let name = self.stored_name(name);
        let Some((info, data)) = self.file.tensor(&name) else {
            return Ok(None);
        };
        let data = match self.interleaved_heads(&name) {
            Some(heads) => Cow::Owned(halves_from_pairs(self.file.path(), data, info.shape[0], heads)?),
            None => Cow::Borrowed(data),
        };
        let shape = Shape(info.shape.clone());
        Ok(Some(Tensor {
            name,
            dtype: WeightType::from(info.dtype),
            shape,
            data,
        }))
    }

    fn names(&self) -> Vec<String> {
        self.file.tensor_names().map(str::to_owned).collect()
    }

    fn total_bytes(&self) -> u64 {
        self.file.tensor_bytes()
    }

    fn stored_name(&self, name: &str) -> String {
        gguf_name(name)
    }
}

/// Reorders the rows of each head from (0, d/2, 1, d/2 + 1, ...) back to (0, 1, 2, ...). Rows are whole blocks in every
/// quantised type, so this moves bytes.
fn halves_from_pairs(path: &Path, data: &[u8], rows: usize, heads: usize) -> Result<Vec<u8>, ModelError> {
    if rows == 0 || !rows.is_multiple_of(2 * heads) {
        return Err(ModelError::corrupt(
            path,
            format!("{rows} rows of q or k are not {heads} heads of even size"),
        ));
    }
    let row_bytes = data.len() / rows;
    let head_dim = rows / heads;
    let mut out = Vec::with_capacity(data.len());
    for head in data.chunks_exact(head_dim * row_bytes) {
        for row in 0..head_dim {
            let stored = 2 * (row % (head_dim / 2)) + row / (head_dim / 2);
            out.extend_from_slice(&head[stored * row_bytes..(stored + 1) * row_bytes]);
        }
    }
    Ok(out)
}

/// GGUF's name of a tensor; a name without a counterpart stays as it is.
fn gguf_name(name: &str) -> String {
    const PARTS: [(&str, &str); 11] = [
        ("input_layernorm", "attn_norm"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.q_norm", "attn_q_norm"),
        ("self_attn.k_norm", "attn_k_norm"),
        ("self_attn.o_proj", "attn_output"),
        ("post_attention_layernorm", "ffn_norm"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
    ];
    let in_layer = || {
        let (layer, rest) = name.strip_prefix("model.layers.")?.split_once('.')?;
        let (part, kind) = rest.rsplit_once('.')?;
        let (_, gguf) = PARTS.iter().find(|(hf, _)| *hf == part)?;
        Some(format!("blk.{layer}.{gguf}.{kind}"))
    };
    match name {
        "model.embed_tokens.weight" => "token_embd.weight".to_owned(),
        "model.norm.weight" => "output_norm.weight".to_owned(),
        "lm_head.weight" => "output.weight".to_owned(),
        _ => in_layer().unwrap_or_else(|| name.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_follow_llama_cpp() {
        assert_eq!(
            gguf_name("model.layers.12.self_attn.q_proj.bias"),
            "blk.12.attn_q.bias"
        );
        assert_eq!(
            gguf_name("model.layers.0.post_attention_layernorm.weight"),
            "blk.0.ffn_norm.weight"
        );
        assert_eq!(gguf_name("lm_head.weight"), "output.weight");
        assert_eq!(gguf_name("rope_freqs.weight"), "rope_freqs.weight");
    }

    /// The converter's own words: `w.reshape(heads, 2, d / 2).swapaxes(1, 2)`.
    #[test]
    fn undoes_the_converters_permutation() {
        let (heads, half) = (3_u8, 4_u8);
        let original: Vec<u8> = (0..heads * 2 * half).collect();
        let row = |head: u8, pair: u8, side: u8| head * 2 * half + side * half + pair;
        let pairs = (0..heads).flat_map(|h| (0..half).flat_map(move |p| [row(h, p, 0), row(h, p, 1)]));
        let converted: Vec<u8> = pairs.collect();
        assert_ne!(converted, original);
        let rows = usize::from(heads * 2 * half);
        assert_eq!(
            halves_from_pairs(Path::new(""), &converted, rows, 3).unwrap(),
            original
        );
        assert!(halves_from_pairs(Path::new(""), &converted, rows, 5).is_err());
    }
}
