"""Checkpoints of integers of four bits for scripts/make-goldens: packed and read by AutoAWQ, GPTQModel, AutoRound and
compressed-tensors themselves. None of them needs a GPU for that."""

import json
import pathlib

import torch
from auto_round.export.export_to_awq.utils import WQLinear_GEMM as AutoRoundAwq
from auto_round.export.export_to_awq.utils import dequantize_gemm as dequantize_auto_round_awq
from auto_round_extension.torch.qlinear_torch_zp import QuantLinear as AutoRoundGptq
from awq.modules.linear.gemm import WQLinear_GEMM as AutoAwq
from awq.utils.packing_utils import dequantize_gemm
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from gptqmodel.nn_modules.qlinear.torch import TorchLinear as Gptq
from gptqmodel.quantization import QuantizeConfig
from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module, convert_gptq_v2_to_v1_format_module
from safetensors.torch import load_file, save_file


def group(size: int, **more) -> dict:
    """The scheme that compressed-tensors calls `pack-quantized`."""
    strategy = dict(strategy="channel") if size < 0 else dict(strategy="group", group_size=size)
    weights = dict(num_bits=4, type="int", symmetric=True, dynamic=False) | strategy | more
    groups = {"group_0": dict(targets=["Linear"], weights=weights)}
    return dict(format="pack-quantized", config_groups=groups, ignore=["lm_head"])


# name of a tiny model: its `quantization_config`
SCHEMES = {
    "llama-int4-group-128": group(128),
    "qwen2-int4-group-32": group(32, symmetric=False) | dict(ignore=["lm_head", "model.layers.0.mlp.down_proj"]),
    "phi3-int4-channel": group(-1),
    "qwen3-int4-group-128": group(128, symmetric=False),
    "qwen3-awq": dict(
        quant_method="awq",
        version="gemm",
        bits=4,
        group_size=128,
        zero_point=True,
        # The last layer's attention as it was.
        modules_to_not_convert=["model.layers.1.self_attn"],
    ),
    "qwen3-moe-awq": dict(quant_method="awq", version="gemm", bits=4, group_size=32, zero_point=True),
    "llama-gptq": dict(
        quant_method="gptq", bits=4, group_size=128, sym=True, desc_act=False, checkpoint_format="gptq", lm_head=False
    ),
    "qwen3-gptq-order": dict(
        quant_method="gptq", bits=4, group_size=32, sym=False, desc_act=True, checkpoint_format="gptq_v2", lm_head=False
    ),
    "llama-auto-round": dict(
        quant_method="auto-round",
        packing_format="auto_round:auto_gptq",
        bits=4,
        group_size=64,
        sym=False,
        data_type="int",
        extra_config={"model.layers.1.mlp.down_proj": dict(bits=16, data_type="float")},
    ),
    "qwen2-auto-round-awq": dict(
        quant_method="auto-round", packing_format="auto_round:auto_awq", bits=4, group_size=64, sym=False, data_type="int"
    ),
}


