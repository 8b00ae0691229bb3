"""SmolLM2 quantised, for scripts/make-goldens: checkpoints that compressed-tensors writes of the default model, and what they say.

The weights of the GGUF file, dequantised by transformers and rounded to bfloat16, are the reference. Checkpoints are too large for git:
the golden file has their SHA-256, and the tests write the same bytes from the same GGUF file by the rules of compressed-tensors."""

import copy
import hashlib
import importlib.metadata
import json
import pathlib
import tempfile

import golden_int4
import golden_quantised
import torch
import transformers
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file

SCHEMES = {
    "bf16": None,
    "fp8-channel": golden_quantised.compressed(dict(strategy="channel"), golden_quantised.TOKENS, ignore=["lm_head"]),
    "int4-group-64": golden_int4.group(64),
}
# Numbers of tokens that follow, and of the best logits that are kept.
NEW_TOKENS, TOP = 24, 64


def write(model, directory: pathlib.Path, scheme: dict | None) -> None:
    """Quantised by compressed-tensors, with the scales that it computes from the least and the largest weight."""
    if scheme is None:
        model.save_pretrained(directory)
        return
    apply_quantization_config(model, QuantizationConfig(**scheme), show_progress=False)
    with torch.no_grad():
        for module in model.modules():
            if hasattr(module, "weight_scale"):
                arguments = module.quantization_scheme.weights
                grouped = module.weight.unflatten(-1, (-1, arguments.group_size or module.weight.shape[-1]))
                scales, _ = calculate_qparams(grouped.amin(-1), grouped.amax(-1), arguments)
                module.weight_scale.copy_(scales)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(directory)
    compressor.update_config(directory)


def sha256(file: pathlib.Path) -> str:
    """Of the tensors in the order of their names, each behind a line with its name, type and shape."""
    data = file.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    digest = hashlib.sha256()
    for name in sorted(header.keys() - {"__metadata__"}):
        tensor = header[name]
        digest.update(f"{name} {tensor['dtype']} {tensor['shape']}\n".encode())
        digest.update(data[begin + tensor["data_offsets"][0] : begin + tensor["data_offsets"][1]])
    return digest.hexdigest()


def read(model, directory: pathlib.Path, scheme: dict | None):
    """The stored weights as compressed-tensors decompresses them, in a model without quantisation that computes in float32."""
    plain = copy.deepcopy(model)
    if scheme is not None:
        dequantise = transformers.CompressedTensorsConfig(dequantize=True)
        stored = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype="auto", quantization_config=dequantise)
        found = stored.state_dict()
        plain.load_state_dict({name: found[name] for name in plain.state_dict()})
        with tempfile.TemporaryDirectory() as ours:
            # As the other goldens are dequantised.
            golden_quantised.dequantise(directory, pathlib.Path(ours))
            for name, tensor in load_file(pathlib.Path(ours) / "model.safetensors").items():
                assert torch.equal(tensor, plain.state_dict()[name]), name
    return plain.float().eval()


@torch.no_grad()
def every_row(model, text: list[int]) -> torch.Tensor:
    """Logits behind each token of a text, without a cache."""
    return model(torch.tensor([text])).logits[0]


@torch.no_grad()
def greedy(model, prompt: list[int]) -> list[int]:
    tokens, known, cache = prompt, [], None
    while len(known) < NEW_TOKENS:
        output = model(torch.tensor([tokens]), past_key_values=cache, use_cache=True)
        tokens, cache = [int(output.logits[0, -1].argmax())], output.past_key_values
        known += tokens
    return known


def divergence(expected: torch.Tensor, found: torch.Tensor) -> list[float]:
    """KL divergence of distributions from those expected, in nats."""
    expected, found = (logits.double().log_softmax(-1) for logits in (expected, found))
    return [float(f"{value:.4g}") for value in (expected.exp() * (expected - found)).sum(-1).tolist()]


def quantised(gguf_file: pathlib.Path, prompts: list[str], into: pathlib.Path) -> dict:
    """What is in quantised.json; the checkpoints stay in directories of `into`."""
    where = dict(gguf_file=gguf_file.name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf_file.parent, **where)
    dequantise = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf_file.parent, **where, dtype=torch.bfloat16, attn_implementation="eager", quantization_config=dequantise
    ).eval()
    # Metadata of the file, no field of the family.
    del model.config._model_name_or_path
    reference = copy.deepcopy(model).float()
    checkpoints = []
    for name, scheme in SCHEMES.items():
        directory = into / name
        write(copy.deepcopy(model), directory, scheme)
        file = directory / "model.safetensors"
        plain = read(model, directory, scheme)
        rounding = copy.deepcopy(plain)
        golden_quantised.quantise_inputs(rounding, golden_quantised.quantised_modules(directory))
        cases = []
        for text in prompts:
            prompt = tokenizer(text, add_special_tokens=False).input_ids
            continuation = greedy(plain, prompt)
            read_text = prompt + continuation[:-1]
            logits = every_row(plain, read_text)
            first, second = logits[len(prompt) - 1 :].topk(2).values.T
            chosen = logits[len(prompt) - 1 :].gather(1, torch.tensor(continuation).unsqueeze(1))[:, 0]
            assert torch.equal(chosen, first), "a near-tie that the cache decides"
            top = logits[len(prompt) - 1].topk(TOP)
            case = {
                "text": text,
                "prompt": prompt,
                "top_tokens": top.indices.tolist(),
                "top_logits": [float(f"{value:.7g}") for value in top.values.tolist()],
                "greedy": continuation,
                "greedy_text": tokenizer.decode(continuation),
                "leads": [round(lead, 4) for lead in (first - second).tolist()],
            }
            if scheme is not None:
                expected = every_row(reference, read_text)
                case["divergence"] = divergence(expected, logits)
            if name.startswith("fp8"):
                case["divergence_of_rounded_inputs"] = divergence(expected, every_row(rounding, read_text))
            cases.append(case)
            print(name, json.dumps({key: case[key] for key in ("greedy_text", "leads")}), flush=True)
        config = json.loads((directory / "config.json").read_text())
        checkpoints.append({"name": name, "sha256": sha256(file), "config": config, "cases": cases})
    made_with = {package: importlib.metadata.version(package) for package in ("compressed-tensors", "gguf")}
    return {"made_with": made_with, "checkpoints": checkpoints}
