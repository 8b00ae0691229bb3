//! GGUF files as llama.cpp's converter writes them.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::BufWriter;
use std::path::{Path, PathBuf};

use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Tensor};
use plimsoll_model::rope::{RopeScaling, RopeSpec};
use plimsoll_model::{DecoderSpec, KvCacheDtype, Mlp, Model};

use super::{golden_path, load};

mod states;

use states::{of_states, unfused};

pub type Tensors = BTreeMap<String, Tensor>;

/// What convert_hf_to_gguf.py writes for this model.
pub fn metadata(architecture: &str, spec: &DecoderSpec) -> Vec<(String, Value)> {
    let mut out = vec![
        (
            "general.architecture".to_owned(),
            Value::String(architecture.to_owned()),
        ),
        ("tokenizer.ggml.eos_token_id".to_owned(), Value::U32(2)),
    ];
    let mut add = |key: &str, value| out.push((format!("{architecture}.{key}"), value));
    let size = |value: usize| Value::U32(value as u32);
    let float = |value: f64| Value::F32(value as f32);
    let layer = &spec.layers[0];
    let is_qwen35 = architecture.starts_with("qwen35");
    let is_gemma4 = architecture == "gemma4";
    let full = spec.attention().find(|attention| attention.window.is_none());
    let attention = full.or(layer.attention()).unwrap();
    let rope = attention.rope.as_ref().unwrap();
    let sliding = spec.attention().find(|attention| attention.window.is_some());
    add("block_count", size(spec.layers.len()));
    add("context_length", size(spec.max_position_embeddings));
    add("embedding_length", size(spec.hidden_size));
    match &layer.mlp {
        Mlp::Both(mlp, moe) => {
            add("feed_forward_length", size(mlp.intermediate_size));
            add("expert_count", size(moe.experts));
            add("expert_used_count", size(moe.top_k));
            add("expert_feed_forward_length", size(moe.intermediate_size));
        }
        Mlp::Dense(_) if is_gemma4 => {
            let inner = spec
                .layers
                .iter()
                .map(|layer| size(layer.dense_mlp().intermediate_size));
            add("feed_forward_length", Value::Array(inner.collect()));
        }
        Mlp::Dense(mlp) => add("feed_forward_length", size(mlp.intermediate_size)),
        Mlp::Moe(moe) => {
            // Qwen's is that of dense layers, of which there are none; newer ones do not say.
            if !is_qwen35 {
                add("feed_forward_length", size(moe.intermediate_size));
            }
            add("expert_count", size(moe.experts));
            add("expert_used_count", size(moe.top_k));
            if architecture != "llama" {
                add("expert_feed_forward_length", size(moe.intermediate_size));
            }
            if let Some(shared) = &moe.shared {
                add(
                    "expert_shared_feed_forward_length",
                    size(shared.intermediate_size),
                );
            }
        }
    }
    if let Some(delta_net) = spec.delta_nets().next() {
        let layout = delta_net.layout;
        let full = spec.layers.iter().position(|layer| layer.attention().is_some());
        add("full_attention_interval", size(full.unwrap() + 1));
        add("ssm.conv_kernel", size(layout.taps));
        add("ssm.state_size", size(layout.key_dim));
        add("ssm.group_count", size(layout.key_heads));
        add("ssm.time_step_rank", size(layout.value_heads));
        add("ssm.inner_size", size(layout.values()));
        add("rope.dimension_count", size(rope.rotary_dim));
    }
    add("attention.head_count", size(attention.heads));
    match is_gemma4 {
        false => add("attention.head_count_kv", size(attention.kv_heads)),
        true => {
            let heads = spec.attention().map(|attention| size(attention.kv_heads));
            add("attention.head_count_kv", Value::Array(heads.collect()));
            let sharing = spec.attention().filter(|attention| attention.shares_kv.is_some());
            add("attention.shared_kv_layers", size(sharing.count()));
            let inputs = spec.per_layer.map_or(0, |own| own.width);
            add("embedding_length_per_layer_input", size(inputs));
            let head_dim = sliding.unwrap().head_dim;
            for field in [
                "attention.key_length_swa",
                "attention.value_length_swa",
                "rope.dimension_count_swa",
            ] {
                add(field, size(head_dim));
            }
            add("rope.dimension_count", size(attention.head_dim));
        }
    }
    add("attention.layer_norm_rms_epsilon", Value::F32(layer.norm.eps));
    add("rope.freq_base", float(rope.theta));
    // Phi3MiniModel writes its own.
    if architecture == "phi3" {
        add("rope.dimension_count", size(rope.rotary_dim));
        let window = sliding.and_then(|attention| attention.window);
        add("attention.sliding_window", size(window.unwrap_or(0)));
    } else {
        add("attention.key_length", size(attention.head_dim));
        add("attention.value_length", size(attention.head_dim));
        if let Some(window) = sliding.and_then(|attention| attention.window) {
            add("attention.sliding_window", size(window));
        }
    }
    // `LlamaModel` and what derives from it; for others the number of tokens says so, of which there are none here.
    add("vocab_size", size(spec.vocab_size));
    if architecture == "gemma3" || is_gemma4 {
        let slides = spec
            .attention()
            .map(|attention| Value::Bool(attention.window.is_some()));
        add("attention.sliding_window_pattern", Value::Array(slides.collect()));
        let local = sliding.and_then(|attention| attention.rope.as_deref());
        add("rope.freq_base_swa", float(local.unwrap().theta));
    }
    if let Some(cap) = attention.soft_cap {
        add("attn_logit_softcapping", Value::F32(cap));
    }
    if let Some(cap) = spec.logit_soft_cap {
        add("final_logit_softcapping", Value::F32(cap));
    }
    let text = |text: &str| Value::String(text.to_owned());
    match rope.scaling {
        RopeScaling::Linear { factor } => {
            add("rope.scaling.type", text("linear"));
            add("rope.scaling.factor", float(factor));
        }
        RopeScaling::Yarn {
            factor,
            original_context,
            beta_fast,
            beta_slow,
            attention_factor,
            ..
        } => {
            add("rope.scaling.type", text("yarn"));
            add("rope.scaling.factor", float(factor));
            add(
                "rope.scaling.original_context_length",
                size(original_context as usize),
            );
            add("rope.scaling.yarn_beta_fast", float(beta_fast));
            add("rope.scaling.yarn_beta_slow", float(beta_slow));
            // `mscale_all_dim`, from (0.1 ln factor + 1) / (0.1 mscale_all_dim ln factor + 1).
            let log = 0.1 * factor.ln();
            add(
                "rope.scaling.yarn_log_multiplier",
                float(((log + 1.0) / attention_factor - 1.0) / log),
            );
        }
        RopeScaling::LongRope {
            original_context,
            attention_factor,
            ..
        } => {
            add("rope.scaling.original_context_length", size(original_context));
            add("rope.scaling.attn_factor", float(attention_factor));
        }
        // Its divisors are a tensor.
        RopeScaling::Proportional { .. } | RopeScaling::None | RopeScaling::Llama3 { .. } => {}
    }
    if let Some(scale) = rope.query_scale {
        add("attention.temperature_scale", Value::F32(scale.beta));
    }
    out
}

