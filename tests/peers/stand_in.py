"""Stands in for what vLLM's tests import: a server that is ours, a tokenizer, and names of vLLM's insides that nothing may use.

A test that only imports a name of vLLM, torch or the like (for a type, or in another test of the file) runs; one that calls it fails
with `Inside`, which says what it wanted.
"""

import importlib.abc
import importlib.machinery
import os
import re
import subprocess
import sys
import tempfile
import types
from pathlib import Path

import openai

import servers

# Packages that are not installed here, and vLLM itself.
ABSENT = (
    "PIL aiohttp datasets fastapi httpx huggingface_hub jiwer librosa lm_eval model_hosting_container_standards numpy openai_harmony "
    "orjson partial_json_parser psutil pybase64 rapidfuzz safetensors soundfile starlette torch transformers uvicorn vllm websockets"
).split()
# Whether the tests are being collected: what a file calls then is made of names, too.
collecting = True


class Inside(Exception):
    """A test uses vLLM's own code, or a library that is not installed."""


class _Name(type):
    """A name in a module that is not there: it can be imported, subscripted, joined to a type and subclassed, but no test may call it."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _name(f"{cls.__name__}.{name}")

    def __call__(cls, *args, **kwargs):
        if "stands_for" not in vars(cls):
            return super().__call__(*args, **kwargs)
        if collecting:
            # A decorator returns what it decorates.
            return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else _name(f"{cls.__name__}()")
        raise Inside(f"the test calls {cls.__name__}")

    def __getitem__(cls, key):
        return cls

    def __or__(cls, other):
        return cls

    __ror__ = __or__

    def __iter__(cls):
        raise Inside(f"the test iterates over {cls.__name__}")


def _name(path):
    # Some are classes of exceptions.
    return _Name(path, (Exception,), {"stands_for": path, "__test__": False})


class _Absent(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _name(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname, path=None, target=None):
        package, *rest = fullname.split(".")
        if package in ABSENT or (package == "tests" and rest and rest[0] not in ("entrypoints", "tool_use")):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        module = _Absent(spec.name)
        vars(module).update(PRESENT.get(spec.name, {}))
        return module

    def exec_module(self, module):
        pass


class _Answer:
    """An object of JSON with its fields as attributes, in place of vLLM's classes of responses."""

    def __init__(self, fields=(), **more):
        fields = {**dict(fields), **more}
        for name, value in fields.items():
            setattr(self, name, self.of(value))

    @classmethod
    def of(cls, value):
        if isinstance(value, dict):
            return cls(value)
        if isinstance(value, list):
            return [cls.of(item) for item in value]
        return value

    model_validate = of


class _Platform:
    """A CPU is none of the platforms that tests make exceptions for."""

    def __getattr__(self, name):
        return lambda *args, **kwargs: False


class _ModelConfig:
    def __init__(self, *args, **kwargs):
        pass

    def get_vocab_size(self):
        return len(servers.model_tokenizer().vocabulary)


class _Hub:
    """Nothing is fetched: the model is ours, and adapters are not supported."""

    @staticmethod
    def snapshot_download(*args, **kwargs):
        return tempfile.mkdtemp(dir=servers.scratch())


def _get_tokenizer(*args, **kwargs):
    return servers.model_tokenizer()


class _AutoTokenizer:
    from_pretrained = staticmethod(_get_tokenizer)


def _version():
    done = subprocess.run([servers.BINARY, "--version"], capture_output=True, text=True, check=True)
    return done.stdout.split()[1]


class RemoteOpenAIServer:
    """vLLM's class of this name, which starts a server of ours with the flags of a test."""

    DUMMY_API_KEY = "none"

    def __init__(self, model, vllm_serve_args, *, env_dict=None, seed=0, auto_port=True, max_wait_seconds=None, override_hf_configs=None):
        if not auto_port and "--port" in vllm_serve_args:
            raise Inside("the test chooses the port")
        if "--uds" in vllm_serve_args:
            raise Inside("the test asks through a Unix socket; tests/http has its own")
        # Their server reads its key from a variable of another name.
        key = (env_dict or {}).get("VLLM_API_KEY")
        own = ["--api-key", key] if key else []
        self.server = servers.start(model, [*vllm_serve_args, *own], override_hf_configs)
        self.proc = self.server.process
        self.host, self.port = "127.0.0.1", self.server.port
        self.show_hidden_metrics = False
        self.uds = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        """It may be what the next test wants; `servers` ends it."""

    @property
    def url_root(self):
        return f"http://{self.host}:{self.port}"

    def url_for(self, *parts):
        return "/".join([self.url_root, *(part.lstrip("/") for part in parts)])

    def get_client(self, **kwargs):
        return openai.OpenAI(base_url=self.url_for("v1"), api_key=self.DUMMY_API_KEY, max_retries=0, **{"timeout": 600, **kwargs})

    def get_async_client(self, **kwargs):
        return openai.AsyncOpenAI(base_url=self.url_for("v1"), api_key=self.DUMMY_API_KEY, max_retries=0, **{"timeout": 600, **kwargs})

    def get_client_anthropic(self, **kwargs):
        import anthropic

        return anthropic.Anthropic(base_url=self.url_root, api_key=self.DUMMY_API_KEY, max_retries=0, **kwargs)

    def get_async_client_anthropic(self, **kwargs):
        import anthropic

        return anthropic.AsyncAnthropic(base_url=self.url_root, api_key=self.DUMMY_API_KEY, max_retries=0, **kwargs)


RESPONSES = {name: _Answer for name in ("EmbeddingResponse", "PoolingResponse", "RerankResponse", "ScoreResponse", "ClassificationResponse")}
# The names that are there.
PRESENT = {
    "httpx": {name: getattr(__import__("httpx2"), name) for name in ("AsyncClient", "Client", "Response", "post", "get", "stream", "Timeout")},
    "huggingface_hub": {"snapshot_download": _Hub.snapshot_download},
    "transformers": {"AutoTokenizer": _AutoTokenizer},
    "vllm.config": {"ModelConfig": _ModelConfig},
    "vllm.entrypoints.openai.protocol": RESPONSES,
    "vllm.entrypoints.pooling.embed.protocol": RESPONSES,
    "vllm.entrypoints.pooling.pooling.protocol": RESPONSES,
    "vllm.entrypoints.pooling.scoring.protocol": RESPONSES,
    "vllm.platforms": {"current_platform": _Platform()},
    "vllm.tokenizers": {"get_tokenizer": _get_tokenizer},
    "vllm.transformers_utils.repo_utils": {"hf_api": _Hub},
    "vllm.transformers_utils.tokenizer": {"get_tokenizer": _get_tokenizer},
    "vllm.version": {"__version__": _version()},
}


def install(root):
    """Put the stand-ins in place of the modules that the tests under `root` import."""
    PRESENT["tests.utils"] = {"RemoteOpenAIServer": RemoteOpenAIServer, "VLLM_PATH": Path(root), "ROCM_EXTRA_ARGS": []}
    sys.meta_path.insert(0, _Finder())
    # The tests use nothing of it that `re` has not.
    sys.modules["regex"] = re
    os.chdir(root)
