"""Families of models with experts through the official clients: published chat templates, random weights."""

import json
from collections.abc import Callable
from typing import NamedTuple

import anthropic
import openai
import pytest

import clients
import tiny_models
from clients import prompt
from tiny_models import TINY_MODELS, WEATHER

ASK = [{"role": "user", "content": "The weather of Ulm?"}]
TOOL = {"type": "function", "function": WEATHER}
CLAUDE_TOOL = {"name": WEATHER["name"], "description": WEATHER["description"], "input_schema": WEATHER["parameters"]}
SCHEMA = {"type": "object", "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["sum"],
          "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA, "strict": True}}


class Family(NamedTuple):
    # How the template writes a call, and what a function gave.
    call: Callable[[str], str]
    result: str
    # The token with which a model begins to think, where the grammar of an answer lets it; None if it does not think.
    thinks_by: str | None = None
    # Thinking can be turned off.
    switch: bool = False
    # The prompt begins a thought.
    begins: bool = False


def hermes(place: str) -> str:
    return f'<tool_call>\n{{"name": "get_weather", "arguments": {{"place": "{place}"}}}}\n</tool_call>'


def coder(place: str) -> str:
    return f"<tool_call>\n<function=get_weather>\n<parameter=place>\n{place}\n</parameter>\n</function>\n</tool_call>"


QWEN_RESULT = "<tool_response>\nRain.\n</tool_response>"
FAMILIES = {
    "qwen3-moe": Family(hermes, QWEN_RESULT, "<think>", True),
    "qwen3.5-moe": Family(coder, QWEN_RESULT, "<think>", True, begins=True),
    "qwen3-next": Family(coder, QWEN_RESULT),
    "qwen2-moe": Family(hermes, QWEN_RESULT),
    "mixtral": Family(lambda place: f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {{"place": "{place}"}}, "id": "',
                      '[TOOL_RESULTS]{"content": Rain., '),
    # Of the names of channels only one begins so.
    "gpt-oss": Family(lambda place: f' to=functions.get_weather<|channel|>commentary <|constrain|>json<|message|>{{"place":"{place}"}}<|call|>',
                      "<|channel|>commentary<|message|>Rain.<|end|>", "a"),
    "gemma4-moe": Family(lambda place: f'<|tool_call>call:get_weather{{place:<|"|>{place}<|"|>}}<tool_call|>',
                         '<|tool_response>response:get_weather{value:<|"|>Rain.<|"|>}<tool_response|>', "<|channel>", True),
}


@pytest.fixture(scope="module", params=FAMILIES)
def served(request, start, tmp_path_factory):
    """A server, the name of its model, what its family does, and Anthropic's client."""
    name = request.param
    # Small steps are proved fast, whatever the vocabulary.
    limits = ["--max-num-seqs", "2", "--max-num-batched-tokens", "64"]
    with start(*tiny_models.write(tmp_path_factory.mktemp(name), name), *limits) as server:
        with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=300) as claude:
            yield server, name, FAMILIES[name], claude


def test_chat(served):
    server, name, family, claude = served
    ask = {"model": name, "messages": ASK, "max_tokens": 24}
    off = {"extra_body": {"enable_thinking": False}} if family.switch else {}
    choice, chunks, usage = clients.chat(server, temperature=0, **ask, **off)
    assert choice.message.content and len(chunks) > 2
    assert usage.completion_tokens == 24 or choice.finish_reason == "stop"
    # Another client, the same prompt and the same answer.
    said = clients.message(claude, thinking={"type": "disabled"}, extra_body={"temperature": 0}, **ask)
    assert [block.text for block in said.content] == [choice.message.content]
    cached = said.usage.cache_read_input_tokens or 0
    assert (cached + said.usage.input_tokens, said.usage.output_tokens) == (usage.prompt_tokens, usage.completion_tokens)


def test_a_call_and_its_result(served):
    server, name, family, claude = served
    off = {"extra_body": {"enable_thinking": False}} if family.switch else {}
    ask = {"model": name, "tools": [TOOL], "max_tokens": 600, "temperature": 0, **off}
    choice, _, _ = clients.chat(server, messages=ASK, tool_choice="required", parallel_tool_calls=False, **ask)
    assert choice.finish_reason == "tool_calls" and not choice.message.content
    [call] = choice.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "get_weather" and arguments["place"] in ("Ulm", "Aachen") and len(arguments) == 1
    history = [*ASK, choice.message.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": call.id, "content": "Rain."}]
    shown = prompt(server, messages=history, tools=[TOOL])
    begin = shown.rindex(family.call(arguments["place"]))
    assert family.result in shown[begin:], shown
    answer = server.openai.chat.completions.create(messages=history, **ask | {"max_tokens": 4})
    assert answer.usage.completion_tokens > 0

    ask = {"model": name, "tools": [CLAUDE_TOOL], "max_tokens": 600, "extra_body": {"temperature": 0}, "thinking": {"type": "disabled"}}
    said = clients.message(claude, messages=ASK, tool_choice={"type": "any", "disable_parallel_tool_use": True}, **ask)
    [use] = said.content
    assert said.stop_reason == "tool_use" and (use.type, use.name, use.input) == ("tool_use", "get_weather", arguments)
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "Rain."}
    history = [*ASK, {"role": "assistant", "content": said.content}, {"role": "user", "content": [result]}]
    again = claude.messages.create(messages=history, **ask | {"max_tokens": 4})
    assert again.usage.output_tokens == answer.usage.completion_tokens
    assert (again.usage.cache_read_input_tokens or 0) + again.usage.input_tokens == answer.usage.prompt_tokens


