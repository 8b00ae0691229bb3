"""Checkpoints in eight bits or four for scripts/make-goldens, as those who publish them write them, and what they hold."""

import json
import pathlib

import golden_int4
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from safetensors.torch import load_file, save_file

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
BLOCK = 128
# Elements of MXFP4 by their codes, of which the upper half are the negative ones, and how many share an exponent.
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
MXFP4_BLOCK = 32

# Names of tensors beside a weight, in transformers' format and in that of compressed-tensors.
SCALES = ("weight_scale_inv", "weight_scale")
UNNEEDED = ("activation_scale", "input_scale", "k_scale", "v_scale")


def compressed(weights: dict, inputs: dict | None, **more) -> dict:
    """The scheme that compressed-tensors calls `float-quantized`."""
    kind = dict(num_bits=8, type="float", symmetric=True)
    inputs = inputs and kind | inputs
    group = dict(targets=["Linear"], weights=kind | dict(dynamic=False) | weights, input_activations=inputs)
    return dict(format="float-quantized", config_groups={"group_0": group}) | more


TOKENS = dict(strategy="token", dynamic=True)
BLOCKS = dict(strategy="block", block_structure=[BLOCK, BLOCK])

# name of a tiny model: its `quantization_config`
SCHEMES = {
    "qwen3-fp8-block": dict(
        quant_method="fp8",
        fmt="e4m3",
        activation_scheme="dynamic",
        weight_block_size=[BLOCK, BLOCK],
        # One layer as it was, but for its MLP.
        modules_to_not_convert=["lm_head", "model.layers.1.self_attn"],
    ),
    "qwen3-moe-fp8-block": dict(
        quant_method="fp8",
        fmt="e4m3",
        activation_scheme="dynamic",
        weight_block_size=[BLOCK, BLOCK],
        # Routers are left alone.
        modules_to_not_convert=["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"],
    ),
    "ministral3-fp8": dict(
        quant_method="fp8",
        activation_scheme="static",
        dequantize=False,
        weight_block_size=None,
        modules_to_not_convert=["model.vision_tower", "model.multi_modal_projector", "lm_head"],
    ),
    # As AutoFP8 publishes them.
    "llama-fp8-tensor": dict(quant_method="fp8", activation_scheme="dynamic", ignored_layers=["lm_head"]),
    "llama-fp8-channel": compressed(dict(strategy="channel"), TOKENS, ignore=["lm_head"]),
    "llama-fp8-block": compressed(BLOCKS, dict(strategy="group", group_size=BLOCK, dynamic=True), ignore=["re:.*lm_head"]),
    "qwen2-fp8-tensor": compressed(
        dict(strategy="tensor"),
        dict(strategy="tensor", dynamic=False),
        ignore=["lm_head", "model.layers.0.mlp.down_proj"],
        kv_cache_scheme=dict(num_bits=8, type="float", strategy="tensor", dynamic=False, symmetric=True),
    ),
    "gpt-oss-mxfp4": dict(
        quant_method="mxfp4",
        modules_to_not_convert=["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
    ),
    "phi3-fp8-tensor": compressed(dict(strategy="tensor"), TOKENS, ignore=["lm_head"]),
} | golden_int4.SCHEMES


def blocks(weight: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """`[rows, height, cols, width]`, filled up with zeros."""
    rows, cols = (-(-size // step) for size, step in zip(weight.shape, (height, width)))
    whole = torch.zeros(rows * height, cols * width)
    whole[: weight.shape[0], : weight.shape[1]] = weight.float()
    return whole.view(rows, height, cols, width)


def scales_of(weight: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Those at which the largest magnitude of each block is the largest there is."""
    return blocks(weight, height, width).abs().amax((1, 3)) / LARGEST


def spread(scales: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """A scale for each element of a matrix, whatever has one: the matrix, its rows, or blocks."""
    scales = scales.float().reshape(scales.shape if scales.dim() == 2 else (1, 1))
    height, width = (BLOCK if count not in (1, size) else size // count for count, size in zip(scales.shape, shape))
    return scales.repeat_interleave(height, 0).repeat_interleave(width, 1)[: shape[0], : shape[1]]


def quantise(model, directory: pathlib.Path, scheme: dict) -> None:
    """Writes a model of floats as a checkpoint of this scheme."""
    if scheme.get("quant_method") == "fp8":
        write_fp8(model, directory, scheme)
    elif scheme.get("quant_method") == "mxfp4":
        write_mxfp4(model, directory, scheme)
    elif "quant_method" in scheme:
        golden_int4.write_packed(model, directory, scheme)
    else:
        write_compressed(model, directory, scheme)


def write_fp8(model, directory: pathlib.Path, scheme: dict) -> None:
    """As transformers' `FP8Linear` and AutoFP8 have it; quantising with transformers itself needs a GPU."""
    model.save_pretrained(directory)
    file = directory / "model.safetensors"
    tensors = {}
    for name, tensor in load_file(file).items():
        module, _, kind = name.rpartition(".")
        left = scheme.get("modules_to_not_convert") or scheme["ignored_layers"]
        is_left = any(part in module for part in left + ["vision", "projector"])
        if kind != "weight" or not module.endswith("_proj") or is_left:
            tensors[name] = tensor
        elif scheme.get("weight_block_size"):
            scales = scales_of(tensor, BLOCK, BLOCK)
            tensors[f"{module}.weight_scale_inv"] = scales
            tensors[name] = (tensor.float() / spread(scales, tensor.shape)).clamp(-LARGEST, LARGEST).to(FP8)
        elif scheme["activation_scheme"] == "dynamic":
            scale = scales_of(tensor, *tensor.shape).reshape(())
            tensors[f"{module}.weight_scale"] = scale
            tensors[name] = (tensor.float() / scale).clamp(-LARGEST, LARGEST).to(FP8)
        else:
            scale = scales_of(tensor, *tensor.shape).reshape(()).bfloat16()
            tensors[f"{module}.weight_scale_inv"] = scale
            tensors[f"{module}.activation_scale"] = torch.tensor(0.017, dtype=torch.bfloat16)
            tensors[name] = (tensor.float() / scale.float()).clamp(-LARGEST, LARGEST).to(FP8)
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": scheme}, indent=2) + "\n")


def write_mxfp4(model, directory: pathlib.Path, scheme: dict) -> None:
    """As gpt-oss is published, whose experts have an output where transformers has an input."""
    model.save_pretrained(directory)
    file = directory / "model.safetensors"
    tensors = {}
    for name, tensor in load_file(file).items():
        if not name.endswith("_proj"):
            tensors[name] = tensor
            continue
        groups = tensor.float().transpose(1, 2).unflatten(-1, (-1, MXFP4_BLOCK))
        exponents = groups.abs().amax(-1, keepdim=True).log2().floor() - 2
        codes = (groups / exponents.exp2()).abs().unsqueeze(-1).sub(E2M1).abs().argmin(-1)
        codes = (codes + 8 * (groups < 0)).to(torch.uint8)
        tensors[f"{name}_blocks"] = codes[..., ::2] | codes[..., 1::2] << 4
        tensors[f"{name}_scales"] = (exponents.squeeze(-1) + 127).to(torch.uint8)
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": scheme}, indent=2) + "\n")


def write_compressed(model, directory: pathlib.Path, scheme: dict) -> None:
    """By compressed-tensors itself; the scales are what its observers would find."""
    apply_quantization_config(model, QuantizationConfig(**scheme), show_progress=False)
    with torch.no_grad():
        for _, module in model.named_modules():
            if hasattr(module, "weight_scale"):
                rows, cols = module.weight.shape
                scheme = module.quantization_scheme.weights
                strategy = str(scheme.strategy)
                if scheme.type == "int":
                    size = cols if strategy == "channel" else scheme.group_size
                    scales, zeros = golden_int4.observed(module.weight.float().unflatten(1, (-1, size)), scheme.symmetric)
                    module.weight_scale.copy_(scales)
                    if not scheme.symmetric:
                        module.weight_zero_point.copy_(zeros - 8)
                    continue
                height, width = dict(tensor=(rows, cols), channel=(1, cols), block=(BLOCK, BLOCK))[strategy]
                kept = module.weight_scale
                kept.copy_(scales_of(module.weight, height, width).reshape(kept.shape))
            for name in UNNEEDED:
                if hasattr(module, name):
                    getattr(module, name).fill_(0.017)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(directory)
    compressor.update_config(directory)


def dequantise(directory: pathlib.Path, to: pathlib.Path) -> None:
    """The checkpoint in floats, each weight times its scale, rounded to bfloat16 once, as a CPU keeps them."""
    tensors = load_file(directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    scheme = config.pop("quantization_config")
    tensors = golden_int4.dequantised(tensors, scheme)
    plain = {}
    for name, tensor in tensors.items():
        module = name.rpartition(".")[0]
        if tensor.dtype == FP8:
            scales = next(tensors[f"{module}.{scale}"] for scale in SCALES if f"{module}.{scale}" in tensors)
            plain[name] = (tensor.float() * spread(scales, tensor.shape)).bfloat16()
        elif name.endswith("_proj_blocks"):
            exponents = tensors[name.removesuffix("blocks") + "scales"].float() - 127
            codes = torch.stack((tensor & 15, tensor >> 4), -1).flatten(-2).int()
            values = torch.cat((E2M1, -E2M1))[codes] * exponents.exp2().unsqueeze(-1)
            plain[name.removesuffix("_blocks")] = values.flatten(-2).transpose(1, 2).contiguous().bfloat16()
        elif not name.endswith(SCALES + UNNEEDED + ("_proj_scales",)):
            plain[name] = tensor
    save_file(plain, to / "model.safetensors", {"format": "pt"})
    (to / "config.json").write_text(json.dumps(config))


def quantised_modules(directory: pathlib.Path) -> set[str]:
    """Names of the modules whose weights are in eight bits, without what is in front of the layers."""
    tensors = load_file(directory / "model.safetensors")
    names = (name.rpartition(".")[0] for name, tensor in tensors.items() if tensor.dtype == FP8)
    return {name[name.index("layers.") :] for name in names}


def quantise_inputs(model, modules: set[str]) -> None:
    """From now on, inputs of these modules are rounded as a GPU rounds them: in eight bits, with a scale for each token."""

    def rounded(_module, inputs):
        x = inputs[0].float()
        scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / LARGEST
        return ((x / scale).to(FP8).float() * scale).to(inputs[0].dtype)

    for name, module in model.named_modules():
        if "layers." in name and name[name.index("layers.") :] in modules:
            module.register_forward_pre_hook(rounded)
