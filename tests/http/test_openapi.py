"""The OpenAPI document: valid by OpenAPI's own schema, and true of what the server answers."""

import json

import httpx2 as httpx
import pytest
from endpoints import EVERY
from jsonschema import Draft202012Validator
from openapi_spec_validator import validate

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def document(sim):
    return sim.http.get("/openapi.json").raise_for_status().json()


@pytest.fixture
def described(document):
    """Checks a body against what the document says of a path's answer."""

    def check(method: str, path: str, status: int, body, kind: str = "application/json"):
        answer = document["paths"][path][method]["responses"][str(status)]
        schema = {**answer["content"][kind]["schema"], "components": document["components"]}
        Draft202012Validator(schema).validate(body)
        return body

    return check


@pytest.fixture
def request_schema(document):
    """The validator of a path's request body."""

    def of(path: str) -> Draft202012Validator:
        schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        return Draft202012Validator({**schema, "components": document["components"]})

    return of


def body_of(response: httpx.Response, status: int):
    assert response.status_code == status, response.text
    return response.json()


def test_document_is_valid(document):
    assert document["openapi"].startswith("3.1.")
    validate(document)


def test_every_schema_is_a_json_schema(document):
    for name, schema in document["components"]["schemas"].items():
        Draft202012Validator.check_schema(schema)
        assert "description" in schema or "oneOf" in schema, f"{name} has no description"


@pytest.mark.parametrize("extra", [{}, {"logprobs": True, "top_logprobs": 2, "n": 2}], ids=["plain", "logprobs"])
def test_chat_answers_as_described(sim, described, extra):
    body = {"messages": HELLO, "max_tokens": 8, **extra}
    described("post", "/v1/chat/completions", 200, body_of(sim.http.post("/v1/chat/completions", json=body), 200))
    stream = {**body, "stream": True, "stream_options": {"include_usage": True}}
    lines = sim.http.post("/v1/chat/completions", json=stream).raise_for_status().text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert len(chunks) > 2
    for chunk in chunks:
        described("post", "/v1/chat/completions", 200, chunk, "text/event-stream")


ECHO = {"logprobs": 2, "echo": True, "prompt_logprobs": 1, "return_token_ids": True}


@pytest.mark.parametrize("extra", [{}, {"logprobs": 2, "echo": False}, ECHO], ids=["plain", "logprobs", "echo"])
def test_completions_answer_as_described(sim, described, extra):
    body = {"prompt": "Hello", "max_tokens": 8, **extra}
    described("post", "/v1/completions", 200, body_of(sim.http.post("/v1/completions", json=body), 200))


def test_everything_else_answers_as_described(sim, described):
    for path in ("/v1/models", "/health", "/ready", "/memory", "/version"):
        described("get", path, 200, body_of(sim.http.get(path), 200))
    described("get", "/v1/models/{id}", 200, body_of(sim.http.get("/v1/models/simulated"), 200))
    described("get", "/v1/models/{id}", 404, body_of(sim.http.get("/v1/models/none"), 404))
    tokens = {"prompt": "Hello", "return_token_strs": True}
    tokenized = described("post", "/tokenize", 200, body_of(sim.http.post("/tokenize", json=tokens), 200))
    described("post", "/tokenize", 200, body_of(sim.http.post("/tokenize", json={"messages": HELLO}), 200))
    back = {"tokens": tokenized["tokens"]}
    described("post", "/detokenize", 200, body_of(sim.http.post("/detokenize", json=back), 200))


def test_every_known_request_is_described(request_schema):
    for path, bodies in EVERY.items():
        for body in bodies:
            request_schema(path).validate(body)


REFUSED = [
    {},
    {"messages": "Hello"},
    {"messages": HELLO, "temprature": 1},
    {"messages": HELLO, "temperature": "hot"},
    {"messages": HELLO, "temperature": -1},
    {"messages": HELLO, "use_beam_search": True},
    {"messages": [{"role": "captain", "content": "Ahoy"}]},
    {"messages": [{"role": "user", "content": "Hello", "mood": "good"}]},
    {"messages": HELLO, "top_logprobs": 21, "logprobs": True},
]


@pytest.mark.parametrize("body", REFUSED, ids=[json.dumps(body)[-40:] for body in REFUSED])
def test_what_the_document_refuses_the_server_refuses(sim, described, request_schema, body):
    assert not request_schema("/v1/chat/completions").is_valid(body)
    described("post", "/v1/chat/completions", 400, body_of(sim.http.post("/v1/chat/completions", json=body), 400))


ACCEPTED = [
    {"messages": HELLO, "use_beam_search": False, "user": "me", "metadata": {"a": "b"}},
    {"messages": HELLO, "temperature": None, "stop": ["a", "b"], "top_k": -1, "seed": -3},
    {"messages": [{"role": "developer", "content": [{"type": "text", "text": "Be kind"}]}, *HELLO]},
    {"messages": HELLO, "modalities": ["text"], "response_format": {"type": "text"}, "stream": None},
]


@pytest.mark.parametrize("body", ACCEPTED, ids=[json.dumps(body)[-40:] for body in ACCEPTED])
def test_what_the_document_accepts_the_server_accepts(sim, request_schema, body):
    body = {**body, "max_tokens": 2}
    request_schema("/v1/chat/completions").validate(body)
    body_of(sim.http.post("/v1/chat/completions", json=body), 200)
