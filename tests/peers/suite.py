"""What of vLLM's tests is run, and with which model. Paths are patterns, relative to `tests/` of vLLM's source distribution."""

import fnmatch
from pathlib import Path

VERSIONS = ("0.9.2", "0.33.0")
DATA = Path(__file__).resolve().parents[2] / ".cache/test-data"

# The first that matches; any other file is run with the simulated model. Files that look at tokens or texts of a model need a real one.
MODELS = (
    ("tool_use/*", "scripted"),
    ("entrypoints/openai/test_tokenization.py", "smollm2"),
    ("entrypoints/openai/test_completion.py", "smollm2"),
    ("entrypoints/openai/test_chat_logit_bias_validation.py", "smollm2"),
    ("entrypoints/openai/test_return_token*.py", "smollm2"),
    ("entrypoints/openai/completion/*", "smollm2"),
    ("entrypoints/openai/chat_completion/test_chat_logit_bias_validation.py", "smollm2"),
    ("entrypoints/serve/tokenize/*", "smollm2"),
    ("entrypoints/openai/test_embedding*.py", "sim-embeddings"),
    ("entrypoints/openai/test_truncation.py", "sim-embeddings"),
    ("entrypoints/openai/test_rerank.py", "sim-embeddings"),
    ("entrypoints/openai/test_score.py", "sim-embeddings"),
    ("entrypoints/openai/test_optional_middleware.py", "sim-embeddings"),
    ("entrypoints/pooling/*", "sim-embeddings"),
)

# These files take a minute with the simulated model, too: they write texts that end late.
SLOW = (
    "entrypoints/openai/responses/test_function_call.py",
    "entrypoints/serve/instrumentator/test_metrics.py",
    # The stand-in waits for a port, which a server with --uds does not have.
    "entrypoints/serve/instrumentator/test_uds.py",
)

# Files that are not run, and why.
LEFT_OUT = (
    ("entrypoints/multimodal/*", "images, audio and video"),
    ("entrypoints/speech_to_text/*", "images, audio and video"),
    ("*_vision*.py", "images, audio and video"),
    ("*_vlm.py", "images, audio and video"),
    ("*/test_audio.py", "images, audio and video"),
    ("*/test_video.py", "images, audio and video"),
    ("*/test_encoder_decoder.py", "models with an encoder"),
    ("*/test_transcription_*.py", "images, audio and video"),
    ("*/test_translation_*.py", "images, audio and video"),
    ("*multimodal*.py", "images, audio and video"),
    ("*lora*.py", "LoRA adapters"),
    ("entrypoints/serve/sagemaker/*", "Amazon SageMaker's endpoints"),
    ("entrypoints/cohere/*", "Cohere's API"),
    ("*_cohere_*.py", "Cohere's API"),
    ("entrypoints/generate/*", "vLLM's endpoints for scoring and decisions with a language model"),
    ("entrypoints/openai/decisions/*", "vLLM's endpoints for scoring and decisions with a language model"),
    ("entrypoints/scale_out/*", "vLLM's endpoints between its own processes"),
    ("entrypoints/rl/*", "changing weights while serving, for reinforcement learning"),
    ("entrypoints/serve/dev/*", "changing weights while serving, for reinforcement learning"),
    ("entrypoints/launchers/*", "vLLM's processes: several API servers, its shutdown"),
    ("*/test_shutdown.py", "vLLM's processes: several API servers, its shutdown"),
    ("*/test_oot_registration.py", "models in Python"),
    ("*prompt_embeds*.py", "prompts as tensors"),
    ("*tensorizer*.py", "tensorizer's weight files"),
    ("*mteb*.py", "scores of other models"),
    ("*/correctness/*", "scores of other models"),
    ("*harmony*.py", "gpt-oss"),
    ("*/test_mcp_tools.py", "gpt-oss"),
    ("*/test_openai_tool_parser.py", "gpt-oss"),
    ("*/test_classification.py", "classifiers and reward models"),
    ("entrypoints/pooling/classify/*", "classifiers and reward models"),
    ("entrypoints/pooling/reward/*", "classifiers and reward models"),
    ("entrypoints/pooling/token_*/*", "vectors of each token"),
    ("*/test_pooling.py", "vectors of each token"),
    ("*late_interaction*.py", "vectors of each token"),
    ("*/test_openai_schema.py", "another version of schemathesis; `tests/http/test_schema.py` does the same"),
    ("entrypoints/openai/responses/test_structured_output.py", "schemas whose texts only a trained model brings to an end"),
    ("entrypoints/unit_tests/*", "vLLM's own code"),
    ("*/test_serving_*.py", "vLLM's own code"),
    ("tool_use/*_parser.py", "vLLM's own code"),
    ("tool_use/*_parse_delta.py", "vLLM's own code"),
    ("tool_use/test_muse*.py", "vLLM's own code"),
    ("tool_use/*_required.py", "vLLM's own code"),
    ("entrypoints/openai/responses/test_streaming_events.py", "vLLM's own code"),
    ("entrypoints/openai/responses/test_responses_utils.py", "vLLM's own code"),
    ("entrypoints/openai/responses/test_protocol.py", "vLLM's own code"),
)


def first(table, path):
    return next((value for pattern, value in table if fnmatch.fnmatch(path, pattern)), None)


def root(version):
    return DATA / f"vllm-{version}"


def starts_servers(path, tests):
    """Whether the file, or a conftest.py above it, speaks of vLLM's class that starts a server."""
    above = [each / "conftest.py" for each in path.parents if each.is_relative_to(tests) and each != tests / "entrypoints"]
    return any(each.exists() and "RemoteOpenAIServer" in each.read_text() for each in [path, *above])


def files(version):
    """The files with tests that start a server, each with its model, or None and why it is not run."""
    tests = root(version) / "tests"
    found = {}
    for path in sorted(tests.rglob("test_*.py")):
        if starts_servers(path, tests):
            name = str(path.relative_to(tests))
            why = first(LEFT_OUT, name)
            found[name] = (None, why) if why else (first(MODELS, name) or "sim", "")
    return found


def unused():
    """Patterns that match no file any more."""
    names = [name for version in VERSIONS for name in files(version)]
    return [pattern for pattern, _ in (*MODELS, *LEFT_OUT) if not fnmatch.filter(names, pattern)]