def test_structured_output(served):
    server, name, family, claude = served
    off = {"extra_body": {"enable_thinking": False}} if family.switch else {}
    ask = {"model": name, "messages": ASK, "max_tokens": 600}
    choice, _, _ = clients.chat(server, response_format=FORMAT, temperature=0, **ask, **off)
    found = json.loads(choice.message.content)
    assert choice.finish_reason == "stop" and set(found) == {"sum"} and found["sum"] in range(10)
    said = clients.message(claude, output_config={"format": {"type": "json_schema", "schema": SCHEMA}}, thinking={"type": "disabled"},
                           extra_body={"temperature": 0}, **ask)
    assert said.stop_reason == "end_turn" and [json.loads(block.text) for block in said.content] == [found]


def test_thinking(served):
    server, name, family, claude = served
    ask = {"model": name, "messages": ASK, "max_tokens": 600, "temperature": 0}
    if family.thinks_by is None:
        for fields in [{"extra_body": {"thinking_token_budget": 8}}, {"reasoning_effort": "high"}]:
            with pytest.raises(openai.BadRequestError, match="reason"):
                server.openai.chat.completions.create(**ask, **fields)
        return
    [begin] = server.http.post("/tokenize", json={"prompt": family.thinks_by, "add_special_tokens": False}).json()["tokens"]
    # Random weights write the token a few times, and then anything else.
    ask |= {"logit_bias": {str(begin): 20}, "frequency_penalty": 2, "response_format": FORMAT}
    on = {"enable_thinking": True} if family.switch else {}
    for budget in (32, 48):
        ask["extra_body"] = {"thinking_token_budget": budget, **on}
        choice, _, usage = clients.chat(server, **ask)
        assert choice.message.reasoning_content and set(json.loads(choice.message.content)) == {"sum"}
        # With the marks around them, and what a character of several bytes has left.
        assert budget <= usage.completion_tokens_details.reasoning_tokens <= budget + 24
    if family.switch:
        ask["extra_body"] = {"enable_thinking": False}
        choice, _, _ = clients.chat(server, **ask)
        assert not hasattr(choice.message, "reasoning_content") and set(json.loads(choice.message.content)) == {"sum"}
        asked = [prompt(server, messages=ASK, chat_template_kwargs={"enable_thinking": thinks}) for thinks in (True, False)]
        assert asked[0] != asked[1]
    else:
        assert "Reasoning: low" in prompt(server, messages=ASK, reasoning_effort="low")
    assert prompt(server, messages=ASK, chat_template_kwargs=on).rstrip().endswith(family.thinks_by) == family.begins
    # Only there can Anthropic's client, which has no biases, count on one.
    if family.begins:
        said = clients.message(claude, model=name, messages=ASK, max_tokens=600, thinking={"type": "enabled", "budget_tokens": 40},
                               extra_body={"temperature": 0}, output_config={"format": {"type": "json_schema", "schema": SCHEMA}})
        thought, text = said.content
        assert (thought.type, text.type) == ("thinking", "text") and thought.thinking and set(json.loads(text.text)) == {"sum"}


def test_weights_are_counted(served):
    server, name, _, _ = served
    model = server.http.get("/v1/models").raise_for_status().json()["data"][0]
    assert model["id"] == name and model["num_active_parameters"] < model["num_parameters"]
    config = tiny_models.golden_config(TINY_MODELS[name].golden)
    config = config.get("text_config", config)
    experts = config.get("num_local_experts") or config["num_experts"]
    unused = experts - (config.get("num_experts_per_tok") or config["top_k_experts"])
    # Gate, up and down of the experts to which a token does not go; gpt-oss has biases of each.
    hidden, inner = config["hidden_size"], config.get("moe_intermediate_size") or config["intermediate_size"]
    weights = 3 * hidden * inner + (2 * inner + hidden if name == "gpt-oss" else 0)
    dense = config.get("mlp_only_layers") or []
    every = config.get("decoder_sparse_step", 1)
    layers = sum(layer not in dense and (layer + 1) % every == 0 for layer in range(config["num_hidden_layers"]))
    assert model["num_parameters"] - model["num_active_parameters"] == layers * unused * weights