pub fn write(path: &Path, metadata: &[(String, Value)], tensors: &[(String, QTensor)]) {
    let metadata: Vec<_> = metadata
        .iter()
        .map(|(key, value)| (key.as_str(), value))
        .collect();
    let tensors: Vec<_> = tensors
        .iter()
        .map(|(name, tensor)| (name.as_str(), tensor))
        .collect();
    gguf_file::write(
        &mut BufWriter::new(File::create(path).unwrap()),
        &metadata,
        &tensors,
    )
    .unwrap();
}

/// The renaming of gguf-py's tensor_mapping.py for these families.
pub fn gguf_name(architecture: &str, name: &str) -> String {
    const GEMMA: [(&str, &str); 3] = [
        ("post_attention_layernorm", "post_attention_norm"),
        ("pre_feedforward_layernorm", "ffn_norm"),
        ("post_feedforward_layernorm", "post_ffw_norm"),
    ];
    const GEMMA4: [(&str, &str); 18] = [
        ("post_attention_layernorm", "post_attention_norm"),
        ("pre_feedforward_layernorm_2", "pre_ffw_norm_2"),
        ("post_feedforward_layernorm_1", "post_ffw_norm_1"),
        ("post_feedforward_layernorm_2", "post_ffw_norm_2"),
        ("pre_feedforward_layernorm", "ffn_norm"),
        ("post_feedforward_layernorm", "post_ffw_norm"),
        ("layer_scalar", "layer_output_scale.weight"),
        ("router.proj", "ffn_gate_inp"),
        ("router.scale", "ffn_gate_inp.scale"),
        ("router.per_expert_scale", "ffn_down_exps.scale"),
        ("experts.gate_up_proj", "ffn_gate_up_exps.weight"),
        ("experts.down_proj", "ffn_down_exps.weight"),
        ("model.embed_tokens_per_layer", "per_layer_token_embd"),
        ("model.per_layer_model_projection", "per_layer_model_proj"),
        ("model.per_layer_projection_norm", "per_layer_proj_norm"),
        ("post_per_layer_input_norm", "post_norm"),
        ("per_layer_input_gate", "inp_gate"),
        ("per_layer_projection", "proj"),
    ];
    const GPT_OSS: [(&str, &str); 2] = [
        ("post_attention_layernorm", "post_attention_norm"),
        ("self_attn.sinks", "attn_sinks.weight"),
    ];
    const QWEN35: [(&str, &str); 10] = [
        ("post_attention_layernorm", "post_attention_norm"),
        ("linear_attn.in_proj_qkv", "attn_qkv"),
        ("linear_attn.in_proj_z", "attn_gate"),
        ("linear_attn.in_proj_a", "ssm_alpha"),
        ("linear_attn.in_proj_ba", "ssm_ba"),
        ("linear_attn.in_proj_b", "ssm_beta"),
        ("linear_attn.A_log", "ssm_a"),
        ("linear_attn.dt_bias", "ssm_dt.bias"),
        ("linear_attn.out_proj", "ssm_out"),
        ("linear_attn.", "ssm_"),
    ];
    const ALL: [(&str, &str); 30] = [
        ("model.layers.", "blk."),
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("lm_head", "output"),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.q_norm", "attn_q_norm"),
        ("self_attn.k_norm", "attn_k_norm"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.qkv_proj", "attn_qkv"),
        ("block_sparse_moe.gate.", "ffn_gate_inp."),
        ("block_sparse_moe.experts.w1", "ffn_gate_exps"),
        ("block_sparse_moe.experts.w2", "ffn_down_exps"),
        ("block_sparse_moe.experts.w3", "ffn_up_exps"),
        ("mlp.experts.gate_proj", "ffn_gate_exps"),
        ("mlp.experts.up_proj", "ffn_up_exps"),
        ("mlp.experts.down_proj", "ffn_down_exps"),
        ("mlp.shared_expert.gate_proj", "ffn_gate_shexp"),
        ("mlp.shared_expert.up_proj", "ffn_up_shexp"),
        ("mlp.shared_expert.down_proj", "ffn_down_shexp"),
        ("mlp.shared_expert_gate", "ffn_gate_inp_shexp"),
        ("mlp.gate.", "ffn_gate_inp."),
        ("mlp.router.", "ffn_gate_inp."),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.gate_up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
    ];
    let own: &[_] = match architecture {
        "gemma2" | "gemma3" => &GEMMA,
        "gemma4" => &GEMMA4,
        "gpt-oss" => &GPT_OSS,
        "qwen35" | "qwen35moe" | "qwen3next" => &QWEN35,
        _ => &[],
    };
    let parts = own.iter().chain(&ALL);
    parts.fold(name.to_owned(), |name, (hf, gguf)| name.replace(hf, gguf))
}

/// `LlamaModel.permute` of convert_hf_to_gguf.py.
pub fn permute(weight: &Tensor, heads: usize) -> Tensor {
    let (rows, cols) = weight.dims2().unwrap();
    let pairs = weight.reshape((heads, 2, rows / heads / 2, cols)).unwrap();
    pairs
        .transpose(1, 2)
        .unwrap()
        .contiguous()
        .unwrap()
        .reshape((rows, cols))
        .unwrap()
}

/// As the converter would write them, norms and biases in f32 and matrices as `dtype`.
pub fn converted(
    spec: &DecoderSpec,
    architecture: &str,
    tensors: &Tensors,
    dtype: GgmlDType,
) -> Vec<(String, QTensor)> {
    let convert = |(name, tensor): (&String, &Tensor)| {
        let tensor = tensor.to_dtype(DType::F32).unwrap();
        let attention = spec.attention().next().unwrap();
        let heads = if name.contains("q_proj.weight") {
            attention.heads
        } else {
            attention.kv_heads
        };
        let rotated = name.contains("q_proj.weight") || name.contains("k_proj.weight");
        let tensor = match architecture {
            "llama" | "mistral3" | "smollm3" if rotated => permute(&tensor, heads),
            // `norm_shift`: Gemma's norms are stored less 1.
            "gemma2" | "gemma3" if name.ends_with("norm.weight") => (tensor + 1.0).unwrap(),
            "qwen35" | "qwen35moe" | "qwen3next" => of_states(spec, architecture, name, tensor),
            _ => tensor,
        };
        // `shared_expert_gate`.
        let is_vector = tensor.rank() == 2 && tensor.dims()[0] == 1;
        let tensor = if is_vector {
            tensor.squeeze(0).unwrap()
        } else {
            tensor
        };
        // Routers stay as they are, and convolutions.
        let kept = [
            "mlp.gate.weight",
            "moe.gate.weight",
            "router.weight",
            "conv1d.weight",
        ];
        let is_kept = kept.iter().any(|kept| name.ends_with(kept));
        let dtype = match tensor.rank() >= 2 && !is_kept {
            true => dtype,
            false => GgmlDType::F32,
        };
        (
            gguf_name(architecture, name),
            QTensor::quantize(&tensor, dtype).unwrap(),
        )
    };
    let tensors = match architecture {
        "gpt-oss" => parted(tensors),
        "qwen3next" => unfused(spec, &merged(tensors)),
        _ => merged(tensors),
    };
    tensors.iter().map(convert).collect()
}

/// The same weights, as quantisation rounded them, in f32.
pub fn dequantised(tensors: &[(String, QTensor)]) -> Vec<(String, QTensor)> {
    let float = |tensor: &QTensor| {
        let tensor = tensor.dequantize(&Device::Cpu).unwrap();
        QTensor::quantize(&tensor, GgmlDType::F32).unwrap()
    };
    let tensors = tensors.iter();
    tensors
        .map(|(name, tensor)| (name.clone(), float(tensor)))
        .collect()
}

/// The matrices of all experts as one tensor (`modify_tensors` of the families with experts).
fn merged(tensors: &Tensors) -> Tensors {
    let mut out = Tensors::new();
    for (name, tensor) in tensors {
        // Gemma 4's are one tensor already.
        let parts = name.split_once(".experts.");
        let parts = parts.and_then(|(before, rest)| Some((before, rest.split_once('.')?)));
        let Some((before, (index, part))) = parts else {
            out.insert(name.clone(), tensor.clone());
            continue;
        };
        if index == "0" {
            let of = |index| tensors.get(&format!("{before}.experts.{index}.{part}"));
            let all: Vec<_> = (0..).map_while(of).collect();
            out.insert(
                format!("{before}.experts.{part}"),
                Tensor::stack(&all, 0).unwrap(),
            );
        }
    }
    out
}

/// gpt-oss's experts, whose gate and up take turns, each by itself and outputs first (`GptOssModel.modify_tensors`). MXFP4, which
/// the converter keeps, becomes what it stands for.
fn parted(tensors: &Tensors) -> Tensors {
    let mut out = Tensors::new();
    for (name, tensor) in tensors {
        let (name, tensor) = match name.strip_suffix("_blocks") {
            Some(matrix) => (matrix, of_mxfp4(tensor, &tensors[&format!("{matrix}_scales")])),
            None if name.ends_with("_scales") => continue,
            None => match name.ends_with("gate_up_proj") || name.ends_with("down_proj") {
                true => (&name[..], tensor.transpose(1, 2).unwrap().contiguous().unwrap()),
                false => (&name[..], tensor.clone()),
            },
        };
        let (name, kind) = match name.strip_suffix("_bias") {
            Some(name) => (name, "bias"),
            None if name.contains(".experts.") => (name, "weight"),
            None => {
                out.insert(name.to_owned(), tensor);
                continue;
            }
        };
        match name.strip_suffix("gate_up_proj") {
            None => {
                out.insert(format!("{name}.{kind}"), tensor);
            }
            Some(module) => {
                for (part, first) in [("gate_proj", 0), ("up_proj", 1)] {
                    let rows: Vec<u32> = (first..tensor.dims()[1] as u32).step_by(2).collect();
                    let rows = Tensor::new(rows, &Device::Cpu).unwrap();
                    out.insert(
                        format!("{module}{part}.{kind}"),
                        tensor.index_select(&rows, 1).unwrap(),
                    );
                }
            }
        }
    }
    out
}

/// `[.., blocks, 16]` bytes with two elements each, the first in the lower bits, times 2^(scale - 127).
fn of_mxfp4(blocks: &Tensor, scales: &Tensor) -> Tensor {
    const LEVELS: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let shape = blocks.dims().to_vec();
    let bytes: Vec<u8> = blocks.flatten_all().unwrap().to_vec1().unwrap();
    let scales: Vec<u8> = scales.flatten_all().unwrap().to_vec1().unwrap();
    let level = |code: u8| LEVELS[usize::from(code & 7)] * if code & 8 == 0 { 1.0 } else { -1.0 };
    let values: Vec<f32> = bytes
        .iter()
        .enumerate()
        .flat_map(|(at, byte)| {
            let scale = 2_f32.powi(i32::from(scales[at / 16]) - 127);
            [level(byte & 15) * scale, level(byte >> 4) * scale]
        })
        .collect();
    Tensor::from_vec(values, (shape[0], shape[1], shape[2] * 32), &Device::Cpu).unwrap()
}

/// Those of the decoder, without the prefix that they have beside a vision tower.
pub fn golden_tensors(name: &str) -> Tensors {
    let files = std::fs::read_dir(golden_path(name))
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let files = files.filter(|path| {
        path.extension()
            .is_some_and(|extension| extension == "safetensors")
    });
    files
        .flat_map(|path| candle_core::safetensors::load(path, &Device::Cpu).unwrap())
        .filter(|(name, _)| {
            let others = [
                "vision_tower",
                "model.vision_tower",
                "model.audio_tower",
                "model.embed_vision",
                "model.embed_audio",
                "multi_modal_projector",
                "model.visual",
            ];
            !others.iter().any(|part| name.starts_with(part))
        })
        .map(|(name, tensor)| (name.replace("language_model.", ""), tensor))
        .collect()
}

pub fn gguf_architecture(model: &Model) -> &'static str {
    model.config().architecture.gguf_name().unwrap_or("llama")
}