def observed(grouped: torch.Tensor, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales, and zeros of codes from 0 to 15, of the last dimension of weights."""
    if symmetric:
        scales = grouped.abs().amax(-1) / 7.5
        return scales, torch.full_like(scales, 8, dtype=torch.int32)
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    scales = (high - low) / 15
    return scales, (-low / scales).round().clamp(0, 15).int()


def is_left(module: str, scheme: dict) -> bool:
    never = module.endswith(("lm_head", "mlp.gate"))
    lists = (scheme.get("modules_to_not_convert") or []) + list(scheme.get("extra_config") or [])
    return never or any(part in module for part in lists)


def index_of(module: str, inputs: int, scheme: dict) -> torch.Tensor:
    """The group of each input. Modules with the same inputs have the same order, as it comes from their inputs."""
    groups = torch.arange(inputs) // scheme["group_size"]
    if not scheme.get("desc_act"):
        return groups.int()
    layer, part = module.split(".")[2], module.rpartition(".")[2]
    sharing = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1, "gate_proj": 2, "up_proj": 2, "down_proj": 3}
    generator = torch.Generator().manual_seed(4 * int(layer) + sharing[part])
    return groups[torch.randperm(inputs, generator=generator)].int()


def linear(weight: torch.Tensor) -> torch.nn.Linear:
    module = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    module.weight.data = weight
    return module


def gptq(shape: torch.Size, scheme: dict) -> Gptq:
    """`[outputs, inputs]`."""
    how = dict(bits=4, group_size=scheme["group_size"], sym=scheme["sym"], desc_act=scheme["desc_act"])
    return Gptq(**how, in_features=shape[1], out_features=shape[0], register_buffers=True).eval()


def packed(weight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, index: torch.Tensor, scheme: dict) -> dict:
    """The tensors of a linear layer by the library that publishes the format. Scales and zeros are `[outputs, groups]`."""
    size = scheme["group_size"]
    shape = weight.shape
    module = linear(weight)
    if scheme["quant_method"] == "awq":
        layer = AutoAwq.from_linear(module, 4, size, scales=scales.T.contiguous(), zeros=zeros.T.contiguous())
    elif scheme["quant_method"] == "gptq":
        layer = gptq(shape, scheme)
        layer.pack_original(module, scales.float(), zeros, index.int())
        if scheme["checkpoint_format"] == "gptq":
            convert_gptq_v2_to_v1_format_module(layer, QuantizeConfig(bits=4, group_size=size, offload_to_disk=False))
    elif scheme["packing_format"] == "auto_round:auto_awq":
        layer = AutoRoundAwq.from_linear(
            module, 4, size, scales=scales.T.contiguous(), zeros=zeros.T.contiguous(), device="cpu"
        )
    else:
        layer = AutoRoundGptq(4, size, shape[1], shape[0], bias=False)
        layer.pack(module, scales.float(), zeros, device="cpu")
    return {name: tensor.contiguous() for name, tensor in layer.state_dict().items()}


def unpacked(found: dict, scheme: dict) -> torch.Tensor:
    """The weight that the tensors of a linear layer mean, by the same library, in float32."""
    found = {name: tensor.float() if name == "scales" else tensor.clone() for name, tensor in found.items()}
    size = scheme["group_size"]
    if scheme["quant_method"] == "awq":
        return dequantize_gemm(found["qweight"], found["qzeros"], found["scales"], 4, size).T
    if scheme.get("packing_format") == "auto_round:auto_awq":
        return dequantize_auto_round_awq(found["qweight"], found["qzeros"], found["scales"], 4, size).T
    shape = (found["qweight"].shape[1], 8 * found["qweight"].shape[0])
    if scheme["quant_method"] == "gptq":
        layer = gptq(shape, scheme)
        for name, tensor in found.items():
            layer.register_buffer(name, tensor)
        if scheme["checkpoint_format"] == "gptq":
            convert_gptq_v1_to_v2_format_module(layer, 4, torch.int32)
        return layer.dequantize_weight().T
    layer = AutoRoundGptq(4, size, shape[1], shape[0], bias=False)
    for name, tensor in found.items():
        layer.register_buffer(name, tensor)
    # What it makes of the inputs that are 1 one by one.
    return layer(torch.eye(shape[1])).T


def write_packed(model, directory: pathlib.Path, scheme: dict) -> None:
    """AWQ, GPTQ or AutoRound."""
    model.save_pretrained(directory)
    file = directory / "model.safetensors"
    tensors = {}
    for name, tensor in load_file(file).items():
        module = name.removesuffix(".weight")
        if module == name or tensor.dim() != 2 or "embed_tokens" in name or is_left(module, scheme):
            tensors[name] = tensor
            continue
        index = index_of(module, tensor.shape[1], scheme).long()
        grouped = tensor.float()[:, index.argsort(stable=True)].unflatten(1, (-1, scheme["group_size"]))
        scales, zeros = observed(grouped, scheme.get("sym", False))
        scales = scales.half()
        steps = tensor.float() / scales.float()[:, index]
        found = (steps.round() + zeros[:, index]).clamp(0, 15) - zeros[:, index]
        # Of these very numbers, so that the library rounds nothing.
        weight = found * scales.float()[:, index]
        for part, packed_tensor in packed(weight, scales, zeros, index, scheme).items():
            tensors[f"{module}.{part}"] = packed_tensor
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": scheme}, indent=2) + "\n")


def dequantised(tensors: dict, scheme: dict) -> dict:
    """The weights that a checkpoint of four bits means, rounded to bfloat16 once; the others as they are."""
    modules: dict[str, dict] = {}
    plain = {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        if f"{module}.weight_packed" in tensors or f"{module}.qweight" in tensors:
            modules.setdefault(module, {})[kind] = tensor
        else:
            plain[name] = tensor
    for module, found in modules.items():
        bias = found.pop("bias", None)
        if bias is not None:
            plain[f"{module}.bias"] = bias
        if "weight_packed" in found:
            group = QuantizationConfig(**scheme).config_groups["group_0"]
            found["weight_scale"] = found["weight_scale"].float()
            weight = BaseCompressor.get_value_from_registry("pack-quantized").decompress(found, group)["weight"]
        else:
            weight = unpacked(found, scheme)
        plain[f"{module}.weight"] = weight.bfloat16().contiguous()
    return plain
