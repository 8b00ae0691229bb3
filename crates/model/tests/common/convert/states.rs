//! Layers with states as llama.cpp's converter writes them.

use candle_core::{Device, Tensor};
use plimsoll_model::DecoderSpec;

use super::Tensors;

/// `Qwen3NextModel.modify_tensors`; of what came after it, heads of v so that those of q and k take turns
/// (`_LinearAttentionVReorderBase`).
pub(super) fn of_states(spec: &DecoderSpec, architecture: &str, name: &str, tensor: Tensor) -> Tensor {
    let layout = spec.delta_nets().next().unwrap().layout;
    let (groups, heads) = (layout.key_heads, layout.value_heads);
    // The elements of heads of v, from `first` on, along a dimension.
    let tiled = |tensor: Tensor, dim: usize, first: usize, of_head: usize| {
        if architecture == "qwen3next" {
            return tensor;
        }
        let order: Vec<u32> = (0..tensor.dims()[dim])
            .map(|at| {
                let Some(at_v) = at.checked_sub(first) else {
                    return at as u32;
                };
                let (head, within) = (at_v / of_head, at_v % of_head);
                let stored = head % groups * (heads / groups) + head / groups;
                (first + stored * of_head + within) as u32
            })
            .collect();
        let order = Tensor::new(order, &Device::Cpu).unwrap();
        tensor.contiguous().unwrap().index_select(&order, dim).unwrap()
    };
    let part = name.rsplit_once("linear_attn.").map(|(_, part)| part);
    match part {
        Some("in_proj_qkv.weight") => tiled(tensor, 0, 2 * layout.keys(), layout.value_dim),
        Some("conv1d.weight") => tiled(tensor.squeeze(1).unwrap(), 0, 2 * layout.keys(), layout.value_dim),
        Some("in_proj_z.weight") => tiled(tensor, 0, 0, layout.value_dim),
        Some("in_proj_a.weight" | "in_proj_b.weight" | "dt_bias") => tiled(tensor, 0, 0, 1),
        Some("A_log") => tiled(tensor.exp().unwrap().neg().unwrap(), 0, 0, 1),
        Some("out_proj.weight") => tiled(tensor, 1, 0, layout.value_dim),
        Some(_) => tensor,
        None if name.ends_with("norm.weight") => (tensor + 1.0).unwrap(),
        None => tensor,
    }
}

/// q, k, v and z of all groups apart: q, k and v as one matrix, z as another (`Qwen3NextModel.modify_tensors`).
pub(super) fn unfused(spec: &DecoderSpec, tensors: &Tensors) -> Tensors {
    let layout = spec.delta_nets().next().unwrap().layout;
    let (groups, keys) = (layout.key_heads, layout.key_dim);
    let values = layout.values() / groups;
    let mut out = Tensors::new();
    for (name, tensor) in tensors {
        let Some(module) = name.strip_suffix("in_proj_qkvz.weight") else {
            out.insert(name.clone(), tensor.clone());
            continue;
        };
        let hidden = tensor.dims()[1];
        let grouped = tensor.reshape((groups, 2 * keys + 2 * values, hidden)).unwrap();
        let part = |first, rows| {
            let part = grouped.narrow(1, first, rows).unwrap().contiguous().unwrap();
            part.reshape((groups * rows, hidden)).unwrap()
        };
        let qkv = [part(0, keys), part(keys, keys), part(2 * keys, values)];
        let qkv = Tensor::cat(&qkv, 0).unwrap();
        out.insert(format!("{module}in_proj_qkv.weight"), qkv);
        out.insert(
            format!("{module}in_proj_z.weight"),
            part(2 * keys + values, values),
        );
    }
    out
}
