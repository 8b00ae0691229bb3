"""LiteLLM's client, as for OpenAI and as for vLLM."""

import json
import os

# It would ask the network for prices.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
import pytest

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(params=["openai", "hosted_vllm"])
def complete(request, sim):
    """`litellm.completion` through a provider, to the simulated model."""

    def complete(**options):
        where = {"api_base": f"{sim.url}/v1", "api_key": "none", "num_retries": 0}
        return litellm.completion(**{"model": f"{request.param}/sim", "messages": HELLO} | where | options)

    return complete


def test_completion(complete):
    answer = complete(max_tokens=8, seed=1)
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.completion_tokens > 0


def test_stream(complete):
    chunks = list(complete(max_tokens=24, seed=2, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == complete(max_tokens=24, seed=2).choices[0].message.content
    assert any(getattr(chunk, "usage", None) for chunk in chunks)


def test_errors(complete):
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        complete(temperature=-1)
    with pytest.raises(litellm.BadRequestError, match="max_tokens|tokens"):
        complete(max_tokens=1_000_000)


def test_structured_output(complete):
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    asked = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": schema}}
    assert json.loads(complete(max_tokens=1000, seed=1, response_format=asked).choices[0].message.content)["n"] in (1, 2)


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
# The simulated model says what it is asked to.
CALL = [{"role": "user", "content": '<say>{"name": "get_weather", "arguments": {"place": "Ely"}}</say>'}]


def test_tools(complete):
    choice = complete(messages=CALL, tools=[WEATHER], max_tokens=100).choices[0]
    assert choice.finish_reason == "tool_calls"
    [call] = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"place": "Ely"})
    result = {"role": "tool", "tool_call_id": call.id, "content": "<say>Rain.</say>"}
    message = choice.message
    for said in [message, message.model_dump(), message.model_dump(exclude_none=True), message.json()]:
        after = complete(messages=[*HELLO, said, result], tools=[WEATHER], max_tokens=100)
        assert after.choices[0].message.content == "Rain."


def test_streamed_tools(complete):
    chunks = list(complete(messages=CALL, tools=[WEATHER], max_tokens=100, stream=True))
    whole = litellm.stream_chunk_builder(chunks, messages=CALL)
    [call] = whole.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"place": "Ely"})
    assert whole.choices[0].finish_reason == "tool_calls"
    result = {"role": "tool", "tool_call_id": call.id, "content": "<say>Rain.</say>"}
    for said in [whole.choices[0].message, whole.choices[0].message.model_dump()]:
        after = complete(messages=[*HELLO, said, result], tools=[WEATHER], max_tokens=100)
        assert after.choices[0].message.content == "Rain."


def test_a_tool_that_is_required_is_called(complete):
    choice = complete(tools=[WEATHER], tool_choice="required", max_tokens=400, seed=1).choices[0]
    assert choice.message.tool_calls[0].function.name == "get_weather"


def test_embeddings(embedder):
    where = {"api_base": f"{embedder.url}/v1", "api_key": "none"}
    answer = litellm.embedding(model="openai/embedder", input=["a load line", "a mark"], **where)
    assert len(answer.data) == 2 and answer.usage.prompt_tokens > 0