pub fn golden_gguf(directory: &Path, name: &str) -> PathBuf {
    let model = load(name, KvCacheDtype::Auto);
    let architecture = gguf_architecture(&model);
    let mut tensors = converted(model.spec(), architecture, &golden_tensors(name), GgmlDType::F32);
    let mut add = |name: &str, values: Vec<f32>| {
        let values = Tensor::new(values, &Device::Cpu).unwrap();
        tensors.push((
            name.to_owned(),
            QTensor::quantize(&values, GgmlDType::F32).unwrap(),
        ));
    };
    for rope in model.spec().ropes() {
        // `Gemma4Model.generate_extra_tensors`.
        if let RopeScaling::Proportional { pairs, .. } = rope.scaling {
            let divisors = (0..rope.rotary_dim / 2).map(|pair| if pair < pairs { 1.0 } else { 1e30 });
            add("rope_freqs.weight", divisors.collect());
        }
    }
    let rope = model.spec().ropes()[0].clone();
    match &rope.scaling {
        RopeScaling::Llama3 { .. } => {
            // The converter spells the scaling out as divisors of the unscaled frequencies.
            let unscaled = RopeSpec {
                scaling: RopeScaling::None,
                ..rope.clone()
            };
            let frequencies = |rope: &RopeSpec| rope.tables()[0].frequencies.clone();
            let factors: Vec<f32> = frequencies(&unscaled)
                .iter()
                .zip(frequencies(&rope))
                .map(|(plain, s)| plain / s)
                .collect();
            assert!(factors[0] == 1.0 && *factors.last().unwrap() > 7.9);
            add("rope_freqs.weight", factors);
        }
        RopeScaling::LongRope { short, long, .. } => {
            for (name, factors) in [("rope_factors_long", long), ("rope_factors_short", short)] {
                let factors = factors.iter().map(|&factor| factor as f32).collect();
                add(&format!("{name}.weight"), factors);
            }
        }
        _ => {}
    }
    let path = directory.join(format!("{name}.gguf"));
    write(&path, &metadata(architecture, model.spec()), &tensors);
    path
}

