"""Checkpoints of integers of four bits for scripts/make-goldens: AWQ and GPTQ, packed as AutoAWQ and GPTQModel publish them, and
what those of compressed-tensors hold."""

import json
import pathlib

import torch
from safetensors.torch import load_file, save_file

# What a word of AWQ holds from its lowest bits on.
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
ORDER = list(range(8))


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
}


def observed(grouped: torch.Tensor, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales, and zeros of codes from 0 to 15, of the last dimension of weights."""
    if symmetric:
        scales = grouped.abs().amax(-1) / 7.5
        return scales, torch.full_like(scales, 8, dtype=torch.int32)
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    scales = (high - low) / 15
    return scales, (-low / scales).round().clamp(0, 15).int()


def words(codes: torch.Tensor, order: list[int]) -> torch.Tensor:
    """Eight neighbouring codes of the last dimension in each word."""
    codes = codes.long().unflatten(-1, (-1, 8))[..., order]
    packed = (codes << torch.arange(0, 32, 4)).sum(-1)
    # As int32 has it.
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int()


def codes(packed: torch.Tensor, order: list[int]) -> torch.Tensor:
    """What `words` packs."""
    found = (packed.long() & 0xFFFFFFFF).unsqueeze(-1) >> torch.arange(0, 32, 4) & 15
    return found[..., torch.tensor(order).argsort()].flatten(-2)


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


def write_packed(model, directory: pathlib.Path, scheme: dict) -> None:
    """AWQ or GPTQ."""
    model.save_pretrained(directory)
    file = directory / "model.safetensors"
    tensors = {}
    is_awq = scheme["quant_method"] == "awq"
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
        found = (steps.round() + zeros[:, index]).clamp(0, 15).int()
        tensors[f"{module}.scales"] = scales.T.contiguous()
        if is_awq:
            tensors[f"{module}.qweight"] = words(found.T, AWQ_ORDER)
            tensors[f"{module}.qzeros"] = words(zeros.T, AWQ_ORDER)
            continue
        tensors[f"{module}.qweight"] = words(found, ORDER).T.contiguous()
        qzeros = words(zeros.T, ORDER)
        is_first = scheme.get("checkpoint_format", "gptq") == "gptq"
        tensors[f"{module}.qzeros"] = qzeros - 0x11111111 if is_first else qzeros
        if scheme["quant_method"] == "gptq":
            tensors[f"{module}.g_idx"] = index.int()
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": scheme}, indent=2) + "\n")


def dequantised(tensors: dict, scheme: dict) -> dict:
    """The weights that a checkpoint of four bits means, rounded to bfloat16 once; the others as they are."""
    plain = {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")

        def part(of: str) -> torch.Tensor:
            return tensors[f"{module}.{of}"]

        if kind == "weight_packed":
            found, scales = codes(tensor, ORDER)[:, : part("weight_shape")[1]], part("weight_scale")
            zeros = 8
            if f"{module}.weight_zero_point" in tensors:
                zeros = codes(part("weight_zero_point").T.contiguous(), ORDER).T[: len(scales)]
        elif kind == "qweight" and scheme["quant_method"] == "awq":
            found, scales = codes(tensor, AWQ_ORDER).T, part("scales").T
            zeros = codes(part("qzeros"), AWQ_ORDER).T
        elif kind == "qweight":
            is_first = scheme.get("checkpoint_format", "gptq") == "gptq"
            found, scales = codes(tensor.T.contiguous(), ORDER), part("scales").T
            zeros = codes(part("qzeros") + (0x11111111 if is_first else 0), ORDER).T
        else:
            if not kind.startswith(("weight_", "qzeros", "scales", "g_idx")):
                plain[name] = tensor
            continue
        groups = torch.arange(found.shape[1]) // (found.shape[1] // scales.shape[1])
        index = tensors.get(f"{module}.g_idx", groups).long()
        zeros = zeros[:, index] if isinstance(zeros, torch.Tensor) else zeros
        plain[f"{module}.weight"] = ((found - zeros) * scales.float()[:, index]).bfloat16().contiguous()
    return plain