pub const LLAMA_256: &str = r#"{"architectures": ["LlamaForCausalLM"], "vocab_size": 256, "hidden_size": 256,
    "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 256, "rope_theta": 10000.0}"#;

pub fn random_tensors(spec: &DecoderSpec) -> Tensors {
    let normal = |rows, cols: usize| {
        Tensor::randn(0f32, 1.0 / (cols as f32).sqrt(), (rows, cols), &Device::Cpu).unwrap()
    };
    let ones_of = |len: usize| Tensor::ones(len, DType::F32, &Device::Cpu).unwrap();
    let ones = || ones_of(spec.hidden_size);
    let mut tensors = Tensors::new();
    tensors.insert(
        "model.embed_tokens.weight".to_owned(),
        normal(spec.vocab_size, spec.hidden_size),
    );
    tensors.insert(
        "lm_head.weight".to_owned(),
        normal(spec.vocab_size, spec.hidden_size),
    );
    tensors.insert("model.norm.weight".to_owned(), ones());
    for (layer, of) in spec.layers.iter().enumerate() {
        let attention = of.attention().unwrap();
        let (q, kv) = (attention.q_size(), attention.kv_size());
        let mut add =
            |name: &str, tensor| tensors.insert(format!("model.layers.{layer}.{name}.weight"), tensor);
        add("input_layernorm", ones());
        add("post_attention_layernorm", ones());
        add("self_attn.q_proj", normal(q, spec.hidden_size));
        add("self_attn.k_proj", normal(kv, spec.hidden_size));
        add("self_attn.v_proj", normal(kv, spec.hidden_size));
        add("self_attn.o_proj", normal(spec.hidden_size, q));
        if attention.qk_norm {
            add("self_attn.q_norm", ones_of(attention.head_dim));
            add("self_attn.k_norm", ones_of(attention.head_dim));
        }
        let mut add_mlp = |module: &str, inner| {
            add(&format!("{module}.gate_proj"), normal(inner, spec.hidden_size));
            add(&format!("{module}.up_proj"), normal(inner, spec.hidden_size));
            add(&format!("{module}.down_proj"), normal(spec.hidden_size, inner));
        };
        match &of.mlp {
            Mlp::Both(..) => unreachable!("none of these models has both"),
            Mlp::Dense(mlp) => add_mlp("mlp", mlp.intermediate_size),
            Mlp::Moe(moe) => {
                for expert in 0..moe.experts {
                    add_mlp(&format!("mlp.experts.{expert}"), moe.intermediate_size);
                }
                add("mlp.gate", normal(moe.experts, spec.hidden_size));
            }
        }
    }
    tensors
}
